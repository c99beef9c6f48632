"""The links of one rank: listening, connecting, admission, and which kind of link each peer gets.

Where in the flow: bootstrap -> **mesh** -> engine.  Everything here happens in the engine's thread once the engine
runs, and never blocks: a stranger on a port costs one descriptor for at most `ADMISSION_LIMIT_S`.

Invariants: connections only along the edges that are asked for; the lower rank connects; a link exists only after
admission; strangers are dropped and counted.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from commhooks.core.plan import Hop
from commhooks.errors import AdmissionError
from commhooks.hosts import LinkMaker
from commhooks.links import tcp
from commhooks.links.admission import Accepting, Claim, Connecting
from commhooks.links.base import Link, LinkEvents

log = logging.getLogger(__name__)

ADMISSION_LIMIT_S = 10.0
MAX_STRANGERS = 64  # unadmitted connections held at once; the oldest goes first


@dataclass
class _Pending:
    """A connection that is not a link yet."""

    sock: socket.socket
    side: Accepting | Connecting
    hop: Hop | None  # known from the start on the connecting side
    since_s: float
    where: str
    connected: bool = True
    outbox: bytes = field(default=b"")


class Mesh:
    """Listens, connects, admits; calls `on_link` for each link that comes up.

    Parameters
    ----------
    rank, world_size : this rank, and how many there are
    maker : knows everybody's placement and builds the links
    listeners : this rank's listening sockets
    secret : the job's secret
    events : the owner of all links
    on_link : called with each new link
    congestion, lowat_bytes : of every TCP connection (see `tcp.tune`)
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        maker: LinkMaker,
        listeners: list[socket.socket],
        secret: bytes,
        events: LinkEvents,
        on_link: Callable[[Link], None],
        congestion: str,
        lowat_bytes: int = tcp.NOTSENT_LOWAT_BYTES,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._maker = maker
        self._secret = secret
        self._events = events
        self._on_link = on_link
        self._congestion = congestion
        self._lowat_bytes = lowat_bytes
        self._poll: select.epoll | None = None
        self._listeners = {sock.fileno(): sock for sock in listeners}
        self._pending: dict[int, _Pending] = {}
        self._wanted: dict[Hop, float] = {}
        self.strangers = 0
        self.last_refusal = ""

    # -- the engine's loop calls these -----------------------------------------------------------------------------------

    def attach(self, poll: select.epoll) -> None:
        self._poll = poll
        for fd in self._listeners:
            poll.register(fd, select.EPOLLIN)

    def owns(self, fd: int) -> bool:
        return fd in self._listeners or fd in self._pending

    def ready(self, fd: int, now_s: float) -> None:
        """Something happened on one of our descriptors."""
        listener = self._listeners.get(fd)
        if listener is not None:
            self._accept(listener, now_s)
            return
        pending = self._pending[fd]
        try:
            self._proceed(pending)
        except (OSError, AdmissionError) as error:
            self._refuse(pending, error)

    def connect(self, hops: frozenset[Hop], now_s: float) -> None:
        """Ask for links; those to lower ranks are opened by them."""
        for hop in sorted(hops):
            self._wanted[hop] = now_s
            if self._rank < hop.rank:
                self._open(hop, now_s)

    @property
    def missing(self) -> list[Hop]:
        return sorted(self._wanted)

    def expire(self, now_s: float) -> None:
        """Drop connections that don't get admitted, and try again those that we want."""
        for listener in self._listeners.values():
            self._poll_listener(listener, True)
        for pending in list(self._pending.values()):
            if now_s - pending.since_s > ADMISSION_LIMIT_S:
                self._refuse(pending, AdmissionError(f"no admission within {ADMISSION_LIMIT_S:g} s"))
        opening = {pending.hop for pending in self._pending.values()}
        for hop in self.missing:
            if self._rank < hop.rank and hop not in opening:
                self._open(hop, now_s)

    def explain_missing(self) -> str:
        """Which links didn't come up and what to look at, for an error message."""
        parts = [f"rank {hop.rank} at {self._maker.describe(hop.rank, hop.channel)}" for hop in self.missing]
        own = self._maker.describe(self._rank, 0)
        refusal = f"; last refusal: {self.last_refusal}" if self.last_refusal else ""
        return (
            f"rank {self._rank} ({own}) has no link to {', '.join(parts)}{refusal}. If an address is a loopback or a wrong "
            "network, set COMMHOOKS_INTERFACE (or GLOO_SOCKET_IFNAME) to the interface that reaches the other hosts"
        )

    def close(self) -> None:
        for pending in self._pending.values():
            pending.sock.close()
        for listener in self._listeners.values():
            listener.close()
        self._pending.clear()
        self._listeners.clear()

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _open(self, hop: Hop, now_s: float) -> None:
        address = self._maker.way_to(hop.rank, hop.channel)
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        if address.family != socket.AF_UNIX:
            tcp.tune(sock, self._congestion, self._lowat_bytes)
            if address.source:
                sock.bind((self._maker.source(hop.channel), 0))
        claim = Claim(self._rank, hop.rank, hop.channel)
        side = Connecting(self._secret, secrets.token_bytes(32), claim)
        pending = _Pending(sock, side, hop, now_s, str(address.where), connected=False)
        try:
            sock.connect(address.where)
            pending.connected = True
        except BlockingIOError:
            pass
        except OSError as error:
            sock.close()
            self.last_refusal = f"connecting to rank {hop.rank} at {address.where}: {error}"
            return  # `expire` tries again
        self._watch(pending)

    def _accept(self, listener: socket.socket, now_s: float) -> None:
        try:
            sock, where = listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EINTR):
                # Most likely out of descriptors: asking again at once would only keep the thread busy.
                log.warning("rank %d can't accept a connection now: %s", self._rank, error)
                self._poll_listener(listener, False)
            return
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            tcp.tune(sock, self._congestion, self._lowat_bytes)
        strangers = [pending for pending in self._pending.values() if pending.hop is None]
        if len(strangers) >= MAX_STRANGERS:
            self._refuse(strangers[0], AdmissionError("too many connections wait for admission"))
        side = Accepting(self._secret, secrets.token_bytes(32), self._rank)
        pending = _Pending(sock, side, None, now_s, str(where), outbox=side.greeting)
        self._watch(pending)

    def _poll_listener(self, listener: socket.socket, on: bool) -> None:
        assert self._poll is not None
        self._poll.modify(listener.fileno(), select.EPOLLIN if on else 0)

    def _watch(self, pending: _Pending) -> None:
        assert self._poll is not None
        self._pending[pending.sock.fileno()] = pending
        mask = (
            select.EPOLLIN if pending.connected and not pending.outbox else select.EPOLLIN | select.EPOLLOUT
        )
        self._poll.register(pending.sock.fileno(), mask)

    def _proceed(self, pending: _Pending) -> None:
        assert self._poll is not None
        if not pending.connected:
            code = pending.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            pending.connected = True
        while (wanted := pending.side.wanted_bytes) and not pending.outbox:
            try:
                chunk = pending.sock.recv(wanted)
            except BlockingIOError:
                break
            if not chunk:
                raise AdmissionError("closed before admission")
            pending.outbox += pending.side.receive(chunk)
        if pending.outbox:
            try:
                pending.outbox = pending.outbox[pending.sock.send(pending.outbox) :]
            except BlockingIOError:
                pass
        if pending.side.admitted and not pending.outbox:
            self._admit(pending)
            return
        mask = select.EPOLLIN | select.EPOLLOUT if pending.outbox else select.EPOLLIN
        self._poll.modify(pending.sock.fileno(), mask)

    def _admit(self, pending: _Pending) -> None:
        assert self._poll is not None
        claim = pending.side.claim
        assert claim is not None
        hop = pending.hop if pending.hop is not None else Hop(claim.rank, claim.channel)
        if hop.rank >= self._world_size:
            raise AdmissionError(f"claims to be rank {hop.rank} of {self._world_size}")
        link = self._maker.make(pending.sock, hop.rank, hop.channel, self._events)
        self._forget(pending)
        self._wanted.pop(hop, None)
        self._on_link(link)

    def _forget(self, pending: _Pending) -> None:
        assert self._poll is not None
        fd = pending.sock.fileno()
        if self._pending.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def _refuse(self, pending: _Pending, error: Exception) -> None:
        self._forget(pending)
        pending.sock.close()
        if pending.hop is None:
            self.strangers += 1
            log.debug("rank %d dropped a connection from %s: %s", self._rank, pending.where, error)
        self.last_refusal = f"{pending.where}: {error}"
