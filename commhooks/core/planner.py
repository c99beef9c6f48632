"""The planner: topology in, proven plan out.

Where in the flow: ``topology`` -> ``treegen`` (optimum) -> ``preference`` (which of the near-optimal ones) ->
**planner** -> ``plan``.

Invariants: every plan is proved by counting before it leaves; it carries its reason in words; the same topology gives
the same plan (ranks still compare digests, since a linear-algebra library may differ between hosts).

Source: Blink 3.2-3.5; the split over channels with different start-up costs is Blink's section on hybrid transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from commhooks.core.packing_exact import solve_exact
from commhooks.core.packing_problem import PackingProblem
from commhooks.core.plan import Plan
from commhooks.core.preference import NOMINAL_BYTES, Candidate, judge, prefer, rotated_rings
from commhooks.core.topology import Topology, rate_text
from commhooks.core.treegen import Packing, alone, checked_call, pack, packing_of
from commhooks.core.trees import edges_of
from commhooks.errors import ConfigError


def plan_for(
    topology: Topology,
    collective: str = "all_reduce",
    root: int | None = None,
    *,
    driver: str = "exact",
    startup_s: Mapping[int, float] | None = None,
    n_bytes: float = 0.0,
) -> Plan:
    """See ``plan.make_plan``, which is the door to this."""
    packing = best_packing(topology, collective, root, driver=driver, n_bytes=n_bytes)
    plan = plan_of(topology.world_size, packing)
    if startup_s:
        plan = replace(plan, shares=shares_with_startup(plan, startup_s, n_bytes))
    plan.prove()
    return plan


def best_packing(
    topology: Topology,
    collective: str = "all_reduce",
    root: int | None = None,
    *,
    driver: str = "exact",
    n_bytes: float = 0.0,
) -> Packing:
    """The packing to run: the preferred one (``exact``) or Blink's (``paper``)."""
    if driver != "exact":
        return pack(topology, collective, root, driver)
    root = checked_call(topology, collective, root)
    if topology.world_size == 1:
        return alone(collective, root)
    problem = PackingProblem(topology, collective, root)
    optimum, pool = solve_exact(problem)
    best, looked_at = prefer(problem, optimum, pool, n_bytes or NOMINAL_BYTES)
    solution = replace(optimum, rate=best.rate, columns=best.columns, weights=best.weights)
    packing = packing_of(problem, solution, "")
    return replace(packing, reason=_reason(packing, best, looked_at))


def plan_of(world_size: int, packing: Packing) -> Plan:
    """A packing's trees and their shares of the bytes."""
    total = packing.bytes_per_s
    shares = tuple(r / total for r in packing.rates) if np.isfinite(total) else (1.0,)
    return Plan(
        world_size,
        packing.collective,
        packing.pairs,
        shares,
        total,
        packing.bound_bytes_per_s,
        packing.reason,
        packing.root,
    )


def _reason(packing: Packing, best: Candidate, looked_at: Sequence[Candidate]) -> str:
    depth = max(p.depth for p in packing.pairs)
    words = (
        f"{best.what}: {len(best.columns)} tree{'s' if len(best.columns) > 1 else ''}, {depth} hops, "
        f"at most {best.neighbours} neighbour{'s' if best.neighbours > 1 else ''} per rank; "
        f"{rate_text(packing.bytes_per_s)}, {100 * packing.bytes_per_s / packing.bound_bytes_per_s:.1f} % of the "
        f"bound, which {_few(packing.bottleneck)} set{'s' if len(packing.bottleneck) == 1 else ''}"
    )
    other = next((c for c in looked_at if c.what != best.what), None)
    if other is not None:
        words += f"; next best: {other.what}, expected {100 * (best.score / other.score - 1):.1f} % slower"
    return words


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def shares_with_startup(plan: Plan, startup_s: Mapping[int, float], n_bytes: float) -> tuple[float, ...]:
    """Shares such that all trees end together although some channels cost time before their first byte.

    Parameters
    ----------
    plan
        Shares in proportion to the rates.
    startup_s
        Seconds before the first byte, per channel (Blink: switching peer access off for PCIe).
    n_bytes
        The size to split.

    Raises
    ------
    ConfigError
        Without a size there is nothing to split.
    """
    if not n_bytes > 0:
        raise ConfigError(
            f"start-up costs {dict(startup_s)} need the size to split (n_bytes), {n_bytes} was given"
        )
    rates = [share * plan.bytes_per_s for share in plan.shares]
    delays = [
        max((startup_s.get(channel, 0.0) for _, _, channel in edges_of(p)), default=0.0) for p in plan.pairs
    ]
    sizes = split_bytes(n_bytes, rates, delays)
    smallest = 1e-12 * n_bytes  # a tree that can't pay for its start-up keeps a share that rounds to nothing
    kept = [max(size, smallest) for size in sizes]
    return tuple(size / sum(kept) for size in kept)


def split_bytes(n_bytes: float, rates: Sequence[float], startup_s: Sequence[float]) -> list[float]:
    """Bytes for each of several ways, so that all that get any finish together.

    For two ways this is Blink's  D_P = (D B_P - T B_P B_N) / (B_P + B_N),  0 if that is negative.
    """
    order = sorted(range(len(rates)), key=lambda i: (startup_s[i], i))
    sizes = [0.0] * len(rates)
    for count in range(len(order), 0, -1):
        members = order[:count]
        finish = (n_bytes + sum(rates[i] * startup_s[i] for i in members)) / sum(rates[i] for i in members)
        if finish > startup_s[members[-1]] or count == 1:
            for i in members:
                sizes[i] = rates[i] * (finish - startup_s[i])
            return sizes
    return sizes


def ring_bytes_per_s(topology: Topology, collective: str = "all_reduce") -> float | None:
    """The rate of a ring in rank order (what Gloo and NCCL do), or None where the routes close no such ring.

    Only for the collectives that rings serve: all_reduce, all_gather, reduce_scatter.
    """
    if collective not in ("all_reduce", "all_gather", "reduce_scatter") or topology.world_size == 1:
        return None
    problem = PackingProblem(topology, collective)
    ring = rotated_rings(problem, range(problem.size))
    if ring is None:
        return None
    return judge(problem, "ring", ring, np.ones(len(ring)), NOMINAL_BYTES).rate * problem.width


def resource_loads(topology: Topology, packing: Packing) -> dict[str, float]:
    """The share of its capacity that a packing uses of each resource."""
    if topology.world_size == 1:
        return {}
    problem = PackingProblem(topology, packing.collective, packing.root)
    pairs = [(p, r) for p, r in zip(packing.pairs, packing.rates, strict=True) if edges_of(p)]
    load = np.sum([problem.column(-1, p).load * r for p, r in pairs], axis=0)
    return {n: float(x / c) for n, x, c in zip(problem.names, load, problem.capacity, strict=True) if c > 0}
