"""The same rate with fewer trees.

Where in the flow: ``packing_exact`` (columns, rate) -> **here** -> ``treegen``; ``packing_paper`` uses its parts.

A linear program's optimum spreads over up to as many trees as there are tight resources; every tree costs slices of
its own and start-up, so fewer are better.

1. Where the rate is a whole number of capacity units, an integer program asks for the fewest trees in whole units
   (Edmonds: for one root such a packing exists; if the columns at hand lack it, multiplicative weights supply more).
2. Otherwise (all-reduce often needs halves, thirds, sevenths) reweighted linear programs: columns that carried little
   get dearer, so that their bytes move to the others.

Invariants: the answer is never worse than what was given (if a search ends without one, the given one stays).  Searches
are limited by nodes and rounds, not by time, so that every rank that runs them gets the same answer.

Sources: Blink 3.2.1 (tree minimisation); Candes, Wakin and Boyd 2008 (reweighting).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from commhooks.core.packing_exact import ColumnPool, Solution, feasible
from commhooks.core.packing_mwu import multiplicative_weights
from commhooks.core.packing_problem import Column, PackingProblem, Vector

MAX_COLUMNS = 96
NODE_LIMIT = 10
_ROUNDS = 6
_MORE = (0.05, 0.3, 0.1, 0.2)  # steps of the weights: each finds other trees
_SLACK = 1e-8


def fewest_trees(problem: PackingProblem, solution: Solution, pool: ColumnPool) -> Solution:
    """A solution of the same rate with as few trees as the searches find."""
    if len(solution.columns) <= len(problem.groups):
        return solution
    columns = list(dict.fromkeys([*solution.columns, *pool.columns]))[:MAX_COLUMNS]
    units = whole_units(problem, solution.rate)
    rooted = problem.collective in ("broadcast", "reduce")
    if units is None or len(problem.groups) > 1:
        return fewer(solution, sparser(problem, solution, columns, solution.rate))
    best = fewer(solution, whole_trees(problem, solution, columns, solution.rate / units))
    for epsilon in _MORE if rooted else ():
        if len(best.columns) <= units:
            break
        more = multiplicative_weights(problem, epsilon, patience=400, minimum=100, tilt=0.5)
        columns = list(dict.fromkeys([*best.columns, *more.columns]))[:MAX_COLUMNS]
        best = fewer(best, whole_trees(problem, best, columns, solution.rate / units))
    return best


def fewer(given: Solution, other: Solution | None) -> Solution:
    """``other`` if it has fewer trees and no less rate."""
    if other is None or len(other.columns) >= len(given.columns):
        return given
    return other if other.rate >= given.rate * (1 - 10 * _SLACK) else given


def whole_units(problem: PackingProblem, rate: float) -> int | None:
    """The rate in units of the smallest capacity, if that divides all the others and the rate."""
    real = problem.scaled[~problem.negligible]
    ratio = np.append(real, rate) / real.min()
    return round(float(ratio[-1])) if (np.abs(ratio - np.round(ratio)) < 1e-6).all() else None


def chosen(
    problem: PackingProblem, given: Solution, columns: Sequence[Column], weights: Vector
) -> Solution | None:
    """The columns that got weight, scaled into the capacities."""
    kept = np.flatnonzero(weights > 1e-7 * weights.sum())
    if not len(kept):
        return None
    used = [columns[i] for i in kept.tolist()]
    rate, scaled = feasible(problem, used, weights[kept])
    return Solution(rate, tuple(used), scaled, given.bound, given.price)


def whole_trees(
    problem: PackingProblem, given: Solution, columns: Sequence[Column], unit: float, at_most: bool = False
) -> Solution | None:
    """The fewest trees with weights in whole units that keep the given rate (one root or one group).

    With ``at_most``, weights are 0 or 1 unit and the rate is maximised instead (Blink's program).
    """
    count = len(columns)
    loads = np.stack([c.load for c in columns], axis=1)
    rows = np.flatnonzero((loads > 0).any(axis=1))
    loads = loads[rows] / problem.scaled[rows, None] * unit
    most = np.minimum(np.floor(1.0 / loads.max(axis=0) + 1e-9), 1.0 if at_most else np.inf)
    fits = LinearConstraint(np.hstack([loads, np.zeros_like(loads)]), -np.inf, 1 + 1e-9)
    opens = LinearConstraint(np.hstack([np.eye(count), -np.diag(most)]), -np.inf, 0)
    keeps = LinearConstraint(
        np.concatenate([np.ones(count), np.zeros(count)]),
        0 if at_most else given.rate / unit * (1 - _SLACK),
        np.inf,
    )
    result = milp(
        np.concatenate([np.full(count, -1.0 if at_most else 0.0), np.full(count, 1e-4 if at_most else 1.0)]),
        constraints=[fits, opens, keeps],
        integrality=np.ones(2 * count),
        bounds=Bounds(0, np.concatenate([most, np.ones(count)])),
        options={"node_limit": NODE_LIMIT},
    )
    return None if result.x is None else chosen(problem, given, columns, np.round(result.x[:count]) * unit)


def sparser(
    problem: PackingProblem, given: Solution, columns: Sequence[Column], rate: float
) -> Solution | None:
    """Few trees with free weights that keep ``rate``: linear programs whose costs fall on the light columns."""
    loads = np.stack([c.load for c in columns], axis=1)
    rows = np.flatnonzero((loads > 0).any(axis=1))
    loads = loads[rows] / problem.scaled[rows, None]
    share = rate / problem.multiplicity
    member = np.array([[c.group == g for c in columns] for g in problem.groups], dtype=np.float64)
    weight_of = {id(c): w for c, w in zip(given.columns, given.weights.tolist(), strict=True)}
    weights = np.array([weight_of.get(id(c), 0.0) for c in columns])
    best: Solution | None = None
    for _ in range(_ROUNDS):
        result = linprog(
            1.0 / (weights + 0.05 * share),
            A_ub=np.vstack([loads, -member]),
            b_ub=np.concatenate([np.ones(len(rows)), np.full(len(member), -share * (1 - _SLACK))]),
            bounds=(0, None),
            method="highs",
        )
        if result.status != 0:
            break
        weights = result.x
        found = chosen(problem, given, columns, weights)
        if found is not None and (best is None or len(found.columns) < len(best.columns)):
            best = found
    return best
