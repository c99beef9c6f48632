"""Side-by-side timing with a clock that the test moves; tables and JSON."""

import json

import pytest

from commhooks.bench.harness import Alone, Contender, Timing, null_note, ratio, render, side_by_side
from commhooks.errors import ConfigError


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Work:
    """Contenders that take given times and write down what happened."""

    def __init__(self):
        self.clock, self.log = Clock(), []

    def contender(self, name, *durations_s):
        turns = iter(durations_s)

        def work():
            self.log.append(name)
            self.clock.now += next(turns, durations_s[-1])

        return Contender(
            name, work, lambda: self.log.append(f"check {name}"), lambda: self.log.append(f"prepare {name}")
        )

    def run(self, *contenders, **options):
        return side_by_side(contenders, Alone(), clock=self.clock, **options)


def test_everything_is_checked_then_warmed_up_then_timed_in_turn():
    work = Work()
    timings = work.run(work.contender("a", 9, 1, 2, 3), work.contender("b", 9, 4, 5, 9), rounds=3)
    turn = ["prepare a", "a", "prepare b", "b"]
    assert work.log == ["check a", "check b", *turn * 4]
    assert timings["a"].durations_s == (1, 2, 3) and timings["b"].median_s == 5
    assert timings["b"].fields("peer") == {"peer_s": 5, "peer_min_s": 4, "peer_max_s": 9}


def test_a_wrong_result_is_never_timed():
    work = Work()

    def wrong():
        raise ValueError("0 instead of 6")

    bad = Contender("b", lambda: work.log.append("b"), wrong)
    with pytest.raises(ValueError, match="0 instead of 6"):
        work.run(work.contender("a", 1), bad)
    assert "a" not in work.log and "b" not in work.log


@pytest.mark.parametrize(("budget_s", "rounds"), [(100, 20), (1, 5), (12, 5), (1e9, 500)])
def test_the_rounds_fit_into_the_budget(budget_s, rounds):
    work = Work()
    timings = work.run(work.contender("a", 2), work.contender("b", 3), budget_s=budget_s, fewest=5)
    assert len(timings["a"].durations_s) == len(timings["b"].durations_s) == rounds


def test_a_measurement_is_the_slowest_ranks_and_all_ranks_do_the_same_rounds():
    class Slower(Alone):
        def slowest(self, duration_s):
            return duration_s + 10

    work = Work()
    timings = side_by_side([work.contender("a", 2)], Slower(), clock=work.clock, budget_s=48)
    assert timings["a"].durations_s == (12, 12, 12, 12)  # 48 s / (2 + 10) s


def test_progress_is_told():
    work, told = Work(), []
    work.run(work.contender("a", 1), rounds=2, progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_contenders_have_names_of_their_own(names):
    work = Work()
    with pytest.raises(ConfigError, match="different names"):
        work.run(*(work.contender(name, 1) for name in names))
    with pytest.raises(ConfigError, match="rounds 0"):
        work.run(work.contender("a", 1), rounds=0)


def test_the_null_ratio_compares_a_contender_with_itself():
    assert Timing((2.0, 1.0, 2.0, 1.0)).null_ratio == 2.0
    assert Timing((2.0,)).null_ratio == 1.0
    assert "gloo against itself, 4 rounds in turn): 2.000" in null_note("gloo", Timing((2.0, 1.0, 2.0, 1.0)))


def test_rendering():
    row = {
        "case": "x|y",
        "peer": "gloo",
        "peer_s": 1.23456,
        "peer_min_s": 1.0,
        "peer_max_s": 2.0,
        "bound_s": None,
    }
    assert json.loads(render([row], True, ["a note"])) == [row]
    assert render([row], False, ["a note"]).splitlines() == [
        "| case | peer | peer_s | bound_s |",
        "| --- | --- | --- | --- |",
        "| x\\|y | gloo | 1.235 (1–2) | – |",
        "",
        "a note",
    ]


def test_ratios_of_what_is_known():
    assert (
        ratio(3.0, 2.0) == 1.5
        and ratio(None, 2.0) is None
        and ratio(3.0, None) is None
        and ratio(3.0, 0.0) is None
    )
