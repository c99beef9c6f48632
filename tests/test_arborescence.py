"""The pricing oracles against networkx."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commhooks.core.arborescence import arborescence, shortest_paths, spanning_tree


@st.composite
def costs(draw, symmetric=False):
    size = draw(st.integers(1, 8))
    cell = st.one_of(st.integers(0, 6).map(float), st.just(float("inf")))
    matrix = np.array(
        draw(st.lists(st.lists(cell, min_size=size, max_size=size), min_size=size, max_size=size))
    )
    matrix = matrix.reshape(size, size)
    return np.minimum(matrix, matrix.T) if symmetric else matrix


def _graph(cost, kind):
    graph = kind()
    graph.add_nodes_from(range(len(cost)))
    size = len(cost)
    edges = [(u, v) for u in range(size) for v in range(size) if u != v and np.isfinite(cost[u, v])]
    graph.add_weighted_edges_from((u, v, cost[u, v]) for u, v in edges)
    return graph


def _cost(cost, parent):
    return sum(cost[p, v] for v, p in enumerate(parent.tolist()) if p >= 0)


@given(costs(), st.data())
def test_arborescence_is_cheapest(cost, data):
    root = data.draw(st.integers(0, len(cost) - 1))
    parent = arborescence(cost, root)
    graph = _graph(cost, nx.DiGraph)
    graph.remove_edges_from(list(graph.in_edges(root)))
    if len(nx.descendants(graph, root)) < len(cost) - 1:
        assert parent is None
        return
    assert parent[root] == -1 and nx.is_arborescence(nx.DiGraph([(p, v) for v, p in enumerate(parent) if p >= 0])
                                                     if len(cost) > 1 else nx.DiGraph({0: []}))  # fmt: skip
    if len(cost) > 1:
        best = nx.minimum_spanning_arborescence(graph)
        assert _cost(cost, parent) == best.size("weight")


@given(costs(symmetric=True))
def test_spanning_tree_is_cheapest(cost):
    parent = spanning_tree(cost)
    graph = _graph(cost, nx.Graph)
    if not nx.is_connected(graph):
        assert parent is None
    else:
        assert _cost(cost, parent) == nx.minimum_spanning_tree(graph).size("weight")


@given(costs())
def test_shortest_paths(cost):
    parent = shortest_paths(cost, 0)
    length = nx.single_source_dijkstra_path_length(_graph(cost, nx.DiGraph), 0)
    if len(length) < len(cost):
        assert parent is None
        return
    for rank in range(len(cost)):
        total, node = 0.0, rank
        while parent[node] >= 0:
            total, node = total + cost[parent[node], node], parent[node]
        assert total == pytest.approx(length[rank])
