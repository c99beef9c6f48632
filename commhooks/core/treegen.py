"""Tree generation: the best packing of trees into a network, with its proof.

Where in the flow: ``topology`` -> **treegen** -> ``planner`` -> ``plan``.

A packing's columns are tree pairs.  All-reduce: an in-tree that reduces and an out-tree that broadcasts, with one
root; mirrored pairs (Blink's: the same edges both ways) and rotated rings (one flow in and out per NIC) are two
families of them.  One-to-many and many-to-one: arborescences.  Many-to-many: arborescences for every root, all at one
rate.

Two drivers, one pricing oracle: ``exact`` (column generation, ``packing_exact``) and ``paper`` (multiplicative
weights and the integer program, ``packing_paper``).  Both give the prices that prove their bound.

Invariants: rates respect every capacity; ``check`` re-derives bound and feasibility from the topology alone.

Source: Blink (MLSys 2020) 3.2-3.4; see ``packing_problem`` for the theory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commhooks.core.packing_exact import Solution, solve_exact
from commhooks.core.packing_fewest import fewest_trees
from commhooks.core.packing_paper import solve_paper
from commhooks.core.packing_problem import PackingProblem
from commhooks.core.plan import COLLECTIVES, ROOTED
from commhooks.core.topology import Topology
from commhooks.core.trees import Tree, TreePair
from commhooks.errors import ConfigError, InternalError

__all__ = ["Packing", "Tree", "TreePair", "allreduce_bound", "check", "pack"]

DRIVERS = ("exact", "paper")
FEASIBILITY = 1e-7  # how far a load may overstep its capacity (rounding)


@dataclass(frozen=True)
class Packing:
    """Trees, their rates, and the proof that no packing does better than the bound.

    Parameters
    ----------
    collective, root
        What was packed.
    pairs, rates
        The trees and their rates in bytes/s, over all the collective's bytes (they sum to the total rate).
    bound_bytes_per_s
        No packing of this collective on this topology is faster.
    duals
        The price of each resource that proves the bound; the priced ones are the bottleneck.
    reason
        Why this one.
    """

    collective: str
    pairs: tuple[TreePair, ...]
    rates: tuple[float, ...]
    bound_bytes_per_s: float
    duals: tuple[tuple[str, float], ...]
    reason: str
    root: int | None = None

    @property
    def bytes_per_s(self) -> float:
        """Total rate over all the collective's bytes."""
        return float(sum(self.rates))

    @property
    def bottleneck(self) -> tuple[str, ...]:
        """The resources that set the bound, the most telling first."""
        most = max((price for _, price in self.duals), default=0.0)
        told = [(price, name) for name, price in self.duals if price > 1e-3 * most]
        return tuple(name for price, name in sorted(told, key=lambda t: (-t[0], t[1])))


def checked_call(topology: Topology, collective: str, root: int | None) -> int | None:
    """The root to use; refuses an unknown collective, and a root that is missing, unknown or not wanted.

    Raises
    ------
    ConfigError
        Naming what was given and what is expected.
    """
    if collective not in COLLECTIVES:
        raise ConfigError(f"collective {collective!r}; expected one of {', '.join(COLLECTIVES)}")
    if collective not in ROOTED:
        if root is not None:
            raise ConfigError(f"{collective} has no root, {root} was given")
        return None
    root = 0 if root is None else root
    if not 0 <= root < topology.world_size:
        raise ConfigError(f"root {root}; expected a rank 0..{topology.world_size - 1} of {topology.name!r}")
    return root


def pack(
    topology: Topology, collective: str = "all_reduce", root: int | None = None, driver: str = "exact"
) -> Packing:
    """The packing of ``collective`` on ``topology``.

    Parameters
    ----------
    topology, collective, root
        What to pack; root only for broadcast, reduce and gather (default 0).
    driver
        ``exact``: optimal to a millionth, then with as few trees as a short search finds.  ``paper``: Blink's.

    Raises
    ------
    TopologyError
        If the network doesn't connect the group; the message names the cut.
    ConfigError
        For an unknown collective, root or driver.

    Notes
    -----
    Seconds at hundreds of ranks; a linear program with a row per resource and a column per tree, a few times.
    """
    root = checked_call(topology, collective, root)
    if driver not in DRIVERS:
        raise ConfigError(f"driver {driver!r}; expected one of {', '.join(DRIVERS)}")
    if topology.world_size == 1:
        return alone(collective, root)
    problem = PackingProblem(topology, collective, root)
    if driver == "paper":
        solution = solve_paper(problem)
        return packing_of(problem, solution, "multiplicative weights, then few trees within 5 % (Blink 3.2)")
    solution, pool = solve_exact(problem)
    return packing_of(problem, fewest_trees(problem, solution, pool), "optimal by column generation")


def allreduce_bound(topology: Topology, n_bytes: float) -> float:
    """Seconds below which no schedule of trees can all-reduce ``n_bytes`` on ``topology``.

    Raises
    ------
    TopologyError
        If the network doesn't connect the group.
    """
    if topology.world_size == 1:
        return 0.0
    problem = PackingProblem(topology, "all_reduce")
    solution, _ = solve_exact(problem)
    return n_bytes / (solution.bound * problem.width)


def check(topology: Topology, packing: Packing) -> None:
    """Re-derive from the topology that a packing is feasible and that its prices prove its bound.

    Raises
    ------
    InternalError
        Naming the resource or the bound that is wrong.
    """
    if topology.world_size == 1:
        return
    problem = PackingProblem(topology, packing.collective, packing.root)
    pairs = [(p, r) for p, r in zip(packing.pairs, packing.rates, strict=True) if edge_count(p)]
    load = np.sum([problem.column(-1, pair).load * rate for pair, rate in pairs], axis=0)
    over = load > problem.capacity * (1 + FEASIBILITY)
    if over.any():
        worst = int(np.argmax(load - problem.capacity))
        raise InternalError(
            f"packing on {topology.name!r}: {problem.names[worst]} carries {load[worst]:.6g} bytes/s of "
            f"{problem.capacity[worst]:.6g}"
        )
    price = dict(packing.duals)
    bound = problem.price(np.array([price.get(name, 0.0) for name in problem.names])).bound * problem.width
    if not bound <= packing.bound_bytes_per_s * (1 + FEASIBILITY):
        raise InternalError(
            f"packing on {topology.name!r}: its prices prove {bound:.9g} bytes/s, it claims "
            f"{packing.bound_bytes_per_s:.9g}"
        )
    if packing.bytes_per_s > bound * (1 + FEASIBILITY):
        raise InternalError(
            f"packing on {topology.name!r}: rate {packing.bytes_per_s:.9g} above its bound {bound:.9g}"
        )


def edge_count(pair: TreePair) -> int:
    """Edges of both trees together."""
    return sum(len(t.members) - 1 for t in (pair.reduce, pair.broadcast) if t is not None)


def packing_of(problem: PackingProblem, solution: Solution, reason: str) -> Packing:
    """A solution in bytes/s, largest tree first (ties: by root)."""
    weights = [round(w, 9) for w in solution.weights.tolist()]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    pairs = [solution.columns[i].pair for i in order]
    rates = [float(solution.weights[i]) * problem.width for i in order]
    if problem.collective == "gather" and problem.root is not None:  # the root's own bytes are there already
        pairs.append(TreePair(None, lone_tree(problem.root, problem.size)))
        rates.append(float(solution.rate) / problem.multiplicity * problem.width)
    duals = tuple((n, float(y)) for n, y in zip(problem.names, solution.price.tolist(), strict=True) if y > 0)
    return Packing(
        problem.collective,
        tuple(pairs),
        tuple(rates),
        solution.bound * problem.width,
        duals,
        reason,
        problem.root,
    )


def lone_tree(rank: int, world_size: int) -> Tree:
    """A tree of one rank."""
    return Tree(rank, (-1,) * world_size, (0,) * world_size)


def alone(collective: str, root: int | None) -> Packing:
    """The packing of a group of one: nothing moves, at any rate."""
    tree = lone_tree(0, 1)
    reduce = tree if collective in ("all_reduce", "reduce", "reduce_scatter") else None
    broadcast = tree if collective not in ("reduce", "reduce_scatter") else None
    return Packing(
        collective, (TreePair(reduce, broadcast),), (np.inf,), np.inf, (), "one rank: nothing moves", root
    )
