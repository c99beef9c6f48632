"""Reported losses, kept as means per moment, cut into the points of a window.

Where in the flow: workers report losses -> ``LossLog.add`` -> ``scheduler`` cuts windows -> ``search`` fits them.

Invariants: only what the last few windows need is kept; a mean is weighted by how many losses each report stands for.

Source: ADSP (AAAI 2020): losses at the start, middle and end of a window; more points are ours.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from commhooks.core.commit.curve import LossPoint


@dataclass(frozen=True)
class LossMean:
    """Mean of ``count`` mini-batch losses around the time ``t_s``."""

    t_s: float
    loss: float
    count: int


class LossLog:
    """Losses of all workers in order of arrival.

    Parameters
    ----------
    keep_s : float
        How far back windows will be cut.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._means: deque[LossMean] = deque()

    def add(self, mean: LossMean) -> None:
        """Take one report."""
        self._means.append(mean)
        while self._means[0].t_s < mean.t_s - self._keep_s:
            self._means.popleft()

    def between(self, start_s: float, end_s: float) -> LossPoint | None:
        """Weighted mean over ``start_s <= t < end_s``; None where nothing was reported."""
        inside = [m for m in self._means if start_s <= m.t_s < end_s]
        weight = sum(m.count for m in inside)
        if weight == 0:
            return None
        return LossPoint(
            t_s=sum(m.t_s * m.count for m in inside) / weight,
            loss=sum(m.loss * m.count for m in inside) / weight,
        )

    def start_middle_end(self, start_s: float, end_s: float) -> tuple[LossPoint, ...]:
        """The published three points, each the mean over an eighth of the window; fewer where losses are missing."""
        eighth = (end_s - start_s) / 8.0
        middle = (start_s + end_s) / 2.0
        spans = (
            (start_s, start_s + eighth),
            (middle - eighth / 2.0, middle + eighth / 2.0),
            (end_s - eighth, end_s),
        )
        return tuple(p for a, b in spans if (p := self.between(a, b)) is not None)

    def evenly(self, start_s: float, end_s: float, points: int) -> tuple[LossPoint, ...]:
        """Up to ``points`` means over equal parts of the window."""
        part = (end_s - start_s) / points
        spans = ((start_s + i * part, start_s + (i + 1) * part) for i in range(points))
        return tuple(p for a, b in spans if (p := self.between(a, b)) is not None)
