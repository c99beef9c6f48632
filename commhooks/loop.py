"""The engine's thread: carries commands to links and link events to the exchange, and watches the clock.

Where in the flow: jobs -> exchange -> **loop** -> links, and back.

Invariants: makes no decision of its own: routes come from jobs, order from keys, commands from `core.exchange`; never blocks but
in `epoll`; after the first error it is latched: jobs end with that error, peers are told, nothing is reduced any more.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from commhooks import errors
from commhooks.buffers import scratch_memory
from commhooks.core.exchange import Add, Command, Done, Exchange, Finish, Phase, Send, SliceId, Take
from commhooks.core.plan import Hop
from commhooks.errors import CommError, CommTimeout, InternalError, Mismatch, PeerLost, ProtocolError
from commhooks.jobs import Job, JobKey
from commhooks.links.base import Key, Link, Payload, Region
from commhooks.links.frames import Header, Kind, control
from commhooks.mesh import Mesh

log = logging.getLogger(__name__)

_CONTROL_KEY: Key = (-2, 0, 0)
_CLOSE_LIMIT_S = 2.0

MessageHandler = Callable[[int, bytes, memoryview], None]


class _Early(NamedTuple):
    """A slice frame whose job this rank hasn't submitted yet."""

    hop: Hop
    header: Header
    payload: Payload | None


@dataclass
class Limits:
    """How long silence may last, in seconds."""

    timeout_s: float
    heartbeat_s: float

    @property
    def tick_s(self) -> float:
        return min(1.0, self.heartbeat_s / 4, self.timeout_s / 4)


class _Heard:
    """When a link last brought bytes."""

    __slots__ = ("at_s", "count")

    def __init__(self, now_s: float) -> None:
        self.at_s = now_s
        self.count = 0


class Loop:
    """Everything that happens in the engine's thread.

    The methods named without underscore and not part of `LinkEvents` are called by other threads only through `call`.
    """

    def __init__(self, rank: int, world_size: int, limits: Limits, checksum: bool, observer: Observer | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.links: dict[Hop, Link] = {}
        self.error: CommError | None = None
        self.mesh: Mesh | None = None
        self.jobs_done = 0
        self.slices_done = 0
        self._limits = limits
        self._checksum = checksum
        self._observer = observer
        self._exchange = Exchange(rank)
        self._jobs: dict[JobKey, Job] = {}
        self._early: dict[JobKey, list[_Early]] = {}
        self._newest: dict[tuple[int, int], int] = {}
        self._payloads: dict[tuple[SliceId, Hop], Payload] = {}
        self._handlers: dict[int, MessageHandler] = {}
        self._by_fd: dict[int, Link] = {}
        self._masks: dict[int, int] = {}
        self._dirty: dict[Link, None] = {}
        self._heard: dict[Hop, _Heard] = {}
        self._gone: dict[Hop, str] = {}
        self._asked: set[SliceId] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._poll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake_fd, select.EPOLLIN)
        self._scratch = scratch_memory()
        self._closing_since: float | None = None
        self._links_changed: Callable[[], None] = lambda: None

    # -- other threads -----------------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the engine's thread, soon."""
        self._calls.append(function)
        os.eventfd_write(self._wake_fd, 1)

    # -- the loop ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `begin_close` has run its course."""
        next_tick_s = time.monotonic()
        while not self._closed():
            wait_s = max(0.0, next_tick_s - time.monotonic())
            for fd, mask in self._poll.poll(wait_s):
                self._guarded(self._on_event, fd, mask)
            self._guarded(self._flush_dirty)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                late = now_s - next_tick_s > 2 * self._limits.tick_s
                next_tick_s = now_s + self._limits.tick_s
                self._guarded(self._tick, now_s, late)
        self._dispose()

    def _guarded(self, function: Callable[..., None], *arguments: object) -> None:
        """No exception leaves the loop: it becomes the engine's error."""
        try:
            function(*arguments)
        except CommError as error:
            self.latch(error)
        except Exception as error:
            log.exception("rank %d: the engine failed", self.rank)
            self.latch(InternalError(f"rank {self.rank}: {type(error).__name__}: {error} (a bug; please report it)"))

    def _on_event(self, fd: int, mask: int) -> None:
        link = self._by_fd.get(fd)
        if link is not None:
            if mask & ~select.EPOLLOUT:
                link.on_readable()
            if mask & select.EPOLLOUT:
                self._dirty[link] = None
        elif fd == self._wake_fd:
            os.eventfd_read(fd)
            while self._calls:
                self._guarded(self._calls.popleft())
        elif self.mesh is not None and self.mesh.owns(fd):
            self.mesh.ready(fd, time.monotonic())

    def _flush_dirty(self) -> None:
        while self._dirty:
            link, _ = self._dirty.popitem()
            link.flush()
            self._watch_writes(link)

    def _watch_writes(self, link: Link) -> None:
        fd = link.fileno()
        if fd < 0 or fd not in self._masks:
            return
        mask = select.EPOLLIN | (select.EPOLLOUT if link.wants_write else 0)
        if self._masks[fd] != mask:
            self._masks[fd] = mask
            self._poll.modify(fd, mask)

    # -- links ---------------------------------------------------------------------------------------------------------------

    def use_mesh(self, mesh: Mesh, links_changed: Callable[[], None]) -> None:
        self.mesh = mesh
        self._links_changed = links_changed
        mesh.attach(self._poll)

    def add_link(self, link: Link) -> None:
        hop = Hop(link.peer, link.channel)
        if hop in self.links:
            link.close()
            return
        self.links[hop] = link
        self._heard[hop] = _Heard(time.monotonic())
        fd = link.fileno()
        self._by_fd[fd] = link
        self._masks[fd] = select.EPOLLIN
        self._poll.register(fd, select.EPOLLIN)
        log.debug("rank %d: %r is up", self.rank, link)
        self._links_changed()

    def target(self, link: Link, header: Header) -> memoryview | None:
        if header.kind != Kind.BROADCAST or self.error is not None:
            return None
        job = self._jobs.get(JobKey(header.stream, header.step, header.bucket))
        if job is None:
            return None
        self._check_fits(job, header, link)
        piece = job.layout.slices[header.slice]
        return job.buffer.region(piece.start, piece.stop).view

    def received(self, link: Link, header: Header, payload: Payload | None) -> None:
        kind = header.kind
        if kind == Kind.REDUCE or kind == Kind.BROADCAST:
            if self.error is None:
                self._slice_received(link, header, payload)
        elif kind == Kind.MESSAGE:
            self._message_received(link, header, payload)
        elif kind == Kind.ABORT:
            self._abort_received(link, payload)
        elif kind == Kind.QUERY:
            self._query_received(link, SliceId(header.stream, header.step, header.bucket, header.slice))
        elif kind == Kind.GOODBYE:
            self._peer_left(Hop(link.peer, link.channel), f"rank {link.peer} has ended (in order)")
            if link.idle:
                self._end_sending(link)  # tells the leaving peer that it need not wait for us

    def sent(self, link: Link, token: object) -> None:
        if isinstance(token, SliceId):
            if self.error is None:
                if self._observer is not None:
                    self._observer.sent(token, link)
                self._execute(self._job_of(token), self._exchange.sent(token))
        elif callable(token):
            token()

    def failed(self, link: Link, error: CommError) -> None:
        self._drop(link)
        if not isinstance(error, PeerLost):
            raise error
        self._peer_left(Hop(link.peer, link.channel), str(error), orderly=_said_goodbye(link))

    def _drop(self, link: Link) -> None:
        fd = link.fileno()
        if self._by_fd.pop(fd, None) is not None:
            self._masks.pop(fd, None)
            self._poll.unregister(fd)
        self._dirty.pop(link, None)
        self.links.pop(Hop(link.peer, link.channel), None)
        link.close()

    def _peer_left(self, hop: Hop, words: str, orderly: bool = True) -> None:
        if self.error is not None or self._closing_since is not None:
            return
        self._gone[hop] = words
        if not orderly:
            raise PeerLost(f"{words}; {self._what_is_awaited()}")
        self._check_gone()

    def _check_gone(self) -> None:
        """Fail when an unfinished slice needs a peer that has left."""
        for slice_id in self._exchange.waiting():
            for hop, words in self._gone.items():
                if self._exchange.needs(slice_id, hop):
                    raise PeerLost(f"{words} while {slice_id} waits for {self._exchange.awaited(slice_id)}")

    # -- jobs ------------------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Start a job (its buffer holds this rank's part)."""
        if self.error is not None:
            job.end(self.error)
            return
        key = job.key
        if key in self._jobs:
            raise InternalError(f"{key} was submitted twice")
        job.submitted_s = time.monotonic()
        if job.left == 0:
            job.end(None)
            return
        self._jobs[key] = job
        self._newest[key.stream, key.bucket] = key.step
        exchange, routes = self._exchange, job.routes
        for piece in job.layout.slices:
            route = routes[piece.tree]
            if route is not None:
                self._execute(job, exchange.local_ready(key.slice(piece.index), route))
        for early in self._early.pop(key, ()):
            self._deliver(job, early.hop, early.header, early.payload)
        if self._gone:
            self._check_gone()

    def _job_of(self, slice_id: SliceId) -> Job:
        return self._jobs[JobKey(slice_id.stream, slice_id.step, slice_id.bucket)]

    def _slice_received(self, link: Link, header: Header, payload: Payload | None) -> None:
        key = JobKey(header.stream, header.step, header.bucket)
        job = self._jobs.get(key)
        hop = Hop(link.peer, link.channel)
        if job is not None:
            self._check_fits(job, header, link)
            self._deliver(job, hop, header, payload)
        elif header.step <= self._newest.get((header.stream, header.bucket), -1):
            raise ProtocolError(f"{key} is finished here, but rank {link.peer} sent slice {header.slice} of it")
        else:
            self._early.setdefault(key, []).append(_Early(hop, header, payload))

    def _check_fits(self, job: Job, header: Header, link: Link) -> None:
        if header.layout != job.layout.digest:
            raise Mismatch(
                f"{job.key}: rank {link.peer} has {_described(header.extra)} there, rank {self.rank} has "
                f"{_described(layout_word(job))}, or cuts it otherwise; models, dtypes, bucket sizes and calls must be equal "
                "on all ranks"
            )
        if header.slice >= len(job.layout.slices):
            raise ProtocolError(f"{job.key}: rank {link.peer} sent slice {header.slice} of {len(job.layout.slices)}")
        piece = job.layout.slices[header.slice]
        nbytes = piece.numel * job.buffer.itemsize
        if header.length != nbytes or header.tree != piece.tree:
            raise Mismatch(
                f"{job.key} slice {header.slice}: rank {link.peer} sent {header.length} bytes on tree {header.tree}, "
                f"rank {self.rank} expected {nbytes} bytes on tree {piece.tree}"
            )

    def _deliver(self, job: Job, hop: Hop, header: Header, payload: Payload | None) -> None:
        piece = job.layout.slices[header.slice]
        route = job.routes[piece.tree]
        slice_id = job.key.slice(piece.index)
        if route is None:
            raise ProtocolError(f"{slice_id}: rank {self.rank} has no part in it, but {hop} sent to it")
        if self._checksum:
            self._verify(job, slice_id, header, payload)
        if payload is not None:
            self._payloads[slice_id, hop] = payload
        if header.kind == Kind.REDUCE:
            self._execute(job, self._exchange.partial_arrived(slice_id, route, hop))
        else:
            self._execute(job, self._exchange.value_arrived(slice_id, route, hop))

    def _verify(self, job: Job, slice_id: SliceId, header: Header, payload: Payload | None) -> None:
        piece = job.layout.slices[slice_id.index]
        view = job.buffer.region(piece.start, piece.stop).view if payload is None else payload.view()
        if view is None:  # still in the sender's memory: no network to distrust
            return
        seen = zlib.crc32(view)
        if seen != header.checksum:
            raise ProtocolError(f"{slice_id}: checksum {seen:#010x}, sent with {header.checksum:#010x}: the network is faulty")

    def _execute(self, job: Job, commands: list[Command]) -> None:
        for command in commands:
            slice_id = command.slice
            piece = job.layout.slices[slice_id.index]
            if type(command) is Send:
                self._send(job, command, piece.start, piece.stop, piece.priority, piece.tree)
            elif type(command) is Add:
                payload = self._payloads.pop((slice_id, command.child))
                job.buffer.add(piece.start, piece.stop, payload, self._scratch)
                payload.release()
            elif type(command) is Take:
                self._take(job, slice_id, piece.start, piece.stop, piece.tree)
            elif type(command) is Finish:
                if job.divisor != 1:
                    job.buffer.divide(piece.start, piece.stop, job.divisor)
            elif type(command) is Done:
                self._slice_done(job, slice_id)

    def _take(self, job: Job, slice_id: SliceId, start: int, stop: int, tree: int) -> None:
        route = job.routes[tree]
        assert route is not None and route.broadcast_parent is not None
        payload = self._payloads.pop((slice_id, route.broadcast_parent), None)
        if payload is not None:
            job.buffer.take(start, stop, payload)
            payload.release()

    def _send(self, job: Job, command: Send, start: int, stop: int, priority: int, tree: int) -> None:
        slice_id = command.slice
        link = self.links.get(command.hop)
        if link is None:
            gone = self._gone.get(command.hop, f"no link to rank {command.hop.rank} channel {command.hop.channel}")
            raise PeerLost(f"{gone}; {slice_id} was to be sent to it")
        region = job.buffer.region(start, stop)
        kind = Kind.REDUCE if command.phase is Phase.REDUCE else Kind.BROADCAST
        checksum = zlib.crc32(region.view) if self._checksum and not link.by_reference else 0
        stream, step, bucket, index = slice_id
        header = Header(
            kind, tree, stream, step, bucket, index, job.layout.digest, len(region.view), checksum, layout_word(job)
        )
        if self._observer is not None:
            self._observer.queued(slice_id, link, priority)
        link.push((step, priority, index), header, region, slice_id)
        self._dirty[link] = None

    def _slice_done(self, job: Job, slice_id: SliceId) -> None:
        job.left -= 1
        self.slices_done += 1
        self._asked.discard(slice_id)
        if self._observer is not None:
            self._observer.done(slice_id)
        if job.on_slice is not None:
            job.on_slice(slice_id.index)
        if job.left == 0:
            del self._jobs[job.key]
            self.jobs_done += 1
            job.end(None)

    # -- point-to-point messages ---------------------------------------------------------------------------------------------

    def handle_messages(self, tag: int, handler: MessageHandler) -> None:
        self._handlers[tag] = handler

    def send_message(
        self, hop: Hop, tag: int, text: bytes, body: memoryview | None, key: Key, done: Callable[[], None] | None
    ) -> None:
        """Send `text` and `body` to a linked rank; `done` runs when `body` may be reused."""
        link = self.links.get(hop)
        if link is None:
            raise PeerLost(f"no link to rank {hop.rank} channel {hop.channel} for a message with tag {tag}")
        whole = memoryview(text + bytes(body)) if body is not None else memoryview(text)
        header = Header(Kind.MESSAGE, 0, 0, 0, 0, tag, 0, len(whole), 0, len(text))
        link.push(key, header, Region(whole, 0), done)
        self._dirty[link] = None

    def _message_received(self, link: Link, header: Header, payload: Payload | None) -> None:
        view = payload.view() if payload is not None else memoryview(b"")
        handler = self._handlers.get(header.slice)
        if handler is None or view is None:
            raise ProtocolError(f"rank {link.peer} sent a message with tag {header.slice}, which nobody handles")
        handler(link.peer, bytes(view[: header.extra]), view[header.extra :])
        if payload is not None:
            payload.release()

    # -- failure -----------------------------------------------------------------------------------------------------------------

    def latch(self, error: CommError, origin: int | None = None) -> None:
        """The first error wins: jobs end with it, peers are told, everything later is refused with it."""
        if self.error is not None:
            return
        self.error = error
        log.error("rank %d: %s: %s", self.rank, type(error).__name__, error)
        text = json.dumps(
            {
                "error": type(error).__name__,
                "message": str(error),
                "rank": self.rank if origin is None else origin,
            }
        ).encode()
        for link in list(self.links.values()):
            link.push(_CONTROL_KEY, control(Kind.ABORT, len(text)), Region(memoryview(text), 0), None)
            self._dirty[link] = None
        jobs = list(self._jobs.values())
        self._jobs.clear()
        self._early.clear()
        self._payloads.clear()
        for job in jobs:
            job.end(error)
        self._links_changed()

    def _abort_received(self, link: Link, payload: Payload | None) -> None:
        if self.error is not None or payload is None:
            return
        fields = json.loads(bytes(payload.view() or b"{}"))
        kind = getattr(errors, str(fields.get("error")), errors.RemoteError)
        if not (isinstance(kind, type) and issubclass(kind, CommError)):
            kind = errors.RemoteError
        origin = int(fields.get("rank", link.peer))
        self.latch(kind(f"{fields.get('message')} [reported by rank {origin}]"), origin)

    def _what_is_awaited(self) -> str:
        for slice_id in self._exchange.waiting():
            return f"{slice_id} waits for {self._exchange.awaited(slice_id)}"
        return "nothing was in flight here"

    # -- time ----------------------------------------------------------------------------------------------------------------------

    def _tick(self, now_s: float, late: bool) -> None:
        if self.mesh is not None and self._closing_since is None:
            self.mesh.expire(now_s)
        if self.error is not None or self._closing_since is not None:
            return
        for hop, link in list(self.links.items()):
            if hop not in self._gone:
                link.push(_CONTROL_KEY, control(Kind.HEARTBEAT), None, None)
                self._dirty[link] = None
        self._check_silence(now_s, late)
        self._check_deadlines(now_s)
        self._flush_dirty()

    def _check_silence(self, now_s: float, late: bool) -> None:
        for hop, link in self.links.items():
            heard = self._heard[hop]
            # When this very thread didn't get to run, what looks like a silent peer may be our own deafness.
            if late or link.bytes_received != heard.count:
                heard.count = link.bytes_received
                heard.at_s = now_s
            elif hop not in self._gone and now_s - heard.at_s > self._limits.heartbeat_s:
                raise PeerLost(
                    f"rank {hop.rank} has been silent for {now_s - heard.at_s:.1f} s (limit {self._limits.heartbeat_s:g} s, "
                    f"COMMHOOKS_HEARTBEAT_S): stopped, frozen or cut off; {self._what_is_awaited()}"
                )

    def _check_deadlines(self, now_s: float) -> None:
        grace_s = min(5.0, self._limits.timeout_s / 4)
        for job in self._jobs.values():
            age_s = now_s - job.submitted_s
            if age_s < self._limits.timeout_s:
                continue
            slice_id = next((s for s in self._exchange.waiting() if s[:3] == job.key), None)
            if slice_id is None:
                continue
            if age_s > self._limits.timeout_s + grace_s:
                raise CommTimeout(
                    f"rank {self.rank} waits since {age_s:.1f} s for {self._exchange.awaited(slice_id)} ({slice_id}); limit "
                    f"{self._limits.timeout_s:g} s, COMMHOOKS_TIMEOUT_S"
                )
            self._ask(slice_id)

    def _ask(self, slice_id: SliceId) -> None:
        """Ask whoever keeps a slice what it waits for; the question travels until it finds the rank at fault."""
        if slice_id in self._asked:
            return
        self._asked.add(slice_id)
        hops = self._exchange.missing_children(slice_id)
        parent = self._exchange.waits_for_value(slice_id)
        for hop in hops + ([parent] if parent is not None else []):
            link = self.links.get(hop)
            if link is not None:
                stream, step, bucket, index = slice_id
                link.push(_CONTROL_KEY, Header(Kind.QUERY, 0, stream, step, bucket, index, 0, 0, 0, 0), None, None)
                self._dirty[link] = None

    def _query_received(self, link: Link, slice_id: SliceId) -> None:
        if self.error is not None or self._newest.get((slice_id.stream, slice_id.bucket), -1) > slice_id.step:
            return
        if JobKey(*slice_id[:3]) in self._jobs:
            self._ask(slice_id)
        elif self._newest.get((slice_id.stream, slice_id.bucket), -1) < slice_id.step:
            raise CommTimeout(
                f"rank {self.rank} has not produced {slice_id} within {self._limits.timeout_s:g} s (COMMHOOKS_TIMEOUT_S), while "
                f"rank {link.peer} waits for it: it skipped a layer, left the loop, or is that slow"
            )

    # -- ending ----------------------------------------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """Say goodbye, let everything queued leave, and end the loop."""
        if self._closing_since is not None:
            return
        self._closing_since = time.monotonic()
        for link in self.links.values():
            link.push((1 << 62, 0, 0), control(Kind.GOODBYE), None, None)
            self._dirty[link] = None
        for job in list(self._jobs.values()):
            job.end(CommError(f"{job.key}: the engine was closed while it was under way"))
        self._jobs.clear()

    def _closed(self) -> bool:
        if self._closing_since is None:
            return False
        if not self.links or time.monotonic() - self._closing_since > _CLOSE_LIMIT_S:
            return True
        # A peer whose goodbye is here and to whom everything has gone out needs this link no more.
        return all(link.idle and (Hop(link.peer, link.channel) in self._gone or _said_goodbye(link)) for link in self.links.values())

    def _dispose(self) -> None:
        for link in list(self.links.values()):
            self._end_sending(link)
            link.close()
        self.links.clear()
        if self.mesh is not None:
            self.mesh.close()
        self._poll.close()
        os.close(self._wake_fd)

    def _end_sending(self, link: Link) -> None:
        """Everything queued is with the kernel: close the sending side, so that nothing of it is thrown away."""
        try:
            with socket.socket(fileno=os.dup(link.fileno())) as sock:
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # already closed by the peer

    def abandon(self) -> None:
        """In a forked child: let go of the parent's descriptors, so that its death is seen by its peers."""
        for link in self.links.values():
            link.close()
        if self.mesh is not None:
            self.mesh.close()


class Observer:
    """What a timeline wants to know; called in the engine's thread."""

    def queued(self, slice_id: SliceId, link: Link, priority: int) -> None: ...

    def sent(self, slice_id: SliceId, link: Link) -> None: ...

    def done(self, slice_id: SliceId) -> None: ...


def _said_goodbye(link: Link) -> bool:
    return bool(getattr(link, "said_goodbye", False))


_DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "int8", "int16", "int32", "int64", "uint8")


def layout_word(job: Job) -> int:
    """Number of elements and type in one word: what a mismatch message shows of the other rank."""
    name = str(job.buffer.dtype).removeprefix("torch.")
    return job.buffer.numel << 8 | (_DTYPES.index(name) if name in _DTYPES else 255)


def _described(word: int) -> str:
    code = word & 255
    name = _DTYPES[code] if code < len(_DTYPES) else "another type"
    return f"{word >> 8} elements of {name}"
