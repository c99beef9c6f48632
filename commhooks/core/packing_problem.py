"""The packing problem of one topology and collective: columns, loads, prices, bounds.

Where in the flow: ``topology`` -> **here** -> the drivers ``packing_exact`` and ``packing_paper`` -> ``treegen``.

The linear program.  A *column* is a tree pair (or one tree, or one path) that carries bytes at some rate w; it loads
each resource as often as its edges' routes name it.  Columns belong to *groups*: all-reduce, broadcast and reduce
have one; where each rank has its own bytes (all_gather, reduce_scatter, gather) each of those ranks is a group, and
all groups must run at one rate::

    max x   subject to   sum of w over each group >= x,   load <= capacity of each resource

Its dual gives a price y >= 0 to every resource.  For *any* such prices, with m_g the cheapest column of group g,

    x <= (sum of capacity * y) / (sum of m_g)

which is the certificate: anyone can check it by pricing once.

Invariants: capacities are scaled by the *width* (the widest bottleneck that still connects the group), so that the
numbers in the program are near 1 whatever the units.  Resources under a ten-millionth of that can't matter to six
digits; no column uses them, and the bound still counts them.

Sources: Edmonds 1973 and Lovasz 1976 for packings of arborescences, Nash-Williams 1961 and Tutte 1961 for spanning
trees, Blink 3.2 for their use; pairs with one root are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from commhooks.core.arborescence import Ranks, arborescence, shortest_paths, spanning_tree
from commhooks.core.topology import Topology
from commhooks.core.trees import Tree, TreePair, centre, edges_of, reroot
from commhooks.errors import InternalError, TopologyError

Vector = npt.NDArray[np.float64]
NEGLIGIBLE = 1e-7  # of the width, shared by all resources


@dataclass(frozen=True, eq=False)
class Column:
    """One way to carry bytes of ``group``: its trees, and how often it loads each resource."""

    group: int
    pair: TreePair
    load: Vector


@dataclass(frozen=True)
class Price:
    """The answer to one set of prices: a bound on the (scaled) total rate, and columns that are cheap under it."""

    bound: float
    columns: tuple[Column, ...]
    cost: float  # of the cheapest column, averaged over the groups


class PackingProblem:
    """Everything that the drivers need to know about a topology, as arrays.

    Parameters
    ----------
    topology, collective, root
        What to pack.
    edges
        If given, only these (src, dst) pairs may be used (a sub-problem; its bound holds only for itself).

    Raises
    ------
    TopologyError
        If the group isn't connected the way the collective needs; the message names the cut.
    """

    def __init__(
        self,
        topology: Topology,
        collective: str,
        root: int | None = None,
        edges: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.topology, self.collective, self.root = topology, collective, root
        self.size = topology.world_size
        self.names = tuple(r.name for r in topology.resources)
        self.capacity = np.array([r.bytes_per_s for r in topology.resources], dtype=np.float64)
        self._read_routes()
        if edges is not None:
            self._usable &= edges
        self.width = self._width()
        floor = NEGLIGIBLE * self.width / max(1, len(self.names))
        self.negligible = self.capacity < floor
        self._usable &= ~np.append(self.negligible, False)[self._index].any(axis=-1)
        ceiling = 2.0 * self.size**2 * max(1, len(self.names)) * self.width  # more than any packing can load
        self.scaled = np.minimum(self.capacity, ceiling) / self.width
        self.groups: tuple[int, ...] = self._groups()
        self.mirror = self._find_mirror()

    # --- geometry ---------------------------------------------------------------------------------------------------

    def _read_routes(self) -> None:
        channels, size = self.topology.channels, self.size
        longest = max((len(r.resources) for r in self.topology.routes), default=1)
        number = {name: i for i, name in enumerate(self.names)}
        self._index = np.full((channels, size, size, longest), len(self.names), dtype=np.intp)
        self._usable = np.zeros((channels, size, size), dtype=bool)
        self._length = np.zeros((channels, size, size), dtype=np.intp)
        for r in self.topology.routes:
            ids = [number[name] for name in r.resources]
            self._index[r.channel, r.src, r.dst, : len(ids)] = ids
            self._usable[r.channel, r.src, r.dst] = True
            self._length[r.channel, r.src, r.dst] = len(ids)

    def _width(self) -> float:
        """The widest bottleneck at which the routes still connect the group."""
        if self.size == 1:
            return 1.0
        narrow = np.append(self.capacity, np.inf)[self._index].min(axis=-1)
        widths = np.where(self._usable, narrow, 0.0).max(axis=0)
        steps = np.unique(widths[widths > 0])
        low, high = 0, len(steps)  # connected at steps[low] (if at all), not at steps[high]
        if not len(steps) or not self._connected(widths >= steps[0]):
            raise TopologyError(self._cut(widths > 0))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._connected(widths >= steps[middle]) else (low, middle)
        return float(steps[low])

    def _connected(self, joined: npt.NDArray[np.bool_]) -> bool:
        return not self._unreached(joined)

    def _unreached(self, joined: npt.NDArray[np.bool_]) -> tuple[list[int], bool] | None:
        """Ranks that can't be reached as the collective needs, and whether that is on the way in (to the root)."""
        starts = [self.root] if self.root is not None else [0]
        for inward in (False, True):
            if self.root is not None and inward != (self.collective in ("reduce", "gather")):
                continue
            reached = _reach(joined.T if inward else joined, starts[0] or 0)
            if not reached.all():
                return np.flatnonzero(reached).tolist(), inward
        return None

    def _cut(self, joined: npt.NDArray[np.bool_]) -> str:
        found = self._unreached(joined)
        if found is None:
            raise InternalError(f"{self.topology.name}: connected, yet no width")
        near, inward = found
        far = [r for r in range(self.size) if r not in set(near)]
        source, target = (far, near) if inward else (near, far)
        return (
            f"topology {self.topology.name!r} doesn't connect the group for {self.collective}: no route with capacity "
            f"from ranks {_few(source)} to ranks {_few(target)}"
        )

    def _find_mirror(self) -> npt.NDArray[np.intp] | None:
        """For each resource its counterpart in the opposite direction, if the network looks the same both ways.

        Then prices may be averaged with their mirror image, distances are symmetric, and a minimum spanning tree is
        a cheapest in-tree and out-tree for every root at once.
        """
        mirror = np.full(len(self.names) + 1, -1, dtype=np.intp)
        mirror[-1] = len(self.names)
        if not (self._usable == self._usable.transpose(0, 2, 1)).all():
            return None
        if not (self._length == self._length.transpose(0, 2, 1)).all():
            return None
        at = np.arange(self._index.shape[-1])
        back = (self._length[..., None] - 1 - at).clip(0)
        opposite = np.take_along_axis(self._index.transpose(0, 2, 1, 3), back, axis=-1)
        real = self._usable[..., None] & (at < self._length[..., None])
        mirror[self._index[real]] = opposite[real]
        unused = mirror < 0
        mirror[unused] = np.flatnonzero(unused)
        whole = np.append(self.scaled, 0.0)
        fits = (mirror[self._index[real]] == opposite[real]).all() and (
            mirror[mirror] == np.arange(len(mirror))
        ).all()
        same = np.allclose(whole[mirror], whole, rtol=1e-12, atol=0)
        return mirror[:-1] if fits and same else None

    def _groups(self) -> tuple[int, ...]:
        if self.collective in ("all_gather", "reduce_scatter"):
            return tuple(range(self.size))
        if self.collective == "gather":
            return tuple(r for r in range(self.size) if r != self.root)
        return (-1 if self.root is None else self.root,)

    @property
    def multiplicity(self) -> int:
        """Total rate of the collective's bytes per unit of x."""
        return self.size if self.collective in ("all_gather", "reduce_scatter", "gather") else 1

    # --- columns ----------------------------------------------------------------------------------------------------

    def distances(self, price: Vector) -> tuple[Vector, Ranks]:
        """Cost of the cheapest channel from each rank to each other, and which it is."""
        cost = np.append(price, 0.0)[self._index].sum(axis=-1)
        cost = np.where(self._usable, cost, np.inf)
        channel = cost.argmin(axis=0)
        return np.take_along_axis(cost, channel[None], axis=0)[0], channel

    def usable(self, src: int, dst: int) -> int | None:
        """The lowest channel from ``src`` to ``dst``, if there is one."""
        found = np.flatnonzero(self._usable[:, src, dst])
        return int(found[0]) if len(found) else None

    def add_load(self, load: Vector, src: int, dst: int, channel: int) -> None:
        """Count one more use of a route, in place."""
        ids = self._index[channel, src, dst]
        np.add.at(load, ids[ids < len(self.names)], 1.0)

    @cached_property
    def slice_time(self) -> Vector:
        """Time of one byte over each [channel, src, dst] at the speed of its narrowest resource (infinite: none)."""
        narrow = np.append(self.scaled, np.inf)[self._index].min(axis=-1)
        return np.where(self._usable, 1.0 / np.maximum(narrow, 1e-300), np.inf)

    @cached_property
    def widest_channel(self) -> Ranks:
        """The fastest channel of each [src, dst]."""
        channel: Ranks = self.slice_time.argmin(axis=0)
        return channel

    @property
    def complete(self) -> bool:
        """Whether every rank has a route to every other."""
        return bool((self._usable.any(axis=0) | np.eye(self.size, dtype=bool)).all())

    def channel_joins(self, order: Sequence[int], channel: int) -> bool:
        """Whether one channel alone closes the ring ``order``."""
        return all(self._usable[channel, a, b] for a, b in zip(order, [*order[1:], order[0]], strict=True))

    def out_tree(self, root: int, parent: Iterable[int], channel: Ranks) -> Tree:
        """A tree whose edges are used from parent to child."""
        up = tuple(parent)
        return Tree(root, up, tuple(int(channel[p, v]) if p >= 0 else 0 for v, p in enumerate(up)))

    def in_tree(self, root: int, parent: Iterable[int], channel: Ranks) -> Tree:
        """A tree whose edges are used from child to parent."""
        up = tuple(parent)
        return Tree(root, up, tuple(int(channel[v, p]) if p >= 0 else 0 for v, p in enumerate(up)))

    def column(self, group: int, pair: TreePair) -> Column:
        """Count the loads of ``pair``."""
        load = np.zeros(len(self.names) + 1)
        for src, dst, channel in edges_of(pair):
            np.add.at(load, self._index[channel, src, dst], 1.0)
        return Column(group, pair, load[:-1])

    def routes_through(self, pairs: Iterable[TreePair]) -> Vector:
        """For each resource, how many different connections of ``pairs`` pass through it."""
        flows = np.zeros(len(self.names) + 1)
        for src, dst, channel in sorted({edge for pair in pairs for edge in edges_of(pair)}):
            flows[np.unique(self._index[channel, src, dst])] += 1.0
        return flows[:-1]

    def mirrored(self, parent: Ranks, channel: Ranks, root: int | None = None) -> TreePair:
        """The pair that uses each edge of an undirected tree both ways, hung up at its centre (or at ``root``)."""
        up = reroot(parent.tolist(), centre(parent.tolist()) if root is None else root)
        top = up.index(-1)
        return TreePair(self.in_tree(top, up, channel), self.out_tree(top, up, channel))

    # --- pricing ----------------------------------------------------------------------------------------------------

    def price(self, price: Vector) -> Price:
        """Bound and cheap columns under ``price``; exact for every collective."""
        distance, channel = self.distances(price)
        if self.collective == "all_reduce":
            found = self._price_pairs(distance, channel)
        elif self.collective == "gather":
            found = self._price_paths(distance, channel)
        else:
            found = self._price_trees(distance, channel)
        costs, columns = found
        return Price(self.bound(price, costs), columns, float(np.mean(costs)))

    def bound(self, price: Vector, costs: Sequence[float]) -> float:
        """The certificate's bound on the scaled total rate, given each group's cheapest column.

        Prices of negligible resources are taken as the dearest group's cost, so that no column through them is
        cheaper than those that were priced; that adds their capacity, and nothing else, to the bound.
        """
        total = float(self.scaled @ np.where(self.negligible, max(costs), price))
        return self.multiplicity * total / sum(costs) if sum(costs) > 0 else np.inf

    def symmetric(self, price: Vector) -> Vector:
        """Prices averaged with their mirror image, where the network has one (all-reduce: as good a certificate)."""
        if self.mirror is None or self.collective != "all_reduce":
            return price
        return 0.5 * (price + price[self.mirror])

    @property
    def pricing_is_dear(self) -> bool:
        """Whether ``price`` has to look at every root by itself."""
        return self.collective == "all_reduce" and self.mirror is None and self.size > 8

    def quick_column(self, price: Vector) -> Column | None:
        """One cheap column of the first group (no bound): all-reduce's cheapest mirrored tree, otherwise exact."""
        if self.collective != "all_reduce":
            return self.price(price).columns[0]
        distance, channel = self.distances(price)
        parent = spanning_tree(distance + distance.T)
        return None if parent is None else self.column(-1, self.mirrored(parent, channel))

    def quick_columns(self, price: Vector) -> list[Column]:
        """Cheap all-reduce columns without asking every root: mirrored, and pairs at the most central ranks."""
        distance, channel = self.distances(price)
        both = distance + distance.T
        parent = spanning_tree(both)
        columns = [] if parent is None else [self.column(-1, self.mirrored(parent, channel))]
        np.fill_diagonal(both, 0.0)
        central = np.argsort(np.minimum(both, 1e300).sum(axis=1), kind="stable")[:3].tolist()
        return columns + [pair for _, pair in self._pairs_at(central, distance, channel)]

    def _price_pairs(self, distance: Vector, channel: Ranks) -> tuple[list[float], tuple[Column, ...]]:
        if self.mirror is not None and np.allclose(distance, distance.T, rtol=1e-12, atol=1e-300):
            parent = spanning_tree(distance)
            if parent is None:
                raise InternalError(f"{self.topology.name}: no spanning tree in a connected network")
            column = self.column(-1, self.mirrored(parent, channel))
            return [2.0 * _total(distance, parent)], (column,)
        offers = self._pairs_at(range(self.size), distance, channel)
        return [offers[0][0]], tuple(column for _, column in offers)

    def _pairs_at(self, roots: Iterable[int], distance: Vector, channel: Ranks) -> list[tuple[float, Column]]:
        """The cheapest pair of each of ``roots`` with its cost, the eight cheapest, cheapest first."""
        offers = []
        for root in roots:
            outward, inward = arborescence(distance, root), arborescence(distance.T, root)
            if outward is not None and inward is not None:
                cost = _total(distance, outward) + _total(distance.T, inward)
                offers.append((cost, root, inward.tolist(), outward.tolist()))
        offers.sort(key=lambda offer: offer[:2])
        return [
            (cost, self.column(-1, TreePair(self.in_tree(r, i, channel), self.out_tree(r, o, channel))))
            for cost, r, i, o in offers[:8]
        ]

    def _price_trees(self, distance: Vector, channel: Ranks) -> tuple[list[float], tuple[Column, ...]]:
        reverse = self.collective in ("reduce", "reduce_scatter")
        costs, columns = [], []
        matrix = distance.T if reverse else distance
        for root in self.groups:
            parent = arborescence(matrix, root)
            if parent is None:
                raise InternalError(
                    f"{self.topology.name}: rank {root} doesn't reach all in a connected network"
                )
            costs.append(_total(matrix, parent))
            up = parent.tolist()
            tree = self.in_tree(root, up, channel) if reverse else self.out_tree(root, up, channel)
            columns.append(self.column(root, TreePair(tree, None) if reverse else TreePair(None, tree)))
        return costs, tuple(columns)

    def _price_paths(self, distance: Vector, channel: Ranks) -> tuple[list[float], tuple[Column, ...]]:
        root = self.root or 0
        onward = shortest_paths(distance.T, root)  # each rank's next hop towards the root
        if onward is None:
            raise InternalError(f"{self.topology.name}: not all reach rank {root} in a connected network")
        costs, columns = [], []
        for source in self.groups:
            up, node, cost = [-1] * self.size, source, 0.0
            while node != root:
                after = int(onward[node])
                up[after], cost, node = node, cost + distance[node, after], after
            costs.append(cost)
            columns.append(self.column(source, TreePair(None, self.out_tree(source, up, channel))))
        return costs, tuple(columns)


def _total(distance: Vector, parent: Ranks) -> float:
    child = np.flatnonzero(parent >= 0)
    return float(distance[parent[child], child].sum())


def _reach(joined: npt.NDArray[np.bool_], start: int) -> npt.NDArray[np.bool_]:
    reached = np.zeros(len(joined), dtype=bool)
    reached[start] = True
    while True:
        wider = reached | joined[reached].any(axis=0)
        if (wider == reached).all():
            return reached
        reached = wider


def _few(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return f"{{{shown}{', ...' if len(ranks) > 16 else ''}}}"
