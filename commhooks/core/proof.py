"""Proof that a plan is what it claims, by counting contributions on every rank's own routes.

Where in the flow: called by ``plan.Plan.prove`` on every plan before its first use.

Invariants: works on ``routes(rank)``, the very objects the exchange runs, not on the trees they came from.  Counts,
never sets: a set would hide a gradient that is added twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from commhooks.errors import InternalError

if TYPE_CHECKING:
    from commhooks.core.plan import Plan, TreeRoute

Counts = npt.NDArray[np.int64]
_REDUCES = ("all_reduce", "reduce", "reduce_scatter")
_BROADCASTS = ("all_reduce", "broadcast", "gather", "all_gather")
_OWN_BYTES = ("gather", "all_gather", "reduce_scatter")
_SHARE_TOLERANCE = 1e-6  # a billionth of the bytes on the wrong tree is no harm; a missing tree is


def prove_plan(plan: Plan) -> None:
    """Check shares, roots and every tree pair of ``plan``; O(world_size^2 x trees) additions at worst.

    Raises
    ------
    InternalError
        If any rank would end with a wrong count, wait for ever, or be sent what it doesn't expect.
    """
    if len(plan.pairs) != len(plan.shares) or not plan.pairs:
        raise InternalError(
            f"plan with {len(plan.pairs)} tree pairs and {len(plan.shares)} shares; one share each"
        )
    _prove_shares(plan)
    by_tree: list[dict[int, TreeRoute]] = [{} for _ in plan.pairs]
    for rank in range(plan.world_size):
        for route in plan.routes(rank):
            by_tree[route.tree][rank] = route
    for index, routes in enumerate(by_tree):
        _prove_pair(plan, index, routes)


def _prove_shares(plan: Plan) -> None:
    if any(not share > 0 for share in plan.shares) or abs(math.fsum(plan.shares) - 1) > _SHARE_TOLERANCE:
        raise InternalError(f"shares {plan.shares} sum to {math.fsum(plan.shares)}; expected positive, sum 1")
    if plan.collective in _OWN_BYTES:
        own = [0.0] * plan.world_size
        for pair, share in zip(plan.pairs, plan.shares, strict=True):
            own[pair.root] += share
        wrong = [r for r, s in enumerate(own) if abs(s - 1 / plan.world_size) > _SHARE_TOLERANCE]
        if wrong:
            raise InternalError(
                f"{plan.collective}: rank {wrong[0]}'s trees carry {own[wrong[0]]} of the bytes, "
                f"expected 1/{plan.world_size}"
            )
    elif plan.collective != "all_reduce":
        roots = sorted({pair.root for pair in plan.pairs})
        if roots != [plan.root]:
            raise InternalError(f"{plan.collective} from root {plan.root}: trees have roots {roots}")


def _prove_pair(plan: Plan, index: int, routes: dict[int, TreeRoute]) -> None:
    root = plan.pairs[index].root
    label = f"{plan.collective} tree {index} of root {root}"
    if plan.collective in _REDUCES:
        counts = reduce_counts(routes, plan.world_size, label)[root]
        _expect_ones(counts, f"{label}: the root's sum counts rank", "contribution")
    if plan.collective in _BROADCASTS:
        copies = broadcast_counts(routes, root, plan.world_size, label)
        needed = [plan.root or 0] if plan.collective == "gather" else range(plan.world_size)
        _expect_copies(copies, needed, label)


def reduce_counts(routes: dict[int, TreeRoute], world_size: int, label: str) -> dict[int, Counts]:
    """Run the reduce half: how often each rank's partial sum contains each rank's gradient."""
    sums = {rank: np.eye(1, world_size, rank, dtype=np.int64)[0] for rank in routes}
    waiting = {
        rank: [(hop.rank, hop.channel) for hop in route.reduce_children] for rank, route in routes.items()
    }
    ready = [rank for rank in sorted(routes) if not waiting[rank]]
    for rank in ready:  # grows while it runs: a rank is ready when its last child has sent
        hop = routes[rank].reduce_parent
        if hop is None:
            continue
        if (rank, hop.channel) not in waiting.get(hop.rank, ()):
            raise InternalError(f"{label}: rank {rank} sends to rank {hop.rank} on channel {hop.channel}, "
                                f"which awaits only {waiting.get(hop.rank, [])}")  # fmt: skip
        waiting[hop.rank].remove((rank, hop.channel))
        sums[hop.rank] += sums[rank]
        if not waiting[hop.rank]:
            ready.append(hop.rank)
    stuck = {rank: hops for rank, hops in waiting.items() if hops}
    if stuck:
        raise InternalError(
            f"{label}: the reduction never ends; awaited for ever (rank: [(from, channel)]): {stuck}"
        )
    return sums


def broadcast_counts(routes: dict[int, TreeRoute], root: int, world_size: int, label: str) -> Counts:
    """Run the broadcast half: how many copies each rank receives (the root has one)."""
    copies = np.zeros(world_size, dtype=np.int64)
    copies[root] = 1
    queue = [root]
    for rank in queue:
        for hop in routes[rank].broadcast_children:
            parent = routes[hop.rank].broadcast_parent if hop.rank in routes else None
            if parent is None or (parent.rank, parent.channel) != (rank, hop.channel):
                raise InternalError(f"{label}: rank {rank} sends to rank {hop.rank} on channel {hop.channel}, "
                                    f"which awaits {parent}")  # fmt: skip
            copies[hop.rank] += 1
            if copies[hop.rank] > 1:
                raise InternalError(
                    f"{label}: rank {hop.rank} receives {copies[hop.rank]} copies, expected 1"
                )
            queue.append(hop.rank)
    return copies


def _expect_ones(counts: Counts, what: str, unit: str) -> None:
    for rank, count in enumerate(counts.tolist()):
        if count != 1:
            raise InternalError(f"{what} {rank} {count} times, expected 1 {unit}")


def _expect_copies(copies: Counts, ranks: Sequence[int], label: str) -> None:
    for rank in ranks:
        if copies[rank] != 1:
            raise InternalError(f"{label}: rank {rank} receives {copies[rank]} copies, expected 1")
