"""Curves, policies, the worker's machine, schedulers, searches and placement: decisions by passing times."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks.core.commit.adacomm import TRIALS, AdacommScheduler
from commhooks.core.commit.catalog import POLICIES, CommitOptions, check_rate, make_policy
from commhooks.core.commit.curve import (
    WORST_REWARD,
    LossCurve,
    LossPoint,
    fit_three_points,
    fit_windows,
    reward,
)
from commhooks.core.commit.losses import LossLog, LossMean
from commhooks.core.commit.placement import cut, place
from commhooks.core.commit.policy import (
    Action,
    CommitBySteps,
    CommitByTimer,
    CommitEveryStep,
    Directive,
    WorkerView,
)
from commhooks.core.commit.scheduler import (
    CommitScheduler,
    Direct,
    LossReport,
    RestoreModel,
    SaveModel,
    Tick,
    WorkerJoined,
    WorkerLeft,
    WorkerReport,
)
from commhooks.core.commit.search import BoundedSearch, FixedRate, PaperSearch, Window
from commhooks.core.commit.theory import (
    batch_sizes,
    heterogeneity,
    implicit_momentum,
    speeds_for_heterogeneity,
)
from commhooks.core.commit.worker import Answered, Commit, Directed, StepDone, Train, WorkerCore
from commhooks.errors import ConfigError, InternalError

# --- Curves ------------------------------------------------------------------------------------------------------------


@given(rate=st.floats(0.001, 1.0), offset=st.floats(0.3, 2.0), floor=st.floats(0.0, 0.5))
@settings(deadline=None, max_examples=50)
def test_both_fits_find_the_curve_where_there_is_no_noise(rate, offset, floor):
    curve = LossCurve(rate, offset, floor)
    points = [LossPoint(t, curve.at(t)) for t in (0.0, 7.0, 10.0, 25.0, 40.0, 60.0)]
    three = fit_three_points([points[0], points[2], points[4]])
    assert three is not None and three.rate == pytest.approx(rate, rel=1e-3)
    assert three.floor == pytest.approx(floor, abs=1e-3)
    fit = fit_windows([points])
    fitted = LossCurve(fit.rates[0], fit.offset, fit.floor)
    assert all(fitted.at(p.t_s) == pytest.approx(p.loss, rel=2e-2) for p in points)


def test_reward_is_one_over_the_time_to_the_target_and_has_the_published_guards():
    curve = LossCurve(rate=0.01, offset=0.5, floor=0.1)
    assert curve.at(1 / reward(curve, 0.3)) == pytest.approx(0.3)
    assert reward(None, 0.3) == reward(curve, 0.1) == WORST_REWARD
    assert reward(LossCurve(0.01, 0.5, 0.1), 0.1 + 1 / 0.5) == WORST_REWARD
    assert reward(curve, 0.05) < 0
    assert fit_three_points([LossPoint(t, 1.0 - 0.1 * t) for t in (0.0, 1.0, 2.0)]) is None
    with pytest.raises(ConfigError, match="needs 3 points, got 2"):
        fit_three_points([LossPoint(0, 1), LossPoint(1, 1)])
    for bad in ([[LossPoint(0, 1.0)]], [[LossPoint(t, math.nan) for t in range(4)]]):
        with pytest.raises(ConfigError):
            fit_windows(bad)


def ranked_rightly(noise: float, factor: float, trials: int) -> tuple[float, float]:
    """Shares of rightly ranked pairs of rates: by the bounded fit, by the published three points."""
    rng = np.random.default_rng(7)
    ours = published = 0
    for _ in range(trials):
        floor, offset, rate = rng.uniform(0, 0.3), rng.uniform(0.4, 1.0), rng.uniform(0.5, 2) / 60
        change = factor ** rng.choice([-1.0, 1.0])
        times = np.arange(8) * 7.5 + 3.75
        inverse = offset + rate * times, offset + rate * 60 + change * rate * times
        noisy = [(1 / g + floor) * (1 + noise * rng.standard_normal(8)) for g in inverse]
        windows = [[LossPoint(t + 60 * w, loss) for t, loss in zip(times, noisy[w])] for w in (0, 1)]
        ours += (fit_windows(windows).gain > 0) == (change > 1)
        first, second = (reward(fit_three_points([w[0], w[4], w[-1]]), noisy[0][0] / 2) for w in windows)
        published += (second > first) == (change > 1)
    return ours / trials, published / trials


@pytest.mark.parametrize(("noise", "factor"), [(0.01, 1.5), (0.02, 2.0), (0.04, 3.0)])
def test_the_bounded_fit_ranks_two_rates_rightly(noise, factor, record_property):
    ours, published = ranked_rightly(noise, factor, trials=60)
    record_property("bounded", ours)
    record_property("three_points", published)
    print(f"noise {noise:.0%}, rates differ {factor:g}x: bounded {ours:.0%}, three points {published:.0%}")
    assert ours >= 0.95 and ours > published


# --- Theory and placement ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "momentum"),
    [(1, 0.459), (2, 0.298), (3, 0.221), (4, 0.175), (5, 0.145), (6, 0.124), (10, 0.078)],
)
def test_implicit_momentum_has_the_published_values(rate, momentum):
    assert implicit_momentum(0.05, [rate] * 18, [1.0] * 18) == pytest.approx(momentum, abs=6e-4)


@settings(deadline=None)
@given(workers=st.integers(2, 40), degree=st.floats(1.0, 4.0))
def test_speeds_have_the_heterogeneity_asked_for(workers, degree):
    assert heterogeneity(speeds_for_heterogeneity(workers, degree)) == pytest.approx(degree)


def test_batches_are_in_proportion_to_speed_and_never_empty():
    assert batch_sizes(96, [1.0, 1.0, 3.0]) == (41, 41, 13)
    assert batch_sizes(4, [1.0, 1.0, 100.0])[2] == 1
    with pytest.raises(ConfigError, match="positive step times"):
        batch_sizes(8, [0.0])


@given(
    numels=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    limit=st.integers(1, 100),
    rates=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
)
@settings(deadline=None)
def test_slices_tile_the_parameters_and_are_spread_by_bandwidth(numels, limit, rates):
    slices = cut(numels, limit)
    for number, numel in enumerate(numels):
        own = [s for s in slices if s.parameter == number]
        assert [s.start for s in own] == [0, *[s.end for s in own[:-1]]][: len(own)]
        assert sum(s.numel for s in own) == numel and all(0 < s.numel <= limit for s in own)
    assert [s.slice_id for s in slices] == list(range(len(slices)))
    holders = place(slices, rates)
    for rank, rate in enumerate(rates):
        held = sum(s.numel for s, h in zip(slices, holders) if h == rank)
        assert held <= sum(numels) * rate / sum(rates) + limit * len(rates)
    assert set(place(slices, (1.0, 0.0))) <= {0}
    with pytest.raises(ConfigError, match="bandwidths >= 0"):
        place(slices, (0.0, 0.0))


# --- Policies and the worker -------------------------------------------------------------------------------------------


def view(**changes):
    fields = {"step": 5, "steps_since_commit": 5, "last_commit_s": 0.0, "overhead_s": 1.0, "in_flight": False,
              "slowest_step": 0, "directive": Directive(1, interval_s=10.0)}  # fmt: skip
    return WorkerView(**{**fields, **changes})


def test_the_published_timer_subtracts_the_commit_and_the_overlapping_one_does_not():
    paper, ours = CommitByTimer(), CommitByTimer(overlap=True)
    assert paper(8.9, view()).action is Action.TRAIN
    assert paper(9.0, view()).action is Action.COMMIT and paper(9.0, view()).block
    assert ours(9.0, view()).action is Action.TRAIN
    assert ours(10.0, view()).action is Action.COMMIT and not ours(10.0, view()).block
    assert ours(10.0, view(in_flight=True)).reason == "the last commit still travels"
    assert paper(99.0, view(directive=Directive())).action is Action.TRAIN


def test_local_sgd_and_ssp():
    assert CommitBySteps(6)(0.0, view()).action is Action.TRAIN
    assert CommitBySteps(6)(0.0, view(directive=Directive(1, steps=5))).action is Action.COMMIT
    assert not CommitEveryStep(6)(0.0, view()).pull
    assert CommitEveryStep(5)(0.0, view()).pull


def test_a_worker_commits_waits_and_goes_on():
    core = WorkerCore(CommitByTimer(), 0.0)
    core.handle(Directed(Directive(2, interval_s=3.0)), 0.0)
    core.handle(Directed(Directive(1, interval_s=0.1)), 0.0)  # older: ignored
    assert isinstance(core.handle(StepDone(2.0), 2.0), Train)
    commit = core.handle(StepDone(2.0), 4.0)
    assert isinstance(commit, Commit) and (commit.sequence, commit.steps) == (1, 2)
    for impossible in (StepDone(1.0), Answered(2)):
        with pytest.raises(InternalError):
            core.handle(impossible, 5.0)
    with pytest.raises(InternalError, match="must wait for it"):
        core.commit_now(5.0, "end")
    assert isinstance(core.handle(Answered(1, 0, 0), 5.0), Train)
    numbers = core.numbers
    assert (numbers.waited_s, numbers.overhead_s, numbers.compute_s, numbers.commits) == (1.0, 1.0, 4.0, 1)
    assert isinstance(core.handle(StepDone(2.0), 7.0), Commit)  # 2 s since, 3 s interval less 1 s overhead
    core.validate()


@settings(deadline=None)
@given(moves=st.lists(st.sampled_from("sad"), max_size=60), overlap=st.booleans())
def test_whatever_happens_at_most_one_commit_is_under_way(moves, overlap):
    core = WorkerCore(CommitByTimer(overlap), 0.0)
    now, sent = 0.0, 0
    for move in moves:
        now += 1.0
        if move == "s" and not core.blocked:
            command = core.handle(StepDone(1.0), now)
            if isinstance(command, Commit):
                assert command.sequence == sent + 1
                sent = command.sequence
        elif move == "a" and core.in_flight:
            core.handle(Answered(sent, 0, 0), now)
        elif move == "d":
            core.handle(Directed(Directive(int(now), interval_s=2.0)), now)
        core.validate()


# --- Schedulers --------------------------------------------------------------------------------------------------------


def directs(commands):
    return {c.worker: c.directive for c in commands if isinstance(c, Direct)}


def test_who_is_behind_is_told_to_commit_more_often_so_that_counts_meet_at_the_checkpoint():
    scheduler = CommitScheduler(60.0, FixedRate(2.0))
    for worker in (0, 1):
        assert directs(scheduler.handle(WorkerJoined(worker), 0.0))[worker].interval_s == 30.0
    scheduler.handle(WorkerReport(0, 2, 20, 1.0, 1.0), 59.0)
    scheduler.handle(WorkerReport(1, 1, 7, 3.0, 1.0), 59.0)
    told = directs(scheduler.handle(Tick(), 60.0))
    assert told[0].interval_s == 30.0 and told[1].interval_s == 20.0
    assert scheduler.history[0].spread == 1
    scheduler.validate()


def test_a_worker_that_left_is_neither_counted_nor_directed_and_a_joiner_owes_only_the_rest():
    scheduler = CommitScheduler(60.0, FixedRate(4.0))
    for worker in (0, 1):
        scheduler.handle(WorkerJoined(worker), 0.0)
    scheduler.handle(WorkerLeft(1), 10.0)
    scheduler.handle(WorkerJoined(2), 30.0)
    assert scheduler.counts == {0: 0.0, 2: 2.0}
    scheduler.handle(WorkerReport(0, 4, 20, 1.0, 1.0), 59.0)
    scheduler.handle(WorkerReport(2, 2, 20, 1.0, 1.0), 59.0)
    told = directs(scheduler.handle(Tick(), 60.0))
    assert set(told) == {0, 2} and told[0].interval_s == told[2].interval_s == 15.0
    scheduler.handle(WorkerLeft(0), 61.0)
    scheduler.handle(WorkerLeft(2), 61.0)
    assert scheduler.handle(Tick(), 200.0) == ()


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("jlrt"), st.integers(0, 3)), max_size=60))
def test_directed_counts_stay_within_reach_whoever_comes_and_goes(moves):
    scheduler = CommitScheduler(10.0, FixedRate(3.0))
    commits, now = {}, 0.0
    for move, worker in moves:
        now += 1.0
        if move == "j" and worker not in commits:
            commits[worker] = 0
            scheduler.handle(WorkerJoined(worker), now)
        elif move == "l":
            commits.pop(worker, None)
            scheduler.handle(WorkerLeft(worker), now)
        elif move == "r" and worker in commits:
            commits[worker] += 1
            scheduler.handle(WorkerReport(worker, commits[worker], 0, 0.1, 0.1), now)
        else:
            scheduler.handle(Tick(), now)
        scheduler.validate()
        assert set(scheduler.counts) == set(commits)


def window(curve, start, rate, commit_s=0.0, step_s=0.0, length=60.0):
    log = LossLog(keep_s=1000.0)
    for i in range(24):
        t = start + (i + 0.5) * length / 24
        log.add(LossMean(t, curve(t), 10))
    return Window(start, start + length, rate, log, commit_s, step_s)


def piecewise(*rates, length=60.0, offset=0.5, floor=0.05):
    """A loss whose rate changes from window to window."""

    def loss(t):
        spent = [min(max(t - i * length, 0.0), length) for i in range(len(rates))]
        return 1.0 / (offset + sum(r * s for r, s in zip(rates, spent))) + floor

    return loss


def test_the_published_search_climbs_while_the_reward_rises_and_never_below():
    search = PaperSearch(target_loss=0.1, epoch_periods=2)
    curve = piecewise(0.01, 0.02, 0.005, 0.005, 0.005, 0.005)
    seen = []
    rate = search.first_rate
    for i in range(6):
        choice = search.after(window(curve, 60.0 * i, rate))
        seen.append((rate, choice.rate))
        rate = choice.rate
    assert seen[:4] == [(1, 2), (2, 3), (3, 2), (2, 2)]
    assert "epoch over" in search.after(window(curve, 360.0, 2)).reason or seen[4] == (2, 2)


def test_the_published_search_needs_losses_and_room():
    empty = Window(0.0, 60.0, 3.0, LossLog(100.0), 0.0)
    assert PaperSearch().after(empty).rate == 3.0
    assert "report_loss" in PaperSearch().after(empty).reason
    full = PaperSearch().after(window(piecewise(0.01), 0.0, 1, commit_s=40.0))
    assert full.rate == 1 and "no room" in full.reason
    search = PaperSearch()
    assert search.after(window(piecewise(0.01), 0.0, 1)).rate == 2  # nothing is known of commits yet
    assert search.after(window(piecewise(0.01), 60.0, 2, commit_s=20.0)).rate == 1


def test_the_bounded_search_goes_up_while_not_worse_down_when_worse_and_keeps_to_its_limits():
    search = BoundedSearch(first_rate=4.0)
    curve = piecewise(0.01, 0.02, 0.005, 0.004)
    assert search.after(window(curve, 0.0, 4.0)).rate == 8.0
    assert search.after(window(curve, 60.0, 8.0)).rate == 16.0
    worse = search.after(window(curve, 120.0, 16.0))
    assert worse.rate == 4.0 and "worse, try fewer" in worse.reason
    back = search.after(window(curve, 180.0, 4.0))
    assert back.rate == 8.0 and "settle" in back.reason
    limited = BoundedSearch().after(window(curve, 0.0, 4.0, commit_s=20.0))
    assert limited.rate == pytest.approx(1.5)
    slow = BoundedSearch().after(window(curve, 0.0, 4.0, step_s=6.0))
    assert slow.rate == 4.0 and "limit of 5" in slow.reason


def test_a_loss_that_rises_by_a_third_starts_a_new_search():
    for search in (PaperSearch(target_loss=0.1), BoundedSearch()):
        search.after(window(lambda t: 1.0, 0.0, 2.0))
        assert "loss rose" in search.after(window(lambda t: 1.4, 60.0, 2.0)).reason


def test_adacomm_tries_rolls_back_and_then_shrinks():
    scheduler = AdacommScheduler(60.0, trial_s=10.0)
    first = scheduler.handle(WorkerJoined(0), 0.0)
    assert isinstance(first[0], SaveModel) and first[1].directive.steps == TRIALS[0]
    drops = {20: 1.0}
    now = 0.0
    for number, steps in enumerate(TRIALS):
        for i in range(10):
            scheduler.handle(LossReport(0, 2.0 - drops.get(steps, 0.5) * i / 10, 5), now + i + 0.5)
        now += 10.0
        commands = scheduler.handle(Tick(), now)
        assert commands[0] == RestoreModel(number + 1)
    assert scheduler.steps == 20
    scheduler.handle(LossReport(0, 0.5, 5), now + 59.0)
    told = directs(scheduler.handle(Tick(), now + 60.0))
    assert told[0].steps == math.ceil(20 * math.sqrt(0.5 / 1.9))  # l0: the start of a trial
    scheduler.handle(LossReport(0, 2.0, 5), now + 119.0)
    assert directs(scheduler.handle(Tick(), now + 120.0))[0].steps == 6  # it didn't fall: half
    scheduler.validate()


# --- The catalog -------------------------------------------------------------------------------------------------------


def test_every_name_builds_and_every_bad_setting_is_refused_with_the_largest_possible_rate():
    assert {make_policy(name).name for name in POLICIES} == set(POLICIES)
    with pytest.raises(ConfigError, match="unknown commit policy 'adps'"):
        make_policy("adps")
    for bad in (
        {"check_period_s": 0.0},
        {"check_period_s": -1.0},
        {"commit_rate": 0.0},
        {"staleness": 0},
        {"local_steps": 0},
    ):
        with pytest.raises(ConfigError, match="must be above 0"):
            make_policy("adsp", CommitOptions(**bad))
    check_rate(4.0, 60.0, 10.0)
    with pytest.raises(ConfigError, match="largest possible rate is 6"):
        check_rate(7.0, 60.0, 10.0)
