"""Stall reports: the rank and the parameter that keep the others waiting, from what ranks have told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from commhooks.stall_watch import Progress, StallWatch


class FakeStore:
    def __init__(self):
        self.content = {}

    def put(self, key, value):
        self.content[key] = value

    def get(self, key):
        return self.content.get(key)


class FakeReducer:
    def __init__(self, state):
        self.state = state

    def progress(self):
        return self.state


WAITING = Progress("SGD #0", 7, ("fc.weight", "fc.bias"), ())
BEHIND = Progress("SGD #0", 7, (), ("fc.weight", "conv.weight"))


@pytest.fixture
def watches():
    """Rank 0 waits, rank 1 is behind; turns are taken by hand (the threads never start)."""
    store = FakeStore()
    watches = []
    reducers = [FakeReducer(WAITING), FakeReducer(BEHIND)]
    for rank, reducer in enumerate(reducers):
        watch = StallWatch(store, rank, limit_s=10.0)
        watch.add(reducer, (0, 1))
        watches.append(watch)
    return watches, reducers, store


def test_the_late_rank_and_its_parameter_are_named_after_the_limit(watches):
    (first, second), _, _ = watches
    second.turn(0.0)
    assert first.turn(0.0) == [] == first.turn(9.9)
    (report,) = first.turn(10.0)
    assert report == (
        "rank 0, optimizer SGD #0, step 7: waiting for fc.weight, fc.bias for 10.0 s; "
        "rank 1 is in step 7 and has no gradient yet for fc.weight"
    )


def test_reports_come_at_doubling_intervals_and_begin_anew_after_progress(watches):
    (first, second), (reducer, _), _ = watches
    second.turn(0.0)
    times = [t for t in range(100) if first.turn(float(t))]
    assert times == [10, 30, 90]
    reducer.state = replace(WAITING, step=8)
    assert [t for t in range(100, 115) if first.turn(float(t))] == [110]


def test_not_waiting_is_never_a_stall(watches):
    (_, second), _, _ = watches
    assert not any(second.turn(float(t)) for t in range(100))


def test_a_rank_in_an_earlier_step_is_named_with_what_it_lacks(watches):
    (first, second), (_, other), _ = watches
    other.state = Progress("SGD #0", 6, (), ("conv.weight",))
    second.turn(0.0)
    assert "rank 1 is in step 6 and has no gradient yet for conv.weight" in first.explain(WAITING, 1.0)


def test_a_silent_rank_is_named(watches):
    (first, _), _, _ = watches
    assert "rank 1 has told nothing" in first.explain(WAITING, 1.0)


def test_a_rank_that_has_sent_all_is_not_blamed(watches):
    (first, second), (_, other), _ = watches
    other.state = WAITING
    second.turn(0.0)
    assert "every other rank has sent it" in first.explain(WAITING, 1.0)


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"[]", json.dumps({"states": [{"optimizer": 1}]}).encode()]
)
def test_nonsense_in_the_store_is_silence(watches, content):
    (first, _), _, store = watches
    store.put("1", content)
    assert "rank 1 has told nothing" in first.explain(WAITING, 1.0)


def test_without_a_store_the_wait_is_still_reported():
    watch = StallWatch(None, 0, limit_s=1.0)
    reducer = FakeReducer(WAITING)
    watch.add(reducer, (0, 1))
    watch.turn(0.0)
    (report,) = watch.turn(1.0)
    assert "waiting for fc.weight, fc.bias" in report and "isn't known" in report


def test_several_optimizers_of_a_rank_share_its_entry():
    store = FakeStore()
    kept = []  # a watch holds its reducers weakly
    ours, theirs = StallWatch(store, 0, limit_s=10.0), StallWatch(store, 1, limit_s=10.0)
    for state in (BEHIND, replace(BEHIND, optimizer="Adam #1", missing=("gate.bias",))):
        theirs.add(reducer := FakeReducer(state), (0, 1))
        kept.append(reducer)
    theirs.turn(0.0)
    ours.add(first := FakeReducer(WAITING), (0, 1))
    ours.add(second := FakeReducer(replace(WAITING, optimizer="Adam #1", waiting_for=("gate.bias",))), (0, 1))
    assert "no gradient yet for fc.weight" in ours.explain(first.state, 1.0)
    assert "no gradient yet for gate.bias" in ours.explain(second.state, 1.0)
