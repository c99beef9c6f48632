"""Plans: which trees carry which share of the bytes, and each rank's part in every tree.

Where in the flow: ``treegen`` (packing) -> **plan** -> ``exchange`` (routes) and the links (peers).  Rank 0's plan is
sent to the others (``to_json``) and its digest compared, so that all ranks route alike.

Invariants: shares are positive and sum to 1; children are sorted by (rank, channel), which is the order of addition
and makes results bit-identical; ``prove`` counts every rank's contribution on the routes themselves, so a plan that
loses or doubles a gradient is refused before a byte moves.

Source: Blink (MLSys 2020), 3.2-3.4; the proof by counting follows the idea of msccl-tools' checker.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from commhooks.core.proof import prove_plan
from commhooks.core.trees import Tree, TreePair, chain, ring_pair, star
from commhooks.errors import ConfigError

if TYPE_CHECKING:  # the planner pulls in scipy; a rank that is handed its plan doesn't need it
    from commhooks.core.topology import Topology

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "gather", "all_gather", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather")


class Hop(NamedTuple):
    """The other end of one edge: a peer and the channel to it."""

    rank: int
    channel: int


@dataclass(frozen=True)
class TreeRoute:
    """One rank's part of one tree pair; children in the fixed order of addition."""

    tree: int
    root: int
    reduce_parent: Hop | None
    reduce_children: tuple[Hop, ...]
    broadcast_parent: Hop | None
    broadcast_children: tuple[Hop, ...]
    #: hops that a slice still has before it when this rank sends it up, and when it sends it down
    reduce_hops_left: int = 0
    broadcast_hops_left: int = 0


@dataclass(frozen=True)
class Plan:
    """What every rank does with its slices.

    Parameters
    ----------
    world_size
        Number of ranks.
    collective
        One of ``COLLECTIVES``.
    pairs
        The trees.  ``all_reduce``: reduce and broadcast; ``broadcast``, ``gather``, ``all_gather``: broadcast trees
        (for the last two rooted at the rank whose own bytes they carry); ``reduce``, ``reduce_scatter``: reduce trees.
    shares
        Fraction of all bytes that each pair carries; sums to 1.  Where each rank has its own bytes (gather,
        all_gather, reduce_scatter) the trees of one root sum to 1 / world_size.
    bytes_per_s
        Predicted rate over all the collective's bytes; 0 when the plan was made without a topology.
    bound_bytes_per_s
        The best rate that any plan can have on that topology (0: unknown).
    reason
        Why this plan, for people.
    root
        The root of broadcast, reduce and gather, otherwise None.
    """

    world_size: int
    collective: str
    pairs: tuple[TreePair, ...]
    shares: tuple[float, ...]
    bytes_per_s: float
    bound_bytes_per_s: float
    reason: str
    root: int | None = None

    @property
    def depth(self) -> int:
        """Hops of the longest way through a tree pair, in and out."""
        return max((pair.depth for pair in self.pairs), default=0)

    @cached_property
    def _routes(self) -> tuple[tuple[TreeRoute, ...], ...]:
        return tuple(
            tuple(_route(i, pair, rank) for i, pair in enumerate(self.pairs) if _takes_part(pair, rank))
            for rank in range(self.world_size)
        )

    def routes(self, rank: int) -> tuple[TreeRoute, ...]:
        """The parts of ``rank``, in tree order; trees that it is not in are left out."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} asked of a plan for ranks 0..{self.world_size - 1}")
        return self._routes[rank]

    def peers(self, rank: int) -> frozenset[Hop]:
        """The hops that ``rank`` needs a connection to."""
        found: set[Hop] = set()
        for route in self.routes(rank):
            found.update(route.reduce_children + route.broadcast_children)
            found.update(hop for hop in (route.reduce_parent, route.broadcast_parent) if hop is not None)
        return frozenset(found)

    def assign(self, sizes: Sequence[int], roots: Sequence[int] | None = None) -> tuple[int, ...]:
        """The tree of each slice, in order, such that every prefix is spread by the shares.

        Parameters
        ----------
        sizes
            Slice sizes in any unit.
        roots
            For collectives where each rank has its own bytes: the rank that each slice belongs to.

        Notes
        -----
        Weighted fair queueing: the next slice goes to the tree that would finish its share first.  O(log trees) a
        slice, and equal on all ranks because ties end in the tree's number.
        """
        unit = max(sizes, default=1) or 1
        queues: dict[int, list[tuple[float, int]]] = {}
        for i, (pair, share) in enumerate(zip(self.pairs, self.shares, strict=True)):
            queues.setdefault(pair.root if roots is not None else -1, []).append((unit / share, i))
        for queue in queues.values():
            heapq.heapify(queue)
        chosen = []
        for at, size in enumerate(sizes):
            queue = queues[roots[at] if roots is not None else -1]
            finish, i = queue[0]
            heapq.heapreplace(queue, (finish + size / self.shares[i], i))
            chosen.append(i)
        return tuple(chosen)

    def digest(self) -> str:
        """A hash of all that decides where bytes go (not of the reason or the predictions)."""
        fields = self.to_json()
        for name in ("reason", "bytes_per_s", "bound_bytes_per_s"):
            del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    def prove(self) -> None:
        """Check that the routes do what ``collective`` says.

        Raises
        ------
        InternalError
            With the tree, the rank, and the counts seen and expected.
        """
        prove_plan(self)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types; ``from_json`` gives back an equal plan with the same digest."""
        return {
            "world_size": self.world_size,
            "collective": self.collective,
            "root": self.root,
            "pairs": [
                {"reduce": _tree_json(p.reduce), "broadcast": _tree_json(p.broadcast)} for p in self.pairs
            ],
            "shares": list(self.shares),
            "bytes_per_s": self.bytes_per_s if math.isfinite(self.bytes_per_s) else 0.0,
            "bound_bytes_per_s": self.bound_bytes_per_s if math.isfinite(self.bound_bytes_per_s) else 0.0,
            "reason": self.reason,
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Plan:
        """Rebuild a plan from ``to_json``; call ``prove`` on what another process sent.

        Raises
        ------
        ConfigError
            If a field is missing or of the wrong kind.
        """
        try:
            pairs = tuple(TreePair(_tree(p["reduce"]), _tree(p["broadcast"])) for p in fields["pairs"])
            return Plan(
                int(fields["world_size"]),
                str(fields["collective"]),
                pairs,
                tuple(float(s) for s in fields["shares"]),
                float(fields["bytes_per_s"]),
                float(fields["bound_bytes_per_s"]),
                str(fields["reason"]),
                None if fields["root"] is None else int(fields["root"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a plan: {error!r}; expected what Plan.to_json writes") from error


def _tree_json(tree: Tree | None) -> dict[str, Any] | None:
    if tree is None:
        return None
    return {"root": tree.root, "parent": list(tree.parent), "channel": list(tree.channel)}


def _tree(fields: Mapping[str, Any] | None) -> Tree | None:
    if fields is None:
        return None
    return Tree(int(fields["root"]), tuple(map(int, fields["parent"])), tuple(map(int, fields["channel"])))


def _takes_part(pair: TreePair, rank: int) -> bool:
    return rank == pair.root or any(
        t is not None and t.parent[rank] >= 0 for t in (pair.reduce, pair.broadcast)
    )


def _route(index: int, pair: TreePair, rank: int) -> TreeRoute:
    return TreeRoute(
        index,
        pair.root,
        _parent(pair.reduce, rank),
        _children(pair.reduce, rank),
        _parent(pair.broadcast, rank),
        _children(pair.broadcast, rank),
        _depth(pair.reduce, rank) + _height(pair.broadcast, pair.root),
        _height(pair.broadcast, rank),
    )


def _depth(tree: Tree | None, rank: int) -> int:
    """Hops from `rank` up to the root.  Bounded, because a plan is only proven after its routes are made."""
    hops = 0
    while tree is not None and tree.parent[rank] >= 0 and hops < len(tree.parent):
        rank = tree.parent[rank]
        hops += 1
    return hops


def _height(tree: Tree | None, rank: int) -> int:
    """Hops from `rank` down to the farthest rank below it; bounded like `_depth`."""
    below, hops = ([rank], 0) if tree is not None else ([], 0)
    while tree is not None and hops < len(tree.parent):
        below = [child for parent in below for child in tree.children[parent]]
        if not below:
            break
        hops += 1
    return hops


def _parent(tree: Tree | None, rank: int) -> Hop | None:
    return Hop(tree.parent[rank], tree.channel[rank]) if tree is not None and tree.parent[rank] >= 0 else None


def _children(tree: Tree | None, rank: int) -> tuple[Hop, ...]:
    return () if tree is None else tuple(Hop(c, tree.channel[c]) for c in tree.children[rank])


# --- plans that need no topology -----------------------------------------------------------------------------------


def ring_plan(world_size: int) -> Plan:
    """``world_size`` rotated ring pairs: the shape of Gloo's and NCCL's ring, best on a uniform network.

    Tree j is rooted at rank j: the chain j+1 -> j+2 -> ... -> j reduces, the chain j -> j+1 -> ... broadcasts.
    """
    order = range(_checked(world_size))
    pairs = tuple(ring_pair(order, j) for j in order)
    return _proven(pairs, "rotated ring pairs: one flow in and one out per rank")


def star_plan(world_size: int) -> Plan:
    """``world_size`` one-hop trees, rank j the root of tree j (Blink on a switch: DGX-2)."""
    trees = [star(j, world_size) for j in range(_checked(world_size))]
    return _proven(
        tuple(TreePair(t, t) for t in trees), "one-hop trees: two hops, whatever the number of ranks"
    )


def chain_plan(order: Sequence[int]) -> Plan:
    """One mirrored chain through ``order``, rooted at its middle: at most two neighbours per rank."""
    if sorted(order) != list(range(_checked(len(order)))):
        raise ConfigError(f"chain order {list(order)}: every rank 0..{len(order) - 1} must appear once")
    tree = chain(order, order[len(order) // 2], len(order))
    return _proven((TreePair(tree, tree),), "one mirrored chain: at most two neighbours per rank")


def _checked(world_size: int) -> int:
    if world_size < 1:
        raise ConfigError(f"world size {world_size}: a plan needs at least one rank")
    return world_size


def _proven(pairs: tuple[TreePair, ...], reason: str) -> Plan:
    size = len(pairs[0].reduce.parent) if pairs[0].reduce is not None else 0
    plan = Plan(size, "all_reduce", pairs, (1.0 / len(pairs),) * len(pairs), 0.0, 0.0, reason)
    plan.prove()
    return plan


def make_plan(
    topology: Topology,
    collective: str = "all_reduce",
    root: int | None = None,
    *,
    driver: str = "exact",
    startup_s: Mapping[int, float] | None = None,
    n_bytes: float = 0.0,
) -> Plan:
    """Plan a collective for a topology, and prove the plan.

    Parameters
    ----------
    topology
        The network.
    collective, root
        One of ``COLLECTIVES``; the root for broadcast, reduce and gather.
    driver
        ``exact`` (optimal packing, then the plan that leaves most headroom) or ``paper`` (Blink as published).
    startup_s, n_bytes
        Seconds that a channel costs before its first byte, and the size to split for (Blink's hybrid split).

    Raises
    ------
    TopologyError
        If the topology doesn't connect the group; the message names the cut.
    ConfigError
        For an unknown collective, root or driver.
    """
    from commhooks.core.planner import plan_for  # here, so that routes alone don't cost scipy's import

    return plan_for(topology, collective, root, driver=driver, startup_s=startup_s or {}, n_bytes=n_bytes)
