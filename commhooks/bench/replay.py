"""A module with a real model's parameters that emulates its computing by waiting.

Where in the flow: `bench train` wraps it in DistributedDataParallel, Horovod or commhooks, and times its steps.

Each layer reads its parameters, waits for its part of the step's computing (a third forward, two thirds backward, in
proportion to its operations) and yields a gradient for each parameter.  Waiting releases the interpreter lock and the
processor, so two cores are enough for eight ranks; everything around it (autograd, buckets, the optimizer) is real.

Invariants: the output depends on the current value of every parameter, so a forward that reads an old value shows; the
same seed and inputs give the same gradients, bit for bit; a wait that came out too long shortens the next one.
"""

from __future__ import annotations

import time
from typing import Any, cast

import torch
from torch import nn

from commhooks.bench.models import ModelSpec

_FORWARD_SHARE = 1 / 3
# Oversleeping beyond this isn't the timer's doing but the machine's (other ranks on the same core); it isn't made up for.
_LARGEST_DEBT_S = 0.002


class ComputeClock:
    """Waits for spans that add up to what was asked, although each single wait wakes late."""

    def __init__(self) -> None:
        self._debt_s = 0.0

    def wait(self, duration_s: float) -> None:
        """Block for `duration_s`, less what earlier waits were late."""
        planned_s = duration_s - self._debt_s
        if planned_s <= 0:
            self._debt_s -= duration_s
            return
        start = time.perf_counter()
        time.sleep(planned_s)
        late_s = time.perf_counter() - start - planned_s
        self._debt_s = min(late_s, _LARGEST_DEBT_S)


class _Compute(torch.autograd.Function):
    """The identity plus a touch of every parameter, at the cost of a wait in each direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: ReplayLayer, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        touched = torch.stack([parameter.view(-1)[-1] for parameter in parameters]).mean()
        layer.clock.wait(layer.forward_s)
        return x * 0.9 + touched * 0.1

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (gradient,) = grad_outputs
        layer: ReplayLayer = ctx.layer
        layer.clock.wait(layer.backward_s)
        value = (gradient * 0.1).sum()
        # A gradient of one repeated value costs nothing here; what follows (accumulation, buckets) copies it for real.
        return (gradient * 0.9, None, *(value.expand(parameter.shape) for parameter in layer.weights))


class ReplayLayer(nn.Module):
    """One layer of a replayed model."""

    def __init__(
        self, shapes: tuple[tuple[int, ...], ...], compute_share: float, clock: ComputeClock
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.1) for shape in shapes)
        self.compute_share = compute_share
        self.clock = clock
        self.forward_s = self.backward_s = 0.0

    def set_compute(self, step_s: float) -> None:
        """Let one step of the whole model take `step_s` of computing."""
        self.forward_s = step_s * self.compute_share * _FORWARD_SHARE
        self.backward_s = step_s * self.compute_share * (1 - _FORWARD_SHARE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Read the parameters, wait, pass the value on."""
        return _Compute.apply(x, self, *self.weights)


class ReplayModel(nn.Module):
    """A replayed model; its input and output are vectors of any length.

    Parameters
    ----------
    model : what to replay
    compute_s : computing time of one step (forward and backward) on this rank
    """

    def __init__(self, model: ModelSpec, compute_s: float) -> None:
        super().__init__()
        self.clock = ComputeClock()
        self.layers = nn.ModuleList(
            ReplayLayer(layer.shapes, share.compute, self.clock)
            for layer, share in zip(model.layers, model.shares(), strict=True)
        )
        self.set_compute(compute_s)

    def set_compute(self, step_s: float) -> None:
        """Change the computing time of one step."""
        for layer in cast("list[ReplayLayer]", self.layers):
            layer.set_compute(step_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers in order."""
        for layer in cast("list[ReplayLayer]", self.layers):
            x = layer(x)
        return x
