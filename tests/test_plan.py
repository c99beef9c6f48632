"""Plans: hand-made shapes, routes, the symbolic proof and what it must catch."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks.core.plan import Hop, Plan, chain_plan, ring_plan, star_plan
from commhooks.core.trees import Tree, TreePair, chain
from commhooks.errors import ConfigError, InternalError


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_hand_made_plans_prove(world_size):
    for plan in (ring_plan(world_size), star_plan(world_size), chain_plan(range(world_size))):
        plan.prove()
        assert plan.world_size == world_size
        assert sum(plan.shares) == pytest.approx(1)


def test_ring_uses_one_flow_out_and_one_in():
    plan = ring_plan(5)
    for rank in range(5):
        after, before = (rank + 1) % 5, (rank - 1) % 5
        assert plan.peers(rank) == {Hop(after, 0), Hop(before, 0)}
        for route in plan.routes(rank):
            assert route.reduce_parent in (None, Hop(after, 0))
            assert route.broadcast_children in ((), (Hop(after, 0),))
            assert route.reduce_children in ((), (Hop(before, 0),))
    assert plan.depth == 8


def test_star_has_two_hops():
    plan = star_plan(16)
    assert plan.depth == 2
    assert [route.root for route in plan.routes(3)] == list(range(16))
    assert plan.routes(3)[3].reduce_children == tuple(Hop(r, 0) for r in range(16) if r != 3)


def test_chain_is_rooted_in_its_middle_and_ends_are_leaves():
    plan = chain_plan([2, 0, 3, 1])
    assert plan.peers(2) == {Hop(0, 0)} and plan.peers(1) == {Hop(3, 0)}
    assert plan.depth == 4  # two hops in, two out


def test_chain_refuses_a_wrong_order():
    with pytest.raises(ConfigError, match="must appear once"):
        chain_plan([0, 0, 1])


def test_routes_refuse_an_unknown_rank():
    with pytest.raises(ConfigError, match="rank 4 asked of a plan for ranks 0..3"):
        ring_plan(4).routes(4)


def test_json_round_trip_keeps_the_digest():
    plan = ring_plan(4)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).digest() == plan.digest()
    assert plan.digest() != star_plan(4).digest()
    assert replace(plan, reason="other words").digest() == plan.digest()


def test_json_names_what_is_missing():
    fields = ring_plan(2).to_json()
    del fields["shares"]
    with pytest.raises(ConfigError, match="shares"):
        Plan.from_json(fields)


def _plan(pair, **changes):
    fields = {"world_size": 3, "collective": "all_reduce", "pairs": (pair,), "shares": (1.0,)}
    return Plan(**{**fields, "bytes_per_s": 0.0, "bound_bytes_per_s": 0.0, "reason": "test", **changes})


CHAIN = chain([0, 1, 2], 1, 3)


def test_proof_catches_a_missing_rank():
    partial = Tree(1, (1, -1, -1), (0, 0, 0))
    with pytest.raises(InternalError, match="counts rank 2 0 times"):
        _plan(TreePair(partial, CHAIN)).prove()
    with pytest.raises(InternalError, match="rank 2 receives 0 copies"):
        _plan(TreePair(CHAIN, partial)).prove()


def test_proof_catches_a_cycle():
    cycle = Tree(0, (-1, 2, 1), (0, 0, 0))
    with pytest.raises(InternalError, match="never ends"):
        _plan(TreePair(cycle, CHAIN)).prove()


def test_proof_counts_a_double_add():
    plan = ring_plan(3)
    doubled = list(plan._routes[1])
    doubled[0] = replace(doubled[0], reduce_children=(Hop(0, 0), Hop(2, 0)))
    plan.__dict__["_routes"] = (plan._routes[0], tuple(doubled), plan._routes[2])
    with pytest.raises(InternalError, match=r"tree 0.*awaited for ever"):
        plan.prove()


def test_proof_catches_wrong_shares_and_roots():
    with pytest.raises(InternalError, match="sum to 0.5"):
        _plan(TreePair(CHAIN, CHAIN), shares=(0.5,)).prove()
    with pytest.raises(InternalError, match=r"roots \[1\]"):
        _plan(TreePair(None, CHAIN), collective="broadcast", root=0).prove()
    with pytest.raises(InternalError, match="rank 0's trees carry"):
        _plan(TreePair(None, CHAIN), collective="all_gather").prove()


@settings(deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 50), max_size=60))
def test_assignment_follows_the_shares(world_size, sizes):
    plan = ring_plan(world_size)
    trees = plan.assign(sizes)
    carried = [sum(s for s, t in zip(sizes, trees, strict=True) if t == i) for i in range(world_size)]
    assert sum(carried) == sum(sizes)
    assert max(carried) - min(carried) <= max(sizes, default=0)


@settings(deadline=None)
@given(st.permutations(range(6)))
def test_any_chain_proves(order):
    chain_plan(order).prove()
