"""Trees or native: what is predicted, what is tried, and that all ranks decide alike."""

import pytest

from commhooks.core.choice import SAMPLES, WARM_UP_STEPS, Trial, Way, needs_trial, verdict
from commhooks.core.plan import make_plan, ring_plan
from commhooks.core.planner import ring_bytes_per_s
from commhooks.core.topology_readers import parse_topology


@pytest.mark.parametrize(
    ("text", "gain"), [("nic:200,800,800,800", 1.5), ("nic:800*4", 1.0), ("sites:4+4@200/1000", 7.0)]
)
def test_the_native_ring_is_predicted_from_the_topology(text: str, gain: float) -> None:
    topology = parse_topology(text)
    assert make_plan(topology).bytes_per_s / (ring_bytes_per_s(topology) or 0.0) == pytest.approx(
        gain, rel=0.01
    )


def test_a_clear_prediction_needs_no_trial_and_a_close_one_does() -> None:
    uneven, even = parse_topology("nic:200,800,800,800"), parse_topology("nic:800*4")
    clear = needs_trial(make_plan(uneven), ring_bytes_per_s(uneven) or 0.0, one_host=False)
    assert clear is not None and clear.way is Way.TREES and "1.50x" in clear.reason
    assert needs_trial(make_plan(even), ring_bytes_per_s(even) or 0.0, one_host=False) is None
    assert needs_trial(ring_plan(4), 0.0, one_host=False) is None
    memory = needs_trial(ring_plan(4), 0.0, one_host=True)
    assert memory is not None and "memory" in memory.reason


@pytest.mark.parametrize(("native_s", "way"), [(0.5, Way.NATIVE), (0.99, Way.TREES), (1.5, Way.TREES)])
def test_the_verdict_keeps_trees_on_a_tie(native_s: float, way: Way) -> None:
    trial = Trial()
    for step in range(Trial.length):
        # The warm-up is slow and must not count; a single outlier neither.
        seconds = 1.0 if trial.way(step) is Way.TREES else native_s
        trial.record(step, 100.0 if step < WARM_UP_STEPS or step == WARM_UP_STEPS + 1 else seconds)
    choice = verdict([2 * figure for figure in trial.figures()])
    assert choice.way is way
    assert "ms" in choice.reason


def test_both_ways_are_tried_equally_often_and_a_rank_without_data_does_not_count() -> None:
    trial = Trial()
    ways = [trial.way(step) for step in range(WARM_UP_STEPS, Trial.length)]
    assert ways.count(Way.TREES) == ways.count(Way.NATIVE) == SAMPLES
    assert trial.figures() == (0.0, 0.0, 0.0)
    assert verdict([0.0, 0.0, 0.0]).way is Way.TREES
    assert verdict([3.0, 1.0, 1.0]).way is Way.NATIVE
