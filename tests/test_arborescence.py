"""The pricing oracles against brute force and networkx."""

import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks.core.arborescence import arborescence, shortest_paths, spanning_tree


@st.composite
def costs(draw, symmetric=False, most=8):
    size = draw(st.integers(1, most))
    cell = st.one_of(st.integers(0, 6).map(float), st.just(float("inf")))
    matrix = np.array(
        draw(st.lists(st.lists(cell, min_size=size, max_size=size), min_size=size, max_size=size))
    )
    matrix = matrix.reshape(size, size)
    return np.minimum(matrix, matrix.T) if symmetric else matrix


def graph_of(cost, kind):
    graph = kind()
    graph.add_nodes_from(range(len(cost)))
    pairs = itertools.permutations(range(len(cost)), 2)
    graph.add_weighted_edges_from((u, v, cost[u, v]) for u, v in pairs if np.isfinite(cost[u, v]))
    return graph


def total(cost, parent):
    return sum(cost[p, v] for v, p in enumerate(parent) if p >= 0)


def reaches_all(parent, root):
    return all(_climbs(parent, v, root) for v in range(len(parent)))


def _climbs(parent, v, root):
    for _ in parent:
        if v == root:
            return True
        v = parent[v]
    return v == root


def cheapest(cost, root):
    """Over every choice of one predecessor per rank (networkx 3.6's Edmonds misses some arborescences)."""
    size = len(cost)
    choices = [[-1] if v == root else [u for u in range(size) if u != v] for v in range(size)]
    trees = (p for p in itertools.product(*choices) if reaches_all(p, root))
    return min((total(cost, p) for p in trees), default=np.inf)


@settings(deadline=None, max_examples=60)
@given(costs(most=5), st.data())
def test_arborescence_is_cheapest(cost, data):
    root = data.draw(st.integers(0, len(cost) - 1))
    parent = arborescence(cost, root)
    best = cheapest(cost, root)
    if parent is None:
        assert best == np.inf
    else:
        assert parent[root] == -1 and reaches_all(parent.tolist(), root)
        assert total(cost, parent) == best


@settings(deadline=None, max_examples=60)
@given(costs(symmetric=True))
def test_spanning_tree_is_cheapest(cost):
    parent = spanning_tree(cost)
    graph = graph_of(cost, nx.Graph)
    if not nx.is_connected(graph):
        assert parent is None
    else:
        assert total(cost, parent) == nx.minimum_spanning_tree(graph).size("weight")


@settings(deadline=None, max_examples=60)
@given(costs())
def test_shortest_paths(cost):
    parent = shortest_paths(cost, 0)
    length = nx.single_source_dijkstra_path_length(graph_of(cost, nx.DiGraph), 0)
    if len(length) < len(cost):
        assert parent is None
        return
    for rank in range(len(cost)):
        way, node = 0.0, rank
        while parent[node] >= 0:
            way, node = way + cost[parent[node], node], parent[node]
        assert way == pytest.approx(length[rank])
