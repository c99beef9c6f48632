"""The online search of the commit rate: published, improved, or none.

Where in the flow: ``scheduler`` closes a check period -> ``RateSearch.after(window)`` -> the next period's rate and why.

Invariants: every window advances the model (nothing is rolled back); a rate is never above the bandwidth's limit;
without reported losses the rate stays where it is, and the reason says so.

Source: ADSP (AAAI 2020), DecideCommitRate and OnlineEvaluate; ``BoundedSearch`` is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from commhooks.core.commit.curve import LossPoint, fit_three_points, fit_windows, reward
from commhooks.core.commit.losses import LossLog

DIVERGED = 1.3
"""A loss that rises by this factor between two checkpoints starts a new search (published guard)."""

POINTS_PER_WINDOW = 8
FEWEST_POINTS = 3

BLOCKING_SHARE = 0.1
"""Three points can't tell two rates apart (see the tests of the fits), but a worker that waits for its commits loses time for
certain: the published climb ends where they would take more than a tenth of it."""

SLACK = 1.2
"""The limit is a measurement: only a rate clearly above it is lowered."""

STEPS_PER_COMMIT = 2
"""A worker can't commit more often than it steps; with fewer steps than this per commit, counts can't be kept equal."""


@dataclass(frozen=True)
class Window:
    """One closed check period.

    ``commit_s``: what a commit took lately, ``slowest_step_s``: the slowest worker's step (0: not measured).
    """

    start_s: float
    end_s: float
    rate: float
    losses: LossLog
    commit_s: float
    slowest_step_s: float = 0.0

    @property
    def length_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class RateChoice:
    """Commits per check period from now on. ``reward``: of the closed window, where one was computed."""

    rate: float
    reason: str
    reward: float | None = None


class RateSearch(Protocol):
    """Chooses the next check period's rate."""

    @property
    def first_rate(self) -> float: ...

    def after(self, window: Window) -> RateChoice: ...


@dataclass(frozen=True)
class FixedRate:
    """No search."""

    first_rate: float

    def after(self, window: Window) -> RateChoice:
        return RateChoice(self.first_rate, "fixed rate")


class PaperSearch:
    """Climb by one commit per period while the three-point reward rises; hold; climb again every epoch.

    Never lowers a rate, as published, but to what the bandwidth allows.

    Parameters
    ----------
    first_rate : int
        Commits per period in the first window.
    target_loss : float or None
        ``l*`` of the reward. None: half of each search's first loss.
    epoch_periods : int
        Check periods from one search's end to the next's start.
    share : float
        Commits may take this share of a worker's time (the published optional cap by bandwidth).
    """

    def __init__(
        self,
        first_rate: float = 1,
        target_loss: float | None = None,
        epoch_periods: int = 20,
        share: float = BLOCKING_SHARE,
    ) -> None:
        self.first_rate = float(first_rate)
        self._target = target_loss
        self._search_target = target_loss
        self._epoch = epoch_periods
        self._share = share
        self._previous: float | None = None
        self._searching = True
        self._held = 0
        self._last_loss: float | None = None

    def after(self, window: Window) -> RateChoice:
        points = window.losses.start_middle_end(window.start_s, window.end_s)
        if len(points) < FEWEST_POINTS:
            return RateChoice(
                window.rate, f"{len(points)} of 3 losses in the window: report_loss() feeds the search"
            )
        if self._has_diverged(window):
            self._restart()
            return RateChoice(window.rate, f"loss rose to {points[-1].loss:.4g}: search again")
        limit = self._limit(window)
        if window.rate > limit:
            self._settle()
            return RateChoice(limit, f"a commit takes {window.commit_s:.4g} s: at most {limit:g} per period")
        return self._climb(window, points, limit) if self._searching else self._hold(window)

    def _limit(self, window: Window) -> float:
        if window.commit_s <= 0.0:
            return float("inf")
        return max(1.0, float(int(self._share * window.length_s / window.commit_s)))

    def _climb(self, window: Window, points: tuple[LossPoint, ...], limit: float) -> RateChoice:
        if self._search_target is None:
            self._search_target = points[0].loss / 2.0
        seen = reward(fit_three_points(points), self._search_target)
        previous, self._previous = self._previous, seen
        if previous is not None and seen <= previous:
            self._settle()
            return RateChoice(
                max(window.rate - 1, 1), f"reward {seen:.4g} <= {previous:.4g}: back by one", seen
            )
        if window.rate + 1 > limit:
            self._settle()
            return RateChoice(
                window.rate, f"a commit takes {window.commit_s:.4g} s: no room for one more", seen
            )
        against = "first window" if previous is None else f"reward {seen:.4g} > {previous:.4g}"
        return RateChoice(window.rate + 1, f"{against}: one more", seen)

    def _hold(self, window: Window) -> RateChoice:
        self._held += 1
        if self._held >= self._epoch:
            self._restart()
            return RateChoice(window.rate, "epoch over: search from the present rate")
        return RateChoice(window.rate, f"hold, period {self._held} of {self._epoch}")

    def _settle(self) -> None:
        self._searching, self._held = False, 0

    def _restart(self) -> None:
        self._searching, self._previous, self._search_target = True, None, self._target

    def _has_diverged(self, window: Window) -> bool:
        last, self._last_loss = self._last_loss, _mean_loss(window)
        return last is not None and self._last_loss is not None and self._last_loss >= DIVERGED * last


class BoundedSearch:
    """Double or halve the rate, keep it while the bounded fit doesn't show it to be worse; the rate may fall.

    Two neighbouring windows are fitted as one curve with one floor and two rates, so a later window isn't
    favoured for starting lower, and a difference counts only beyond its standard error. Ties go to more commits:
    they cost an overlapping worker nothing, and mean less staleness. The bandwidth limits them.

    Parameters
    ----------
    first_rate : float
        Commits per period in the first window.
    epoch_periods : int
        Check periods from one search's end to the next's start.
    share : float
        Commits may be under way this share of the time.
    certainty : float
        Standard errors that a worse rate must be worse by.
    """

    def __init__(
        self, first_rate: float = 4.0, epoch_periods: int = 20, share: float = 0.5, certainty: float = 2.0
    ) -> None:
        self.first_rate = float(first_rate)
        self._epoch = epoch_periods
        self._share = share
        self._certainty = certainty
        self._direction = 2.0
        self._turned = False
        self._before: tuple[float, tuple[LossPoint, ...]] | None = None
        self._held: int | None = None
        self._last_loss: float | None = None

    def after(self, window: Window) -> RateChoice:
        points = window.losses.evenly(window.start_s, window.end_s, POINTS_PER_WINDOW)
        points = tuple(p for p in points if p.loss > 0.0)
        if len(points) < FEWEST_POINTS:
            return RateChoice(
                window.rate, f"{len(points)} losses in the window: report_loss() feeds the search"
            )
        limit = self._limit(window)
        if self._has_diverged(window):
            self._start_again(2.0)
            rate = min(window.rate * 2.0, limit)
            return RateChoice(rate, f"loss rose to {points[-1].loss:.4g}: commit more often and search again")
        if window.rate > SLACK * limit:
            return self._settle(limit, _why(limit, window), None)
        return self._search(window, points, limit) if self._held is None else self._hold(window, points)

    def _search(self, window: Window, points: tuple[LossPoint, ...], limit: float) -> RateChoice:
        if self._before is None:
            return self._try_next(window, points, limit, "first window", None)
        rate_before, points_before = self._before
        fit = fit_windows((points_before, points))
        gain, error = fit.gain, fit.gain_error
        shown = f"{window.rate:.3g} against {rate_before:.3g} per period: log gain {gain:+.2f} +- {error:.2f}"
        worse = gain < -self._certainty * error or (self._direction < 1.0 and gain < self._certainty * error)
        if not worse:
            return self._try_next(window, points, limit, shown, fit.rates[-1])
        if self._turned or self._direction < 1.0:
            return self._settle(rate_before, shown, fit.rates[-1])
        self._turned, self._direction, self._before = True, 0.5, (rate_before, points_before)
        return RateChoice(rate_before / 2.0, shown + ": worse, try fewer", fit.rates[-1])

    def _try_next(
        self, window: Window, points: tuple[LossPoint, ...], limit: float, shown: str, seen: float | None
    ) -> RateChoice:
        wanted = window.rate * self._direction
        if wanted > limit:
            return self._settle(window.rate, f"{shown}; {wanted:.3g} is above the limit of {limit:.3g}", seen)
        self._before = (window.rate, points)
        return RateChoice(wanted, f"{shown}: try {wanted:.3g}", seen)

    def _hold(self, window: Window, points: tuple[LossPoint, ...]) -> RateChoice:
        assert self._held is not None
        self._held += 1
        if self._held < self._epoch:
            return RateChoice(window.rate, f"hold, period {self._held} of {self._epoch}")
        # The last search ended above or below: look first in the other direction.
        self._start_again(1.0 / self._direction)
        self._before = (window.rate, points)
        return RateChoice(window.rate * self._direction, "epoch over: search again")

    def _settle(self, rate: float, reason: str, seen: float | None) -> RateChoice:
        self._held, self._before = 0, None
        return RateChoice(rate, reason + f": settle on {rate:.3g}", seen)

    def _start_again(self, direction: float) -> None:
        self._held, self._before, self._turned, self._direction = None, None, direction < 1.0, direction

    def _limit(self, window: Window) -> float:
        """Most commits per period: within the share of the time, and ``STEPS_PER_COMMIT`` for the slowest worker."""
        shortest_s = max(window.commit_s / self._share, STEPS_PER_COMMIT * window.slowest_step_s)
        return window.length_s / shortest_s if shortest_s > 0.0 else float("inf")

    def _has_diverged(self, window: Window) -> bool:
        last, self._last_loss = self._last_loss, _mean_loss(window)
        return last is not None and self._last_loss is not None and self._last_loss >= DIVERGED * last


def _why(limit: float, window: Window) -> str:
    costs = f"a commit takes {window.commit_s:.4g} s, the slowest step {window.slowest_step_s:.4g} s"
    return f"at most {limit:.3g} per period: {costs}"


def _mean_loss(window: Window) -> float | None:
    """Over the whole window: a mini-batch's loss alone rises by a third now and then."""
    point = window.losses.between(window.start_s, window.end_s)
    return None if point is None else point.loss
