"""Known optima of link networks by other means than our packing: cuts, partitions, rings.

Where in the flow: ``bench plans`` and the tests set them beside ``core.treegen``.

Invariants: shares no code with the packing; exponential where that is simplest (boxes of at most eight GPUs).

Sources: Edmonds 1973 (a rooted packing meets the smallest cut); Nash-Williams 1961 and Tutte 1961 (a packing of
spanning trees meets the weakest partition); NCCL 2.4 builds rings, which are Hamiltonian cycles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import networkx as nx
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def min_cut(graph: nx.Graph, root: int) -> float:
    """The least max-flow from ``root`` to any rank; ``links`` is the capacity of each direction of an edge."""
    directed = nx.DiGraph(graph)
    others = [v for v in graph if v != root]
    return float(min(nx.maximum_flow_value(directed, root, v, capacity="links") for v in others))


def strength(graph: nx.Graph) -> float:
    """The least capacity between the parts of a partition, over one less than their number, of all partitions."""
    edges = [(u, v, d["links"]) for u, v, d in graph.edges(data=True)]
    return min(
        sum(c for u, v, c in edges if part[u] != part[v]) / max(part.values())
        for part in _partitions(sorted(graph))
        if max(part.values()) > 0
    )


def _partitions(nodes: Sequence[int]) -> Iterator[dict[int, int]]:
    """Every partition once, as the number of each node's part (restricted growth)."""

    def extend(part: dict[int, int], at: int, parts: int) -> Iterator[dict[int, int]]:
        if at == len(nodes):
            yield part
            return
        for number in range(parts + 1):
            part[nodes[at]] = number
            yield from extend(part, at + 1, max(parts, number + 1))

    return extend({}, 0, 0)


def most_rings(graph: nx.Graph) -> int:
    """How many rings through all ranks fit at once (edge-disjoint Hamiltonian cycles, counting parallel links)."""
    cycles = list(_hamiltonian_cycles(graph))
    if not cycles:
        return 0
    number = {frozenset(edge): i for i, edge in enumerate(graph.edges)}
    uses = np.zeros((len(number), len(cycles)))
    for j, cycle in enumerate(cycles):
        for edge in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            uses[number[frozenset(edge)], j] += 1
    links = np.array([d["links"] for _, _, d in graph.edges(data=True)], dtype=float)
    result = milp(
        -np.ones(len(cycles)),
        constraints=LinearConstraint(uses, -np.inf, links),
        integrality=np.ones(len(cycles)),
        bounds=Bounds(0, 2),
    )
    return round(-result.fun)


def _hamiltonian_cycles(graph: nx.Graph) -> Iterator[list[int]]:
    first, *rest = sorted(graph)
    for order in itertools.permutations(rest):
        cycle = [first, *order]
        once = order[0] <= order[-1]  # not again backwards
        if once and all(graph.has_edge(a, b) for a, b in zip(cycle, [*order, first], strict=True)):
            yield cycle
