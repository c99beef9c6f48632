"""Turns a user's optimizer into one whose gradients are reduced: the same class underneath, the same state.

Where in the flow: ``commhooks.horovod.DistributedOptimizer`` -> **distributed optimizer** -> reducer; at the end the user's own
``step``.

Invariants: the new object is an instance of the user's class and *shares* parameter groups, state and defaults with the
optimizer that was wrapped, so a scheduler or GradScaler made before wrapping goes on working; the user's ``step`` is called
once per step and never re-implemented.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from commhooks.errors import ConfigError, UnsupportedModelError
from commhooks.handle import Handle
from commhooks.reduction import few

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_REDUCER = "_commhooks_reducer"
_WRAPPED = "_commhooks_wrapped"
_INSTANCE_METHODS = frozenset(("step", "zero_grad", "__getstate__"))


class DistributedMethods:
    """What the user's class gains; Horovod's names and meanings.

    ``step`` isn't here but in the class made for each optimizer: Horovod's ``broadcast_optimizer_state`` calls the one
    above it to make the state without communicating.
    """

    param_groups: list[dict[str, Any]]
    _should_synchronize = True

    @property
    def handle(self) -> Handle:
        """What ``commhooks.register`` gives back for a DDP model: ``flush()``, ``stats()``, ``report_loss()``, ``finish()``."""
        return reducer_of(self).handle

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes before gradients are sent."""
        return reducer_of(self).passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes, between steps and equally on all ranks."""
        reducer = reducer_of(self)
        reducer.passes = checked_passes(passes)
        reducer.forget()

    def synchronize(self) -> None:
        """Wait until every gradient is the average; collective.  Free when ``backward()`` has done so already."""
        reducer_of(self).synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step()`` takes the gradients as they are; ``synchronize()`` comes before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The user's own, with all its arguments (``set_to_none`` too)."""
        reducer_of(self).forget()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The user's own; what has been accumulated of a step is forgotten."""
        reducer_of(self).abandon()
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        share(self, getattr(self, _WRAPPED))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The user's own; the new parameters are reduced from the next step on."""
        super().add_param_group(param_group)  # type: ignore[misc]
        group = len(self.param_groups) - 1
        added = [(f"group{group}.{i}", p) for i, p in enumerate(self.param_groups[group]["params"])]
        reducer_of(self).add_parameters(added)


def reducer_of(optimizer: object) -> Any:
    """The reducer behind a distributed optimizer.

    Raises
    ------
    UnsupportedModelError
        The optimizer is a copy: copies and unpickled ones have no connection.
    """
    reducer = getattr(optimizer, _REDUCER, None)
    if reducer is None:
        raise UnsupportedModelError(
            f"this {type(optimizer).__name__} is a copy of a distributed optimizer and isn't connected; "
            "copy the state (state_dict) and call DistributedOptimizer on a new one"
        )
    return reducer


def is_distributed(optimizer: object) -> bool:
    """Whether it came from `distribute`."""
    return isinstance(optimizer, DistributedMethods)


def checked_passes(passes: int) -> int:
    """``backward_passes_per_step`` if it makes sense."""
    if passes != int(passes) or passes <= 0:
        raise ConfigError(f"backward_passes_per_step={passes!r}: expected a whole number of at least 1")
    return int(passes)


def share(optimizer: Any, wrapped: torch.optim.Optimizer) -> None:
    """Let the wrapped optimizer see what the distributed one has: a scheduler may hold on to it."""
    wrapped.param_groups = optimizer.param_groups
    wrapped.state = optimizer.state


def distribute(
    optimizer: OptimizerT,
    reducer: Any,
    module: str,
    methods: type = DistributedMethods,
    own_step: Callable[..., Any] | None = None,
) -> OptimizerT:
    """A distributed optimizer over `optimizer`'s own groups and state.

    Parameters
    ----------
    optimizer : the user's
    reducer : reduces its gradients
    module : ``__module__`` of the new class; Horovod recognises its own kind by it
    methods : what the user's class gains
    own_step : ``step`` of the new class; None: synchronize, then the user's
    """
    base = type(optimizer)
    refuse_unsupported(optimizer)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then the user's own step."""
        mine = reducer_of(self)
        if closure is not None:
            closure = _synchronizing(closure, mine)
        elif self._should_synchronize:
            mine.synchronize()
        elif mine.under_way:
            raise ConfigError(
                f"optimizer {mine.label}: step() inside skip_synchronize() while gradients are under way; "
                "call synchronize() before it"
            )
        # A scheduler that was made before wrapping asks the wrapped one whether it has stepped.
        getattr(self, _WRAPPED)._opt_called = True
        try:
            return super(made, self).step(*(() if closure is None else (closure,)))
        finally:
            mine.stepped()

    chosen: Any = own_step or step
    chosen.hooked = True  # torch fires step hooks in every `step` without this: twice, here
    made: Any = type(base.__name__, (methods, base), {"__module__": module, "step": chosen})
    new = made.__new__(made)
    # All but methods that a scheduler or deferred steps have put on the instance.
    new.__dict__.update(
        (name, value) for name, value in vars(optimizer).items() if name not in _INSTANCE_METHODS
    )
    setattr(new, _REDUCER, reducer)
    setattr(new, _WRAPPED, optimizer)
    return new


def _synchronizing(closure: Callable[[], Any], reducer: Any) -> Callable[[], Any]:
    """The closure computes gradients inside the user's step: they're averaged before it goes on."""

    def evaluate() -> Any:
        loss = closure()
        reducer.synchronize()
        return loss

    return evaluate


def refuse_unsupported(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what can't be right, by name.

    Raises
    ------
    ConfigError
        It is distributed already.
    UnsupportedModelError
        It decides by the local loss (LBFGS): ranks would take different numbers of steps.
    """
    name = type(optimizer).__name__
    if is_distributed(optimizer) or hasattr(optimizer, "skip_synchronize"):
        raise ConfigError(f"{name} is a distributed optimizer already; wrap the original one, once")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedModelError(
            "LBFGS decides by the local loss how often to evaluate, so ranks would wait for each other for ever; "
            "use SGD, Adam or another optimizer that steps once per call"
        )


def named_in_order(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]] | None, label: str
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters with their names, in the order given (forward order, from ``model.named_parameters()``).

    Raises
    ------
    ConfigError
        Not pairs, a name or a parameter given twice, or a parameter of the optimizer without a name.
    """
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        return [
            (f"group{i}.{j}", p)
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        ]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in named):
        raise ConfigError(
            f"optimizer {label}: named_parameters is not a sequence of (name, parameter) pairs; pass model.named_parameters()"
        )
    twice = [name for name, count in collections.Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ConfigError(
            f"optimizer {label}: named_parameters has the name {few(twice)} more than once; "
            "for several models, put the model's name in front of its parameters'"
        )
    known = {id(p): name for name, p in named}
    nameless = [
        f"param_groups[{i}]['params'][{j}] of shape {list(p.shape)}"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if id(p) not in known
    ]
    if nameless:
        raise ConfigError(
            f"optimizer {label}: {len(nameless)} of its {len(owned)} parameters aren't in named_parameters: "
            f"{few(nameless)}; pass the named_parameters() of every model it optimizes"
        )
    ids = {id(p) for p in owned}
    return [(name, p) for name, p in {p: (name, p) for name, p in reversed(named) if id(p) in ids}.values()][
        ::-1
    ]


__all__ = [
    "DistributedMethods",
    "checked_passes",
    "distribute",
    "is_distributed",
    "named_in_order",
    "reducer_of",
]
