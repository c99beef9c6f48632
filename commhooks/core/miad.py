"""The slice size by MIAD: multiplicative increase, additive decrease, over real steps.

Where in the flow: beside it: measured rates -> **miad** -> slicing.

Invariants: pure; one decision per window, with its reason; ends (a steady size stays until `restart`).

Source: Blink, section 4 (CodeGen): start small, double while the measured throughput rises, on a drop subtract a
constant until it is steady.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Runs differ by a few per cent by themselves; a smaller rise is no reason for larger, less urgent slices.
RISE = 1.03


class Move(enum.Enum):
    """What a window decided."""

    DOUBLE = "double"
    DECREASE = "decrease"
    STEADY = "steady"


@dataclass(frozen=True)
class SizeDecision:
    """The next size in bytes, and why."""

    slice_bytes: int
    move: Move
    reason: str


class Miad:
    """Finds a slice size.

    Parameters
    ----------
    start_bytes : the first size, and the constant that is subtracted
    least_bytes, largest_bytes : bounds
    """

    def __init__(self, start_bytes: int, least_bytes: int, largest_bytes: int) -> None:
        self._least = least_bytes
        self._largest = largest_bytes
        self._start = start_bytes
        self.history: list[SizeDecision] = []
        self.restart()

    def restart(self) -> None:
        """The network has changed: search again from where the size is."""
        self._size = self.history[-1].slice_bytes if self.history else self._start
        self._best = (0.0, self._size)
        self._rising = True
        self.steady = False

    @property
    def slice_bytes(self) -> int:
        """The size to use now."""
        return self._size

    def window(self, bytes_per_s: float) -> SizeDecision:
        """Take the rate that the current size reached; get the next size."""
        decision = self._decide(bytes_per_s)
        self._size = decision.slice_bytes
        self.history.append(decision)
        return decision

    def _decide(self, rate: float) -> SizeDecision:
        size, (best_rate, best_size) = self._size, self._best
        figures = (
            f"{rate / 1e6:.1f} MB/s at {size} bytes, best {best_rate / 1e6:.1f} MB/s at {best_size} bytes"
        )
        if self.steady:
            return SizeDecision(size, Move.STEADY, "steady")
        if rate > RISE * best_rate:
            self._best = (rate, size)
            if self._rising and size < self._largest:
                return SizeDecision(min(2 * size, self._largest), Move.DOUBLE, f"rising: {figures}")
        elif self._rising and size > best_size:
            self._rising = False
            lower = max(best_size, size - self._start, self._least)
            if best_size < lower < size:
                return SizeDecision(lower, Move.DECREASE, f"no rise: {figures}")
        elif size - self._start > best_size:
            return SizeDecision(size - self._start, Move.DECREASE, f"still no rise: {figures}")
        self.steady = True
        return SizeDecision(self._best[1], Move.STEADY, f"steady: {figures}")
