"""The fluid limits of a training step: what any schedule could reach if messages had no latency and no minimum size.

Where in the flow: beside it; the benches and `simulate` hold their measured steps against these figures.

Model: one worker computes layer after layer (forward, then backward in reverse order); a layer's gradient is complete at
the end of its backward; the network is one server that moves all layers' bytes at a constant rate.  Time is in units of the
step's computing; ``ratio`` is communication / computing.

Invariants: no state is kept; the result never falls below max(computing, communication).

Source: P3 (Jayarajan et al., MLSys 2019), sections 3 and 4: communicate in the order of the next forward pass, and let it
start layer by layer.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.core.topology import Topology

_SETTLING_STEPS = 12
_EPSILON = 1e-12


@dataclass(frozen=True)
class LayerShare:
    """One layer's share of a step's computing and of its communication; each sums to 1 over a model."""

    compute: float
    communication: float


@dataclass(frozen=True)
class FluidLimits:
    """A step's duration with computing = 1: with a barrier after backward, and with ideal priority across it."""

    plain: float
    priority: float


def fluid_limits(layers: Sequence[LayerShare], ratio: float, backward_share: float = 2 / 3) -> FluidLimits:
    """Both limits of one model at one ratio of communication to computing.

    Parameters
    ----------
    layers : in forward order
    ratio : seconds of communication per second of computing, whole model
    backward_share : the backward pass's part of each layer's computing
    """
    return FluidLimits(
        plain_step(layers, ratio, backward_share), priority_step(layers, ratio, backward_share)
    )


def plain_step(layers: Sequence[LayerShare], ratio: float, backward_share: float = 2 / 3) -> float:
    """A step whose next forward waits for all of the communication, which runs in the order gradients appear."""
    now, network_free = 1 - backward_share, 0.0
    for layer in reversed(layers):
        now += layer.compute * backward_share
        network_free = max(network_free, now) + layer.communication * ratio
    return max(now, network_free)


class _Network:
    """One server with preemptive priority: of the jobs that are there, the smallest key is served."""

    def __init__(self) -> None:
        self.now = 0.0
        self._jobs: list[tuple[int, int]] = []
        self._left: dict[tuple[int, int], float] = {}

    def add(self, key: tuple[int, int], duration: float) -> None:
        self._left[key] = duration
        heapq.heappush(self._jobs, key)

    def run_for(self, duration: float) -> None:
        """Let `duration` pass."""
        until = self.now + duration
        while self._jobs and self.now < until:
            self._serve(until - self.now)
        self.now = max(self.now, until)

    def run_until_done(self, key: tuple[int, int]) -> None:
        """Let as much time pass as it takes until job `key` is done (none, if it is)."""
        while key in self._left:
            self._serve(float("inf"))

    def _serve(self, available: float) -> None:
        key = self._jobs[0]
        used = min(self._left[key], available)
        self.now += used
        self._left[key] -= used
        if self._left[key] <= _EPSILON:
            heapq.heappop(self._jobs)
            del self._left[key]


def priority_step(layers: Sequence[LayerShare], ratio: float, backward_share: float = 2 / 3) -> float:
    """A step in the steady state of ideal priority: each layer's forward waits for its own gradients only.

    Older steps go first, then earlier layers; a more urgent gradient interrupts a less urgent one at once.
    Complexity: O(steps x layers x log layers), with a dozen steps until the state is steady.
    """
    network = _Network()
    starts: list[float] = []
    for step in range(_SETTLING_STEPS):
        starts.append(network.now)
        for index, layer in enumerate(layers):
            network.run_until_done((step - 1, index))
            network.run_for(layer.compute * (1 - backward_share))
        for index in reversed(range(len(layers))):
            network.run_for(layers[index].compute * backward_share)
            network.add((step, index), layers[index].communication * ratio)
    half = len(starts) // 2
    return (starts[-1] - starts[half]) / (len(starts) - 1 - half)


def ring_s(network: Topology, n_bytes: float) -> float:
    """Seconds of an all-reduce by a ring in rank order, as Gloo does it: each rank sends 2 (n - 1) / n of the bytes on.

    The resource that the ring's edges load most for its capacity decides.  Complexity: O(ranks x resources per route).
    """
    ranks = network.world_size
    if ranks == 1:
        return 0.0
    load: Counter[str] = Counter()
    for rank in range(ranks):
        load.update(network.route_of[rank, (rank + 1) % ranks, 0].resources)
    slowest = max(edges / network.capacity[name] for name, edges in load.items())
    return slowest * n_bytes * 2 * (ranks - 1) / ranks
