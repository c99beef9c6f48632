"""One rank's part in reducing and broadcasting slices: events in, commands out.

Where in the flow: slicing -> **exchange** -> links.  The engine carries the commands out and reports what came of them.

A slice travels one tree pair: partial sums climb the in-tree to the root, the root finishes the value, and the value
descends the out-tree.  A rank forwards a slice as soon as its own gradient and all children's sums are in; no rank ever
waits for a global order, so slices may arrive in any order and no interleaving can get stuck.

Invariants
----------
* Children's sums are added in the route's fixed child order: the same bits on every rank and in every run.
* Every rank, the root included, ends with the root's finished value.
* A slice is done when its last receive *and* its last send are done; before that its memory must not be touched.
* An event that can't be (twice the same arrival, from a stranger to the route) raises `ProtocolError` and changes nothing.

Source: Blink section 4 (reduce and broadcast along a tree); P3 section 4 (slices move independently).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from commhooks.core.plan import Hop, TreeRoute
from commhooks.errors import ProtocolError


class Phase(enum.IntEnum):
    """Which way a slice travels."""

    REDUCE = 1
    BROADCAST = 2


class SliceId(NamedTuple):
    """Names one slice on every rank: which stream of buffers, which step of it, which bucket, which slice."""

    stream: int
    step: int
    bucket: int
    index: int  # type: ignore[assignment]  # tuple.index is not wanted here

    def __str__(self) -> str:
        return f"stream {self.stream} step {self.step} bucket {self.bucket} slice {self.index}"


class Add(NamedTuple):
    """Add the partial sum that `child` sent to this rank's memory of the slice."""

    slice: SliceId
    child: Hop


class Finish(NamedTuple):
    """This rank is the root and the sum is complete: scale it (average), before anyone is sent it."""

    slice: SliceId


class Take(NamedTuple):
    """The finished value has come from the parent: put it into this rank's memory if it isn't there already."""

    slice: SliceId


class Send(NamedTuple):
    """Send this rank's memory of the slice to `hop`."""

    slice: SliceId
    phase: Phase
    hop: Hop


class Done(NamedTuple):
    """The slice holds its final value here and nothing of it is queued any more."""

    slice: SliceId


Command = Add | Finish | Take | Send | Done


class _SliceState:
    __slots__ = ("arrived", "local", "next_child", "reduced", "route", "sends", "value_arrived", "value_held")

    def __init__(self, route: TreeRoute) -> None:
        self.reset(route)

    def reset(self, route: TreeRoute) -> None:
        """As new: states are used again, since a state per slice and step keeps the garbage collector busy."""
        self.route = route
        self.local = False
        self.arrived = 0  # bit i: the sum of child i of the route is here
        self.next_child = 0
        self.reduced = False
        self.value_arrived = False
        self.value_held = False
        self.sends = 0


class Exchange:
    """The state of all slices that this rank has met and not finished.

    A route without an in-tree part (broadcast, gather) has no parent and no children there; whether this rank is the
    source is then decided by ``route.root``.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._slices: dict[SliceId, _SliceState] = {}
        self._free: list[_SliceState] = []

    def __len__(self) -> int:
        return len(self._slices)

    def __contains__(self, slice_id: SliceId) -> bool:
        return slice_id in self._slices

    # -- events -----------------------------------------------------------------------------------------------------

    def local_ready(self, slice_id: SliceId, route: TreeRoute) -> list[Command]:
        """This rank's memory of the slice is there (its own gradient is in it, or it may be overwritten)."""
        state = self._state(slice_id, route)
        if state.local:
            raise ProtocolError(f"{slice_id}: this rank's own gradient was handed over twice")
        state.local = True
        return self._advance(slice_id, state)

    def partial_arrived(self, slice_id: SliceId, route: TreeRoute, child: Hop) -> list[Command]:
        """A child's partial sum is here in full."""
        if child not in route.reduce_children:
            raise ProtocolError(
                f"{slice_id}: partial sum from {child}, which is no child of rank {self.rank} there"
            )
        state = self._state(slice_id, route)
        bit = 1 << route.reduce_children.index(child)
        if state.arrived & bit:
            raise ProtocolError(f"{slice_id}: partial sum from {child} came twice")
        state.arrived |= bit
        return self._advance(slice_id, state)

    def value_arrived(self, slice_id: SliceId, route: TreeRoute, parent: Hop) -> list[Command]:
        """The finished value is here in full."""
        if parent != route.broadcast_parent:
            raise ProtocolError(
                f"{slice_id}: value from {parent}, which is not the parent of rank {self.rank} there"
            )
        state = self._state(slice_id, route)
        if state.value_arrived:
            raise ProtocolError(f"{slice_id}: the value came twice from {parent}")
        state.value_arrived = True
        return self._advance(slice_id, state)

    def sent(self, slice_id: SliceId) -> list[Command]:
        """One `Send` of this slice has left this rank's memory for good."""
        state = self._slices.get(slice_id)
        if state is None or state.sends == 0:
            raise ProtocolError(f"{slice_id}: a send ended that was never asked for")
        state.sends -= 1
        return self._advance(slice_id, state)

    # -- what is awaited (for deadlines and error messages) -----------------------------------------------------------

    def awaited(self, slice_id: SliceId) -> str:
        """What the slice waits for, in words; empty when unknown here."""
        state = self._slices.get(slice_id)
        if state is None:
            return ""
        if not state.local:
            return f"rank {self.rank}'s own gradient"
        missing = self.missing_children(slice_id)
        if missing:
            return "partial sums from " + ", ".join(f"rank {hop.rank}" for hop in missing)
        if state.sends:
            return f"{state.sends} sends to end"
        parent = state.route.broadcast_parent
        return f"the value from rank {parent.rank}" if parent is not None else "nothing"

    def missing_children(self, slice_id: SliceId) -> list[Hop]:
        state = self._slices.get(slice_id)
        if state is None:
            return []
        return [hop for i, hop in enumerate(state.route.reduce_children) if not state.arrived >> i & 1]

    def waits_for_value(self, slice_id: SliceId) -> Hop | None:
        """The broadcast parent whose value is all that is missing, if so."""
        state = self._slices.get(slice_id)
        if state is None or not state.reduced or state.value_held:
            return None
        return state.route.broadcast_parent

    def needs(self, slice_id: SliceId, hop: Hop) -> bool:
        """Whether something that the slice waits for can come from `hop` only."""
        return hop in self.missing_children(slice_id) or hop == self.waits_for_value(slice_id)

    def waiting(self) -> Iterator[SliceId]:
        """Slices whose own part is here and which are not done."""
        return (slice_id for slice_id, state in self._slices.items() if state.local)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _state(self, slice_id: SliceId, route: TreeRoute) -> _SliceState:
        state = self._slices.get(slice_id)
        if state is None:
            if self._free:
                state = self._free.pop()
                state.reset(route)
            else:
                state = _SliceState(route)
            self._slices[slice_id] = state
        return state

    def _advance(self, slice_id: SliceId, state: _SliceState) -> list[Command]:
        commands: list[Command] = []
        if not state.local:
            return commands
        if not state.reduced:
            self._reduce(slice_id, state, commands)
        if state.reduced and state.value_arrived and not state.value_held:
            commands.append(Take(slice_id))
            self._hold_value(slice_id, state, commands)
        if self._finished(state):
            self._free.append(self._slices.pop(slice_id))
            commands.append(Done(slice_id))
        return commands

    def _reduce(self, slice_id: SliceId, state: _SliceState, commands: list[Command]) -> None:
        children = state.route.reduce_children
        while state.arrived >> state.next_child & 1:
            commands.append(Add(slice_id, children[state.next_child]))
            state.next_child += 1
        if state.next_child < len(children):
            return
        state.reduced = True
        if state.route.reduce_parent is not None:
            self._send(slice_id, state, Phase.REDUCE, state.route.reduce_parent, commands)
        if state.route.root == self.rank:
            commands.append(Finish(slice_id))
            self._hold_value(slice_id, state, commands)

    def _hold_value(self, slice_id: SliceId, state: _SliceState, commands: list[Command]) -> None:
        state.value_held = True
        for child in state.route.broadcast_children:
            self._send(slice_id, state, Phase.BROADCAST, child, commands)

    def _send(
        self, slice_id: SliceId, state: _SliceState, phase: Phase, hop: Hop, commands: list[Command]
    ) -> None:
        state.sends += 1
        commands.append(Send(slice_id, phase, hop))

    @staticmethod
    def _finished(state: _SliceState) -> bool:
        if state.sends or not state.reduced:
            return False
        return state.value_held or state.route.broadcast_parent is None

    def validate(self) -> None:
        """Check the invariants; tests call it after every event.

        Raises
        ------
        AssertionError
            One of them is broken.
        """
        for slice_id, state in self._slices.items():
            children = state.route.reduce_children
            assert state.arrived < 1 << len(children), f"{slice_id}: arrival from a rank that is no child"
            added = (1 << state.next_child) - 1
            assert state.arrived & added == added, f"{slice_id}: added, not here"
            assert not state.reduced or state.next_child == len(children), f"{slice_id}: reduced too early"
            assert not state.value_held or state.reduced, f"{slice_id}: value before own part was in"
            assert state.sends >= 0, f"{slice_id}: {state.sends} sends"
            assert not self._finished(state), f"{slice_id}: finished but still here"
