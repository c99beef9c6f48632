"""The engine's thread: polls descriptors, hands frames to the traffic, spreads the first error, ends in order.

Where in the flow: jobs -> traffic -> **loop** -> links, and back.

Invariants: never blocks but in `epoll`; no exception leaves it; after the first error it is latched: jobs end with that
error, peers are told, nothing is reduced any more.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from commhooks import errors
from commhooks.core.exchange import SliceId
from commhooks.core.plan import Hop
from commhooks.errors import CommError, InternalError, PeerLost, ProtocolError
from commhooks.jobs import Job
from commhooks.links.base import Key, Link, Payload, Region
from commhooks.links.frames import Header, Kind, control
from commhooks.mesh import Mesh
from commhooks.traffic import Observer, Traffic
from commhooks.watch import CONTROL_KEY, Limits, Watch

log = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 2.0

MessageHandler = Callable[[int, bytes, memoryview], None]


class Loop:
    """Everything that happens in the engine's thread.  Other threads use `call` only.

    Parameters
    ----------
    rank : this rank
    limits : how long silence may last
    checksum : whether frames carry one
    observer : a timeline, or None
    """

    def __init__(self, rank: int, limits: Limits, checksum: bool, observer: Observer | None) -> None:
        self.rank = rank
        self.links: dict[Hop, Link] = {}
        self.error: CommError | None = None
        self.mesh: Mesh | None = None
        self._gone: dict[Hop, str] = {}
        self._dirty: dict[Link, None] = {}
        self.traffic = Traffic(rank, self.links, self._dirty, self._gone, checksum, observer)
        self._watch = Watch(self.traffic, limits, self.links, self._dirty, self._gone, self._silent)
        self._on_loss: Callable[[int, str], None] | None = None
        self._tick_s = limits.tick_s
        self._handlers: dict[int, MessageHandler] = {}
        self._by_fd: dict[int, Link] = {}
        self._masks: dict[int, int] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_lock = threading.Lock()
        self._poll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake_fd, select.EPOLLIN)
        self._closing_since: float | None = None
        self._links_changed: Callable[[], None] = lambda: None

    # -- other threads -----------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the engine's thread, soon."""
        self._calls.append(function)
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
                return
        self._run_calls()  # the loop is over, and its error set: what was asked ends with that

    # -- the loop ----------------------------------------------------------------------------------------------------

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
                late = now_s - next_tick_s > 2 * self._tick_s
                next_tick_s = now_s + self._tick_s
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
            self.latch(
                InternalError(f"rank {self.rank}: {type(error).__name__}: {error} (a bug; please report it)")
            )

    def _on_event(self, fd: int, mask: int) -> None:
        link = self._by_fd.get(fd)
        if link is not None:
            if mask & ~select.EPOLLOUT:
                link.on_readable()
            if mask & select.EPOLLOUT:
                self._dirty[link] = None
        elif fd == self._wake_fd:
            os.eventfd_read(fd)
            self._run_calls()
        elif self.mesh is not None and self.mesh.owns(fd):
            self.mesh.ready(fd, time.monotonic())

    def _run_calls(self) -> None:
        while self._calls:
            self._guarded(self._calls.popleft())

    def _flush_dirty(self) -> None:
        while self._dirty:
            link, _ = self._dirty.popitem()
            link.flush()
            self._watch_writes(link)
            if link.idle and Hop(link.peer, link.channel) in self._gone:
                self._end_sending(link)  # tells the leaving peer that it need not wait for us

    def _watch_writes(self, link: Link) -> None:
        fd = link.fileno()
        if fd < 0 or fd not in self._masks:
            return
        mask = select.EPOLLIN | (select.EPOLLOUT if link.wants_write else 0)
        if self._masks[fd] != mask:
            self._masks[fd] = mask
            self._poll.modify(fd, mask)

    @property
    def gone(self) -> list[str]:
        """Which peers have left, in words.  Any thread."""
        return list(self._gone.values())

    # -- links -------------------------------------------------------------------------------------------------------

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
        fd = link.fileno()
        self._by_fd[fd] = link
        self._masks[fd] = select.EPOLLIN
        self._poll.register(fd, select.EPOLLIN)
        link.on_blocked = self._watch_writes
        log.debug("rank %d: %r is up", self.rank, link)
        self._links_changed()

    def target(self, link: Link, header: Header) -> memoryview | None:
        return self.traffic.target(link, header) if self.error is None else None

    def received(self, link: Link, header: Header, payload: Payload | None) -> None:
        kind = header.kind
        if kind == Kind.REDUCE or kind == Kind.BROADCAST:
            if self.error is None:
                self.traffic.received(link, header, payload)
        elif kind == Kind.MESSAGE:
            self._message_received(link, header, payload)
        elif kind == Kind.ABORT:
            self._abort_received(link, payload)
        elif kind == Kind.QUERY:
            if self.error is None:
                self._watch.asked(link, SliceId(header.stream, header.step, header.bucket, header.slice))
        elif kind == Kind.GOODBYE:
            self._peer_left(link, f"rank {link.peer} has ended (in order)", orderly=True)
            self._dirty[link] = None

    def sent(self, link: Link, token: object) -> None:
        if isinstance(token, SliceId):
            if self.error is None:
                self.traffic.sent(link, token)
        elif callable(token):
            token()

    def failed(self, link: Link, error: CommError) -> None:
        lost = isinstance(error, PeerLost)
        try:
            if lost:
                self._peer_left(link, str(error), orderly=_said_goodbye(link))
        finally:
            self._drop(link)
        if not lost:
            raise error

    def _drop(self, link: Link) -> None:
        fd = link.fileno()
        if self._by_fd.pop(fd, None) is not None:
            self._masks.pop(fd, None)
            self._poll.unregister(fd)
        self._dirty.pop(link, None)
        self.links.pop(Hop(link.peer, link.channel), None)
        link.close()

    def _peer_left(self, link: Link, words: str, orderly: bool) -> None:
        if self.error is not None or self._closing_since is not None:
            return
        hop = Hop(link.peer, link.channel)
        known = hop in self._gone
        self._gone[hop] = words
        if self._on_loss is not None:
            if not known:
                self._on_loss(hop.rank, words)
        elif not orderly:
            raise PeerLost(f"{words}; {self.traffic.what_is_awaited()}")
        for token in link.unsent():
            # A rank that is finished with a slice has taken all that it is sent of it.
            if isinstance(token, SliceId):
                raise PeerLost(f"{words} before it took {token}")
        self._check_gone()

    def _silent(self, hop: Hop, words: str) -> None:
        """A peer that says nothing counts as lost, also when it comes back later."""
        link = self.links[hop]
        self._peer_left(link, words, orderly=False)
        if self._on_loss is not None:
            self._drop(link)

    def tolerate_losses(self, handler: Callable[[int, str], None]) -> None:
        """Tell `handler` of lost peers instead of failing."""
        self._on_loss = handler

    def _check_gone(self) -> None:
        """Fail when an unfinished slice needs a peer that has left."""
        for hop, words in self._gone.items():
            slice_id = self.traffic.waiting_for(hop)
            if slice_id is not None:
                raise PeerLost(
                    f"{words} while {slice_id} waits for {self.traffic.exchange.awaited(slice_id)}"
                )

    def submit(self, job: Job) -> None:
        """Start a job."""
        if self.error is not None:
            job.end(self.error)
            return
        self.traffic.submit(job)
        if self._gone:
            self._check_gone()

    # -- point-to-point messages -------------------------------------------------------------------------------------

    def handle_messages(self, tag: int, handler: MessageHandler) -> None:
        self._handlers[tag] = handler

    def send_message(
        self,
        hop: Hop,
        tag: int,
        text: bytes,
        body: memoryview | None,
        key: Key,
        done: Callable[[], None] | None,
    ) -> None:
        """Send `text` and `body` to a linked rank; `done` runs when `body` may be reused."""
        link = self.links.get(hop)
        if link is None:
            if self._on_loss is not None and hop in self._gone:
                return  # whoever tolerates losses has been told of this one
            raise PeerLost(f"no link to rank {hop.rank} channel {hop.channel} for a message with tag {tag}")
        whole = memoryview(text + bytes(body)) if body is not None else memoryview(text)
        header = Header(Kind.MESSAGE, 0, 0, 0, 0, tag, 0, len(whole), 0, len(text))
        link.push(key, header, Region(whole, 0), done)
        self._dirty[link] = None

    def _message_received(self, link: Link, header: Header, payload: Payload | None) -> None:
        view = payload.view() if payload is not None else memoryview(b"")
        handler = self._handlers.get(header.slice)
        if handler is None or view is None:
            raise ProtocolError(
                f"rank {link.peer} sent a message with tag {header.slice}, which nobody handles"
            )
        handler(link.peer, bytes(view[: header.extra]), view[header.extra :])
        if payload is not None:
            payload.release()

    # -- failure -----------------------------------------------------------------------------------------------------

    def latch(self, error: CommError, origin: int | None = None, words: str | None = None) -> None:
        """The first error wins: jobs end with it, peers are told, everything later is refused with it.

        `origin` and `words` are what the rank that failed first has said.
        """
        if self.error is not None:
            return
        self.error = error
        log.error("rank %d: %s: %s", self.rank, type(error).__name__, error)
        text = json.dumps(
            {
                "error": type(error).__name__,
                "message": str(error) if words is None else words,
                "rank": self.rank if origin is None else origin,
            }
        ).encode()
        for link in list(self.links.values()):
            link.push(CONTROL_KEY, control(Kind.ABORT, len(text)), Region(memoryview(text), 0), None)
            self._dirty[link] = None
        self.traffic.end_all(error)
        self._links_changed()

    def _abort_received(self, link: Link, payload: Payload | None) -> None:
        if self.error is not None or payload is None:
            return
        fields = json.loads(bytes(payload.view() or b"{}"))
        kind = getattr(errors, str(fields.get("error")), errors.RemoteError)
        if not (isinstance(kind, type) and issubclass(kind, CommError)):
            kind = errors.RemoteError
        origin = int(fields.get("rank", link.peer))
        words = str(fields.get("message"))
        self.latch(kind(f"{words} [reported by rank {origin}]"), origin, words)

    # -- time --------------------------------------------------------------------------------------------------------

    def _tick(self, now_s: float, late: bool) -> None:
        if self.mesh is not None and self._closing_since is None:
            self.mesh.expire(now_s)
        if self.error is not None or self._closing_since is not None:
            return
        self._watch.tick(now_s, late)
        self._flush_dirty()

    # -- ending ------------------------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """Say goodbye, let everything queued leave, and end the loop."""
        if self._closing_since is not None:
            return
        self._closing_since = time.monotonic()
        for link in self.links.values():
            link.push((1 << 62, 0, 0), control(Kind.GOODBYE), None, None)
            self._dirty[link] = None
        self.traffic.end_all(CommError("the engine was closed while this was under way"))

    def _closed(self) -> bool:
        if self._closing_since is None:
            return False
        if not self.links or time.monotonic() - self._closing_since > _CLOSE_LIMIT_S:
            return True
        # A peer whose goodbye is here and to whom everything has gone out needs this link no more.
        return all(link.idle and _said_goodbye(link) for link in self.links.values())

    def _dispose(self) -> None:
        silent = [link.peer for link in self.links.values() if not _said_goodbye(link)]
        if silent and self.error is None:
            log.info("rank %d: ranks %s didn't answer the goodbye", self.rank, silent)
        for link in list(self.links.values()):
            self._end_sending(link)
            link.close()
        self.links.clear()
        if self.mesh is not None:
            self.mesh.close()
        self._poll.close()
        with self._wake_lock:
            wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)
        if self.error is None:
            self.error = CommError("the engine is closed; register again to start a new one")
        self._run_calls()

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
        self._poll.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)


def _said_goodbye(link: Link) -> bool:
    return bool(getattr(link, "said_goodbye", False))
