"""A lab's ranks: started together, their output passed on, watched until all have ended.

Where in the flow: lab -> **lab_ranks** -> the user's command, once per rank.

Invariants: one thread and one loop; rank 0's standard output isn't touched (it is the lab's own), everything else becomes
lines on standard error that begin with the rank; the exit code is that of the rank that failed first; a rank that fails
gives the others a limited time, because what they say about it is what a user wants to see.
"""

from __future__ import annotations

import heapq
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO

from commhooks import shell

_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class RankCommand:
    """What to start for one rank."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]


class Lines:
    """Turns a stream of bytes into lines with a prefix."""

    def __init__(self, prefix: str, write: Callable[[bytes], object]) -> None:
        self._prefix = prefix.encode()
        self._write = write
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Pass on all complete lines."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:  # no line at all: don't keep it for ever
            lines, self._rest = [*lines, self._rest], b""
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def end(self) -> None:
        """Pass on a last line without an end."""
        if self._rest:
            self.feed(b"\n")


class Ranks:
    """The loop around the processes of one run.

    Parameters
    ----------
    commands
        One per rank.
    write_stderr
        Receives prefixed lines.
    stdout
        Receives rank 0's standard output when it is to be captured; None: rank 0 writes to ours.
    grace_s
        How long the others may run on after a rank has failed.
    """

    def __init__(
        self,
        commands: Sequence[RankCommand],
        write_stderr: Callable[[bytes], object],
        stdout: Callable[[bytes], object] | None = None,
        grace_s: float = 30.0,
    ) -> None:
        self._commands = commands
        self._write_stderr = write_stderr
        self._stdout = stdout
        self._grace_s = grace_s
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._children: dict[int, shell.Child[bytes]] = {}
        self._running: set[int] = set()
        self._outputs: list[tuple[IO[bytes], Callable[[bytes], object], Lines | None]] = []
        self._first_failure: int | None = None

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call something in the loop after a delay."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, len(self._timers), action))

    def watch(self, descriptor: int, action: Callable[[], object]) -> None:
        """Call something in the loop whenever a descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def run(self, timeout_s: float | None = None) -> int:
        """Start all ranks and wait for all of them; the exit code (124: `timeout_s` was over)."""
        try:
            for rank, command in enumerate(self._commands):
                self._start(rank, command)
            if timeout_s is not None:
                self.at(timeout_s, partial(self._give_up, timeout_s))
            while self._running:
                self._turn()
            self._drain()
            return self._first_failure or 0
        finally:
            self.stop()

    def interrupt(self, number: signal.Signals, grace_s: float = 3.0) -> None:
        """Pass a signal on to all ranks and wait a little for them to end by it."""
        for rank in sorted(self._running):
            shell.send(self._children[rank], number)
        deadline = time.monotonic() + grace_s
        while self._running and time.monotonic() < deadline:
            self._turn(deadline)

    def stop(self) -> None:
        """End whatever still runs, and close everything; may be called again."""
        shell.terminate([self._children[rank] for rank in sorted(self._running)], grace_s=2.0)
        self._running.clear()
        self._drain()
        for stream, _, _ in self._outputs:
            stream.close()
        self._outputs.clear()
        self._selector.close()

    # --- the loop ------------------------------------------------------------------------------------------------

    def _start(self, rank: int, command: RankCommand) -> None:
        own_stdout = rank == 0 and self._stdout is None
        child = shell.start(
            command.argv,
            command.environ,
            stdout=sys.stdout.fileno() if own_stdout else shell.PIPE,
            stderr=shell.PIPE,
        )
        self._children[rank] = child
        self._running.add(rank)
        lines = Lines(f"[rank {rank}] ", self._write_stderr)
        self._pass_on(child.stderr, lines.feed, lines)
        if child.stdout is not None:
            if rank == 0 and self._stdout is not None:
                self._pass_on(child.stdout, self._stdout, None)
            else:
                lines = Lines(f"[rank {rank}] ", self._write_stderr)
                self._pass_on(child.stdout, lines.feed, lines)
        pidfd = os.pidfd_open(child.pid)
        self.watch(pidfd, partial(self._ended, rank, pidfd))

    def _pass_on(
        self, stream: IO[bytes] | None, feed: Callable[[bytes], object], lines: Lines | None
    ) -> None:
        assert stream is not None  # the callers asked for a pipe
        os.set_blocking(stream.fileno(), False)
        self._outputs.append((stream, feed, lines))
        self.watch(stream.fileno(), partial(self._read, stream, feed))

    def _turn(self, deadline: float = float("inf")) -> None:
        """Wait for the next event or timer, and handle what is due."""
        until = min(deadline, self._timers[0][0] if self._timers else float("inf"))
        wait = None if until == float("inf") else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(wait):
            key.data()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def _read(self, stream: IO[bytes], feed: Callable[[bytes], object]) -> bool:
        """Read once; whether there may be more."""
        try:
            chunk = os.read(stream.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            feed(chunk)
            return True
        with suppress(KeyError):  # read to its end before
            self._selector.unregister(stream.fileno())
        return False

    def _ended(self, rank: int, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = shell.exit_code(self._children[rank])
        self._running.discard(rank)
        if code == 0 or self._first_failure is not None:
            return
        self._first_failure = code
        if self._running:
            self._note(f"rank {rank} ended with exit code {code}; the others have {self._grace_s:g} s to end")
            self.at(self._grace_s, self._end_rest)
        else:
            self._note(f"rank {rank} ended with exit code {code}")

    def _end_rest(self) -> None:
        if self._running:
            self._note(f"ending ranks {', '.join(map(str, sorted(self._running)))}, which still run")
            shell.terminate([self._children[rank] for rank in sorted(self._running)])

    def _give_up(self, timeout_s: float) -> None:
        if self._first_failure is None:
            self._first_failure = 124
        self._note(f"not done after {timeout_s:g} s")
        self._end_rest()

    def _note(self, text: str) -> None:
        self._write_stderr(f"commhooks lab: {text}\n".encode())

    def _drain(self) -> None:
        """What is in the pipes now; a process that a rank left behind may hold them open for ever."""
        for stream, feed, lines in self._outputs:
            while self._read(stream, feed):
                pass
            if lines is not None:
                lines.end()


def write_stderr(text: bytes) -> None:
    """Write whole lines to standard error, also from a process whose ``sys.stderr`` is buffered."""
    sys.stderr.flush()
    sys.stderr.buffer.write(text)
    sys.stderr.buffer.flush()


class Interrupted(BaseException):
    """A signal asked the lab to end; raised in the main thread."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise ``Interrupted`` once; further ones don't disturb the cleaning up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number))

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
