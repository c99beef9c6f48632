"""Packings: known optima by independent methods, certificates, drivers, and random networks."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from commhooks.core.packing_problem import PackingProblem
from commhooks.core.plan import COLLECTIVES, ROOTED, make_plan
from commhooks.core.topology import Resource, Route, Topology
from commhooks.core.topology_readers import parse_topology
from commhooks.core.treegen import Packing, allreduce_bound, check, pack
from commhooks.core.trees import centre, reroot
from commhooks.errors import InternalError, TopologyError


def links(size, capacities):
    """A network of one directed link per pair; ``capacities`` maps (src, dst) to bytes/s."""
    resources = tuple(Resource(f"{a}->{b}", c) for (a, b), c in sorted(capacities.items()))
    routes = tuple(Route(a, b, 0, (f"{a}->{b}",)) for a, b in sorted(capacities))
    return Topology("links", size, resources, routes, tuple(f"h{r}" for r in range(size)))


def digraph(size, capacities):
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_weighted_edges_from(((a, b, c) for (a, b), c in capacities.items()), weight="capacity")
    return graph


def partitions(items):
    """All partitions of a list into non-empty blocks."""
    if not items:
        yield []
        return
    for smaller in partitions(items[1:]):
        for i, block in enumerate(smaller):
            yield [*smaller[:i], [items[0], *block], *smaller[i + 1 :]]
        yield [[items[0]], *smaller]


@st.composite
def link_networks(draw):
    size = draw(st.integers(2, 5))
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    rates = draw(st.lists(st.integers(0, 5), min_size=len(pairs), max_size=len(pairs)))
    return size, {pair: float(rate) for pair, rate in zip(pairs, rates, strict=True) if rate}


@settings(deadline=None, max_examples=60)
@given(link_networks())
def test_broadcast_meets_edmonds_min_cut(network):
    size, capacities = network
    graph = digraph(size, capacities)
    cut = min(nx.maximum_flow_value(graph, 0, v) for v in range(1, size))
    if cut == 0:
        with pytest.raises(TopologyError, match=r"from ranks \{0"):
            pack(links(size, capacities), "broadcast", 0)
        return
    packing = pack(links(size, capacities), "broadcast", 0)
    check(links(size, capacities), packing)
    assert packing.bytes_per_s == pytest.approx(cut, rel=1e-5)
    reverse = links(size, {(b, a): c for (a, b), c in capacities.items()})
    assert pack(reverse, "reduce", 0).bytes_per_s == pytest.approx(cut, rel=1e-5)


@settings(deadline=None, max_examples=40)
@given(link_networks())
def test_allreduce_meets_nash_williams_on_two_way_links(network):
    size, one_way = network
    capacities = {}
    for (a, b), rate in one_way.items():
        capacities[min(a, b), max(a, b)] = rate
    both = {**capacities, **{(b, a): c for (a, b), c in capacities.items()}}
    assume(nx.is_connected(digraph(size, both).to_undirected()))
    strength = min(
        sum(c for (a, b), c in capacities.items() if not any(a in p and b in p for p in blocks))
        / (len(blocks) - 1)
        for blocks in partitions(list(range(size)))
        if len(blocks) > 1
    )
    packing = pack(links(size, both))
    check(links(size, both), packing)
    assert packing.bytes_per_s == pytest.approx(strength, rel=1e-5)


@st.composite
def networks(draw):
    """Anything: shared resources, several channels, one-way routes, capacities from nothing to absurd."""
    size = draw(st.integers(2, 5))
    rate = st.sampled_from([0.0, 0.5, 1e-3, 1.0, 3.0, 10.0, 1e7, 1.2345e8, 1e15])
    rates = draw(st.lists(rate, min_size=1, max_size=8))
    resources = tuple(Resource(f"r{i}", c) for i, c in enumerate(rates))
    names = st.lists(st.sampled_from([r.name for r in resources]), min_size=1, max_size=3)
    wanted = draw(
        st.lists(
            st.tuples(st.integers(0, size - 1), st.integers(0, size - 1), st.integers(0, 1), names),
            min_size=size,
            max_size=4 * size,
        )
    )
    if draw(st.integers(0, 3)):  # mostly connected
        wanted += [(v, (v + 1) % size, 0, draw(names)) for v in range(size)]
    routes = {(a, b, c): Route(a, b, c, tuple(n)) for a, b, c, n in wanted if a != b}
    return Topology("random", size, resources, tuple(routes.values()), ("h",) * size, draw(st.booleans()))


@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(networks(), st.sampled_from(COLLECTIVES), st.booleans())
def test_any_network_is_packed_or_refused_with_the_cut(topology, collective, sized):
    root = 1 if collective in ROOTED else None
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.world_size))
    wide = [r for r in topology.routes if all(topology.capacity[n] > 0 for n in r.resources)]
    graph.add_edges_from((r.src, r.dst) for r in wide)
    if collective in ("reduce", "gather"):
        joined = len(nx.ancestors(graph, root)) == topology.world_size - 1
    elif collective == "broadcast":
        joined = len(nx.descendants(graph, root)) == topology.world_size - 1
    else:
        joined = nx.is_strongly_connected(graph)
    if not joined:
        with pytest.raises(TopologyError, match="no route with capacity from ranks"):
            pack(topology, collective, root)
        return
    exact, paper = pack(topology, collective, root), pack(topology, collective, root, driver="paper")
    for packing in (exact, paper):
        check(topology, packing)
    assert exact.bytes_per_s >= exact.bound_bytes_per_s * (1 - 1e-5)
    assert paper.bytes_per_s >= exact.bytes_per_s * 0.9
    plan = make_plan(topology, collective, root)
    assert plan.bytes_per_s <= exact.bound_bytes_per_s * (1 + 1e-6)


def test_symmetric_shortcut_agrees_with_pricing_every_root():
    for text in ("dgx-1v", "sites:2+3@150/600", "nic:200,400,800,800+200"):
        topology = parse_topology(text)
        problem = PackingProblem(topology, "all_reduce")
        assert problem.mirror is not None
        packing = pack(topology)
        price = dict(packing.duals)
        vector = problem.symmetric(np.array([price.get(n, 0.0) for n in problem.names]))
        fast = problem.price(vector)
        problem.mirror = None
        assert problem.price(vector).bound == pytest.approx(fast.bound, rel=1e-9)


def test_asymmetric_networks_profit_from_pairs_that_are_not_mirrored():
    # Rank 0 receives well and sends badly: it must be a leaf of the broadcast, and may take many in the reduction.
    topology = parse_topology("nic:100/900,800,800,800")
    packing = pack(topology)
    check(topology, packing)
    assert packing.bytes_per_s == pytest.approx(packing.bound_bytes_per_s, rel=1e-5)


def test_check_catches_wrong_rates_and_wrong_bounds():
    topology = parse_topology("nic:200,800,800")
    good = pack(topology)
    fields = {f: getattr(good, f) for f in good.__dataclass_fields__}
    with pytest.raises(InternalError, match="carries"):
        check(topology, Packing(**{**fields, "rates": tuple(2 * r for r in good.rates)}))
    with pytest.raises(InternalError, match="it claims"):
        check(topology, Packing(**{**fields, "bound_bytes_per_s": 0.5 * good.bound_bytes_per_s}))


def test_bound_is_in_seconds():
    assert allreduce_bound(parse_topology("nic:200,800,800,800"), 25e6) == pytest.approx(1.0456, rel=1e-3)
    assert allreduce_bound(parse_topology("nic:100"), 25e6) == 0.0


@given(st.lists(st.integers(0, 10), min_size=1, max_size=9), st.data())
def test_rerooting_and_centre(picks, data):
    parent = [-1] + [pick % (v + 1) for v, pick in enumerate(picks)]
    edges = {frozenset((v, p)) for v, p in enumerate(parent) if p >= 0}
    root = data.draw(st.integers(0, len(picks)))
    again = reroot(parent, root)
    assert again[root] == -1 and {frozenset((v, p)) for v, p in enumerate(again) if p >= 0} == edges
    graph = nx.Graph([tuple(e) for e in edges])
    assert centre(again) == min(nx.center(graph))
