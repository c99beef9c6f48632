"""Messages between ranks for the parameter server: over the engine's links, or through queues inside one process.

Where in the flow: parameter_server, commit_worker -> **messengers** -> engine.

Invariants: handlers of one rank run one at a time, in that rank's network thread, whether a message comes from a peer or
from the rank itself; messages between two ranks with equal keys keep their order; a lost peer is an event, told once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from commhooks.engine import Engine
from commhooks.errors import CommError, InternalError, PeerLost

log = logging.getLogger(__name__)

Key = tuple[int, int, int]
MessageHandler = Callable[[int, bytes, memoryview], None]
LossHandler = Callable[[int, str], None]


class Messenger(Protocol):
    """What the parameter server and its workers need of a network."""

    rank: int

    def send(
        self, peer: int, tag: int, text: bytes, body: memoryview | None = None, key: Key = (0, 0, 0)
    ) -> None:
        """Send to a rank (this one included).  Returns at once; `body` must stay as it is until it has been sent."""

    def on_message(self, tag: int, handler: MessageHandler) -> None:
        """Handle messages with `tag`; `body` is valid only during the call."""

    def on_loss(self, handler: LossHandler) -> None:
        """Be told of peers that died, were cut off or left, and why."""

    def run_soon(self, function: Callable[[], None]) -> None:
        """Run `function` in the network thread."""

    def raise_if_failed(self) -> None:
        """Raise the network's own error, if it has one."""

    def close(self) -> None:
        """Leave in order."""


class EngineMessenger:
    """Messages over an engine's links; losing a peer doesn't latch the engine any more."""

    def __init__(self, engine: Engine) -> None:
        self.rank = engine.rank
        self._engine = engine
        self._handlers: dict[int, MessageHandler] = {}
        self._on_loss: list[LossHandler] = []
        engine.tolerate_losses(self._lost)

    def send(
        self, peer: int, tag: int, text: bytes, body: memoryview | None = None, key: Key = (0, 0, 0)
    ) -> None:
        """See `Messenger.send`."""
        if self._engine.closed:
            return  # this rank has left in order; what others still told it needs no answer
        if peer != self.rank:
            self._engine.send(peer, tag, text, body, key)
            return
        handler = self._handlers[tag]
        whole = body if body is not None else memoryview(b"")
        self._engine.run_soon(lambda: handler(peer, text, whole))

    def on_message(self, tag: int, handler: MessageHandler) -> None:
        """See `Messenger.on_message`."""
        self._handlers[tag] = handler
        self._engine.on_message(tag, handler)

    def on_loss(self, handler: LossHandler) -> None:
        """See `Messenger.on_loss`."""
        self._on_loss.append(handler)

    def _lost(self, peer: int, words: str) -> None:
        for handler in self._on_loss:
            handler(peer, words)

    def run_soon(self, function: Callable[[], None]) -> None:
        """See `Messenger.run_soon`."""
        self._engine.run_soon(function)

    def raise_if_failed(self) -> None:
        """See `Messenger.raise_if_failed`."""
        self._engine.raise_if_failed()

    def close(self) -> None:
        """See `Messenger.close`."""
        self._engine.close()


@dataclass(frozen=True)
class _Letter:
    sender: int
    tag: int
    text: bytes
    body: bytes


class QueueNetwork:
    """A network inside one process: a queue and a thread per rank.  For tests and for trying things out.

    ``cut(a, b)`` holds back what travels between two ranks, ``mend(a, b)`` lets it go on or, with ``lossy``, throws
    away what was held; ``kill(rank)`` lets the others know that it is gone.
    """

    def __init__(self, ranks: int) -> None:
        self._mailboxes = [_Mailbox(rank, self) for rank in range(ranks)]
        self._lock = threading.Lock()
        self._held: dict[frozenset[int], list[tuple[int, _Letter]]] = {}
        self._dead: set[int] = set()

    def messenger(self, rank: int) -> _Mailbox:
        """The messenger of one rank; a new one (an empty mailbox) if that rank was killed."""
        if rank in self._dead:
            self._dead.discard(rank)
            self._mailboxes[rank] = _Mailbox(rank, self)
        return self._mailboxes[rank]

    def cut(self, a: int, b: int) -> None:
        """Hold back everything between two ranks."""
        with self._lock:
            self._held[frozenset((a, b))] = []

    def mend(self, a: int, b: int, lossy: bool = False) -> None:
        """Deliver what was held back, or lose it."""
        with self._lock:
            letters = self._held.pop(frozenset((a, b)))
        for peer, letter in letters if not lossy else ():
            self._mailboxes[peer].put(letter)

    def kill(self, rank: int, words: str = "killed") -> None:
        """`rank` neither sends nor receives any more; all others are told."""
        self._dead.add(rank)
        self._mailboxes[rank].close()
        for mailbox in self._mailboxes:
            if mailbox.rank not in self._dead:
                mailbox.run_soon(lambda box=mailbox: box.lost(rank, words))  # type: ignore[misc]

    def deliver(self, peer: int, letter: _Letter) -> None:
        """Called by messengers."""
        with self._lock:
            held = self._held.get(frozenset((peer, letter.sender)))
            if held is not None:
                held.append((peer, letter))
                return
        if peer not in self._dead and letter.sender not in self._dead:
            self._mailboxes[peer].put(letter)

    def close(self) -> None:
        """End all threads."""
        for mailbox in self._mailboxes:
            mailbox.close()

    def __enter__(self) -> QueueNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Mailbox:
    """One rank of a `QueueNetwork`."""

    def __init__(self, rank: int, network: QueueNetwork) -> None:
        self.rank = rank
        self._network = network
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._handlers: dict[int, MessageHandler] = {}
        self._on_loss: list[LossHandler] = []
        self._error: CommError | None = None
        self._thread = threading.Thread(target=self._run, name=f"mailbox-{rank}", daemon=True)
        self._thread.start()

    def send(
        self, peer: int, tag: int, text: bytes, body: memoryview | None = None, key: Key = (0, 0, 0)
    ) -> None:
        """See `Messenger.send`."""
        self._network.deliver(peer, _Letter(self.rank, tag, text, bytes(body) if body is not None else b""))

    def put(self, letter: _Letter) -> None:
        """Called by the network."""
        self._queue.put(lambda: self._handle(letter))

    def on_message(self, tag: int, handler: MessageHandler) -> None:
        """See `Messenger.on_message`."""
        self._handlers[tag] = handler

    def on_loss(self, handler: LossHandler) -> None:
        """See `Messenger.on_loss`."""
        self._on_loss.append(handler)

    def lost(self, peer: int, words: str) -> None:
        """Called by the network, in this rank's thread."""
        for handler in self._on_loss:
            handler(peer, words)

    def run_soon(self, function: Callable[[], None]) -> None:
        """See `Messenger.run_soon`."""
        self._queue.put(function)

    def raise_if_failed(self) -> None:
        """See `Messenger.raise_if_failed`."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def close(self) -> None:
        """See `Messenger.close`."""
        self._queue.put(None)

    def _handle(self, letter: _Letter) -> None:
        self._handlers[letter.tag](letter.sender, letter.text, memoryview(letter.body))

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except CommError as error:
                self._error = self._error or error
            except Exception as error:
                log.exception("rank %d: a handler failed", self.rank)
                self._error = self._error or InternalError(f"{type(error).__name__}: {error}")
        self._error = self._error or PeerLost(f"rank {self.rank} has left the network")
