"""The user's optimizer, run on a few parameters at a time, with the hyper-parameters of the moment it was asked to step.

Where in the flow: deferred -> **deferred_optimizer** -> the user's own ``step``.

The optimizer is never re-implemented: its own ``step`` runs on some of its parameters, with the same state, while
``param_groups`` holds only these, in their groups, with the values recorded at the user's call.  An optimizer for which that
isn't the same as one step on everything is refused by name.

Invariants: ``param_groups`` and every ``.grad`` are as before when a partial step returns or raises; schedulers,
``add_param_group`` and the user see the real groups all the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from commhooks.errors import UnsupportedModelError

# What couples parameters to each other, or evaluates the model again, by class name along the inheritance.
_REFUSED = {
    "LBFGS": "searches along a direction common to all parameters and evaluates the model again",
    "ZeroRedundancyOptimizer": "keeps each rank's share of the state and communicates in its own step",
    "PostLocalSGDOptimizer": "averages models in its own step",
    "_NamedOptimizer": "steps on parameters it was not given",
    "DistributedOptimizer": "communicates in its own step",
    "_DistributedOptimizer": "communicates in its own step",
}
# Of torch's own, these treat each parameter by itself; any other class is put to the test once.
_ELEMENTWISE_NAMES = (
    "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop SparseAdam Adafactor Muon"
)


def unwrapped(optimizer: Any) -> Optimizer:
    """The `torch.optim.Optimizer` behind Accelerate's wrapper; other objects as they are.

    Raises
    ------
    UnsupportedModelError
        Not an optimizer, or of a kind that can't step layer by layer.
    """
    if type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedModelError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer; pass the optimizer that holds the parameters, "
            'or use overlap="backward"'
        )
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _REFUSED:
            raise UnsupportedModelError(
                f"{type(optimizer).__name__} {_REFUSED[kind.__name__]}, so it can't step layer by layer; "
                'use register(ddp) without it (overlap="backward")'
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedModelError(
            f'{type(optimizer).__name__}(differentiable=True) records its step for autograd; use overlap="backward"'
        )
    return optimizer


Hyper = dict[str, Any]


class Recorded:
    """The groups of an optimizer as they were when the user called ``step``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.hyper: list[Hyper] = [_hyper(group) for group in optimizer.param_groups]
        self.group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def groups(self, parameters: Sequence[torch.Tensor]) -> list[Hyper]:
        """Groups that hold `parameters` only, in the recorded order of groups."""
        chosen: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            chosen.setdefault(self.group_of[id(parameter)], []).append(parameter)
        return [{**self.hyper[number], "params": chosen[number]} for number in sorted(chosen)]


def _hyper(group: Mapping[str, Any]) -> Hyper:
    """A group's settings, fixed: a learning rate that is a tensor is changed in place by schedulers."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


class PartialStepper:
    """Runs an optimizer's own ``step`` on some of its parameters.

    Parameters
    ----------
    optimizer : the user's
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        self._checked = self.name in _ELEMENTWISE_NAMES.split() and type(optimizer).__module__.startswith(
            "torch.optim"
        )
        step: Callable[..., Any] = type(optimizer).step
        # Inside torch's wrapper, which calls the user's step hooks: they belong to the user's call, not to each layer.
        self._raw_step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step

    def run(
        self, recorded: Recorded, parameters: Sequence[torch.Tensor], averages: Sequence[torch.Tensor]
    ) -> None:
        """One step of `parameters`, with `averages` as their gradients."""
        optimizer = self.optimizer
        with _plain_context(parameters), _gradients(parameters, averages):
            real = optimizer.param_groups
            optimizer.param_groups = recorded.groups(parameters)
            try:
                self._raw_step(optimizer)
            finally:
                optimizer.param_groups = real

    def run_whole(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step as it is, with its hooks, on what is in ``.grad`` now."""
        if self._checked:
            return type(self.optimizer).step(self.optimizer, *args, **kwargs)
        self._checked = True
        return self._run_checked(*args, **kwargs)

    @property
    def unchecked(self) -> bool:
        """Whether this optimizer must still be put to the test, in a whole step."""
        return not self._checked

    @property
    def has_step_hooks(self) -> bool:
        """Whether the user hooked the step: such hooks see the whole step, so it must run as one."""
        optimizer = self.optimizer
        return bool(
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )

    def _run_checked(self, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer that isn't known: whole, and once more one parameter at a time; both must agree."""
        optimizer = self.optimizer
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        recorded = Recorded(optimizer)
        before = [parameter.detach().clone() for parameter in stepped]
        state_before = _copied(optimizer.state)
        result = type(optimizer).step(optimizer, *args, **kwargs)
        self._refuse_if_groups_changed(recorded)
        after = [parameter.detach().clone() for parameter in stepped]
        state_after = _copied(optimizer.state)
        gradients = [p.grad for p in stepped]
        try:
            _restore(optimizer, stepped, before, state_before)
            for parameter, gradient in zip(stepped, gradients, strict=True):
                assert gradient is not None  # chosen above
                self.run(recorded, [parameter], [gradient])
            alike = all(torch.equal(p, value) for p, value in zip(stepped, after, strict=True))
        finally:
            _restore(optimizer, stepped, after, state_after)
        if not alike:
            raise UnsupportedModelError(
                f"{self.name}: stepping one parameter at a time gives other values than stepping all of them, so its step "
                'couples parameters; use register(ddp) without it (overlap="backward")'
            )
        return result

    def _refuse_if_groups_changed(self, recorded: Recorded) -> None:
        for hyper, group in zip(recorded.hyper, self.optimizer.param_groups, strict=True):
            for name, value in _hyper(group).items():
                if not _same(value, hyper.get(name)):
                    raise UnsupportedModelError(
                        f"{self.name} keeps running state in param_groups ({name!r} changed from {hyper.get(name)!r} to "
                        f"{value!r} in one step), so it can't step layer by layer; use register(ddp) without it "
                        '(overlap="backward")'
                    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def _copied(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy of an optimizer's state, one level of containers deep (parameter -> name -> value)."""
    return {
        owner: {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
        if isinstance(values, dict)
        else values
        for owner, values in state.items()
    }


def _restore(
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    state: Mapping[Any, Any],
) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    optimizer.state.clear()
    optimizer.state.update(_copied(state))


@contextlib.contextmanager
def _gradients(parameters: Sequence[torch.Tensor], averages: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let `averages` be the gradients for a while; the user's own come back in any case."""
    own = _swap_gradients(parameters, averages)
    try:
        yield
    finally:
        _swap_gradients(parameters, own)


def _swap_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Set ``.grad``, return what was there."""
    with torch._C.DisableTorchFunction():
        before = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    return before


@contextlib.contextmanager
def _plain_context(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """As after ``backward()``: no autocast, no inference mode (a step can come in the middle of a forward)."""
    kinds = {parameter.device.type for parameter in parameters}
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for kind in sorted(kinds):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
