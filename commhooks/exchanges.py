"""What deferred steps need of a transport: start a buffer's slices, hear which are back, wait for some of them.

Where in the flow: deferred -> **exchange** (the engine's trees, or the framework's own collective) -> gates.

Invariants: a slice is reported once, after its last receive and its last send; `poll` never blocks; a failure is raised from
every later `poll` and `wait` on the user's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from commhooks.core.gates import SliceKey
from commhooks.core.slicing import Layout, Segment
from commhooks.errors import CommError, CommTimeout


class SliceExchange(Protocol):
    """Averages flat buffers slice by slice; one object per registered model, used by one thread."""

    world_size: int

    @property
    def epoch(self) -> int:
        """Changes when buffers are to be cut anew; on all ranks between the same two steps."""

    @property
    def any_order(self) -> bool:
        """Whether ranks may start the buffers of a step in different orders."""

    def begin(self, step: int) -> None:
        """Another step; every slice of the last one is back.  May be collective."""

    def layout(self, segments: Sequence[Segment], itemsize: int) -> Layout:
        """Cut a bucket into slices; equal on all ranks."""

    def start(self, step: int, bucket: int, flat: torch.Tensor, layout: Layout) -> None:
        """Average `flat` over the ranks, in place.  Returns at once; `flat` isn't to be touched until its slices are back."""

    def seal(self) -> None:
        """Every bucket of this step has started."""

    def poll(self) -> Sequence[SliceKey]:
        """The slices that came back since the last call."""

    def wait(self, slices: Collection[SliceKey]) -> None:
        """Block until all of `slices` are back (or were reported before)."""

    def agree(self, name: str, value: Any) -> Any:
        """Rank 0's `value` (JSON), on every rank.  Collective."""

    def close(self, timeout_s: float) -> None:
        """Let go of threads and connections; waits for slices under way for at most `timeout_s`."""


class Completions:
    """Slices that are back, told by a transport's thread and asked for by the user's thread.

    Parameters
    ----------
    timeout_s : how long a wait may last without any slice coming back
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._unread: deque[SliceKey] = deque()
        self._under_way: set[SliceKey] = set()
        self._awaited: set[SliceKey] = set()
        self._done = 0
        self._error: CommError | None = None

    def expect(self, slices: Collection[SliceKey]) -> None:
        """User's thread: these are about to leave."""
        with self._changed:
            self._under_way.update(slices)

    def done(self, key: SliceKey) -> None:
        """Any thread: a slice is back."""
        with self._changed:
            self._under_way.discard(key)
            self._unread.append(key)
            self._done += 1
            self._awaited.discard(key)
            if not self._awaited:
                self._changed.notify_all()

    def fail(self, error: CommError) -> None:
        """Any thread: nothing more will come back; the first error stays."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> bool:
        """User's thread: wait until nothing is under way; False after `timeout_s` or a failure.  Never raises."""
        with self._changed:
            self._awaited = set(self._under_way)
            self._changed.wait_for(lambda: not self._awaited or self._error is not None, timeout_s)
            self._awaited = set()
            return not self._under_way

    @property
    def failed(self) -> bool:
        """Whether an error is latched."""
        return self._error is not None

    def poll(self) -> list[SliceKey]:
        """User's thread: what came back since the last call.

        Raises
        ------
        CommError
            The latched failure, unchanged.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            found = list(self._unread)
            self._unread.clear()
        return found

    def wait(self, slices: Collection[SliceKey]) -> None:
        """User's thread: block until `slices` are back.

        Raises
        ------
        CommError
            The latched failure.
        CommTimeout
            No slice at all came back for `timeout_s`.
        """
        with self._changed:
            self._awaited = {key for key in slices if key in self._under_way}
            done = self._done
            while self._awaited and self._error is None:
                notified = self._changed.wait(self._timeout_s)
                if not notified and self._done == done:
                    self._error = self._late()
                done = self._done
            self._awaited = set()
            if self._error is not None:
                raise self._error

    def _late(self) -> CommTimeout:
        first = min(self._awaited)
        return CommTimeout(
            f"bucket {first.bucket} slice {first.number} and {len(self._awaited) - 1} more didn't come back, and no other "
            f"slice did for {self._timeout_s:g} s (timeout_s); a rank has stopped, or never called backward() for this step"
        )
