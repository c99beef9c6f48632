"""Slices under way on this rank: jobs in, frames out, frames in, jobs done.

Where in the flow: jobs -> **traffic** (drives `core.exchange`) -> links; called by the loop, in the engine's thread.

Invariants: makes no decision of its own: routes come from jobs, order from keys, commands from the exchange; a frame is checked
against the job's layout before a byte of it is added; frames that come before their job wait for it.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from commhooks.buffers import scratch_memory
from commhooks.core.exchange import Add, Command, Done, Exchange, Finish, Phase, Send, SliceId, Take
from commhooks.core.plan import Hop
from commhooks.core.slicing import Slice
from commhooks.errors import CommError, InternalError, Mismatch, PeerLost, ProtocolError
from commhooks.jobs import Job, JobKey, describe_word
from commhooks.links.base import Link, Payload
from commhooks.links.frames import Header, Kind

log = logging.getLogger(__name__)

_EQUAL = "models, types, bucket sizes and calls must be equal on all ranks"


class Observer(Protocol):
    """What a timeline wants to know; called in the engine's thread."""

    def ready(self, slice_id: SliceId, priority: int) -> None:
        """The rank's own part is here."""

    def queued(self, slice_id: SliceId, link: Link, priority: int) -> None:
        """A frame of the slice was given to a link."""

    def sent(self, slice_id: SliceId, link: Link) -> None:
        """A frame of the slice has left its memory."""

    def done(self, slice_id: SliceId) -> None:
        """The slice holds its final value."""


class Early(NamedTuple):
    """A slice frame whose job this rank hasn't submitted yet."""

    hop: Hop
    header: Header
    payload: Payload | None


class Traffic:
    """All jobs of one rank.

    Parameters
    ----------
    links : the loop's links, by hop
    dirty : where to note links that have something to flush
    gone : why a hop has no link any more
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[Hop, Link],
        dirty: dict[Link, None],
        gone: Mapping[Hop, str],
        checksum: bool,
        observer: Observer | None,
    ) -> None:
        self.rank = rank
        self.exchange = Exchange(rank)
        self.jobs: dict[JobKey, Job] = {}
        self.jobs_done = 0
        self.slices_done = 0
        self.moved_s = 0.0  # when any slice last came or ended
        self._busy_s = 0.0
        self._busy_from: float | None = None
        self._busy_bytes = 0
        self._links = links
        self._dirty = dirty
        self._gone = gone
        self._checksum = checksum
        self._observer = observer
        self._early: dict[JobKey, list[Early]] = {}
        self._newest: dict[tuple[int, int], int] = {}
        self._payloads: dict[tuple[SliceId, Hop], Payload] = {}
        self._scratch = scratch_memory()

    # -- jobs ------------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Start a job (its buffer holds this rank's part)."""
        key = job.key
        if key in self.jobs or self.newest_step(key.stream, key.bucket) >= key.step:
            job.end(InternalError(f"{key} was submitted twice"))
            raise InternalError(f"{key} was submitted twice")
        job.submitted_s = job.moved_s = time.monotonic()
        self._newest[key.stream, key.bucket] = key.step
        if job.left == 0:
            for early in self._early.pop(key, ()):
                error = self._mismatch(job, early.header, early.hop.rank)
                job.end(error)
                raise error
            job.end(None)
            return
        if not self.jobs:
            self._busy_from = job.submitted_s
        self.jobs[key] = job
        for piece in job.layout.slices:
            route = job.routes[piece.tree]
            if route is not None:
                slice_id = key.slice(piece.index)
                if self._observer is not None:
                    self._observer.ready(slice_id, piece.priority)
                self._execute(job, self.exchange.local_ready(slice_id, route))
        for early in self._early.pop(key, ()):
            self._check_fits(job, early.header, early.hop.rank)
            self._deliver(job, early.hop, early.header, early.payload)

    def busy(self) -> tuple[float, int]:
        """Seconds with at least one job under way, and bytes of finished jobs, since the start.  Any thread."""
        since = self._busy_from
        return self._busy_s + (time.monotonic() - since if since is not None else 0.0), self._busy_bytes

    def newest_step(self, stream: int, bucket: int) -> int:
        """The last step of which this bucket was submitted here; -1 before the first."""
        return self._newest.get((stream, bucket), -1)

    def end_all(self, error: CommError) -> None:
        """Every job ends with `error`; nothing of it is touched any more."""
        jobs = list(self.jobs.values())
        self.jobs.clear()
        self._early.clear()
        self._payloads.clear()
        for job in jobs:
            try:
                job.end(error)
            except Exception:  # a callback's own failure must not keep the others waiting
                log.exception("rank %d: the callback of %s failed", self.rank, job.key)

    # -- frames in -------------------------------------------------------------------------------------------------------

    def target(self, link: Link, header: Header) -> memoryview | None:
        """A finished value goes straight into the job's memory; partial sums are staged."""
        if header.kind != Kind.BROADCAST:
            return None
        job = self.jobs.get((header.stream, header.step, header.bucket))  # type: ignore[call-overload]
        if job is None:
            return None
        piece = self._check_fits(job, header, link.peer)
        return job.buffer.region(piece.start, piece.stop).view

    def received(self, link: Link, header: Header, payload: Payload | None) -> None:
        """A slice frame is here."""
        key = JobKey(header.stream, header.step, header.bucket)
        job = self.jobs.get(key)
        hop = Hop(link.peer, link.channel)
        if job is not None:
            self._check_fits(job, header, link.peer)
            self._deliver(job, hop, header, payload)
        elif header.step <= self.newest_step(header.stream, header.bucket):
            raise Mismatch(
                f"{key}: rank {link.peer} has {describe_word(header.extra)} there and sends slice {header.slice} of it, "
                f"but rank {self.rank} has finished it with less; {_EQUAL}"
            )
        else:
            self._early.setdefault(key, []).append(Early(hop, header, payload))

    def sent(self, link: Link, slice_id: SliceId) -> None:
        """A slice frame has left its memory."""
        if self._observer is not None:
            self._observer.sent(slice_id, link)
        job = self.jobs[JobKey(*slice_id[:3])]
        self._execute(job, self.exchange.sent(slice_id))

    def _check_fits(self, job: Job, header: Header, peer: int) -> Slice:
        if header.layout != job.check:
            raise self._mismatch(job, header, peer)
        if header.slice >= len(job.layout.slices):
            raise ProtocolError(
                f"{job.key}: rank {peer} sent slice {header.slice} of {len(job.layout.slices)}"
            )
        piece = job.layout.slices[header.slice]
        nbytes = piece.numel * job.buffer.itemsize
        if header.length != nbytes or header.tree != piece.tree:
            raise Mismatch(
                f"{job.key} slice {header.slice}: rank {peer} sent {header.length} bytes on tree {header.tree}, "
                f"rank {self.rank} expected {nbytes} bytes on tree {piece.tree}"
            )
        return piece

    def _mismatch(self, job: Job, header: Header, peer: int) -> Mismatch:
        theirs, ours = describe_word(header.extra), describe_word(job.word)
        if theirs == ours:
            return Mismatch(
                f"{job.key}: ranks {peer} and {self.rank} both have {ours} there, but cut it differently, send it by "
                f"different trees or make different calls; {_EQUAL}"
            )
        return Mismatch(f"{job.key}: rank {peer} has {theirs} there, rank {self.rank} has {ours}; {_EQUAL}")

    def _deliver(self, job: Job, hop: Hop, header: Header, payload: Payload | None) -> None:
        job.moved_s = self.moved_s = time.monotonic()
        piece = job.layout.slices[header.slice]
        route = job.routes[piece.tree]
        slice_id = job.key.slice(piece.index)
        if route is None:
            raise ProtocolError(f"{slice_id}: rank {self.rank} has no part in it, but {hop} sent to it")
        if self._checksum:
            self._verify(job, piece, slice_id, header, payload)
        if payload is not None:
            self._payloads[slice_id, hop] = payload
        if header.kind == Kind.REDUCE:
            self._execute(job, self.exchange.partial_arrived(slice_id, route, hop))
        else:
            self._execute(job, self.exchange.value_arrived(slice_id, route, hop))

    def _verify(
        self, job: Job, piece: Slice, slice_id: SliceId, header: Header, payload: Payload | None
    ) -> None:
        view = job.buffer.region(piece.start, piece.stop).view if payload is None else payload.view()
        if view is None:  # still in the sender's memory: no network to distrust
            return
        seen = zlib.crc32(view)
        if seen != header.checksum:
            raise ProtocolError(
                f"{slice_id}: checksum {seen:#010x}, sent with {header.checksum:#010x}: the network is faulty"
            )

    # -- commands --------------------------------------------------------------------------------------------------------

    def _execute(self, job: Job, commands: list[Command]) -> None:
        for command in commands:
            slice_id = command.slice
            piece = job.layout.slices[slice_id.index]
            kind = type(command)
            if kind is Send:
                self._send(job, piece, command)  # type: ignore[arg-type]
            elif kind is Add:
                payload = self._payloads.pop((slice_id, command.child))  # type: ignore[union-attr]
                job.buffer.add(piece.start, piece.stop, payload, self._scratch)
                payload.release()
            elif kind is Take:
                self._take(job, piece, slice_id)
            elif kind is Finish:
                if job.divisor != 1:
                    job.buffer.divide(piece.start, piece.stop, job.divisor)
            elif kind is Done:
                self._slice_done(job, slice_id)

    def _take(self, job: Job, piece: Slice, slice_id: SliceId) -> None:
        route = job.routes[piece.tree]
        assert route is not None and route.broadcast_parent is not None
        payload = self._payloads.pop((slice_id, route.broadcast_parent), None)
        if payload is not None:
            job.buffer.take(piece.start, piece.stop, payload)
            payload.release()

    def _send(self, job: Job, piece: Slice, command: Send) -> None:
        slice_id = command.slice
        link = self._links.get(command.hop)
        if link is None or command.hop in self._gone:
            why = self._gone.get(
                command.hop, f"no link to rank {command.hop.rank} channel {command.hop.channel}"
            )
            raise PeerLost(f"{why}; {slice_id} was to be sent to it")
        region = job.buffer.region(piece.start, piece.stop)
        route = job.routes[piece.tree]
        assert route is not None
        up = command.phase is Phase.REDUCE
        kind = Kind.REDUCE if up else Kind.BROADCAST
        hops_left = route.reduce_hops_left if up else route.broadcast_hops_left
        checksum = zlib.crc32(region.view) if self._checksum and not link.by_reference else 0
        stream, step, bucket, index = slice_id
        nbytes = len(region.view)
        header = Header(
            kind,
            piece.tree,
            stream,
            step,
            bucket,
            index,
            job.check,
            nbytes,
            checksum,
            job.word,
        )
        if self._observer is not None:
            self._observer.queued(slice_id, link, piece.priority)
        # Within a priority whoever has the longest way before it goes first: otherwise links run dry at the end.
        link.push((step, piece.priority, index - (hops_left << 32)), header, region, slice_id)
        self._dirty[link] = None

    def _slice_done(self, job: Job, slice_id: SliceId) -> None:
        job.left -= 1
        job.moved_s = self.moved_s = time.monotonic()
        self.slices_done += 1
        if self._observer is not None:
            self._observer.done(slice_id)
        if job.on_slice is not None:
            job.on_slice(slice_id.index)
        if job.left == 0:
            del self.jobs[job.key]
            self.jobs_done += 1
            self._busy_bytes += job.buffer.nbytes
            if not self.jobs:
                self._busy_s, self._busy_from = self.busy()[0], None
            job.end(None)

    # -- what is awaited -------------------------------------------------------------------------------------------------

    def waiting_for(self, hop: Hop) -> SliceId | None:
        """A slice that can't end without something from `hop`."""
        return next((s for s in self.exchange.waiting() if self.exchange.needs(s, hop)), None)

    def oldest_waiting(self, key: JobKey) -> SliceId | None:
        """An unfinished slice of a job."""
        return next((s for s in self.exchange.waiting() if s[:3] == key), None)

    def oldest_waiting_of(self, stream: int) -> SliceId | None:
        """An unfinished slice of the oldest step of a stream."""
        return min((s for s in self.exchange.waiting() if s.stream == stream), default=None)

    def touch(self, now_s: float) -> None:
        """Count from now what jobs wait."""
        self.moved_s = now_s
        for job in self.jobs.values():
            job.moved_s = now_s

    def overdue(self, before_s: float) -> Iterator[Job]:
        """Jobs of which nothing has moved since a moment, oldest first."""
        return (job for job in self.jobs.values() if job.moved_s < before_s)

    def what_is_awaited(self) -> str:
        """For messages: the first unfinished slice and what it waits for."""
        for slice_id in self.exchange.waiting():
            return f"{slice_id} waits for {self.exchange.awaited(slice_id)}"
        return "nothing was in flight here"
