"""Same host: a frame carries an address, and the reader takes the bytes straight from the sender's memory.

Where in the flow: engine -> **links** -> kernel.

A Unix socket carries the headers; payloads are read with ``process_vm_readv`` (one copy, by the reader, when it needs
them) or, where the kernel doesn't permit that, from a shared memory file that the sender copies into.  The reader answers
with an ACK when it is finished; only then is the sender's memory free.

Invariants: a region stays untouched from `push` to `sent`; an ACK names exactly one outstanding frame; point-to-point
messages travel inline (their sender may reuse its memory at once).
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import socket
from collections.abc import Iterator

from commhooks.errors import InternalError, PeerLost, ProtocolError
from commhooks.links.base import LinkEvents, Payload, Region
from commhooks.links.frames import Header
from commhooks.links.stream import SLICES, StreamLink, _Outgoing

#: Memory file, per direction.
HALF_BYTES = 64 << 20


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)


def read_memory(pid: int, address: int, target: memoryview) -> None:
    """Copy ``len(target)`` bytes from `address` in process `pid` (same host, same user).

    Raises
    ------
    OSError
        Not permitted, no such process, or no such memory.
    """
    if _readv is None:
        raise OSError("this C library has no process_vm_readv")
    nbytes = len(target)
    here = (ctypes.c_char * nbytes).from_buffer(target)
    done = 0
    while done < nbytes:
        local = _IoVec(ctypes.addressof(here) + done, nbytes - done)
        remote = _IoVec(address + done, nbytes - done)
        count = _readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += count


class RemotePayload(Payload):
    """Bytes that still lie in the sender's memory."""

    __slots__ = ("_address", "_link", "_token", "nbytes")

    def __init__(self, link: MemoryLink, address: int, nbytes: int, token: int) -> None:
        self._link = link
        self._address = address
        self._token = token
        self.nbytes = nbytes

    def view(self) -> memoryview | None:
        return self._link.shared_view(self._address, self.nbytes)

    def read_into(self, offset: int, target: memoryview) -> None:
        self._link.read(self._address + offset, target)

    def release(self) -> None:
        self._link.acknowledge(self._token)


class MemoryLink(StreamLink):
    """Headers by Unix socket, payloads read in place from process `pid`."""

    kind = "shm"
    by_reference = True

    def __init__(self, sock: socket.socket, peer: int, channel: int, events: LinkEvents, pid: int) -> None:
        super().__init__(sock, peer, channel, events)
        self._pid = pid
        self._tokens = itertools.count(1)
        self._unacknowledged: dict[int, object] = {}

    # -- sending -------------------------------------------------------------------------------------------------------

    def _inline(self, outgoing: _Outgoing) -> list[memoryview]:
        if outgoing.header.kind not in SLICES:
            return super()._inline(outgoing)
        if outgoing.region is None:
            raise InternalError(f"a slice without memory was pushed to rank {self.peer}")
        number = next(self._tokens)
        self._unacknowledged[number] = outgoing.token
        self._in_flight = len(self._unacknowledged)
        reference = self._reference(outgoing.region, number)
        return [memoryview(reference.to_bytes(8, "little") + number.to_bytes(8, "little"))]

    def _reference(self, region: Region, number: int) -> int:
        return region.address

    def _inline_bytes(self, header: Header) -> int:
        return _REFERENCE_BYTES if header.kind in SLICES else header.length

    def _frame_sent(self) -> None:
        if self._current is not None and self._current.header.kind in SLICES:
            self._current = None  # `sent` follows with the ACK
            return
        super()._frame_sent()

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _begin(self, header: Header) -> None:
        if header.kind not in SLICES:
            super()._begin(header)
            return
        self._header = header
        self._raw_got = 0
        self._into_got = 0
        self._staged = None
        self._into = memoryview(bytearray(_REFERENCE_BYTES))

    def _end(self, header: Header) -> None:
        if header.kind not in SLICES:
            super()._end(header)
            return
        reference = self._into
        assert reference is not None
        self._header = self._into = None
        address = int.from_bytes(reference[:8], "little")
        number = int.from_bytes(reference[8:], "little")
        self.bytes_received += header.length
        self._hand_over(header, RemotePayload(self, address, header.length, number))

    def _hand_over(self, header: Header, payload: Payload | None) -> None:
        if header.kind in SLICES:
            self.events.received(self, header, payload)  # acknowledged when it is released
            return
        super()._hand_over(header, payload)

    def _acknowledged(self, number: int) -> None:
        if number not in self._unacknowledged:
            self._fail(
                ProtocolError(
                    f"rank {self.peer}: acknowledgement of frame {number}, which is not outstanding"
                )
            )
            return
        token = self._unacknowledged.pop(number)
        self._in_flight = len(self._unacknowledged)
        if token is not None:
            self.events.sent(self, token)
        self.flush()

    def read(self, address: int, target: memoryview) -> None:
        if self._failed:  # the process has ended, and its number may be another's by now
            raise PeerLost(f"rank {self.peer} ended before its memory was read, channel {self.channel}")
        try:
            read_memory(self._pid, address, target)
        except OSError as error:
            raise PeerLost(
                f"rank {self.peer}: reading the memory of its process {self._pid} failed ({error})"
            ) from error

    def shared_view(self, address: int, nbytes: int) -> memoryview | None:
        return None

    @property
    def idle(self) -> bool:
        return super().idle and not self._unacknowledged

    def unsent(self) -> Iterator[object]:
        # A reference being written counts twice: as current and as unacknowledged.
        yield from super().unsent()
        yield from (token for token in self._unacknowledged.values() if token is not None)


_REFERENCE_BYTES = 16


class SharedFileLink(MemoryLink):
    """Headers by Unix socket, payloads through a memory file that both processes map (no permission needed).

    The file has no name: one end makes it and sends its descriptor as the first byte on the socket.  So there is no
    moment at which a name must exist or be gone, nothing is left behind by a crash, and a small ``/dev/shm`` (a
    container's has 64 MiB) is no limit; pages come into being when they are touched.

    Parameters
    ----------
    makes : whether this end makes the file (exactly one of the two does)
    half_bytes : memory per direction
    """

    kind = "shm-file"

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        channel: int,
        events: LinkEvents,
        makes: bool,
        half_bytes: int = HALF_BYTES,
    ) -> None:
        super().__init__(sock, peer, channel, events, pid=0)
        self._own: memoryview | None = None
        self._theirs: memoryview | None = None
        self._free = _Ring(half_bytes)
        if makes:
            fd = os.memfd_create("commhooks", os.MFD_CLOEXEC)
            os.truncate(fd, 2 * half_bytes)
            self._own, self._theirs = self._map(fd)
            socket.send_fds(sock, [b"\0"], [fd])
            os.close(fd)

    def _map(self, fd: int) -> list[memoryview]:
        half = self._free.size
        return [memoryview(mmap.mmap(fd, half, offset=at)) for at in (0, half)]

    def on_readable(self) -> None:
        if self._own is not None or self._take_memory():
            super().on_readable()

    def _take_memory(self) -> bool:
        """The other end's first byte, with the descriptor of the memory."""
        try:
            first, fds, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._fail_on(error)
            return False
        if not first:
            self._fail_on(ConnectionResetError("closed by peer"))
            return False
        if len(fds) != 1:
            self._fail(
                ProtocolError(f"rank {self.peer} sent {len(fds)} descriptors of its memory file; expected 1")
            )
            return False
        self._theirs, self._own = self._map(fds[0])
        os.close(fds[0])
        self.flush()
        return not self._failed

    def _next(self) -> bool:
        """As for a stream, but a frame whose payload finds no room waits for acknowledgements."""
        if self._queue:
            head = self._queue[0]
            if head.region is not None and head.header.kind in SLICES:
                if self._own is None:
                    return False
                if head.header.length > self._free.size:
                    raise InternalError(
                        f"slice of {head.header.length} bytes for shared memory of {self._free.size} bytes; "
                        "lower COMMHOOKS_SLICE_NUMEL"
                    )
                if not self._free.fits(head.header.length):
                    return False
        return super()._next()

    def _reference(self, region: Region, number: int) -> int:
        offset = self._free.take(len(region.view), number)
        assert self._own is not None
        self._own[offset : offset + len(region.view)] = region.view
        return offset

    def _acknowledged(self, number: int) -> None:
        self._free.give(number)
        super()._acknowledged(number)

    def shared_view(self, address: int, nbytes: int) -> memoryview | None:
        if self._failed or self._theirs is None:
            raise PeerLost(f"rank {self.peer} ended before its memory was read, channel {self.channel}")
        if address + nbytes > len(self._theirs):
            raise ProtocolError(
                f"rank {self.peer}: {nbytes} bytes at {address} lie outside its shared memory"
            )
        return self._theirs[address : address + nbytes]

    def read(self, address: int, target: memoryview) -> None:
        view = self.shared_view(address, len(target))
        assert view is not None
        target[:] = view

    def close(self) -> None:
        super().close()
        self._own = self._theirs = None  # unmapped with the last view of it


class _Ring:
    """First-fit blocks in a fixed memory; blocks are freed in any order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._used: dict[int, tuple[int, int]] = {}

    def _find(self, nbytes: int) -> int | None:
        start = 0
        for offset, length in sorted(self._used.values()):
            if offset - start >= nbytes:
                return start
            start = offset + length
        return start if self.size - start >= nbytes else None

    def fits(self, nbytes: int) -> bool:
        return self._find(nbytes) is not None

    def take(self, nbytes: int, number: int) -> int:
        offset = self._find(nbytes)
        if offset is None:
            raise InternalError(f"no room for {nbytes} bytes in shared memory of {self.size} bytes")
        self._used[number] = (offset, nbytes)
        return offset

    def give(self, number: int) -> None:
        self._used.pop(number, None)
