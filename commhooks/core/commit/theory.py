"""The few formulas of ADSP that stand by themselves: implicit momentum, heterogeneity, batch advice, the rate's limit.

Where in the flow: beside it; ``scheduler`` bounds rates with ``largest_rate``, the statistics show the others.

Source: ADSP (AAAI 2020), Theorem 1 and its experiments; BatchTune is the R2SP baseline there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from commhooks.errors import ConfigError


def implicit_momentum(check_period_s: float, rates: Sequence[float], speeds: Sequence[float]) -> float:
    """``1 - p`` of Theorem 1: the momentum that asynchrony alone causes.

    ``p = 1/(1 + (1 - 1/M) * sum_i period/(dC_i v_i))``, M workers. More frequent commits mean less of it.

    Parameters
    ----------
    check_period_s : float
        Length of a check period, seconds.
    rates : sequence of float
        Commits per check period of each worker, all positive.
    speeds : sequence of float
        Steps per second of each worker, all positive.
    """
    if len(rates) != len(speeds) or not rates:
        raise ConfigError(
            f"need one rate and one speed per worker, got {len(rates)} rates, {len(speeds)} speeds"
        )
    if min(rates) <= 0 or min(speeds) <= 0:
        raise ConfigError(f"rates and speeds must be positive, got {min(rates)} and {min(speeds)}")
    total = sum(check_period_s / (rate * speed) for rate, speed in zip(rates, speeds))
    return 1.0 - 1.0 / (1.0 + (1.0 - 1.0 / len(rates)) * total)


def heterogeneity(speeds: Sequence[float]) -> float:
    """``H = mean(v) / min(v)`` with v in steps per second; 1 means all workers are equally fast."""
    if not speeds or min(speeds) <= 0:
        raise ConfigError(f"need at least one speed, all positive, got {list(speeds)}")
    return sum(speeds) / len(speeds) / min(speeds)


def speeds_for_heterogeneity(workers: int, degree: float) -> tuple[float, ...]:
    """Speeds (steps per second) of ``workers`` workers with ``heterogeneity`` = ``degree``: a third is slow, at speed 1."""
    if workers < 2 or degree < 1.0:
        raise ConfigError(f"need >= 2 workers and a degree >= 1, got {workers} and {degree}")
    slow = max(workers // 3, 1)
    fast = (degree * workers - slow) / (workers - slow)
    return (fast,) * (workers - slow) + (1.0,) * slow


def batch_sizes(total: int, step_s: Sequence[float]) -> tuple[int, ...]:
    """BatchTune's advice: batch sizes in proportion to speed, ``floor(total / (s_i * sum_j 1/s_j))``, at least 1.

    Parameters
    ----------
    total : int
        Samples per step over all workers.
    step_s : sequence of float
        Measured seconds per step (at equal batch sizes) of each worker.
    """
    if total < len(step_s) or not step_s or min(step_s) <= 0:
        raise ConfigError(
            f"need a total >= {len(step_s)} and positive step times, got {total} and {list(step_s)}"
        )
    speed = sum(1.0 / s for s in step_s)
    return tuple(max(1, math.floor(total / (s * speed))) for s in step_s)


def largest_rate(check_period_s: float, commit_s: float, share: float = 1.0) -> float:
    """Most commits per check period when one takes ``commit_s`` and all may take ``share`` of the time."""
    if commit_s <= 0.0:
        return math.inf
    return share * check_period_s / commit_s
