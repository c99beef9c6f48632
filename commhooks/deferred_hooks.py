"""The hooks that deferred steps put on a model, made so that a copy of the model doesn't take them along.

Where in the flow: autograd and the user's forward -> **deferred_hooks** -> deferred_steps.

DDP models are deep-copied and pickled (averages of weights, checkpoints).  A copy's reducer never calls our communication
hook, so the copy must not be half ours: it gets inert stand-ins and trains as plain DDP until it is registered itself.

Invariants: copying or pickling never touches threads or connections; no hook keeps its model's steps alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


class GradientTaker(Protocol):
    """Whom gradients are told to."""

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd has accumulated a gradient."""


def reads_are_hidden(model: torch.nn.Module) -> str | None:
    """Why single reads of parameters can't be seen in this model, or None."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name or 'the model'} is a TorchScript module"
        if (
            type(module).__name__ == "OptimizedModule"
            or getattr(module, "_compiled_call_impl", None) is not None
        ):
            return f"{name or 'the model'} is compiled"
    return None


class InertSteps:
    """Stands for the steps in a copied or unpickled DDP model, which trains as plain DDP until it is registered itself."""


class OnGradient:
    """A parameter's hook, which a copy of the parameter doesn't take along; it doesn't keep its model's steps alive."""

    def __init__(self, steps: GradientTaker | None) -> None:
        self._steps = (lambda: None) if steps is None else weakref.ref(steps)

    def __call__(self, parameter: torch.Tensor) -> None:
        steps = self._steps()
        if steps is not None:
            steps.on_gradient(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnGradient:
        return OnGradient(None)

    def __reduce__(self) -> Any:
        return (OnGradient, (None,))


class ForwardCall:
    """A forward hook that a copy of the model doesn't take along."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardCall:
        return ForwardCall(_nothing)

    def __reduce__(self) -> Any:
        return (ForwardCall, (_nothing,))


def _nothing(*_: Any) -> None:
    """What a copied model calls before and after its forward."""
