"""Real training in virtual time: the policies' order, waiting, equal counts, membership; repeatable to the bit."""

import json

import numpy as np
import pytest

from commhooks.bench.digits import SHAPES, DigitsCnn
from commhooks.cli import main
from commhooks.core.commit.catalog import CommitOptions
from commhooks.errors import ConfigError
from commhooks.simulate_commit import Cluster, Training, simulate

OPTIONS = CommitOptions(check_period_s=50.0, target_loss=0.3, trial_s=12.0)


@pytest.fixture(scope="module")
def problem():
    return DigitsCnn(batch=16)


def run(policy, problem, step_s=(1.0, 1.0, 3.0), exchange_s=3.0, **more):
    cluster = Cluster(step_s, exchange_s, more.pop("delay_s", 0.0), more.pop("leave_s", ()))
    return simulate(
        policy, cluster, problem, Training(**{"learning_rate": 0.4, "target_loss": 0.3, **more}), OPTIONS
    )


def test_the_gradient_is_the_slope(problem):
    rng = np.random.default_rng(0)
    w = problem.initial(0)
    loss_and_gradient = [problem.gradient(w, np.random.default_rng(5)) for _ in range(2)]
    assert loss_and_gradient[0][0] == loss_and_gradient[1][0]
    slope = loss_and_gradient[0][1]
    for _ in range(3):
        along = rng.standard_normal(w.size).astype(np.float32)
        along *= np.sign(along @ slope) / np.linalg.norm(along)
        near = [problem.gradient(w + e * along, np.random.default_rng(5))[0] for e in (1e-2, -1e-2)]
        assert (near[0] - near[1]) / 2e-2 == pytest.approx(along @ slope, abs=5e-3)
    assert problem.size == sum(int(np.prod(s)) for s in SHAPES)


@pytest.fixture(scope="module")
def outcomes(problem):
    return {p: run(p, problem) for p in ("bsp", "fixed", "adsp-paper", "adsp")}


def test_no_worker_waits_for_another_and_time_shrinks_accordingly(outcomes):
    bsp = outcomes["bsp"]
    assert bsp.waiting_share == pytest.approx(1 - 7 / 18, abs=0.35)
    assert outcomes["fixed"].time_s < bsp.time_s
    assert outcomes["adsp-paper"].time_s < 0.4 * bsp.time_s and outcomes["adsp-paper"].waiting_share <= 0.12
    assert outcomes["adsp"].time_s < 0.35 * bsp.time_s and outcomes["adsp"].waiting_share <= 0.02


def test_commit_counts_stay_equal_although_speeds_differ_threefold(outcomes):
    for policy in ("adsp", "adsp-paper"):
        counts = outcomes[policy].commits
        assert max(counts) - min(counts) <= 2
        assert all(period.spread <= 2 for period in outcomes[policy].history)
        assert all(period.reason for period in outcomes[policy].history)


def test_the_same_arguments_give_the_same_run(problem, outcomes):
    assert run("adsp", problem) == outcomes["adsp"]


def test_every_policy_reaches_the_loss_after_a_worker_has_died(problem):
    for policy in ("adsp", "ssp", "fixed", "adacomm"):
        outcome = run(policy, problem, leave_s=((2, 40.0),), target_loss=0.5)
        assert outcome.time_s is not None
        assert outcome.commits[2] <= outcome.commits[0]


def test_many_workers(problem):
    outcome = run(
        "adsp", problem, step_s=(1.0,) * 24 + (3.0,) * 12, target_loss=1.0, evaluate_every_steps=252
    )
    assert outcome.time_s is not None and max(outcome.commits) - min(outcome.commits) <= 2


def test_a_delay_per_commit_costs_the_barrier_more(problem):
    bsp, ours = (run(p, problem, delay_s=4.0, target_loss=0.6) for p in ("bsp", "adsp"))
    assert ours.time_s < 0.25 * bsp.time_s


def test_impossible_clusters_are_refused():
    for bad in (((), 1.0), ((1.0, 0.0), 1.0), ((1.0,), -1.0)):
        with pytest.raises(ConfigError):
            Cluster(*bad)


def test_the_command_in_virtual_time(capsys):
    arguments = "bench converge --virtual --heterogeneity 2.0 --workers 3 --policies adsp,bsp --target-loss 1.0 --json"
    assert main(arguments.split()) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["policy"] for r in rows] == ["adsp", "bsp"] and rows[0]["of_bsp"] < 1 == rows[1]["of_bsp"]
    assert {"case", "policy", "target_loss", "time_s", "steps", "commits", "waiting_share", "bytes"} <= rows[
        0
    ].keys()
    assert main(["bench", "converge", "--policies", "adps"]) == 2
    assert "adacomm" in capsys.readouterr().err
