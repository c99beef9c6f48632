"""Which packing, among those of nearly equal rate: the one that a real network runs at its rate.

Where in the flow: ``packing_exact`` (the optimum and its bound) -> **here** -> ``planner``.

Rate alone doesn't decide.  On TCP, flows that meet at a busy NIC cost each other, and every hop costs a slice at the
start and the end.  Measured with one and the same rate: a chain inside each site 1.05 s, a star 1.1-1.5 s.  So each
candidate is given the time that it is expected to take::

    time = bytes / rate x (1 + slowdown) + hops x slice time
    slowdown = 0.06 x max over resources of (flows - 1) x utilisation ^ 3          (0 on a lossless network)

which is headroom on what isn't the bottleneck, few flows, few neighbours and shallow trees in one number.  The shape
(linear in flows, cubic in utilisation) and the 0.06 are fitted to these measurements of four to eight ranks on
emulated networks, and are no more precise than that:

=============================================  =====  ===========  ========  ========
plan                                           flows  utilisation  measured  modelled
=============================================  =====  ===========  ========  ========
one chain, NICs 200,800,800,800                2      0.5          < 1 %     1 %
star around a fast rank, the same              3      0.75         4-8 %     5 %
three rotated chains, the same                 3      1            10 %      12 %
ring pairs, uniform                            1      1            1-2 %     0
mirrored chains, uniform                       2      1            5-10 %    6 %
stars, uniform                                 3      1            15 %      12 %
star in each of two sites                      4      0.8          20-40 %   9 %
=============================================  =====  ===========  ========  ========

Within half a percent: the fewest trees, then the shallowest.

Candidates: one tree grown so that it leaves headroom, rotated rings, stars, packings confined to a ring and such a
tree, and the optimum itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from commhooks.core.packing_exact import ColumnPool, Solution, feasible, solve_exact
from commhooks.core.packing_fewest import fewest_trees
from commhooks.core.packing_problem import Column, PackingProblem, Vector
from commhooks.core.trees import TreePair, centre, chain, edges_of, reroot, star

NOMINAL_BYTES = 25e6  # DDP's bucket
SLICE_BYTES = 100e3
_PER_FLOW = 0.06
_POWER = 3
_EQUAL = 0.005
_HEADROOM_POWER = 4  # how strongly a growing tree avoids what is already loaded
_GOOD_ENOUGH = 0.97  # of the bound: no need to look further
_MANY = 64  # ranks above which the dear candidates are left out


@dataclass(frozen=True, eq=False)
class Candidate:
    """A packing (scaled units) with what is expected of it."""

    what: str
    columns: tuple[Column, ...]
    weights: Vector
    rate: float
    slowdown: float
    latency: float  # of the time of all bytes
    flows: int  # on the busiest resource
    neighbours: int

    @property
    def score(self) -> float:
        """Rate after slowdown and latency."""
        return self.rate / (1 + self.slowdown + self.latency)


def prefer(
    problem: PackingProblem, optimum: Solution, pool: ColumnPool, n_bytes: float = NOMINAL_BYTES
) -> tuple[Candidate, tuple[Candidate, ...]]:
    """The candidate to run, and all that were looked at, best first."""
    judged = [judge(problem, what, columns, weights, n_bytes) for what, columns, weights in _shapes(problem)]
    good = max((c.rate / (1 + c.slowdown) for c in judged), default=0.0) >= _GOOD_ENOUGH * optimum.rate
    if not good:
        judged += [judge(problem, *shape, n_bytes) for shape in _confined(problem, judged)]
        optimum = fewest_trees(problem, optimum, pool)
    judged.append(judge(problem, "the optimal packing", optimum.columns, optimum.weights, n_bytes))
    top = max(c.score for c in judged)
    order = sorted(
        range(len(judged)),
        key=lambda i: (judged[i].score < top * (1 - _EQUAL), len(judged[i].columns), -judged[i].score, i),
    )
    ranked = tuple(judged[i] for i in order)
    near = [c for c in ranked if c.score >= top * (1 - _EQUAL) and len(c.columns) == len(ranked[0].columns)]
    return min(near, key=lambda c: c.latency), ranked


def judge(
    problem: PackingProblem, what: str, columns: Sequence[Column], weights: Vector, n_bytes: float
) -> Candidate:
    """Scale ``weights`` to what the network carries, and say what to expect."""
    loads = np.stack([c.load for c in columns], axis=1) @ weights
    used = loads > 0
    weights = weights / float((loads[used] / problem.scaled[used]).max())
    rate, weights = feasible(problem, list(columns), weights)
    pairs = [c.pair for c in columns]
    share = np.stack([c.load for c in columns], axis=1) @ weights / np.maximum(problem.scaled, 1e-300)
    flows = problem.routes_through(pairs)
    crowd = np.where(used, np.maximum(flows - 1, 0) * share**_POWER, 0.0)
    slowdown = 0.0 if problem.topology.lossless else min(1.0, _PER_FLOW * float(crowd.max()))
    latency = SLICE_BYTES / n_bytes * rate * max(_longest_way(problem, pair) for pair in pairs)
    return Candidate(
        what,
        tuple(columns),
        weights,
        rate,
        slowdown,
        latency,
        int(flows.max()),
        _neighbours(problem.size, pairs),
    )


def _longest_way(problem: PackingProblem, pair: TreePair) -> float:
    """Time of one byte down the slowest way in and the slowest way out (scaled units)."""
    pace = problem.slice_time
    total = 0.0
    for tree, inward in ((pair.reduce, True), (pair.broadcast, False)):
        if tree is None:
            continue
        time = [0.0] * problem.size
        for v in tree.order[1:]:
            up, channel = tree.parent[v], tree.channel[v]
            time[v] = time[up] + (pace[channel, v, up] if inward else pace[channel, up, v])
        total += max(time)
    return float(total)


def _neighbours(size: int, pairs: Iterable[TreePair]) -> int:
    """The most neighbours that any rank has."""
    joined = np.zeros((size, size), dtype=bool)
    for pair in pairs:
        for src, dst, _ in edges_of(pair):
            joined[src, dst] = joined[dst, src] = True
    return int(joined.sum(axis=1).max())


# --- candidates ----------------------------------------------------------------------------------------------------

Shape = tuple[str, Sequence[Column], Vector]


def _shapes(problem: PackingProblem) -> Iterator[Shape]:
    """Structured packings, every tree at the same rate."""
    family = {
        "all_reduce": _all_reduce_shapes,
        "broadcast": _rooted_shapes,
        "reduce": _rooted_shapes,
        "all_gather": _every_root_shapes,
        "reduce_scatter": _every_root_shapes,
        "gather": _gather_shapes,
    }[problem.collective]
    for what, columns in family(problem):
        yield what, columns, np.ones(len(columns))


def _all_reduce_shapes(problem: PackingProblem) -> Iterator[tuple[str, list[Column]]]:
    grown = [tree for tree in (grow(problem, start) for start in _starts(problem)) if tree is not None]
    for tree in grown:
        yield "one mirrored tree", [problem.column(-1, tree.pair(problem, centre(tree.parent)))]
    orders = {tuple(range(problem.size)), *(tree.walk() for tree in grown[:4])}
    for order in sorted(orders):
        columns = rotated_rings(problem, order)
        if columns is not None:
            yield "rotated ring pairs", columns
    if problem.complete:
        channel = problem.widest_channel
        stars = [star(r, problem.size).parent for r in range(problem.size)]
        yield (
            "one-hop trees",
            [
                problem.column(-1, TreePair(problem.in_tree(r, s, channel), problem.out_tree(r, s, channel)))
                for r, s in enumerate(stars)
            ],
        )


def _rooted_shapes(problem: PackingProblem) -> Iterator[tuple[str, list[Column]]]:
    root = problem.root or 0
    tree = grow(problem, root)
    if tree is not None:
        yield "one tree", [problem.column(root, tree.one_way(problem, root))]


def _every_root_shapes(problem: PackingProblem) -> Iterator[tuple[str, list[Column]]]:
    tree = grow(problem, 0, both_ways=True)
    orders = {tuple(range(problem.size))}
    if tree is not None:
        orders.add(tree.walk())
        yield (
            "one tree, hung up at every rank",
            [problem.column(r, tree.one_way(problem, r)) for r in range(problem.size)],
        )
    for order in sorted(orders):
        columns = rotated_rings(problem, order)
        if columns is not None:
            yield "rotated chains", columns


def _gather_shapes(problem: PackingProblem) -> Iterator[tuple[str, list[Column]]]:
    root = problem.root or 0
    if all(problem.usable(s, root) is not None for s in problem.groups):
        columns = []
        for source in problem.groups:
            up = [source if r == root else -1 for r in range(problem.size)]
            columns.append(
                problem.column(source, TreePair(None, problem.out_tree(source, up, problem.widest_channel)))
            )
        yield "each rank straight to the root", columns


def _starts(problem: PackingProblem) -> list[int]:
    if problem.size <= 16:
        return list(range(problem.size))
    fast = np.minimum(problem.slice_time.min(axis=0), 1e300).sum(axis=1)
    return sorted({0, int(fast.argmin()), problem.size // 2})


def rotated_rings(
    problem: PackingProblem, order: Sequence[int], channel: int | None = None
) -> list[Column] | None:
    """Rotated rings along ``order`` on the widest channels (or on one), as the collective uses them."""
    size = len(order)
    hops = [(order[i], order[(i + 1) % size]) for i in range(size)]
    if any(problem.usable(a, b) is None for a, b in hops):
        return None
    choice = problem.widest_channel if channel is None else np.full((size, size), channel, dtype=np.intp)
    columns = []
    for i, root in enumerate(order):
        onward = [order[(i + k) % size] for k in range(size)]
        out = chain(onward, root, size).parent
        into = chain(onward[1:] + [root], root, size).parent
        reduce = problem.in_tree(root, into, choice) if problem.collective in _REDUCES else None
        broadcast = problem.out_tree(root, out, choice) if problem.collective in _BROADCASTS else None
        group = -1 if problem.collective == "all_reduce" else root
        columns.append(problem.column(group, TreePair(reduce, broadcast)))
    return columns


_REDUCES = ("all_reduce", "reduce", "reduce_scatter")
_BROADCASTS = ("all_reduce", "broadcast", "all_gather")


def _confined(problem: PackingProblem, judged: Sequence[Candidate]) -> Iterator[Shape]:
    """The best packings that use only a ring's edges, or only those of a ring and of the best tree."""
    if problem.collective != "all_reduce" or problem.size > _MANY or problem.topology.lossless:
        return
    rings = [c for c in judged if c.what == "rotated ring pairs"]
    trees = [c for c in judged if c.what == "one mirrored tree"]
    best = [max(family, key=lambda c: c.score) for family in (rings, trees) if family]
    for members in (best[:1], best) if len(best) > 1 else ():
        yield from _within(problem, members)


def _within(problem: PackingProblem, members: Sequence[Candidate]) -> Iterator[Shape]:
    edges = np.zeros((problem.size, problem.size), dtype=bool)
    for candidate in members:
        for column in candidate.columns:
            for src, dst, _ in edges_of(column.pair):
                edges[src, dst] = edges[dst, src] = True
    part = PackingProblem(problem.topology, problem.collective, problem.root, edges)
    seeds = [part.column(c.group, c.pair) for candidate in members for c in candidate.columns]
    if problem.topology.channels > 1:
        order = [c.pair.root for c in members[0].columns]
        for channel in range(problem.topology.channels):
            if part.channel_joins(order, channel):
                seeds += rotated_rings(part, order, channel) or []
    solution, pool = solve_exact(part, seeds)
    solution = fewest_trees(part, solution, pool)
    columns = [problem.column(c.group, c.pair) for c in solution.columns]
    yield "a packing confined to few neighbours", columns, solution.weights


@dataclass(frozen=True)
class Grown:
    """An undirected tree, grown for headroom, with a channel for each direction of each edge."""

    parent: list[int]
    channel: np.ndarray  # [src, dst]

    def pair(self, problem: PackingProblem, root: int) -> TreePair:
        """Reduce and broadcast over the same edges."""
        up = reroot(self.parent, root)
        return TreePair(problem.in_tree(root, up, self.channel), problem.out_tree(root, up, self.channel))

    def one_way(self, problem: PackingProblem, root: int) -> TreePair:
        """The half that the collective uses."""
        both = self.pair(problem, root)
        return (
            TreePair(both.reduce, None) if problem.collective in _REDUCES else TreePair(None, both.broadcast)
        )

    def walk(self) -> tuple[int, ...]:
        """The ranks in depth-first order from one end, which keeps neighbours in the tree near in a ring."""
        end = max(range(len(self.parent)), key=lambda r: (_depths(self.parent)[r], -r))
        up = reroot(self.parent, end)
        below: list[list[int]] = [[] for _ in up]
        for v, p in enumerate(up):
            if p >= 0:
                below[p].append(v)
        order, stack = [], [end]
        while stack:
            v = stack.pop()
            order.append(v)
            stack.extend(sorted(below[v], reverse=True))
        return tuple(order)


def _depths(parent: Sequence[int]) -> list[int]:
    depth = [0] * len(parent)
    for v in range(len(parent)):
        node = v
        while parent[node] >= 0:
            node, depth[v] = parent[node], depth[v] + 1
    return depth


def grow(problem: PackingProblem, start: int, both_ways: bool | None = None) -> Grown | None:
    """Grow a tree from ``start``, each time by the edge that costs the least headroom.

    The cost of a resource is (load / capacity)^4, so a second edge at one NIC costs 15 times the first: the tree
    becomes a chain where the network allows it, a slow NIC becomes a leaf, and a shared cut is crossed once.

    Returns
    -------
    None if the edges that can be used (both ways, where that is needed) don't connect all.
    """
    mirrored = (
        problem.collective in ("all_reduce", "all_gather", "reduce_scatter")
        if both_ways is None
        else both_ways
    )
    size = problem.size
    load = np.zeros(len(problem.names))
    scale = np.where(problem.negligible, 1.0, problem.scaled)
    parent, channel = [-1] * size, np.zeros((size, size), dtype=np.intp)
    inside = np.zeros(size, dtype=bool)
    inside[start] = True
    for _ in range(size - 1):
        step = ((load + 1) / scale) ** _HEADROOM_POWER - (load / scale) ** _HEADROOM_POWER
        distance, choice = problem.distances(step)
        cost = (
            distance + distance.T if mirrored else distance.T if problem.collective == "reduce" else distance
        )
        cost = np.where(inside[:, None] & ~inside[None, :], cost, np.inf)
        above, below = np.unravel_index(int(cost.argmin()), cost.shape)
        if not np.isfinite(cost[above, below]):
            return None
        up, down = int(above), int(below)
        parent[down], inside[down] = up, True
        channel[up, down], channel[down, up] = choice[up, down], choice[down, up]
        for src, dst in (
            ((up, down), (down, up))
            if mirrored
            else (((down, up),) if problem.collective == "reduce" else ((up, down),))
        ):
            problem.add_load(load, src, dst, int(choice[src, dst]))
    return Grown(parent, channel)
