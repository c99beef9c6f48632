"""Any interleaving of deliveries over any tree pairs ends, with the right sums, and no invariant is ever broken."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks.core.exchange import Add, Done, Exchange, Finish, Phase, Send, SliceId, Take
from commhooks.core.plan import Hop, Plan, TreeRoute, chain_plan, make_plan, ring_plan, star_plan
from commhooks.core.trees import Tree, TreePair
from commhooks.errors import ProtocolError


class Cluster:
    """All ranks' exchanges with symbolic values, joined by a network that reorders everything."""

    def __init__(self, plan: Plan, slices: int, rng: random.Random) -> None:
        self.plan = plan
        self.rng = rng
        self.exchanges = [Exchange(rank) for rank in range(plan.world_size)]
        self.routes = [{route.tree: route for route in plan.routes(rank)} for rank in range(plan.world_size)]
        self.trees = [rng.randrange(len(plan.pairs)) for _ in range(slices)]
        # memory[rank][slice]: how often each rank's gradient is contained
        size = plan.world_size
        self.memory = [[self.unit(rank) for _ in range(slices)] for rank in range(size)]
        self.arrived: dict[tuple[int, SliceId, Hop], list[int]] = {}
        self.done: list[set[int]] = [set() for _ in range(size)]
        self.order_of_adds: list[tuple[int, int, int]] = []
        self.todo = [("local", rank, index, None, None) for rank in range(size) for index in range(slices)]

    def unit(self, rank: int) -> list[int]:
        return [int(rank == other) for other in range(self.plan.world_size)]

    def run(self) -> None:
        while self.todo:
            event = self.todo.pop(self.rng.randrange(len(self.todo)))
            self.handle(*event)
            for exchange in self.exchanges:
                exchange.validate()

    def handle(self, kind: str, rank: int, index: int, hop: Hop | None, content: list[int] | None) -> None:
        slice_id = SliceId(1, 0, 0, index)
        exchange, route = self.exchanges[rank], self.routes[rank][self.trees[index]]
        if kind == "local":
            commands = exchange.local_ready(slice_id, route)
        elif kind == "sent":
            commands = exchange.sent(slice_id)
        else:
            assert hop is not None and content is not None
            self.arrived[rank, slice_id, hop] = content
            arrive = exchange.partial_arrived if kind == "partial" else exchange.value_arrived
            commands = arrive(slice_id, route, hop)
        for command in commands:
            self.carry_out(rank, index, route, command)

    def carry_out(self, rank: int, index: int, route: TreeRoute, command: object) -> None:
        memory = self.memory[rank]
        slice_id = SliceId(1, 0, 0, index)
        match command:
            case Add(child=child):
                assert index not in self.done[rank]
                content = self.arrived.pop((rank, slice_id, child))
                memory[index] = [a + b for a, b in zip(memory[index], content, strict=True)]
                self.order_of_adds.append((rank, index, child.rank))
            case Take():
                assert route.broadcast_parent is not None
                memory[index] = self.arrived.pop((rank, slice_id, route.broadcast_parent))
            case Send(phase=phase, hop=hop):
                kind = "partial" if phase is Phase.REDUCE else "value"
                # The peer may take in the bytes and this rank learn of it in any order.
                self.todo.append((kind, hop.rank, index, Hop(rank, hop.channel), list(memory[index])))
                self.todo.append(("sent", rank, index, None, None))
            case Finish():
                assert route.root == rank
            case Done():
                assert index not in self.done[rank], "done twice"
                self.done[rank].add(index)


def random_tree(rng: random.Random, world_size: int, root: int) -> Tree:
    order = [rank for rank in range(world_size) if rank != root]
    rng.shuffle(order)
    parent = [-1] * world_size
    placed = [root]
    for rank in order:
        parent[rank] = rng.choice(placed)
        placed.append(rank)
    return Tree(root, tuple(parent), (0,) * world_size)


def random_plan(rng: random.Random, world_size: int, pairs: int) -> Plan:
    made = []
    for _ in range(pairs):
        root = rng.randrange(world_size)
        made.append(TreePair(random_tree(rng, world_size, root), random_tree(rng, world_size, root)))
    plan = Plan(world_size, "all_reduce", tuple(made), (1 / pairs,) * pairs, 0.0, 0.0, "random")
    plan.prove()
    return plan


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_interleaving_over_any_pairs_ends_with_the_sum(
    world_size: int, pairs: int, slices: int, rng: random.Random
) -> None:
    cluster = Cluster(random_plan(rng, world_size, pairs), slices, rng)
    cluster.run()
    everything = [1] * world_size
    for rank in range(world_size):
        assert cluster.done[rank] == set(range(slices))
        assert cluster.memory[rank] == [everything] * slices
        assert len(cluster.exchanges[rank]) == 0


@pytest.mark.parametrize(
    "plan", [ring_plan(4), star_plan(4), chain_plan([2, 0, 1, 3])], ids=["ring", "star", "chain"]
)
def test_children_are_added_in_one_order_whatever_arrives_first(plan: Plan) -> None:
    orders = set()
    for seed in range(20):
        cluster = Cluster(plan, 1, random.Random(seed))
        cluster.trees = [0]
        cluster.run()
        by_rank: dict[int, list[int]] = {}
        for rank, _, child in cluster.order_of_adds:
            by_rank.setdefault(rank, []).append(child)
        orders.add(tuple(sorted((rank, tuple(children)) for rank, children in by_rank.items())))
    assert len(orders) == 1


def test_a_slice_is_not_done_while_a_send_is_queued() -> None:
    plan = chain_plan([0, 1])
    rank = plan.pairs[0].root
    other = 1 - rank
    route = plan.routes(rank)[0]
    exchange = Exchange(rank)
    slice_id = SliceId(1, 0, 0, 0)
    assert exchange.local_ready(slice_id, route) == []
    commands = exchange.partial_arrived(slice_id, route, Hop(other, 0))
    assert [type(command) for command in commands] == [Add, Finish, Send]
    assert [type(command) for command in exchange.sent(slice_id)] == [Done]


def test_impossible_events_are_refused_and_change_nothing() -> None:
    plan = star_plan(3)
    route = plan.routes(0)[0]
    exchange = Exchange(0)
    slice_id = SliceId(1, 0, 0, 0)
    exchange.partial_arrived(slice_id, route, Hop(1, 0))
    for event in (
        lambda: exchange.partial_arrived(slice_id, route, Hop(1, 0)),
        lambda: exchange.partial_arrived(slice_id, route, Hop(7, 0)),
        lambda: exchange.value_arrived(slice_id, route, Hop(1, 0)),
        lambda: exchange.sent(slice_id),
    ):
        with pytest.raises(ProtocolError):
            event()
        exchange.validate()
    assert exchange.missing_children(slice_id) == [Hop(2, 0)]
    assert exchange.awaited(slice_id) == "rank 0's own gradient"


def test_every_collective_ends_for_everyone_in_the_plan() -> None:
    """Routes with only one phase (broadcast, reduce and their kin) end too."""
    from commhooks.core.topology_readers import parse_topology

    topology = parse_topology("nic:200,800,800,800", 4)
    for collective, root in (("broadcast", 2), ("reduce", 1)):
        plan = make_plan(topology, collective, root)
        cluster = Cluster(plan, 3, random.Random(1))
        cluster.run()
        assert all(cluster.done[rank] == {0, 1, 2} for rank in range(4))
        want = [1, 1, 1, 1] if collective == "reduce" else [0, 0, 1, 0]
        ranks = [root] if collective == "reduce" else range(4)
        assert all(cluster.memory[rank] == [want] * 3 for rank in ranks)
