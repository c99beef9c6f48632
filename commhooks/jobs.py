"""A job: one flat buffer on its way through the engine, with its slices, and how its end is told.

Where in the flow: ddp / collectives -> **job** -> engine.

Invariants: every job ends exactly once, done or failed; `on_done` and `on_slice` run in the engine's thread and must be short.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import NamedTuple

from commhooks.buffers import FlatBuffer
from commhooks.core.exchange import SliceId
from commhooks.core.plan import TreeRoute
from commhooks.core.slicing import Layout
from commhooks.errors import CommError


class JobKey(NamedTuple):
    """Names a job on every rank: a stream of buffers (one per registration), its step, the bucket in it."""

    stream: int
    step: int
    bucket: int

    def slice(self, index: int) -> SliceId:
        return SliceId(self.stream, self.step, self.bucket, index)

    def __str__(self) -> str:
        return f"stream {self.stream} step {self.step} bucket {self.bucket}"


class Job:
    """A buffer to exchange.

    Parameters
    ----------
    key : equal on all ranks, never used twice
    buffer : this rank's data; holds the result at the end
    layout : its slices, equal on all ranks
    routes : this rank's part of each tree, indexed by the slices' ``tree``
    divisor : the root divides by it (1: plain sum)
    average : whether the result is an average (the division may be elsewhere)
    label : which collective, for `check`
    on_slice : called with each finished slice's index
    on_done : called once with the job, done or failed
    """

    def __init__(
        self,
        key: JobKey,
        buffer: FlatBuffer,
        layout: Layout,
        routes: tuple[TreeRoute | None, ...],
        divisor: int = 1,
        on_slice: Callable[[int], None] | None = None,
        on_done: Callable[[Job], None] | None = None,
        average: bool = False,
        label: str = "",
    ) -> None:
        self.key = key
        self.buffer = buffer
        self.layout = layout
        self.routes = routes
        self.divisor = divisor
        self.on_slice = on_slice
        self.on_done = on_done
        self.left = sum(1 for piece in layout.slices if routes[piece.tree] is not None)
        self.word = layout_word(buffer, average)
        #: equal on all ranks, or they disagree about cuts, trees, type, averaging or the collective itself
        self.check = zlib.crc32(f"{layout.digest}/{self.word}/{label}".encode())
        self.error: CommError | None = None
        self.submitted_s = 0.0
        self.moved_s = 0.0  # when a slice last came or ended
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self, error: CommError | None) -> None:
        """Engine's thread: the job is over."""
        if self._ended.is_set():
            return
        self.error = error
        self._ended.set()
        if self.on_done is not None:
            self.on_done(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """User's thread: block until the job is over; False when `timeout_s` passed first."""
        return self._ended.wait(timeout_s)


DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
)


_AVERAGE = 128


def layout_word(buffer: FlatBuffer, average: bool) -> int:
    """Number of elements, type, and whether they are averaged in one word: what a mismatch shows of the other rank."""
    code = DTYPES.index(str(buffer.dtype).removeprefix("torch."))
    return buffer.numel << 8 | code | (_AVERAGE if average else 0)


def describe_word(word: int) -> str:
    """In words, what `layout_word` put into a header."""
    code = word & 127
    name = DTYPES[code] if code < len(DTYPES) else "another type"
    return f"{word >> 8} elements of {name}" + (" to average" if word & _AVERAGE else "")
