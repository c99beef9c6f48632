"""The parameter server's messages: their tags, and what their bytes mean.

Where in the flow: commit_worker <-> **commit_messages** <-> parameter_server; carried by ``messengers``.

Invariants: fixed layouts for what carries parameters, JSON for the rare rest; nothing is unpickled; a message of a wrong
length is refused with its numbers.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from commhooks.core.commit.policy import Directive
from commhooks.errors import ProtocolError

_PUSH = struct.Struct("<IIIIQI?")
_ANSWER = struct.Struct("<IIIq?I")

FIRST_TAG = 1 << 20
"""Above the tags that others use; each model on an engine gets its own three."""


class Tags(NamedTuple):
    """Message tags of one model."""

    push: int
    answer: int
    control: int

    @classmethod
    def of(cls, stream: int) -> Tags:
        """The tags of the ``stream``-th model."""
        first = FIRST_TAG + 4 * stream
        return cls(first, first + 1, first + 2)


class PushHead(NamedTuple):
    """One slice of a commit: worker -> shard; the body is U as float32."""

    worker: int
    incarnation: int
    sequence: int
    slice_id: int
    step: int
    generation: int
    pull: bool

    def pack(self) -> bytes:
        """As bytes."""
        return _PUSH.pack(*self)

    @classmethod
    def unpack(cls, text: bytes) -> PushHead:
        """From bytes; raises ProtocolError."""
        return cls(*_read(_PUSH, text, "commit"))


class AnswerHead(NamedTuple):
    """One slice's answer: shard -> worker; the body is the slice's values, or empty if not ``pull``."""

    incarnation: int
    sequence: int
    slice_id: int
    slowest_step: int
    pull: bool
    generation: int

    def pack(self) -> bytes:
        """As bytes."""
        return _ANSWER.pack(*self)

    @classmethod
    def unpack(cls, text: bytes) -> AnswerHead:
        """From bytes; raises ProtocolError."""
        return cls(*_read(_ANSWER, text, "answer"))


def _read(layout: struct.Struct, text: bytes, what: str) -> tuple[Any, ...]:
    if len(text) != layout.size:
        raise ProtocolError(f"{what} header of {len(text)} bytes; expected {layout.size}")
    return layout.unpack(text)


@dataclass(frozen=True)
class Hello:
    """Worker -> shards and scheduler: I start (again)."""

    worker: int
    incarnation: int


@dataclass(frozen=True)
class Done:
    """Worker -> shards: I have made my last commit; the body is my buffers, as float32."""

    worker: int
    incarnation: int


@dataclass(frozen=True)
class BufferMean:
    """Scheduler's rank -> workers: all have finished; the body is the mean of their buffers."""


@dataclass(frozen=True)
class Gone:
    """Scheduler -> shards: that worker died or left; told by whoever noticed first."""

    worker: int
    words: str


@dataclass(frozen=True)
class Numbers:
    """Worker -> scheduler: counters, and the losses reported since the last such message."""

    worker: int
    commits: int
    step: int
    step_s: float
    overhead_s: float
    waited_s: float
    compute_s: float
    loss: float
    losses: int


@dataclass(frozen=True)
class Direction:
    """Scheduler -> worker: a directive."""

    number: int
    interval_s: float | None
    steps: int | None

    @property
    def directive(self) -> Directive:
        """As the core has it."""
        return Directive(self.number, self.interval_s, self.steps)


@dataclass(frozen=True)
class Keep:
    """Scheduler -> shards: keep a copy of the values."""


@dataclass(frozen=True)
class GoBack:
    """Scheduler -> shards: go back to the copy."""

    generation: int


@dataclass(frozen=True)
class Stop:
    """Anyone -> workers: training has reached its aim; ``should_stop`` is true from now on."""

    reason: str


Control = Hello | Done | BufferMean | Gone | Numbers | Direction | Keep | GoBack | Stop
_KINDS: dict[str, type[Control]] = {
    k.__name__: k for k in (Hello, Done, BufferMean, Gone, Numbers, Direction, Keep, GoBack, Stop)
}


def pack_control(message: Control) -> bytes:
    """As JSON bytes."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()


def unpack_control(text: bytes) -> Control:
    """From JSON bytes.

    Raises
    ------
    ProtocolError
        Not JSON, an unknown kind, or other fields than that kind has.
    """
    try:
        fields = json.loads(text)
        return _KINDS[fields.pop("kind")](**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"control message {text[:80]!r}: {type(error).__name__}: {error}") from error
