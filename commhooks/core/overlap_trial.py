"""Whether overlap across steps pays for this model here: times real steps both ways, in turn, and keeps the faster.

Where in the flow: beside it; deferred_steps asks before each step and tells how long it took.

Phases: warm-up (DDP rebuilds its buckets, the forward order is learned), then windows of steps with and without overlap in
turn.  The first step of a window isn't counted: it still bears the other way's end.

Invariants: pure (seconds are arguments); which way a step goes depends on its number and the agreed window only, so all
ranks go the same way.

Source: BytePS issues 339, 241, 370: a scheduler that is slower than the baseline where communication was hidden anyway.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

WARM_UP_STEPS = 4
FEWEST_STEPS, MOST_STEPS = 3, 100
WINDOW_S = 0.3
WINDOWS = 4  # with, without, with, without
# Plain steps must be this much faster to be chosen: below it the difference can't be told from noise.
MARGIN = 0.98


def window_steps(step_s: float) -> int:
    """Steps per window, the uncounted one included, for steps of about `step_s` seconds."""
    return max(FEWEST_STEPS, min(MOST_STEPS, round(WINDOW_S / max(step_s, 1e-6))))


@dataclass(frozen=True)
class Verdict:
    """Which way, and why."""

    overlap: bool
    reason: str


class OverlapTrial:
    """The trial of one model; steps are numbered from 1."""

    def __init__(self) -> None:
        self._window = 0
        self._durations: dict[bool, list[float]] = {True: [], False: []}
        self._warm_s: list[float] = []

    def record(self, step: int, duration_s: float) -> None:
        """Step number `step` took `duration_s`, from its first gradient to the next step's."""
        if step <= WARM_UP_STEPS:
            self._warm_s.append(duration_s)
        elif (step - WARM_UP_STEPS - 1) % self._window:
            self._durations[self.overlaps(step)].append(duration_s)

    def wish(self) -> int:
        """The window this rank would choose, at the end of the warm-up."""
        return window_steps(self._warm_s[-1] if self._warm_s else 0.0)

    def set_window(self, steps: int) -> None:
        """What the ranks agreed on."""
        self._window = steps

    @property
    def last_step(self) -> int:
        """The last step of the trial; known once the window is."""
        return WARM_UP_STEPS + WINDOWS * self._window

    def overlaps(self, step: int) -> bool:
        """Whether step number `step` overlaps with the next."""
        return step <= WARM_UP_STEPS or (step - WARM_UP_STEPS - 1) // self._window % 2 == 0

    def figures(self) -> tuple[float, float]:
        """This rank's medians, with overlap and without."""
        with_s, without_s = (self._durations[way] or [0.0] for way in (True, False))
        return statistics.median(with_s), statistics.median(without_s)


def verdict(with_s: float, without_s: float) -> Verdict:
    """Decide on one rank's medians."""
    figures = f"{with_s * 1e3:.3g} ms a step with overlap, {without_s * 1e3:.3g} ms without"
    if without_s < MARGIN * with_s:
        return Verdict(False, f"measured {figures}: plain steps are faster here")
    return Verdict(True, f"measured {figures}")
