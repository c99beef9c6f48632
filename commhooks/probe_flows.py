"""One rank's part of a round of flows: connect, admit, send, count.

Where in the flow: probing (which rounds) -> **flows** -> kernel.

So that Python isn't what is measured: senders let the kernel take pages from a memory file (no copy), receivers let it throw
the bytes away (no copy), and what arrived is read from the kernel's own counter, which runs on while this process waits for
a processor.  A round's connections are reset at its end: nothing has to drain.

Invariants: a connection counts only after both ends have proved the job's secret; strangers are dropped; a rank that can't be
reached is an error that names both ends; nothing is left open after a round.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from commhooks.errors import AdmissionError, CommTimeout, TopologyError
from commhooks.links import tcp
from commhooks.links.admission import Accepting, Claim, Connecting

_PAGES_BYTES = 8 << 20  # what is sent, again and again
_SEND_BUFFER_BYTES = 4 << 20  # the kernel sends on for tens of milliseconds while this process waits
_RECEIVED_OFFSET = 128  # of tcpi_bytes_received in Linux' struct tcp_info
_SAMPLE_S = 0.004
_TAIL_S = (
    0.03  # senders go on a little longer than receivers count: the ranks don't start at the same instant
)
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Target:
    """One flow of a round, as the ranks see it."""

    src: int
    dst: int
    channel: int


@dataclass(eq=False)
class _Connecting:
    sock: socket.socket
    side: Accepting | Connecting
    where: str
    flow: int | None  # known from the start on the sending side
    connected: bool
    outbox: bytes = b""


@dataclass(eq=False)
class _Inflow:
    """A flow that this rank receives."""

    sock: socket.socket
    counted: int = 0  # where the kernel doesn't count
    samples: list[tuple[float, int]] = field(default_factory=list)

    def received(self) -> int:
        """Payload bytes so far, by the kernel's count."""
        fields = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(fields) < _RECEIVED_OFFSET + 8:
            return self.counted
        return int(struct.unpack_from("Q", fields, _RECEIVED_OFFSET)[0])


class FlowRunner:
    """Opens and runs this rank's flows.

    Parameters
    ----------
    rank : this rank
    listeners : one per channel, bound to the channel's interface
    addresses : for each rank and channel where it listens
    secret : the job's secret
    congestion : as ``tcp.tune`` takes it
    limit_s : how long opening may take
    """

    def __init__(
        self,
        rank: int,
        listeners: Sequence[socket.socket],
        addresses: Sequence[Sequence[tuple[str, int]]],
        secret: bytes,
        congestion: str,
        limit_s: float,
    ) -> None:
        self._rank = rank
        self._listeners = listeners
        self._addresses = addresses
        self._secret = secret
        self._congestion = congestion
        self._limit_s = limit_s
        self._pages = os.memfd_create("commhooks-probe")
        os.truncate(self._pages, _PAGES_BYTES)
        self._waste = bytearray(1 << 20)
        self._outflows: list[socket.socket] = []
        self._inflows: dict[int, _Inflow] = {}

    # -- opening ----------------------------------------------------------------------------------------------------------

    def open(self, number: int, flows: Sequence[Target]) -> None:
        """Have the connections of a round; blocks until they are up.

        Parameters
        ----------
        number : the round's; a late connection of another round is a stranger
        flows : of all ranks

        Raises
        ------
        TopologyError
            A rank can't be reached.
        CommTimeout
            A flow didn't come up in time.
        """
        outgoing = [i for i, flow in enumerate(flows) if flow.src == self._rank]
        expected = {i for i, flow in enumerate(flows) if flow.dst == self._rank}
        opening = _Opening(self, number, flows, expected)
        try:
            for index in outgoing:
                opening.connect(index)
            opening.complete(len(outgoing), time.monotonic() + self._limit_s)
        except BaseException:
            opening.abandon()
            self.finish()
            raise
        self._outflows, self._inflows = opening.outflows, opening.inflows

    # -- running ----------------------------------------------------------------------------------------------------------

    def run(self, duration_s: float, ramp_s: float) -> dict[int, float]:
        """Send and receive; the rates of this rank's incoming flows, in payload bytes/s.

        Parameters
        ----------
        duration_s : of the whole round
        ramp_s : the part that doesn't count: slow start, and token buckets that begin full
        """
        poll = select.epoll()
        began_s = time.monotonic()
        try:
            by_fd = self._register(poll)
            sampled_s = 0.0
            while (now_s := time.monotonic() - began_s) < duration_s + _TAIL_S:
                for fd, _ in poll.poll(_SAMPLE_S):
                    by_fd[fd](fd)
                if now_s - sampled_s >= _SAMPLE_S:
                    sampled_s = now_s
                    for flow in self._inflows.values():
                        flow.samples.append((time.monotonic() - began_s, flow.received()))
        finally:
            poll.close()
        rates = {index: rate_of(flow.samples, ramp_s, duration_s) for index, flow in self._inflows.items()}
        self.finish()
        return rates

    def _register(self, poll: select.epoll) -> dict[int, Callable[[int], None]]:
        by_fd: dict[int, Callable[[int], None]] = {}
        for sock in self._outflows:
            poll.register(sock.fileno(), select.EPOLLOUT)
            by_fd[sock.fileno()] = self._send
        for flow in self._inflows.values():
            poll.register(flow.sock.fileno(), select.EPOLLIN)
            by_fd[flow.sock.fileno()] = functools.partial(self._receive, flow)
        return by_fd

    def _send(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # the other end's round may be over
            while os.sendfile(fd, self._pages, 0, _PAGES_BYTES):
                pass

    def _receive(self, flow: _Inflow, _: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(8):  # then the others have a turn
                # TCP throws truncated bytes away without copying them.
                count = flow.sock.recv_into(self._waste, len(self._waste), socket.MSG_TRUNC)
                flow.counted += count
                if not count:
                    return

    def finish(self) -> None:
        """Reset the round's connections."""
        for sock in [*self._outflows, *(flow.sock for flow in self._inflows.values())]:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()
        self._outflows, self._inflows = [], {}

    def close(self) -> None:
        """Close everything but the listeners."""
        self.finish()
        if self._pages >= 0:
            os.close(self._pages)
            self._pages = -1


def rate_of(samples: Sequence[tuple[float, int]], ramp_s: float, end_s: float) -> float:
    """Bytes per second between the first sample after the ramp and the last one before the end.

    Parameters
    ----------
    samples : seconds since the round's start, bytes received until then
    """
    inside = [sample for sample in samples if ramp_s <= sample[0] <= end_s]
    if len(inside) < 2:  # this process hardly ran: everything there is
        inside = [sample for sample in samples if sample[0] <= end_s + _TAIL_S][-2:]
    if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return 0.0
    (from_s, before), (to_s, after) = inside[0], inside[-1]
    return (after - before) / (to_s - from_s)


class _Opening:
    """Connections of a round on their way up."""

    def __init__(self, owner: FlowRunner, number: int, flows: Sequence[Target], expected: set[int]) -> None:
        self._owner = owner
        self._number = number
        self._flows = flows
        self._expected = expected
        self._poll = select.epoll()
        self._listeners = {listener.fileno(): listener for listener in set(owner._listeners)}
        for fd in self._listeners:
            self._poll.register(fd, select.EPOLLIN)
        self._pending: dict[int, _Connecting] = {}
        self.outflows: list[socket.socket] = []
        self.inflows: dict[int, _Inflow] = {}
        self.strangers = 0

    def connect(self, index: int) -> None:
        owner, flow = self._owner, self._flows[index]
        address = tuple(owner._addresses[flow.dst][flow.channel])
        sock = self._prepared(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        where = f"{address[0]}:{address[1]}"
        try:
            sock.bind((owner._listeners[flow.channel].getsockname()[0], 0))
            code = sock.connect_ex(address)
        except OSError as error:
            sock.close()
            raise self._unreachable(index, where, error) from error
        if code not in (0, 115, 11):  # done, in progress
            sock.close()
            raise self._unreachable(index, where, OSError(code, os.strerror(code)))
        claim = Claim(owner._rank, flow.dst, self._number << 12 | index)
        side = Connecting(owner._secret, secrets.token_bytes(32), claim)
        self._watch(_Connecting(sock, side, where, index, connected=False))

    def _unreachable(self, index: int, where: str, error: OSError) -> TopologyError:
        flow = self._flows[index]
        own = self._owner._addresses[flow.src][flow.channel][0]
        return TopologyError(
            f"probe: rank {flow.src} ({own}) can't reach rank {flow.dst} ({where}) on channel {flow.channel}: "
            f"{error.strerror or error}; every rank must reach every other one. If an address is of a wrong network, set "
            "COMMHOOKS_INTERFACE (or GLOO_SOCKET_IFNAME) to the interface that reaches the other hosts"
        )

    def _prepared(self, sock: socket.socket) -> socket.socket:
        sock.setblocking(False)
        tcp.tune(sock, self._owner._congestion, notsent_lowat_bytes=_SEND_BUFFER_BYTES)
        # Linux' SO_SNDBUFFORCE, for those who may; without it the kernel grows the buffer by itself.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, 32, _SEND_BUFFER_BYTES)
        return sock

    def _watch(self, pending: _Connecting) -> None:
        self._pending[pending.sock.fileno()] = pending
        self._poll.register(pending.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def complete(self, outgoing: int, deadline_s: float) -> None:
        """Admit until all flows are there."""
        try:
            while len(self.outflows) < outgoing or len(self.inflows) < len(self._expected):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise self._late(outgoing)
                for fd, _ in self._poll.poll(min(left_s, 1.0)):
                    self._ready(fd)
        finally:
            self._poll.close()
        for pending in self._pending.values():  # strangers
            pending.sock.close()
        self._pending.clear()

    def _late(self, outgoing: int) -> CommTimeout:
        missing = [self._flows[i] for i in sorted(self._expected - set(self.inflows))]
        missing += [self._flows[p.flow] for p in self._pending.values() if p.flow is not None]
        ways = ", ".join(f"{flow.src}->{flow.dst} (channel {flow.channel})" for flow in missing)
        return CommTimeout(
            f"probe: rank {self._owner._rank} waited {self._owner._limit_s:g} s for connections {ways}; "
            "a firewall between these ranks, or a wrong interface (COMMHOOKS_INTERFACE, GLOO_SOCKET_IFNAME)?"
        )

    def _ready(self, fd: int) -> None:
        listener = self._listeners.get(fd)
        if listener is not None:
            with contextlib.suppress(OSError):
                sock, where = listener.accept()
                side = Accepting(self._owner._secret, secrets.token_bytes(32), self._owner._rank)
                pending = _Connecting(self._prepared(sock), side, str(where), None, True, side.greeting)
                self._watch(pending)
            return
        pending = self._pending[fd]
        try:
            self._proceed(pending)
        except (OSError, AdmissionError) as error:
            self._forget(pending).close()
            if pending.flow is None:
                self.strangers += 1
            elif isinstance(error, OSError):
                raise self._unreachable(pending.flow, pending.where, error) from error
            else:
                raise

    def _proceed(self, pending: _Connecting) -> None:
        sock = pending.sock
        if not pending.connected:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            pending.connected = True
        with contextlib.suppress(BlockingIOError):
            while (wanted := pending.side.wanted_bytes) and not pending.outbox:
                chunk = sock.recv(wanted)
                if not chunk:
                    raise AdmissionError("closed before admission")
                pending.outbox += pending.side.receive(chunk)
        if pending.outbox:
            with contextlib.suppress(BlockingIOError):
                pending.outbox = pending.outbox[sock.send(pending.outbox) :]
        if pending.side.admitted and not pending.outbox:
            self._admit(pending)
        elif not pending.outbox:
            self._poll.modify(sock.fileno(), select.EPOLLIN)
        else:
            self._poll.modify(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _admit(self, pending: _Connecting) -> None:
        sock = self._forget(pending)
        claim = pending.side.claim
        assert claim is not None
        if pending.flow is not None:
            self.outflows.append(sock)
            return
        index = claim.channel & 0xFFF
        if (
            claim.channel >> 12 != self._number
            or index not in self._expected
            or self._flows[index].src != claim.rank
        ):
            sock.close()  # of a round that is over
            return
        self.inflows[index] = _Inflow(sock)

    def _forget(self, pending: _Connecting) -> socket.socket:
        self._poll.unregister(pending.sock.fileno())
        del self._pending[pending.sock.fileno()]
        return pending.sock

    def abandon(self) -> None:
        """Close all that this opening has made."""
        for sock in [
            *(pending.sock for pending in self._pending.values()),
            *self.outflows,
            *(flow.sock for flow in self.inflows.values()),
        ]:
            sock.close()
