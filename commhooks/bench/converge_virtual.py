"""The policies of ``bench converge`` in virtual time: any number of workers, exactly repeatable.

Where in the flow: ``bench converge --virtual`` -> **converge_virtual** -> ``simulate_commit``, a small CNN in numpy on digits.

Invariants: one fast step is one second of virtual time; every figure follows from the arguments, whatever machine this is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commhooks.bench.digits import DigitsCnn
from commhooks.core.commit.catalog import CommitOptions
from commhooks.core.commit.theory import heterogeneity, speeds_for_heterogeneity
from commhooks.simulate_commit import Cluster, Outcome, Training, simulate

PARAMETER_BYTES = 4 * DigitsCnn.size


@dataclass(frozen=True)
class Setting:
    """One cluster and how it is trained on. ``check_steps``: check period in fast steps."""

    cluster: Cluster
    policies: Sequence[str]
    local_steps: Sequence[int]
    seeds: Sequence[int]
    learning_rate: float
    batch: int
    target_loss: float
    check_steps: float


def cluster_of(degree: float, workers: int, exchange_s: float, delay_s: float = 0.0) -> Cluster:
    """A cluster of a given heterogeneity whose fast workers take a second per step."""
    speeds = speeds_for_heterogeneity(workers, degree)
    fastest = max(speeds)
    return Cluster(tuple(fastest / s for s in speeds), exchange_s, delay_s)


def rows_of(setting: Setting) -> list[dict[str, Any]]:
    """One row per policy: medians over the seeds, best of ``fixed``'s local steps."""
    problem = DigitsCnn(setting.batch)
    rows = []
    for policy in setting.policies:
        tried = [_row(setting, problem, policy, steps) for steps in _sweep(setting, policy)]
        best = min(tried, key=lambda r: (r["time_s"] is None, r["time_s"] or 0.0))
        if len(tried) > 1:
            best = {**best, "sweep": {str(r["local_steps"]): r["time_s"] for r in tried}}
        rows.append(best)
    return rows


def _sweep(setting: Setting, policy: str) -> Sequence[int]:
    return setting.local_steps if policy == "fixed" else (40,)


def _row(setting: Setting, problem: DigitsCnn, policy: str, local_steps: int) -> dict[str, Any]:
    options = CommitOptions(
        check_period_s=setting.check_steps,
        local_steps=local_steps,
        target_loss=setting.target_loss,
        trial_s=setting.check_steps / 4,
    )
    runs = [
        simulate(
            policy,
            setting.cluster,
            problem,
            Training(
                learning_rate=setting.learning_rate,
                target_loss=setting.target_loss,
                seed=seed,
                evaluate_every_steps=7 * len(setting.cluster.step_s),
            ),
            options,
        )
        for seed in setting.seeds
    ]
    return {"policy": policy, "local_steps": local_steps, **_figures(setting, runs)}


def _figures(setting: Setting, runs: Sequence[Outcome]) -> dict[str, Any]:
    times = sorted(r.time_s for r in runs if r.time_s is not None)
    middle = statistics.median(times + [float("inf")] * (len(runs) - len(times)))
    return {
        "target_loss": setting.target_loss,
        "time_s": None if middle == float("inf") else middle,
        "time_min_s": times[0] if times else None,
        "time_max_s": times[-1] if times else None,
        "steps": int(statistics.median(r.steps for r in runs)),
        "commits": int(statistics.median(sum(r.commits) for r in runs)),
        "waiting_share": round(statistics.median(r.waiting_share for r in runs), 4),
        "bytes": int(statistics.median(r.exchanges for r in runs)) * PARAMETER_BYTES,
        "accuracy": round(statistics.median(r.accuracy for r in runs), 4),
        "seeds": len(runs),
        "missed": len(runs) - len(times),
        "workers": len(setting.cluster.step_s),
        "heterogeneity": round(heterogeneity([1 / s for s in setting.cluster.step_s]), 3),
    }
