"""Gates: no interleaving of events lets an old value be read, and impossible events change nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks.core.gates import (
    ForwardOrder,
    Gates,
    GateState,
    SliceCost,
    SliceKey,
    agreed_order,
    displaced,
)
from commhooks.errors import InternalError


def key(index: int, bucket: int = 0) -> SliceKey:
    return SliceKey(bucket, index)


def two_parameters() -> Gates:
    """Parameter 0 travels in slices 0 and 1, parameter 1 in slices 1 and 2."""
    gates = Gates(2)
    gates.depart([(key(0), [0]), (key(1), [0, 1]), (key(2), [1])], [0, 1])
    return gates


def test_a_parameter_is_ready_when_the_last_of_its_slices_is_back():
    gates = two_parameters()
    gates.close([0, 1])
    gates.slice_done(key(1))
    assert gates.ready() == ()
    assert gates.awaited([0]) == (key(0),)
    gates.slice_done(key(0))
    gates.validate()
    assert gates.ready() == (0,)
    gates.stepped([0])
    assert gates.state(0) is GateState.OPEN
    assert gates.state(1) is GateState.CLOSED
    assert gates.closed == 1


def test_a_step_asked_for_after_the_slices_are_back_is_ready_at_once():
    gates = two_parameters()
    for index in range(3):
        gates.slice_done(key(index))
    assert gates.ready() == ()
    gates.close([1])
    assert gates.ready() == (1,)
    assert gates.in_flight == (0,)
    gates.validate()


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (lambda g: g.slice_done(key(9)), "bucket 0 slice 9 came back, but it never left"),
        (lambda g: g.stepped([0]), "parameter 0 was stepped while its gate is in flight and 2 of its slices"),
        (lambda g: g.release([0]), "parameter 0 is released while 2 of its slices are outstanding"),
        (lambda g: g.depart([], [1]), "parameter 1: its gradient left, which needs its gate to be open"),
        (lambda g: g.close([0, 0, 1]) or g.close([1]), "parameter 1: a step was asked for"),
    ],
)
def test_an_impossible_event_is_named(event, message):
    with pytest.raises(InternalError, match=message):
        event(two_parameters())


def test_an_impossible_event_changes_nothing():
    gates = two_parameters()
    gates.close([0])
    with pytest.raises(InternalError):
        gates.close([1, 0])
    assert gates.state(1) is GateState.IN_FLIGHT
    with pytest.raises(InternalError):
        gates.depart([(key(7), [1])], [1])
    assert gates.awaited([0, 1]) == (key(0), key(1), key(2))
    gates.validate()


@settings(max_examples=60)
@given(st.data())
def test_under_random_events_only_complete_parameters_are_stepped(data):
    """Random layouts, arrivals and steps; the gates agree at all times with a count kept here by hand."""
    count = data.draw(st.integers(1, 5))
    layout = data.draw(
        st.lists(st.sets(st.integers(0, count - 1), min_size=1, max_size=2), min_size=1, max_size=8)
    )
    gates = Gates(count)
    for _ in range(data.draw(st.integers(1, 3))):
        gates.depart([(key(i), sorted(holders)) for i, holders in enumerate(layout)], range(count))
        missing = {p: {i for i, holders in enumerate(layout) if p in holders} for p in range(count)}
        asked: set[int] = set()
        stepped: set[int] = set()
        for index in data.draw(st.permutations(range(len(layout)))):
            wish = data.draw(st.integers(0, count - 1))
            if wish not in asked:
                gates.close([wish])
                asked.add(wish)
            gates.slice_done(key(index))
            for slices in missing.values():
                slices.discard(index)
            gates.validate()
            ready = {p for p in asked - stepped if not missing[p]}
            assert gates.ready() == tuple(sorted(ready))
            if data.draw(st.booleans()):
                gates.stepped(ready)
                stepped |= ready
        gates.release(set(range(count)) - asked)
        gates.stepped(gates.ready())
        gates.validate()
        assert gates.closed == 0
        assert all(gates.state(p) is GateState.OPEN for p in range(count))


def test_forward_order_keeps_first_reads_and_puts_unread_parameters_last():
    order = ForwardOrder(5)
    for reads in ((3,), (1, 3), (0,)):
        order.read(reads)
    assert order.order() == (3, 1, 0, 2, 4)
    assert order.seen == 3


def test_displaced_counts_reads_that_came_too_early():
    assert displaced((3, 1, 0, 2), (3, 1, 0, 2)) == 0
    assert displaced((3, 1, 0, 2), (3, 0)) == 0
    assert displaced((3, 1, 0, 2), (0, 3, 1)) == 2


def test_agreed_order_lets_urgent_slices_overtake_within_one_slice():
    late = [SliceCost(key(i, bucket=0), 0.0, priority=9, duration_s=1.0) for i in range(4)]
    urgent = [SliceCost(key(i, bucket=1), 1.5, priority=0, duration_s=1.0) for i in range(2)]
    assert agreed_order([*urgent, *late]) == (
        key(0),
        key(1),
        key(0, bucket=1),
        key(1, bucket=1),
        key(2),
        key(3),
    )


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 3), st.floats(0, 2)),
        max_size=12,
    )
)
def test_agreed_order_is_a_permutation(costs):
    slices = [SliceCost(key(i), *cost) for i, cost in enumerate(costs)]
    assert sorted(agreed_order(slices)) == [cost.key for cost in slices]
