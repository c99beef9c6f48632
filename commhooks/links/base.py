"""What every kind of link does: the contract that `tests/test_links_contract.py` holds all of them to.

Where in the flow: exchange -> engine -> **links**.  A link moves frames between this rank and one peer, most urgent first.
It knows no gradient, no tree and no priority rule: a frame comes with a key, and smaller keys leave sooner.

Invariants
----------
* Frames leave in key order as far as the kernel hasn't taken them yet; a frame is never interrupted by another.
* `LinkEvents.sent` for a frame means: its memory is read for good and may be reused.
* A failure is an event (`LinkEvents.failed`), reported once; a failed link reports nothing else afterwards.
* Every call and every event happens in the engine's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from commhooks.errors import CommError
from commhooks.links.frames import Header


class Region(NamedTuple):
    """Memory to send: a byte view and the address of its first byte (same-host links read by address)."""

    view: memoryview
    address: int


class Payload(ABC):
    """Bytes of a received frame, wherever they lie, until `release`."""

    nbytes: int

    @abstractmethod
    def view(self) -> memoryview | None:
        """The bytes, when they lie in this process's reach; otherwise use `read_into`."""

    @abstractmethod
    def read_into(self, offset: int, target: memoryview) -> None:
        """Copy ``len(target)`` bytes from `offset` on."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back (the sender may learn that it was read)."""


class LinkEvents(Protocol):
    """What a link tells its owner."""

    def target(self, link: Link, header: Header) -> memoryview | None:
        """Where to put the payload of this frame; None: the link finds memory (and `received` gets a `Payload`)."""

    def received(self, link: Link, header: Header, payload: Payload | None) -> None:
        """A frame is here in full; `payload` is None when it went into the memory that `target` gave, or is empty."""

    def sent(self, link: Link, token: object) -> None:
        """The frame pushed with `token` has left its memory for good."""

    def failed(self, link: Link, error: CommError) -> None:
        """The link is broken."""


Key = tuple[int, int, int]


class Link(ABC):
    """Frames to and from one peer over one channel."""

    kind = "link"
    #: whether payloads are read from the sender's memory in place (no staging, larger slices pay)
    by_reference = False

    def __init__(self, peer: int, channel: int, events: LinkEvents) -> None:
        self.peer = peer
        self.channel = channel
        self.events = events
        self.bytes_sent = 0
        self.bytes_received = 0
        #: called when the kernel takes no more for now, wherever `flush` was called from: `wants_write` has become true
        self.on_blocked: Callable[[Link], None] | None = None

    def __repr__(self) -> str:
        return f"<{self.kind} link to rank {self.peer} channel {self.channel}>"

    @abstractmethod
    def push(self, key: Key, header: Header, region: Region | None, token: object) -> None:
        """Queue a frame.  `token` comes back in `sent` unless it is None."""

    @abstractmethod
    def flush(self) -> None:
        """Send what the kernel takes now; never blocks."""

    @abstractmethod
    def on_readable(self) -> None:
        """Take in what is there; never blocks."""

    @abstractmethod
    def fileno(self) -> int: ...

    def backlog(self) -> tuple[float, int]:
        """Seconds in which the network, not the sender, was the limit, and bytes sent in them; zeros where unknown."""
        return 0.0, 0

    @property
    @abstractmethod
    def wants_write(self) -> bool:
        """Whether `flush` should be called when the descriptor becomes writable."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Nothing queued and nothing unacknowledged."""

    def unsent(self) -> Iterator[object]:
        """Tokens for which `sent` hasn't been told."""
        return iter(())

    @abstractmethod
    def close(self) -> None: ...


class StagingPool:
    """Reusable receive memory, so that a slice costs no allocation.

    Sizes are rounded up to a quarter of a power of two, so at most 25 % is unused.
    """

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[memoryview]] = {}
        self.allocated_bytes = 0

    @staticmethod
    def rounded(nbytes: int) -> int:
        step = max(64, 1 << max(0, nbytes.bit_length() - 3))
        return -(-nbytes // step) * step

    def take(self, nbytes: int) -> memoryview:
        size = self.rounded(nbytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        self.allocated_bytes += size
        return self._allocate(size)

    def give(self, memory: memoryview) -> None:
        self._free.setdefault(len(memory), []).append(memory)


class StagedPayload(Payload):
    """A payload in memory of the pool."""

    __slots__ = ("_memory", "_pool", "nbytes")

    def __init__(self, memory: memoryview, nbytes: int, pool: StagingPool) -> None:
        self._memory = memory
        self._pool = pool
        self.nbytes = nbytes

    def view(self) -> memoryview:
        return self._memory[: self.nbytes]

    def read_into(self, offset: int, target: memoryview) -> None:
        target[:] = self._memory[offset : offset + len(target)]

    def release(self) -> None:
        self._pool.give(self._memory)
