"""Gates: which parameters may be read, which must be stepped first, and which slices that has to wait for.

Where in the flow: links -> **gates** -> deferred.  The shell reports what happened (gradients left, a slice came back, the user
asked for a step, parameters were stepped) and asks what a read must wait for.

A parameter's gate is OPEN (its value is current, nothing of it is under way), IN_FLIGHT (its gradient is under way, no step has
been asked for: the value is current) or CLOSED (the step has been asked for and not run: the value is old, no one may
read it).  A CLOSED gate whose slices are all back is ready to be stepped.

Invariants
----------
* A parameter has at most one gradient under way.
* A CLOSED gate opens only by `stepped`: nothing lets an old value be read.
* An event that can't be raises `InternalError` and changes nothing.
* Parameters are numbered in forward order, so that "smaller" means "needed sooner" everywhere.

Source: P3 (Jayarajan et al., MLSys 2019), section 4: a layer's forward waits for its own slices only.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from commhooks.errors import InternalError


class GateState(enum.Enum):
    """What a parameter's value is good for."""

    OPEN = "open"
    IN_FLIGHT = "in flight"
    CLOSED = "closed"


class SliceKey(NamedTuple):
    """Names one slice of the step under way on this rank."""

    bucket: int
    number: int


class Gates:
    """The gates of all parameters of one model on one rank.

    Parameters
    ----------
    count : how many parameters there are
    """

    def __init__(self, count: int) -> None:
        self._state = [GateState.OPEN] * count
        self._outstanding: list[set[SliceKey]] = [set() for _ in range(count)]
        self._holders: dict[SliceKey, tuple[int, ...]] = {}
        self._ready: set[int] = set()
        self._closed = 0

    # -- events -----------------------------------------------------------------------------------------------------

    def depart(self, slices: Sequence[tuple[SliceKey, Sequence[int]]], parameters: Sequence[int]) -> None:
        """Gradients of `parameters` left in `slices`, each of which carries elements of the parameters beside it."""
        for parameter in parameters:
            self._expect(parameter, GateState.OPEN, "its gradient left")
        for key, _ in slices:
            if key in self._holders:
                raise InternalError(f"{_slice(key)} left twice")
        for parameter in parameters:
            self._state[parameter] = GateState.IN_FLIGHT
        for key, holders in slices:
            self._holders[key] = tuple(holders)
            for parameter in holders:
                self._outstanding[parameter].add(key)

    def slice_done(self, key: SliceKey) -> None:
        """A slice is back: its memory holds the average."""
        if key not in self._holders:
            raise InternalError(f"{_slice(key)} came back, but it never left (or came back before)")
        for parameter in self._holders.pop(key):
            self._outstanding[parameter].discard(key)
            if self._state[parameter] is GateState.CLOSED and not self._outstanding[parameter]:
                self._ready.add(parameter)

    def close(self, parameters: Iterable[int]) -> None:
        """The user asked for a step of `parameters`: from here on their values are old."""
        chosen = list(dict.fromkeys(parameters))
        for parameter in chosen:
            self._expect(parameter, GateState.IN_FLIGHT, "a step was asked for")
        for parameter in chosen:
            self._state[parameter] = GateState.CLOSED
            if not self._outstanding[parameter]:
                self._ready.add(parameter)
        self._closed += len(chosen)

    def release(self, parameters: Iterable[int]) -> None:
        """The averages of `parameters` were taken over by the user, or dropped; no step follows from them."""
        chosen = list(dict.fromkeys(parameters))
        for parameter in chosen:
            self._expect(parameter, GateState.IN_FLIGHT, "its average was taken or dropped")
            if self._outstanding[parameter]:
                raise InternalError(
                    f"parameter {parameter} is released while {self._awaited_words(parameter)}"
                )
        for parameter in chosen:
            self._state[parameter] = GateState.OPEN

    def stepped(self, parameters: Iterable[int]) -> None:
        """The optimizer ran on `parameters`: their values are current."""
        chosen = list(dict.fromkeys(parameters))
        for parameter in chosen:
            if parameter not in self._ready:
                raise InternalError(
                    f"parameter {parameter} was stepped while its gate is {self._state[parameter].value} and "
                    f"{self._awaited_words(parameter)}"
                )
        for parameter in chosen:
            self._ready.discard(parameter)
            self._state[parameter] = GateState.OPEN
        self._closed -= len(chosen)

    # -- questions --------------------------------------------------------------------------------------------------

    def state(self, parameter: int) -> GateState:
        """One gate's state."""
        return self._state[parameter]

    @property
    def closed(self) -> int:
        """How many gates are closed."""
        return self._closed

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Parameters whose gradient is under way without a step asked for, in forward order."""
        return tuple(p for p, state in enumerate(self._state) if state is GateState.IN_FLIGHT)

    @property
    def outstanding(self) -> tuple[SliceKey, ...]:
        """Every slice that is not back, in key order."""
        return tuple(sorted(self._holders))

    def awaited(self, parameters: Iterable[int]) -> tuple[SliceKey, ...]:
        """The slices that have to come back before all of `parameters` can be stepped, in key order."""
        return tuple(sorted(set().union(*(self._outstanding[parameter] for parameter in parameters))))

    def ready(self) -> tuple[int, ...]:
        """Parameters whose step was asked for and whose slices are all back, in forward order."""
        return tuple(sorted(self._ready))

    def closed_parameters(self) -> tuple[int, ...]:
        """Parameters whose gate is closed, in forward order."""
        return tuple(p for p, state in enumerate(self._state) if state is GateState.CLOSED)

    # -- checks -----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant; for tests, after every event.

        Raises
        ------
        InternalError
            Names the broken invariant.
        """
        held: dict[int, set[SliceKey]] = {}
        for key, holders in self._holders.items():
            for parameter in holders:
                held.setdefault(parameter, set()).add(key)
        for parameter, state in enumerate(self._state):
            outstanding = self._outstanding[parameter]
            _require(
                outstanding == held.get(parameter, set()), parameter, "slices and their holders disagree"
            )
            _require(state is not GateState.OPEN or not outstanding, parameter, "open with slices under way")
            is_ready = state is GateState.CLOSED and not outstanding
            _require(
                is_ready == (parameter in self._ready), parameter, "wrongly listed as ready or not ready"
            )
        if self._closed != len(self.closed_parameters()):
            raise InternalError(f"{self._closed} gates are counted as closed, {self.closed_parameters()} are")

    def _expect(self, parameter: int, state: GateState, what: str) -> None:
        if self._state[parameter] is not state:
            raise InternalError(
                f"parameter {parameter}: {what}, which needs its gate to be {state.value}; it is {self._state[parameter].value}"
            )

    def _awaited_words(self, parameter: int) -> str:
        return f"{len(self._outstanding[parameter])} of its slices are outstanding"


def _slice(key: SliceKey) -> str:
    return f"bucket {key.bucket} slice {key.number}"


def _require(holds: bool, parameter: int, words: str) -> None:
    if not holds:
        raise InternalError(f"parameter {parameter}: {words}")


class ForwardOrder:
    """Learns the order in which a forward pass first reads its parameters.

    Parameters
    ----------
    count : how many parameters there are
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._reads: dict[int, None] = {}

    def read(self, parameters: Iterable[int]) -> None:
        """`parameters` were read; only the first read of each counts."""
        for parameter in parameters:
            self._reads.setdefault(parameter)

    @property
    def seen(self) -> int:
        """How many parameters were read so far."""
        return len(self._reads)

    def order(self) -> tuple[int, ...]:
        """All parameters, first read first; those never read follow as they were declared."""
        return (*self._reads, *(p for p in range(self._count) if p not in self._reads))


def displaced(order: Sequence[int], seen: Sequence[int]) -> int:
    """How many of the parameters in `seen` were read before one that `order` puts ahead of them.

    0 means that the reads followed `order`; parameters missing from `seen` don't count.
    """
    position = {parameter: place for place, parameter in enumerate(order)}
    count, latest = 0, -1
    for parameter in seen:
        place = position[parameter]
        count += place < latest
        latest = max(latest, place)
    return count


class SliceCost(NamedTuple):
    """A slice to be put in order: when it can leave, how urgent it is, how long it takes."""

    key: SliceKey
    ready_s: float
    priority: int
    duration_s: float


def agreed_order(slices: Collection[SliceCost]) -> tuple[SliceKey, ...]:
    """The order in which one sender that always takes the most urgent slice would send `slices`.

    Ranks that must issue collectives in the same order can't choose by what happens to be ready on each; they all follow
    this order, made from one rank's measured times.  Ties go to the smaller key.  Complexity: O(n^2) in the worst case.
    """
    waiting = sorted(slices, key=lambda cost: (cost.ready_s, cost.key))
    order: list[SliceKey] = []
    now = 0.0
    while waiting:
        now = max(now, waiting[0].ready_s)
        there = [cost for cost in waiting if cost.ready_s <= now]
        chosen = min(there, key=lambda cost: (cost.priority, cost.key))
        waiting.remove(chosen)
        order.append(chosen.key)
        now += chosen.duration_s
    return tuple(order)
