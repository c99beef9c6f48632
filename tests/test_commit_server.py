"""The server's state machine: exactly once, gates, membership."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks.core.commit.policy import AnswerAtOnce, AnswerWhenRoundComplete, AnswerWithinStaleness
from commhooks.core.commit.server import Answer, Dropped, Join, Leave, Push, Restore, Save, ShardCore
from commhooks.core.commit.update import DelayedNesterov, PlainAddition, ServerMomentum
from commhooks.errors import ConfigError, InternalError, ProtocolError


def shard(workers=2, gate=None, rule=None, slices=1, size=3):
    core = ShardCore(
        {i: np.zeros(size, np.float32) for i in range(slices)},
        rule or PlainAddition(),
        gate or AnswerAtOnce(),
    )
    for worker in range(workers):
        core.handle(Join(worker))
    return core


def push(worker, sequence, value=1.0, slice_id=0, step=None, **more):
    delta = np.full(3, value, np.float32)
    return Push(
        worker,
        more.pop("incarnation", 0),
        sequence,
        slice_id,
        sequence if step is None else step,
        delta,
        **more,
    )


def answered(commands):
    return [(a.worker, a.sequence) for a in commands if isinstance(a, Answer)]


def test_a_commit_is_added_divided_by_the_number_of_workers_and_answered_at_once():
    core = shard(workers=4)
    commands = core.handle(push(1, 1, 8.0))
    assert answered(commands) == [(1, 1)] and commands[0].pull
    assert core.value(0).tolist() == [2.0, 2.0, 2.0]


def test_a_repeated_push_is_answered_again_but_added_once():
    core = shard()
    core.handle(push(0, 1))
    assert answered(core.handle(push(0, 1))) == [(0, 1)]
    assert core.value(0)[0] == 0.5 and core.commits(0) == 1


def test_an_overtaken_repeat_is_dropped_and_a_gap_changes_nothing():
    core = shard()
    core.handle(push(0, 1))
    core.handle(push(0, 2))
    assert isinstance(core.handle(push(0, 1))[0], Dropped)
    before = core.value(0).copy()
    with pytest.raises(ProtocolError, match="commit 4 after 2, expected 3"):
        core.handle(push(0, 4))
    assert (core.value(0) == before).all() and core.commits(0) == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (push(7, 1), "worker 7, which never joined"),
        (push(0, 1, slice_id=5), "slice 5 isn't held here"),
        (Push(0, 0, 1, 0, 1, np.zeros(4, np.float32)), "4 elements, expected 3"),
    ],
)
def test_an_impossible_push_is_refused(wrong, words):
    core = shard()
    with pytest.raises(ProtocolError, match=words):
        core.handle(wrong)
    core.validate()


def test_bsp_answers_when_the_round_is_complete_and_everybody_gets_the_same():
    core = shard(workers=3, gate=AnswerWhenRoundComplete())
    assert answered(core.handle(push(2, 1))) == []
    assert answered(core.handle(push(0, 1))) == []
    assert answered(core.handle(push(1, 1))) == [(0, 1), (1, 1), (2, 1)]
    assert core.value(0)[0] == 1.0


def test_a_worker_that_dies_releases_the_barrier_and_what_it_committed_stays():
    core = shard(workers=3, gate=AnswerWhenRoundComplete())
    core.handle(push(2, 1, 3.0))
    core.handle(push(0, 1, 3.0))
    assert answered(core.handle(Leave(1, "killed"))) == [(0, 1), (2, 1)]
    assert core.value(0)[0] == 2.0 and core.members == (0, 2)
    core.handle(push(0, 2, 2.0))
    assert core.value(0)[0] == 3.0  # two members now


def test_a_joiner_gets_the_model_and_neither_holds_the_round_under_way_nor_is_held_by_it():
    core = shard(workers=2, gate=AnswerWhenRoundComplete(), slices=2)
    for s in (0, 1):
        core.handle(push(0, 1, slice_id=s))
    welcome = core.handle(Join(5))
    assert [(a.worker, a.sequence, a.slice_id) for a in welcome] == [(5, 0, 0), (5, 0, 1)]
    assert answered(core.handle(push(1, 1))) == [(0, 1), (1, 1)]
    core.handle(push(0, 2))
    core.handle(push(1, 2))
    assert answered(core.handle(push(5, 1))) == [(0, 2), (1, 2), (5, 1)]


def test_an_older_life_of_a_worker_is_dropped():
    core = shard()
    core.handle(push(0, 1, 2.0))
    core.handle(Join(0, incarnation=1))
    assert isinstance(core.handle(push(0, 2, 2.0))[0], Dropped)
    assert answered(core.handle(push(0, 1, 2.0, incarnation=1))) == [(0, 1)]
    assert core.value(0)[0] == 2.0 and core.commits(0) == 1
    assert isinstance(core.handle(Join(0, incarnation=0))[0], Dropped)
    core.handle(Leave(0))
    assert isinstance(core.handle(push(0, 2, incarnation=1))[0], Dropped)


def test_ssp_holds_the_pull_of_a_worker_too_far_ahead_but_not_its_pushes():
    core = shard(workers=2, gate=AnswerWithinStaleness(3))
    for n in range(1, 5):
        assert answered(core.handle(push(0, n, pull=False))) == [(0, n)]
    assert answered(core.handle(push(0, 5))) == []
    assert answered(core.handle(push(1, 1))) == [(1, 1)]
    assert answered(core.handle(push(1, 2))) == [(1, 2)]
    assert answered(core.handle(push(1, 3))) == [(0, 5), (1, 3)]


def test_a_rollback_restores_and_older_generations_are_answered_but_not_added():
    core = shard()
    core.handle(Save())
    core.handle(push(0, 1, 4.0))
    core.handle(Restore(1))
    assert core.value(0)[0] == 0.0
    (answer,) = core.handle(push(1, 1, 4.0, generation=0))
    assert core.value(0)[0] == 0.0 and answer.generation == 1 and core.commits(1) == 1
    core.handle(push(1, 2, 4.0, generation=1))
    assert core.value(0)[0] == 2.0
    with pytest.raises(InternalError, match="without a saved copy"):
        shard().handle(Restore(1))


def test_server_momentum_and_delayed_nesterov():
    core = shard(workers=1, rule=ServerMomentum(0.5))
    core.handle(push(0, 1, 4.0))
    core.handle(push(0, 2, 4.0))
    assert core.value(0)[0] == 4.0 + 6.0
    core = shard(workers=2, rule=DelayedNesterov(0.5))
    core.handle(push(0, 1, 4.0))
    assert core.value(0)[0] == 2.0  # the first arrival moves by U/M alone
    core.handle(push(1, 1, 4.0))
    assert core.value(0)[0] == 2.0 + 2.0 + 0.5 * 4.0
    for bad in (ServerMomentum, DelayedNesterov):
        with pytest.raises(ConfigError, match="momentum"):
            bad(1.0)


@given(
    workers=st.integers(1, 4),
    slices=st.integers(1, 3),
    gate=st.sampled_from([AnswerAtOnce(), AnswerWhenRoundComplete(), AnswerWithinStaleness(2)]),
    moves=st.lists(st.tuples(st.integers(0, 3), st.sampled_from("pppprlj"), st.integers(0, 2)), max_size=80),
)
@settings(max_examples=150, deadline=None)
def test_whatever_arrives_every_commit_is_added_exactly_once_and_every_push_is_answered_in_the_end(
    workers, slices, gate, moves
):
    """Workers push, repeat, leave and come back in any order; the sum says what was added."""
    core = ShardCore({i: np.zeros(1, np.float32) for i in range(slices)}, _Sum(), gate)
    lives, sent = dict.fromkeys(range(workers), 0), {}
    unanswered: set[tuple[int, int, int, int]] = set()
    expected = np.zeros(slices)
    for worker in range(workers):
        core.handle(Join(worker))
        sent[worker] = [0] * slices

    def take(commands):
        for a in commands:
            if isinstance(a, Answer) and a.sequence:
                unanswered.discard((a.worker, a.incarnation, a.sequence, a.slice_id))

    for number, kind, where in moves:
        worker, s = number % workers, where % slices
        ticket = (worker, lives[worker], sent[worker][s], s)
        if kind == "p" and worker in core.members and ticket not in unanswered:
            sent[worker][s] += 1
            ticket = (worker, lives[worker], sent[worker][s], s)
            unanswered.add(ticket)
            expected[s] += 1.0
            take(
                core.handle(
                    Push(worker, lives[worker], sent[worker][s], s, sent[worker][s], np.ones(1, np.float32))
                )
            )
        elif kind == "r" and worker in core.members and sent[worker][s]:
            take(
                core.handle(
                    Push(worker, lives[worker], sent[worker][s], s, sent[worker][s], np.ones(1, np.float32))
                )
            )
        elif kind == "l":
            take(core.handle(Leave(worker)))
            unanswered = {t for t in unanswered if t[0] != worker}
        elif kind == "j":
            lives[worker] += 1
            sent[worker] = [0] * slices
            unanswered = {t for t in unanswered if t[0] != worker}
            take(core.handle(Join(worker, lives[worker])))
        core.validate()
        assert [core.value(i)[0] for i in range(slices)] == expected.tolist()
    for worker in range(workers):  # when all others have left, nobody is held back
        take(core.handle(Leave(worker)))
        unanswered = {t for t in unanswered if t[0] != worker}
    assert not unanswered


class _Sum:
    def apply(self, value, delta, members, kept):
        value += delta
