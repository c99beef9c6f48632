"""Intercepts what a user calls on one optimizer: ``step``, ``zero_grad``, and whatever reads its state.

Where in the flow: the user's ``optimizer.step()`` -> **optimizer_calls** -> deferred.

Methods are set on the instance, so the class and other optimizers are untouched, and schedulers, which wrap ``step`` on the
instance too, compose with it in either order.

Invariants: after the handle has finished, every call does what the class does.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from commhooks.deferred_optimizer import PartialStepper


class StepOwner(Protocol):
    """Who decides what a call leads to."""

    def on_step(self, call: OptimizerCalls, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The user called ``step``."""

    def on_zero_grad(self, call: OptimizerCalls) -> None:
        """The user is about to zero the gradients."""

    def flush(self) -> None:
        """Run what was asked for."""


class OptimizerCalls:
    """One optimizer's intercepted methods.

    Parameters
    ----------
    optimizer : the user's
    owner : is told about the calls
    """

    def __init__(self, optimizer: Optimizer, owner: StepOwner) -> None:
        self.optimizer = optimizer
        self.stepper = PartialStepper(optimizer)
        self._owner = owner

    def parameters(self) -> Iterator[torch.Tensor]:
        """All parameters in all groups, as they are now."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def intercept(self) -> list[Any]:
        """Take the methods over; returns what undoes the hooks (the methods themselves become transparent)."""
        optimizer: Any = self.optimizer
        scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        calls = self

        # Schedulers unwrap `step.__func__`, so these must be bound methods.
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer._opt_called = (
                True  # what a scheduler's own wrapper, if ours replaced it, would have set
            )
            return calls._owner.on_step(calls, args, kwargs)

        def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            calls._owner.on_zero_grad(calls)
            with torch._C.DisableTorchFunction():
                type(optimizer).zero_grad(optimizer, *args, **kwargs)

        def getstate(optimizer: Any) -> Any:
            calls._owner.flush()
            return Optimizer.__getstate__(optimizer)

        if scheduled:
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)
        optimizer.__getstate__ = types.MethodType(getstate, optimizer)
        return [
            optimizer.register_state_dict_pre_hook(lambda _: self._owner.flush()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._owner.flush()),
        ]
