"""Trees over ranks: the shapes that a packing weighs and a plan turns into routes.

Where in the flow: made by ``treegen`` (or by hand in ``plan``), read by ``plan``.

Invariants: a tree's edges are child <-> parent; the *use* gives the direction (reduce: child to parent, broadcast:
parent to child).  A rank that isn't the root and has no parent is not in the tree.

Source: Blink (Wang et al., MLSys 2020), sections 3.2-3.4; the pair of trees with one root is our generalisation of
its all-reduce (see ``treegen``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from commhooks.errors import InternalError


@dataclass(frozen=True)
class Tree:
    """One rooted tree.

    Parameters
    ----------
    root
        The rank at the top.
    parent
        For each rank its parent, or -1 at the root and for ranks that are not in the tree.
    channel
        For each rank the channel of the edge to its parent (0 where there is none).
    """

    root: int
    parent: tuple[int, ...]
    channel: tuple[int, ...]

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks in the tree, ascending."""
        return tuple(r for r, up in enumerate(self.parent) if up >= 0 or r == self.root)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each rank its children, ascending."""
        lists: list[list[int]] = [[] for _ in self.parent]
        for rank, up in enumerate(self.parent):
            if up >= 0:
                lists[up].append(rank)
        return tuple(tuple(c) for c in lists)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Members from the root down, every parent before its children.

        Raises
        ------
        InternalError
            If some member hangs on a cycle, and so can't be reached from the root.
        """
        order = [self.root]
        for rank in order:
            order.extend(self.children[rank])
            if len(order) > len(self.parent):
                break
        if len(order) != len(self.members) or len(set(order)) != len(order):
            raise InternalError(
                f"tree of root {self.root}: reached {len(order)} of {len(self.members)} members {self.parent}; "
                "the parents form a cycle"
            )
        return tuple(order)

    @cached_property
    def depth(self) -> int:
        """Hops from the root to the farthest member."""
        return max(self.levels)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """For each rank its hops from the root (0 for ranks that are not in the tree)."""
        level = [0] * len(self.parent)
        for rank in self.order[1:]:
            level[rank] = level[self.parent[rank]] + 1
        return tuple(level)


@dataclass(frozen=True)
class TreePair:
    """A reduce tree and a broadcast tree with one root; either may be absent."""

    reduce: Tree | None
    broadcast: Tree | None

    @property
    def root(self) -> int:
        """The root that both trees share."""
        tree = self.reduce or self.broadcast
        if tree is None:
            raise InternalError("a tree pair with neither a reduce nor a broadcast tree has no root")
        return tree.root

    @property
    def depth(self) -> int:
        """Hops of the longest way in plus the longest way out."""
        return sum(t.depth for t in (self.reduce, self.broadcast) if t is not None)


def chain(order: Sequence[int], root: int, world_size: int, channel: int = 0) -> Tree:
    """A path through ``order``, hung up at ``root`` (which must be in it)."""
    parent = [-1] * world_size
    at = list(order).index(root)
    for i, rank in enumerate(order):
        if i != at:
            parent[rank] = order[i + 1] if i < at else order[i - 1]
    return Tree(root, tuple(parent), tuple(channel if p >= 0 else 0 for p in parent))


def star(root: int, world_size: int, channel: int = 0) -> Tree:
    """Every other rank is a child of ``root``."""
    return Tree(
        root,
        tuple(-1 if r == root else root for r in range(world_size)),
        tuple(0 if r == root else channel for r in range(world_size)),
    )


def ring_pair(order: Sequence[int], root_at: int, channel: int = 0) -> TreePair:
    """The chain along the ring ``order`` into the rank at ``root_at``, and the chain from it on round.

    Both use only edges from one rank to the next in the ring: one flow in and one flow out per rank.
    """
    size = len(order)
    onward = [order[(root_at + i) % size] for i in range(size)]
    root = onward[0]
    inward = onward[1:] + [root]
    return TreePair(chain(inward, root, size, channel), chain(onward, root, size, channel))


def edges_of(pair: TreePair) -> list[tuple[int, int, int]]:
    """Every directed use of a route by ``pair``: (src, dst, channel)."""
    edges = []
    if pair.reduce is not None:
        edges += [
            (v, p, c)
            for v, (p, c) in enumerate(zip(pair.reduce.parent, pair.reduce.channel, strict=True))
            if p >= 0
        ]
    if pair.broadcast is not None:
        tree = pair.broadcast
        edges += [(p, v, c) for v, (p, c) in enumerate(zip(tree.parent, tree.channel, strict=True)) if p >= 0]
    return edges


def reroot(parent: Sequence[int], root: int) -> list[int]:
    """The same undirected tree, hung up at ``root``."""
    up = list(parent)
    node, above = root, -1
    while node >= 0:
        up[node], above, node = above, node, up[node]
    return up


def centre(parent: Sequence[int]) -> int:
    """The rank from which a tree is shallowest (lowest rank of the two when there are two)."""
    order = _from_root(parent)
    far = [(0, v) for v in range(len(parent))]  # per rank its deepest descendant
    best: tuple[int, int, int] = (0, order[0], order[0])
    for v in reversed(order):
        p = parent[v]
        if p < 0:
            continue
        length = far[v][0] + 1
        if length + far[p][0] > best[0]:
            best = (length + far[p][0], far[v][1], far[p][1])
        far[p] = max(far[p], (length, far[v][1]), key=lambda f: f[0])
    up, path = reroot(parent, best[1]), [best[2]]
    while up[path[-1]] >= 0:
        path.append(up[path[-1]])
    middle = path[(len(path) - 1) // 2 : len(path) // 2 + 1]
    return min(middle)


def _from_root(parent: Sequence[int]) -> list[int]:
    below: list[list[int]] = [[] for _ in parent]
    for v, p in enumerate(parent):
        if p >= 0:
            below[p].append(v)
    order = [list(parent).index(-1)]
    for v in order:
        order.extend(below[v])
    return order
