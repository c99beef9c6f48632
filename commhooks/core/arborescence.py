"""Cheapest trees on dense cost matrices: the pricing oracles of the packing.

Where in the flow: called by ``packing_problem`` once per pricing, thousands of times per packing, hence numpy over
whole rows rather than a graph library's dictionaries.

Invariants: ``cost[u, v]`` is the cost of the edge u -> v, infinite where there is none; every function is
deterministic (ties go to the lowest rank).

Sources: Prim 1957; Chu-Liu 1965 and Edmonds 1967 (contraction); Dijkstra 1959.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.intp]


def spanning_tree(cost: Costs) -> Ranks | None:
    """Minimum spanning tree of a symmetric matrix, as each rank's parent towards rank 0 (-1 at rank 0).

    Returns
    -------
    parents, or None when the graph isn't connected.  O(n^2).
    """
    return _grow(cost, 0, along=False)


def shortest_paths(cost: Costs, root: int) -> Ranks | None:
    """Shortest-path tree from ``root``: each rank's predecessor (-1 at the root), or None if some rank isn't reached."""
    return _grow(cost, root, along=True)


def _grow(cost: Costs, root: int, along: bool) -> Ranks | None:
    """Prim's (``along`` false) or Dijkstra's (true) growth of a tree from ``root``."""
    size = len(cost)
    parent = np.full(size, root, dtype=np.intp)
    parent[root] = -1
    best = cost[root].copy()
    best[root] = np.inf
    outside = np.ones(size, dtype=bool)
    outside[root] = False
    for _ in range(size - 1):
        nearest = int(best.argmin())
        reach = best[nearest]
        if not np.isfinite(reach):
            return None
        outside[nearest] = False
        best[nearest] = np.inf
        through = cost[nearest] + reach if along else cost[nearest]
        better = outside & (through < best)
        best[better] = through[better]
        parent[better] = nearest
    return parent


def arborescence(cost: Costs, root: int) -> Ranks | None:
    """Minimum-cost spanning arborescence away from ``root`` (Chu-Liu/Edmonds).

    Returns
    -------
    Each rank's parent (-1 at the root), or None when the root doesn't reach every rank.

    Notes
    -----
    O(n^2) per level of contraction, at most n levels, in practice a handful.
    """
    matrix = cost.copy()
    np.fill_diagonal(matrix, np.inf)
    matrix[:, root] = np.inf
    return _contract(matrix, root)


def _contract(cost: Costs, root: int) -> Ranks | None:
    size = len(cost)
    if size == 1:
        return np.full(1, -1, dtype=np.intp)
    parent: Ranks = cost.argmin(axis=0)
    cheapest = cost[parent, np.arange(size)]
    cheapest[root] = 0.0
    if not np.isfinite(cheapest).all():
        return None
    parent[root] = -1
    cycles = _cycles(parent.tolist())
    if not cycles:
        return parent
    # Every rank pays its cheapest edge in any case; what remains of a cost is the extra for another choice.
    rest = cost - cheapest
    smaller, tail, head, new_root = _merge(rest, cycles, root)
    above = _contract(smaller, new_root)
    if above is None:
        return None
    for node, up in enumerate(above.tolist()):
        if up >= 0:  # the edge that enters this node also opens the cycle inside it
            parent[head[up, node]] = tail[up, node]
    return parent


def _merge(rest: Costs, cycles: list[list[int]], root: int) -> tuple[Costs, Ranks, Ranks, int]:
    """Shrink each cycle to one node; per new pair the cheapest original edge (tail -> head)."""
    size = len(rest)
    in_cycle = np.zeros(size, dtype=bool)
    for cycle in cycles:
        in_cycle[cycle] = True
    single = np.flatnonzero(~in_cycle)
    count, new_size = len(single), len(single) + len(cycles)
    # Rows first (the cheapest member to leave from), then columns (the cheapest member to enter).
    rows = np.empty((new_size, size))
    row_of = np.empty((new_size, size), dtype=np.intp)
    rows[:count], row_of[:count] = rest[single], single[:, None]
    for i, cycle in enumerate(cycles):
        block = rest[cycle]
        at = block.argmin(axis=0)
        rows[count + i], row_of[count + i] = block[at, np.arange(size)], np.asarray(cycle)[at]
    smaller = np.empty((new_size, new_size))
    head = np.empty((new_size, new_size), dtype=np.intp)
    smaller[:, :count], head[:, :count] = rows[:, single], single[None, :]
    for i, cycle in enumerate(cycles):
        block = rows[:, cycle]
        at = block.argmin(axis=1)
        smaller[:, count + i], head[:, count + i] = block[np.arange(new_size), at], np.asarray(cycle)[at]
    np.fill_diagonal(smaller, np.inf)
    tail = row_of[np.arange(new_size)[:, None], head]
    return smaller, tail, head, int(np.searchsorted(single, root))


def _cycles(parent: list[int]) -> list[list[int]]:
    """The cycles of a graph in which each node has one predecessor (-1: none)."""
    seen = [0] * len(parent)
    found = []
    for start in range(len(parent)):
        node, path = start, []
        while node >= 0 and not seen[node]:
            seen[node] = start + 1
            path.append(node)
            node = parent[node]
        if node >= 0 and seen[node] == start + 1:
            found.append(path[path.index(node) :])
    return found
