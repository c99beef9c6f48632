"""The trial of overlap across steps: windows in turn, one verdict for all ranks, ties keep overlap."""

from hypothesis import given
from hypothesis import strategies as st

from commhooks.core.overlap_trial import WARM_UP_STEPS, WINDOWS, OverlapTrial, verdict, window_steps


def run(with_s: float, without_s: float, window: int) -> OverlapTrial:
    trial = OverlapTrial()
    for step in range(1, WARM_UP_STEPS + 1):
        trial.record(step, 1.0)
    trial.set_window(window)
    for step in range(WARM_UP_STEPS + 1, trial.last_step + 1):
        first = (step - WARM_UP_STEPS - 1) % window == 0
        trial.record(step, 99.0 if first else with_s if trial.overlaps(step) else without_s)
    return trial


def test_windows_take_turns_and_their_first_steps_do_not_count():
    trial = run(0.5, 0.75, window=3)
    ways = [trial.overlaps(step) for step in range(1, trial.last_step + 1)]
    assert ways == [True] * WARM_UP_STEPS + [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert trial.figures() == (0.5, 0.75)


def test_plain_steps_are_chosen_only_when_clearly_faster():
    assert verdict(1.0, 1.2).overlap
    assert verdict(1.0, 0.99).overlap
    chosen = verdict(0.010, 0.009)
    assert not chosen.overlap
    assert "10 ms a step with overlap, 9 ms without: plain steps are faster here" in chosen.reason


@given(st.floats(0, 1e4))
def test_windows_are_long_for_short_steps_and_bounded(step_s):
    assert 3 <= window_steps(step_s) <= 100
    assert WINDOWS % 2 == 0
