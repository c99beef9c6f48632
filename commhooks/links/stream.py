"""Frames over a connected stream socket: the part that TCP and same-host links share.

Where in the flow: engine -> **links** -> kernel.

Invariants: one heap of waiting frames, smallest key first; one frame on the wire at a time; reading never blocks and never
copies: a payload goes straight into its final memory or a pooled staging buffer, and one system call fetches a payload's
rest together with the next header.
"""

from __future__ import annotations

import heapq
import itertools
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from commhooks.errors import CommError, PeerLost, ProtocolError
from commhooks.links.base import Key, Link, LinkEvents, Payload, Region, StagedPayload, StagingPool
from commhooks.links.frames import HEADER_BYTES, Header, Kind, control, pack, unpack

# A busy peer must not keep the loop from writing: after this many frames other descriptors get their turn.
_FRAMES_PER_TURN = 16


def _allocate(nbytes: int) -> memoryview:
    return memoryview(np.empty(nbytes, dtype=np.uint8))


SLICES = frozenset((int(Kind.REDUCE), int(Kind.BROADCAST)))
_ACK_KEY: Key = (-1, 0, 0)  # before everything else: memory is waiting for it


class _Outgoing(NamedTuple):
    key: Key
    order: int
    header: Header
    region: Region | None
    token: object


class StreamLink(Link):
    """Frames with their payload inline on a non-blocking stream socket."""

    kind = "stream"

    def __init__(self, sock: socket.socket, peer: int, channel: int, events: LinkEvents) -> None:
        super().__init__(peer, channel, events)
        sock.setblocking(False)
        self._sock = sock
        self._order = itertools.count()
        self._queue: list[_Outgoing] = []
        self._current: _Outgoing | None = None
        self._rest: list[memoryview] = []
        self._blocked = False
        self._backlog_s = 0.0
        self._backlog_bytes = 0
        self._backlog_from: tuple[float, int] | None = None
        self._failed = False
        self._said_goodbye = False
        #: slices in flight at most, each until the peer has acknowledged it; 0: no limit (must be equal on both ends)
        self.window = 0
        self._in_flight = 0
        self.pool = StagingPool(_allocate)
        self._raw = bytearray(HEADER_BYTES)
        self._raw_view = memoryview(self._raw)
        self._raw_got = 0
        self._header: Header | None = None
        self._into: memoryview | None = None
        self._into_got = 0
        self._staged: memoryview | None = None

    # -- sending -------------------------------------------------------------------------------------------------------

    def push(self, key: Key, header: Header, region: Region | None, token: object) -> None:
        if not self._failed:
            heapq.heappush(self._queue, _Outgoing(key, next(self._order), header, region, token))

    def _next(self) -> bool:
        """Make the most urgent frame the current one."""
        if not self._queue or self._window_full(self._queue[0].header):
            return False
        outgoing = self._current = heapq.heappop(self._queue)
        self._rest = [memoryview(pack(outgoing.header)), *self._inline(outgoing)]
        return True

    def _window_full(self, header: Header) -> bool:
        return 0 < self.window <= self._in_flight and header.kind in SLICES

    def _inline(self, outgoing: _Outgoing) -> list[memoryview]:
        """The bytes that travel behind the header."""
        return [outgoing.region.view] if outgoing.region is not None else []

    def flush(self) -> None:
        while not self._failed and (self._current is not None or self._next()):
            if not self._send_rest():
                return
            self._frame_sent()
        self._unblock()

    def _block(self) -> None:
        """The kernel takes no more: from here until all is sent the network is the limit."""
        self._blocked = True
        if self.on_blocked is not None:
            self.on_blocked(self)
        if self._backlog_from is None:
            self._backlog_from = (time.monotonic(), self.bytes_sent)

    def _unblock(self) -> None:
        self._blocked = False
        if self._backlog_from is not None:
            self._backlog_s, self._backlog_bytes = self.backlog()
            self._backlog_from = None

    def backlog(self) -> tuple[float, int]:
        """Seconds in which the network was the limit, and bytes sent in them, since the link came up.  Any thread."""
        since = self._backlog_from
        if since is None:
            return self._backlog_s, self._backlog_bytes
        return self._backlog_s + time.monotonic() - since[0], self._backlog_bytes + self.bytes_sent - since[1]

    def _send_rest(self) -> bool:
        """Send what is left of the current frame; False when the kernel is full or the link has failed."""
        while self._rest:
            try:
                count = self._sock.sendmsg(self._rest)
            except (BlockingIOError, InterruptedError):
                self._block()
                return False
            except OSError as error:
                self._fail_on(error)
                return False
            self.bytes_sent += count
            while self._rest and count >= len(self._rest[0]):
                count -= len(self._rest.pop(0))
            if count:
                self._rest[0] = self._rest[0][count:]
                self._block()
                return False
        return True

    def _frame_sent(self) -> None:
        outgoing = self._current
        self._current = None
        assert outgoing is not None
        if self.window and outgoing.header.kind in SLICES:
            self._in_flight += 1
        if outgoing.token is not None:
            self.events.sent(self, outgoing.token)

    @property
    def wants_write(self) -> bool:
        return self._blocked and not self._failed

    @property
    def idle(self) -> bool:
        return not self._queue and self._current is None

    def unsent(self) -> Iterator[object]:
        current = [self._current] if self._current is not None else []
        return (outgoing.token for outgoing in current + self._queue if outgoing.token is not None)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def on_readable(self) -> None:
        for turn in range(_FRAMES_PER_TURN):
            # The last frame of a turn leaves the next header in the kernel, so that the descriptor stays readable.
            if self._failed or not self._read_frame(ahead=turn < _FRAMES_PER_TURN - 1):
                return

    def _read_frame(self, ahead: bool) -> bool:
        """Read on; True when a whole frame was handed over and more may be there."""
        if self._header is None:
            if self._raw_got < HEADER_BYTES:
                self._raw_got += self._receive([self._raw_view[self._raw_got :]])
                if self._raw_got < HEADER_BYTES:
                    return False
            try:
                begun = unpack(self._raw)
            except ProtocolError as error:
                self._fail(ProtocolError(f"rank {self.peer}, channel {self.channel}: {error}"))
                return False
            self._begin(begun)
        header, into = self._header, self._into
        assert header is not None
        if into is not None:
            left = len(into) - self._into_got
            if left:
                # The next header often lies behind this payload already: one call for both.
                rest = into[self._into_got :]
                count = self._receive([rest, self._raw_view] if ahead else [rest])
                if count < left:
                    self._into_got += count
                    return False
                self._raw_got = count - left
        self._end(header)
        return True

    def _receive(self, buffers: list[memoryview]) -> int:
        """Bytes that the kernel had; 0: nothing there now, or the link has just failed.

        Only the system call's own errors are the link's: those of the owner's callbacks (a `CommTimeout` is an
        `OSError`) must reach the owner as they are.
        """
        try:
            count = self._sock.recvmsg_into(buffers)[0]
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._fail_on(error)
            return 0
        if count == 0:
            self._fail_on(ConnectionResetError("closed by peer"))
        self.bytes_received += count
        return count

    def _begin(self, header: Header) -> None:
        nbytes = self._inline_bytes(header)
        # First, because the owner may raise: the header is then read again, never what follows taken for a header.
        target = self.events.target(self, header) if nbytes else None
        if target is not None and len(target) != nbytes:
            raise ProtocolError(f"payload of {nbytes} bytes for a slice of {len(target)} bytes")
        self._header = header
        self._raw_got = 0
        self._into_got = 0
        self._staged = self.pool.take(nbytes) if nbytes and target is None else None
        self._into = self._staged[:nbytes] if self._staged is not None else target

    def _inline_bytes(self, header: Header) -> int:
        return header.length

    def _end(self, header: Header) -> None:
        staged = self._staged
        self._header = self._into = self._staged = None
        payload = StagedPayload(staged, header.length, self.pool) if staged is not None else None
        self._hand_over(header, payload)

    def _hand_over(self, header: Header, payload: Payload | None) -> None:
        if header.kind == Kind.ACK:
            self._acknowledged(header.extra)
            return
        if header.kind == Kind.GOODBYE:
            self._said_goodbye = True
        if self.window and header.kind in SLICES:
            self.acknowledge(0)
        self.events.received(self, header, payload)

    def acknowledge(self, number: int) -> None:
        """Tell the peer that its frame has been taken in."""
        self.push(_ACK_KEY, control(Kind.ACK, extra=number), None, None)
        self.flush()

    def _acknowledged(self, number: int) -> None:
        if self._in_flight == 0:
            self._fail(
                ProtocolError(f"rank {self.peer}: acknowledgement of frame {number}, but none is outstanding")
            )
            return
        self._in_flight -= 1
        self.flush()

    # -- ending --------------------------------------------------------------------------------------------------------

    def _fail_on(self, error: OSError) -> None:
        words = "closed the connection" if isinstance(error, ConnectionResetError) else f"failed ({error})"
        ended = " after its orderly goodbye" if self._said_goodbye else ""
        self._fail(PeerLost(f"rank {self.peer} {words}{ended}, channel {self.channel}"))

    def _fail(self, error: CommError) -> None:
        if not self._failed:
            self._failed = True
            self.events.failed(self, error)

    @property
    def said_goodbye(self) -> bool:
        """The peer has ended in order."""
        return self._said_goodbye

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._failed = True
        self._queue.clear()
        self._current = None
        self._sock.close()
