"""``model=`` under Horovod: the step and the next forward overlap with communication.

Where in the flow: autograd -> **horovod forward** -> deferred steps (gates, partial steps) -> the user's own optimizer.

What DDP's buckets are to deferred steps, parcels are here: a parcel whose gradients are complete is handed over like a
bucket.  Everything else (gates, reads, clipping, flushing) is `deferred`'s.

Invariants: every trainable parameter takes part in every step, as under plain DDP (a rank that skipped one would leave the
others' gates closed for ever): otherwise a named error at ``step()``; the average is the only operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commhooks.config import Config
from commhooks.deferred import register_exit
from commhooks.deferred_steps import EXIT_LIMIT_S, DeferredSteps
from commhooks.distributed_optimizer import DistributedMethods
from commhooks.errors import ConfigError, UnsupportedModelError
from commhooks.exchanges import SliceExchange
from commhooks.handle import Handle
from commhooks.parcels import Parcel, make_parcels
from commhooks.reduction import AgreedOrder, few


class _Facade:
    """The model where `DeferredSteps` expects a DDP model; kept alive by the reducer."""

    parameters_to_ignore: frozenset[str] = frozenset()
    process_group = None
    static_graph = False
    # Gradients come as parcels only: a step may have several backward passes, and only we count them.
    require_forward_param_sync = False

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    @property
    def training(self) -> bool:
        """The model's."""
        return self.module.training

    def register_forward_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """On the model."""
        return self.module.register_forward_pre_hook(_Forwarded(self, hook))

    def register_forward_hook(self, hook: Callable[..., Any], *, always_call: bool = False) -> Any:
        """On the model."""
        return self.module.register_forward_hook(_Forwarded(self, hook), always_call=always_call)


class _Forwarded:
    """A forward hook that hears of the facade instead of the model; a copy of the model doesn't take it along."""

    def __init__(self, facade: _Facade | None, hook: Callable[..., Any] | None) -> None:
        self._facade = facade
        self._hook = hook

    def __call__(self, _: torch.nn.Module, *values: Any) -> None:
        if self._hook is not None:
            self._hook(self._facade, *values)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forwarded:
        return _Forwarded(None, None)

    def __reduce__(self) -> Any:
        return (_Forwarded, (None, None))


class _Bucket:
    """A parcel as DDP would hand it to its hook."""

    def __init__(self, index: int, flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        self.index = lambda: index
        self.buffer = lambda: flat
        self.parameters = lambda: list(parameters)


class ForwardReducer:
    """Collects the gradients of one model into parcels and hands them to deferred steps.

    Parameters
    ----------
    label : the optimizer's name in messages
    order : the trainable parameters in forward order
    model : whose forward waits for them
    optimizer : the user's
    exchange : averages slices; this optimizer's own
    config : settings
    passes : backward passes per step
    groups : parameters to keep together
    """

    def __init__(
        self,
        label: str,
        order: AgreedOrder,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        exchange: SliceExchange,
        config: Config,
        passes: int,
        groups: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self.label = label
        self.passes = passes
        self._names = [entry.name for entry in order.entries]
        self._parameters = order.parameters
        place = {p: i for i, p in enumerate(self._parameters)}
        self._parcels = make_parcels(order.entries, [[place[p] for p in group] for group in groups])
        self._parcel_of = {self._parameters[i]: parcel for parcel in self._parcels for i in parcel.members}
        self._counts: dict[torch.Tensor, int] = {}
        self._left: dict[int, int] = {}
        self._facade = _Facade(model)
        self.steps = DeferredSteps(self._facade, [optimizer], exchange, config)  # type: ignore[arg-type]
        self.steps.wire()
        self.handle = Handle(self.steps)
        register_exit()
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self._parameters]  # type: ignore[attr-defined]

    # -- gradients ------------------------------------------------------------------------------------------------------

    def _arrived(self, parameter: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            count = self._counts[parameter] = self._counts.get(parameter, 0) + 1
            if count > self.passes:
                self._refuse_pass(parameter, count)
            if count < self.passes:
                return
            parcel = self._parcel_of[parameter]
            left = self._left.get(parcel.index, len(parcel.members)) - 1
            self._left[parcel.index] = left
            if left == 0:
                parameters = [self._parameters[i] for i in parcel.members]
                self.steps.on_bucket(_Bucket(parcel.index, self._flat(parcel, parameters), parameters))  # type: ignore[arg-type]

    def _refuse_pass(self, parameter: torch.Tensor, count: int) -> None:
        name = self._names[self._parameters.index(parameter)]
        raise ConfigError(
            f"optimizer {self.label}: parameter {name} got gradient number {count} since the last step(), and "
            f"backward_passes_per_step is {self.passes}. Call step() after every {self.passes} backward passes, or pass "
            "a larger backward_passes_per_step"
        )

    def _flat(self, parcel: Parcel, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradients one after the other, each in its parameter's own memory order."""
        runs = [self._run(parameter, i) for parameter, i in zip(parameters, parcel.members, strict=True)]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def _run(self, parameter: torch.Tensor, position: int) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None  # autograd has just added to it
        if gradient.layout is not torch.strided:
            raise UnsupportedModelError(
                f"optimizer {self.label}: {self._names[position]} has a sparse gradient, which can't overlap with the "
                "next forward; leave model= out, or use a dense embedding"
            )
        ordered = torch.empty_like(parameter)  # the parameter's strides where it is dense, else contiguous
        if gradient.stride() != ordered.stride():
            gradient = ordered.copy_(gradient)
        flat = gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

    # -- what the distributed optimizer calls -------------------------------------------------------------------------------

    under_way = False

    def add_parameters(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Refused: gates are counted when the optimizer is made."""
        raise UnsupportedModelError(
            f"optimizer {self.label}: add_param_group() with model= isn't supported; make the distributed optimizer anew"
        )

    def synchronize(self) -> None:
        """Averages into every gradient; this step then doesn't overlap."""
        if self._left:
            self._refuse_missing()
            self.steps._on_gradient_read()

    def forget(self) -> None:
        """The step begins anew."""
        self._counts.clear()

    def stepped(self) -> None:
        """The user has called step()."""
        self._counts.clear()
        self._left.clear()

    abandon = stepped

    def before_step(self) -> None:
        """All parcels must have left."""
        if self._left:
            self._refuse_missing()

    def _refuse_missing(self) -> None:
        missing = [
            name
            for name, p in zip(self._names, self._parameters, strict=True)
            if self._counts.get(p, 0) < self.passes
        ]
        if missing:
            raise UnsupportedModelError(
                f"optimizer {self.label}: no gradient came for {few(missing)} in this step, and overlap with the next "
                "forward needs every parameter's; leave model= out (then missing ones count as zeros), or freeze them"
            )

    def detach(self) -> None:
        """Let go of model and optimizer."""
        for hook in self._hooks:
            hook.remove()
        self.steps.let_go(EXIT_LIMIT_S)


class ForwardMethods(DistributedMethods):
    """As `DistributedMethods`; what `DeferredSteps` has taken over on the wrapped optimizer is called there."""

    _commhooks_wrapped: torch.optim.Optimizer

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The user's own; averages of gradients that are thrown away aren't waited for."""
        self._commhooks_wrapped.zero_grad(*args, **kwargs)


def forward_step(reducer: ForwardReducer, wrapped: torch.optim.Optimizer) -> Callable[..., Any]:
    """``step`` of the distributed optimizer: closes gates and returns."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Ask for a step; it runs layer by layer, before each parameter's next read."""
        reducer.before_step()
        try:
            return wrapped.step() if closure is None else wrapped.step(closure)
        finally:
            reducer.stepped()

    return step
