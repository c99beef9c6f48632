"""The clock's part: heartbeats, silence, deadlines, and the question that finds the rank at fault.

Where in the flow: beside the traffic; called by the loop once per tick, in the engine's thread.

Invariants: a peer is called lost only when this thread itself was running all the while; a deadline names the rank
that keeps the slice, not merely the neighbour that passes it on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from commhooks.core.exchange import SliceId
from commhooks.core.plan import Hop
from commhooks.errors import CommTimeout, Mismatch
from commhooks.jobs import JobKey
from commhooks.links.base import Key, Link
from commhooks.links.frames import Header, Kind, control
from commhooks.traffic import Traffic

CONTROL_KEY: Key = (-2, 0, 0)  # before every slice


@dataclass(frozen=True)
class Limits:
    """How long silence may last, in seconds."""

    timeout_s: float
    heartbeat_s: float

    @property
    def tick_s(self) -> float:
        return min(1.0, self.heartbeat_s / 4, self.timeout_s / 4)

    @property
    def grace_s(self) -> float:
        """From asking who keeps a slice to giving up."""
        return min(5.0, max(2.0, self.timeout_s / 4))


class _Heard:
    """When a link last brought bytes."""

    __slots__ = ("at_s", "count")

    def __init__(self, now_s: float) -> None:
        self.at_s = now_s
        self.count = -1


class Watch:
    """Raises `CommTimeout` into the loop; tells `silent` which peer counts as lost."""

    def __init__(
        self,
        traffic: Traffic,
        limits: Limits,
        links: Mapping[Hop, Link],
        dirty: dict[Link, None],
        gone: Mapping[Hop, str],
        silent: Callable[[Hop, str], None],
    ) -> None:
        self._traffic = traffic
        self._limits = limits
        self._links = links
        self._dirty = dirty
        self._gone = gone
        self._silent = silent
        self._heard: dict[Hop, _Heard] = {}
        self._asked: set[SliceId] = set()

    def tick(self, now_s: float, late: bool) -> None:
        """Once per `Limits.tick_s`; `late` says that this thread didn't get to run in time."""
        for hop, link in self._links.items():
            if hop not in self._gone:
                self._push(link, control(Kind.HEARTBEAT))
        self._check_silence(now_s, late)
        if late:
            # This process was stopped, suspended or starved: its own clock says nothing about the others.
            self._traffic.touch(now_s)
        self._check_deadlines(now_s)

    def _push(self, link: Link, header: Header) -> None:
        link.push(CONTROL_KEY, header, None, None)
        self._dirty[link] = None

    def _check_silence(self, now_s: float, late: bool) -> None:
        for hop, link in list(self._links.items()):
            heard = self._heard.get(hop)
            if heard is None:
                heard = self._heard[hop] = _Heard(now_s)
            # When this very thread didn't get to run, what looks like a silent peer may be our own deafness.
            if late or link.bytes_received != heard.count:
                heard.count = link.bytes_received
                heard.at_s = now_s
            elif hop not in self._gone and now_s - heard.at_s > self._limits.heartbeat_s:
                self._silent(
                    hop,
                    f"rank {hop.rank} has been silent for {now_s - heard.at_s:.1f} s (limit {self._limits.heartbeat_s:g} s, "
                    f"COMMHOOKS_HEARTBEAT_S): stopped, frozen or cut off",
                )

    def _check_deadlines(self, now_s: float) -> None:
        limits = self._limits
        overdue = list(self._traffic.overdue(now_s - limits.timeout_s))
        if not overdue:
            self._asked.clear()
        for job in overdue:
            slice_id = self._traffic.oldest_waiting(job.key)
            if slice_id is None:
                continue
            age_s = now_s - job.moved_s
            # While other jobs move, this one may just be less urgent; a rank that doesn't have it answers the question.
            if now_s - max(job.moved_s, self._traffic.moved_s) > limits.timeout_s + limits.grace_s:
                raise CommTimeout(
                    f"rank {self._traffic.rank} has waited {age_s:.1f} s for {self._traffic.exchange.awaited(slice_id)} "
                    f"({slice_id}); limit {limits.timeout_s:g} s, COMMHOOKS_TIMEOUT_S"
                )
            self._ask(slice_id)

    def _ask(self, slice_id: SliceId) -> None:
        """Ask whoever keeps a slice what it waits for; the question travels until it finds the rank at fault."""
        if slice_id in self._asked:
            return
        self._asked.add(slice_id)
        exchange = self._traffic.exchange
        parent = exchange.waits_for_value(slice_id)
        stream, step, bucket, index = slice_id
        for hop in exchange.missing_children(slice_id) + ([parent] if parent is not None else []):
            link = self._links.get(hop)
            if link is not None:
                self._push(link, Header(Kind.QUERY, 0, stream, step, bucket, index, 0, 0, 0, 0))

    def asked(self, link: Link, slice_id: SliceId) -> None:
        """A peer wants to know what keeps a slice.

        Raises
        ------
        CommTimeout
            This rank does: it hasn't produced its own part.
        Mismatch
            This rank is finished with it, so the two don't mean the same.
        """
        traffic = self._traffic
        newest = traffic.newest_step(slice_id.stream, slice_id.bucket)
        if JobKey(slice_id.stream, slice_id.step, slice_id.bucket) in traffic.jobs:
            self._ask(slice_id)
        elif newest >= slice_id.step:
            raise Mismatch(
                f"rank {traffic.rank} has finished its part of {slice_id}, but rank {link.peer} waits for more of it; "
                "models, types, bucket sizes and calls must be equal on all ranks"
            )
        elif (older := traffic.oldest_waiting_of(slice_id.stream)) is not None and older.step < slice_id.step:
            self._ask(older)  # whoever keeps us in an earlier step keeps the asker too
        else:
            raise CommTimeout(
                f"rank {self._traffic.rank} has not produced {slice_id} within {self._limits.timeout_s:g} s "
                f"(COMMHOOKS_TIMEOUT_S), while rank {link.peer} waits for it: it skipped a layer, left the loop or is slow"
            )
