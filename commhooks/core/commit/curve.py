"""Fits the loss curve of a window of training and turns it into the search's reward.

Where in the flow: reported losses -> ``search`` makes windows of points -> here -> reward -> ``search`` picks the rate.

SGD's loss is taken to fall as ``l(t) = 1/(a1^2 t + a2) + a3`` (``a1^2`` the rate, ``a2`` the offset, ``a3`` the floor).
The reward of a rate is one over the time that its curve needs to reach a target loss.

* ``fit_three_points`` is the published fit: three points, three unknowns, so it passes through the noise.
* ``fit_windows`` is ours: many points, one floor for all windows, rates that can't be negative and a floor that
  can't exceed the smallest loss seen.

Source: ADSP (Hu, Wang, Wu; AAAI 2020), online search of the commit rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from commhooks.errors import ConfigError

WORST_REWARD = -1e5
"""The published guard for a curve that never reaches the target."""

MIN_OFFSET = 1e-9
"""Keeps ``1/(a1^2 t + a2)`` finite at the start of the first window."""


@dataclass(frozen=True)
class LossPoint:
    """A loss seen at a time (seconds since the start of training)."""

    t_s: float
    loss: float


@dataclass(frozen=True)
class LossCurve:
    """``l(t) = 1/(rate * t + offset) + floor``.

    Parameters
    ----------
    rate : float
        ``a1^2``, per loss and second.
    offset : float
        ``a2``, one over the loss above the floor at ``t = 0``.
    floor : float
        ``a3``, the loss that is never gone below.
    """

    rate: float
    offset: float
    floor: float

    def at(self, t_s: float) -> float:
        """Loss at ``t_s`` seconds."""
        return 1.0 / (self.rate * t_s + self.offset) + self.floor


def fit_three_points(points: Sequence[LossPoint]) -> LossCurve | None:
    """The curve through exactly three points, as published.

    Three points determine the three unknowns: ``1/(l - a3)`` must be linear in ``t``, which is linear in ``a3``.

    Returns
    -------
    LossCurve or None
        None where no such curve exists (two equal losses, or three on a straight line).
    """
    if len(points) != 3:
        raise ConfigError(f"the three-point fit needs 3 points, got {len(points)}; use fit_windows for more")
    first, middle, last = points
    span_s = last.t_s - first.t_s
    if not first.t_s < middle.t_s < last.t_s:
        return None
    weight = (last.t_s - middle.t_s) / span_s
    mixed = weight * last.loss + (1.0 - weight) * first.loss
    divisor = first.loss + last.loss - middle.loss - mixed
    if divisor == 0.0:
        return None
    floor = (first.loss * last.loss - middle.loss * mixed) / divisor
    if floor in (first.loss, last.loss):
        return None
    start, end = 1.0 / (first.loss - floor), 1.0 / (last.loss - floor)
    rate = (end - start) / span_s
    return LossCurve(rate=rate, offset=start - rate * first.t_s, floor=floor)


def reward(curve: LossCurve | None, target_loss: float) -> float:
    """One over the seconds from ``t = 0`` to ``target_loss``: ``a1^2 / (1/(l* - a3) - a2)``.

    A curve that does not exist, or that meets the target only at an infinite time, gets ``WORST_REWARD``. A target
    below the fitted floor gives a negative reward, as published.
    """
    if curve is None or target_loss == curve.floor:
        return WORST_REWARD
    denominator = 1.0 / (target_loss - curve.floor) - curve.offset
    return WORST_REWARD if denominator == 0.0 else curve.rate / denominator


@dataclass(frozen=True)
class WindowFit:
    """One floor and one rate per window, from all windows at once.

    ``spread`` is the root mean square of the relative residuals. ``gain``: natural logarithm of the last window's rate over
    the one before (0 if there is one window), with its standard error ``gain_error``.
    """

    floor: float
    offset: float
    rates: tuple[float, ...]
    spread: float
    gain: float
    gain_error: float

    def reward(self, window: int, from_loss: float, target_loss: float) -> float:
        """One over the seconds that window's rate needs from ``from_loss`` to ``target_loss``.

        The same two losses for every window: measured from each window's own start, as published, a later
        window would look better only because it starts lower.
        """
        reachable = max(target_loss, self.floor + 0.02 * max(from_loss - self.floor, 1e-12))
        distance = 1.0 / max(reachable - self.floor, 1e-12) - 1.0 / max(from_loss - self.floor, 1e-12)
        return self.rates[window] / distance if distance > 0.0 else WORST_REWARD


def fit_windows(windows: Sequence[Sequence[LossPoint]]) -> WindowFit:
    """Least squares over consecutive windows: one continuous curve whose rate may change between windows.

    Bounds: every rate >= 0, offset > 0, 0 <= floor <= the smallest loss seen. Residuals are relative (a mini-batch
    loss is noisy in proportion to itself) and an outlier counts linearly (soft L1).

    Parameters
    ----------
    windows : sequence of sequences of LossPoint
        In order of time; at least three points together, at least one in each.

    Returns
    -------
    WindowFit

    Raises
    ------
    ConfigError
        Fewer than three points, an empty window, or a loss that is not a positive finite number.
    """
    _check_windows(windows)
    times = np.array([p.t_s for w in windows for p in w])
    losses = np.array([p.loss for w in windows for p in w])
    basis = _piecewise_basis(windows, times)
    start = _start_values(losses, basis)
    floor_max = float(losses.min())
    scales = np.maximum(start, 1e-6)

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(((1.0 / _inverse(x, basis) + x[0]) - losses) / losses)

    lower = np.array([0.0, MIN_OFFSET] + [0.0] * len(windows))
    upper = np.array([floor_max, np.inf] + [np.inf] * len(windows))
    solved = least_squares(
        residuals,
        np.clip(start, lower + 1e-12, np.minimum(upper, 1e12)),
        bounds=(lower, upper),
        loss="soft_l1",
        f_scale=0.1,
        x_scale=scales,
        max_nfev=200,
    )
    gain, gain_error = _log_gain(solved.x, solved.jac, solved.fun, solved.active_mask)
    return WindowFit(
        floor=float(solved.x[0]),
        offset=float(solved.x[1]),
        rates=tuple(float(r) for r in solved.x[2:]),
        spread=float(np.sqrt(np.mean(solved.fun**2))),
        gain=gain,
        gain_error=gain_error,
    )


def _check_windows(windows: Sequence[Sequence[LossPoint]]) -> None:
    count = sum(len(w) for w in windows)
    if count < 3 or any(not w for w in windows):
        raise ConfigError(
            f"a fit needs 3 points and none of its windows empty, got {[len(w) for w in windows]}"
        )
    bad = [p for w in windows for p in w if not (math.isfinite(p.loss) and p.loss > 0.0)]
    if bad:
        raise ConfigError(f"losses must be positive and finite, got {bad[0].loss} at {bad[0].t_s:.3f} s")


def _piecewise_basis(
    windows: Sequence[Sequence[LossPoint]], times: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Seconds that each point (row) has spent in each window (column)."""
    starts = [windows[0][0].t_s]
    starts += [(a[-1].t_s + b[0].t_s) / 2.0 for a, b in zip(windows, windows[1:])]
    ends = [*starts[1:], math.inf]
    columns = [np.clip(times, a, b) - a for a, b in zip(starts, ends)]
    return np.stack(columns, axis=1)


def _inverse(x: NDArray[np.float64], basis: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(x[1] + basis @ x[2:])


def _start_values(losses: NDArray[np.float64], basis: NDArray[np.float64]) -> NDArray[np.float64]:
    """Half the smallest loss as floor, then a straight line through ``1/(l - floor)``."""
    floor = 0.5 * float(losses.min())
    inverse = 1.0 / (losses - floor)
    span = max(float(basis.sum(axis=1).max()), 1e-9)
    rate = max((float(inverse[-1]) - float(inverse[0])) / span, 1e-9)
    return np.array([floor, max(float(inverse[0]), MIN_OFFSET * 2)] + [rate] * basis.shape[1])


def _log_gain(
    x: NDArray[np.float64],
    jac: NDArray[np.float64],
    residuals: NDArray[np.float64],
    active: NDArray[np.int_],
) -> tuple[float, float]:
    """``log(last rate / the one before)`` and its standard error, by the delta method on the linearised covariance.

    The two rates' errors have the floor in common and mostly cancel, so the covariance is needed, not the two errors.
    A parameter at its bound is taken as known.
    """
    if len(x) < 4:
        return 0.0, math.inf
    before, after = float(x[-2]), float(x[-1])
    least = 1e-3 * max(before, after, 1e-12)
    gain = math.log(max(after, least) / max(before, least))
    slopes = np.zeros(len(x))
    slopes[-2:] = -1.0 / max(before, least), 1.0 / max(after, least)
    free = active == 0
    free[-2:] = True
    used = jac[:, free]
    scale = np.maximum(np.linalg.norm(used, axis=0), 1e-12)
    variance = float(residuals @ residuals) / max(len(residuals) - used.shape[1], 1)
    direction = slopes[free] / scale
    covariance = np.linalg.pinv((used / scale).T @ (used / scale))
    return gain, math.sqrt(max(float(direction @ covariance @ direction) * variance, 0.0))
