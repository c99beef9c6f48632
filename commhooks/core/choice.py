"""Trees or the native collective: what the topology predicts, and a trial over real steps where that is close.

Where in the flow: beside it, off the hot path: plan -> **choice** -> ddp.

Invariants: pure (seconds are arguments); every decision has its reason; all ranks decide alike, because they
decide on sums over all ranks.

Source: BytePS issues 339, 241, 370: a scheduler that is slower than the baseline where communication was hidden anyway.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.core.plan import Plan

WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step
SAMPLES = 4  # of each
CLEAR_GAIN = 1.05  # a predicted gain above this needs no trial
MARGIN = 0.97  # native must be this much faster to be chosen: a tie keeps trees


class Way(enum.Enum):
    """How a bucket is reduced."""

    TREES = "trees"
    NATIVE = "native"


@dataclass(frozen=True)
class Choice:
    """A way and why."""

    way: Way
    reason: str


def needs_trial(plan: Plan, native_bytes_per_s: float, one_host: bool) -> Choice | None:
    """The choice where the prediction is clear; None: try both.

    Parameters
    ----------
    native_bytes_per_s : the native collective's predicted rate; 0: unknown
    one_host : all ranks share memory
    """
    if plan.world_size == 1:
        return Choice(Way.TREES, "one rank: nothing is sent")
    if one_host:
        return Choice(Way.TREES, "all ranks share memory: slices are read in place")
    if native_bytes_per_s and plan.bytes_per_s > CLEAR_GAIN * native_bytes_per_s:
        gain = plan.bytes_per_s / native_bytes_per_s
        return Choice(
            Way.TREES, f"trees are predicted {gain:.2f}x as fast as a ring in rank order on this network"
        )
    return None


class Trial:
    """Which way each step goes while both are tried.

    After the warm-up the ways alternate step by step, so that both see the same machine.  The way depends on the step's number
    alone: a rank that has run out of data takes part without measuring.
    """

    length = WARM_UP_STEPS + 2 * SAMPLES

    def __init__(self) -> None:
        self._seconds: dict[Way, list[float]] = {way: [] for way in Way}

    def way(self, step: int) -> Way:
        """Of a step, counted from 0."""
        tried = step - WARM_UP_STEPS
        return Way.NATIVE if tried >= 0 and tried % 2 else Way.TREES

    def record(self, step: int, seconds: float) -> None:
        """A step took this long."""
        if step >= WARM_UP_STEPS:
            self._seconds[self.way(step)].append(seconds)

    def figures(self) -> tuple[float, float, float]:
        """What all ranks add up: this rank's medians (trees, native) and 1; zeros when it measured too little."""
        if not all(self._seconds.values()):
            return 0.0, 0.0, 0.0
        trees, native = (statistics.median(self._seconds[way]) for way in (Way.TREES, Way.NATIVE))
        return trees, native, 1.0


def verdict(sums: Sequence[float]) -> Choice:
    """Decide on the ranks' added `Trial.figures`."""
    trees, native, measured = sums
    if not measured:
        return Choice(Way.TREES, "no rank could measure")
    trees_s, native_s = trees / measured, native / measured
    figures = (
        f"trees {trees_s * 1e3:.1f} ms, native {native_s * 1e3:.1f} ms (medians of {SAMPLES} steps each)"
    )
    if native_s < MARGIN * trees_s:
        return Choice(Way.NATIVE, f"measured: {figures}")
    return Choice(Way.TREES, f"measured: {figures}; native must be {1 - MARGIN:.0%} faster to be chosen")
