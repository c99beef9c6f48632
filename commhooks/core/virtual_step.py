"""A training step in virtual time: one rank's computing, slices and gates, and a network that serves one slice after another.

Where in the flow: beside it; `commhooks simulate` asks for the duration of a step under each schedule.

Model: all ranks compute alike, so one stands for all.  The network moves a slice in ``seconds per byte x bytes`` and chooses
the next one when it is done with the last; a slice is back after the other hops of its way, each of which costs the latency
and, where slices are passed on whole (trees), the slice's own time again.  Slicing, priorities and gates are the same code
as in a real run.

Invariants: no state is kept; the same input gives the same figure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.core.gates import Gates, SliceKey
from commhooks.core.slicing import Segment, slice_layout

_STEPS = 8
_SETTLED = 3


@dataclass(frozen=True)
class VirtualLayer:
    """One layer: its gradients, and the seconds of computing in its forward and its backward."""

    numel: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class VirtualNetwork:
    """What the ranks' all-reduce costs.

    Attributes
    ----------
    s_per_byte : seconds per byte of gradients, when busy
    hops : messages in a row from the first sender to the last receiver
    latency_s : of one message
    whole : slices are passed on whole, hop by hop; False: `s_per_byte` is all that bytes cost (a ring's chunks)
    """

    s_per_byte: float
    hops: int
    latency_s: float
    whole: bool


@dataclass(frozen=True)
class VirtualSchedule:
    """How gradients travel.

    Attributes
    ----------
    slice_numel : largest slice; None: whole buckets
    bucket_numel : gradients leave when this many have come together; 0: each layer at once
    by_layer : the first forward layer's slices go first; else first come, first served
    barrier : the step and the next forward wait for everything
    """

    slice_numel: int | None
    bucket_numel: int
    by_layer: bool
    barrier: bool


class _Wire:
    """Serves slices one at a time; knows when each is back."""

    def __init__(self, network: VirtualNetwork, item_bytes: int) -> None:
        self._network = network
        self._item_bytes = item_bytes
        self._free_s = 0.0
        self._queue: list[tuple[int, int, int, SliceKey, int]] = []
        self._count = 0
        self.back_s: dict[SliceKey, float] = {}

    def add(self, now_s: float, step: int, priority: int, key: SliceKey, numel: int) -> None:
        """A slice leaves; what was to be sent until now has been."""
        self.run_until(now_s)
        if not self._queue:
            self._free_s = max(self._free_s, now_s)
        self._count += 1
        heapq.heappush(self._queue, (step, priority, self._count, key, numel))

    def run_until(self, now_s: float) -> None:
        """Serve what begins before `now_s`."""
        while self._queue and self._free_s < now_s:
            self._serve()

    def run_until_back(self, key: SliceKey) -> float:
        """When `key` is back, given that nothing more is added before."""
        while key not in self.back_s:
            self._serve()
        return self.back_s[key]

    def _serve(self) -> None:
        *_, key, numel = heapq.heappop(self._queue)
        service_s = numel * self._item_bytes * self._network.s_per_byte
        self._free_s += service_s
        network = self._network
        hop_s = network.latency_s + (service_s if network.whole else 0.0)
        self.back_s[key] = self._free_s + network.latency_s + (network.hops - 1) * hop_s


def virtual_step_s(
    layers: Sequence[VirtualLayer], network: VirtualNetwork, schedule: VirtualSchedule, item_bytes: int = 4
) -> float:
    """Seconds of a step in the steady state.

    Parameters
    ----------
    layers : in forward order
    network : shared by all ranks
    schedule : how gradients travel
    item_bytes : bytes per element

    Complexity: O(steps x slices x log slices), with eight steps; independent of the number of ranks.
    """
    buckets = _buckets(layers, schedule)
    wire = _Wire(network, item_bytes)
    gates = Gates(len(layers))
    now_s = 0.0
    starts: list[float] = []
    for step in range(_STEPS):
        starts.append(now_s)
        if schedule.barrier:
            now_s = _open(range(len(layers)), gates, wire, now_s)
        for index, layer in enumerate(layers):
            now_s = _open([index], gates, wire, now_s) + layer.forward_s
        wire.back_s.clear()
        for number, (members, pieces) in enumerate(buckets):
            for index in members:
                now_s += layers[index].backward_s
            slices = [(SliceKey(number, at), holders) for at, (_, _, holders) in enumerate(pieces)]
            gates.depart(slices, members)
            for (key, _), (numel, priority, _) in zip(slices, pieces, strict=True):
                wire.add(now_s, step, priority if schedule.by_layer else 0, key, numel)
        gates.close(range(len(layers)))
    return (starts[-1] - starts[_SETTLED]) / (_STEPS - 1 - _SETTLED)


def _open(indices: Sequence[int], gates: Gates, wire: _Wire, now_s: float) -> float:
    """Wait until the gates of `indices` can open, and open them."""
    wire.run_until(now_s)
    for key in gates.awaited(indices):
        now_s = max(now_s, wire.run_until_back(key))
        gates.slice_done(key)
    gates.stepped([index for index in indices if index in gates.ready()])
    return now_s


_Piece = tuple[int, int, list[int]]


def _buckets(
    layers: Sequence[VirtualLayer], schedule: VirtualSchedule
) -> list[tuple[list[int], list[_Piece]]]:
    """What leaves together: layers in backward order, and slices as (numel, priority, layers in it)."""
    groups: list[list[int]] = []
    filled = schedule.bucket_numel
    for index in reversed(range(len(layers))):
        if filled >= schedule.bucket_numel:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += layers[index].numel
    return [(members, _pieces(layers, members, schedule)) for members in groups]


def _pieces(
    layers: Sequence[VirtualLayer], members: Sequence[int], schedule: VirtualSchedule
) -> list[_Piece]:
    if schedule.slice_numel is None:
        return [(sum(layers[index].numel for index in members), min(members), list(members))]
    pieces: list[_Piece] = []
    for index in members:
        layout = slice_layout(
            [Segment(layers[index].numel, index, index)], schedule.slice_numel, lambda sizes: [0] * len(sizes)
        )
        pieces += [(piece.numel, piece.priority, [index]) for piece in layout.slices]
    return pieces
