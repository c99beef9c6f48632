"""The exact packing: column generation with a certificate.

Where in the flow: ``packing_problem`` -> **here** -> ``treegen``.

1. Solve the linear program over the columns at hand (scipy's HiGHS).
2. Take its prices and ask the pricing oracle for the cheapest columns, and the bound that these prices prove.
3. Stop when the rate is within the tolerance of the best bound; otherwise add the columns and go on.

Invariants: the returned weights respect every capacity (they are scaled down by whatever the solver overstepped);
the returned prices prove the returned bound, whether or not the tolerance was reached.

Sources: Dantzig and Wolfe 1960 (column generation); Barahona 1995 (packing spanning trees this way).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from commhooks.core.packing_problem import Column, PackingProblem, Vector
from commhooks.errors import InternalError

TOLERANCE = 1e-6
MAX_ROUNDS = 2000
_BURST = 32  # further cheap trees per round, each after dearer prices for what the last one used
_TIE = 1e-9


@dataclass(frozen=True, eq=False)
class Solution:
    """A packing in scaled units: total rate, weights of the columns, and the proof that it can't be beaten."""

    rate: float
    columns: tuple[Column, ...]
    weights: Vector
    bound: float
    price: Vector


class ColumnPool:
    """Different columns, in order of arrival, and their loads as a matrix."""

    def __init__(self, problem: PackingProblem) -> None:
        self.problem = problem
        self.columns: list[Column] = []
        self._seen: set[tuple[int, object]] = set()

    def add(self, columns: Iterable[Column]) -> int:
        """Take in those that are new; returns how many."""
        before = len(self.columns)
        for column in columns:
            key = (column.group, column.pair)
            if key not in self._seen:
                self._seen.add(key)
                self.columns.append(column)
        return len(self.columns) - before


def solve_master(problem: PackingProblem, columns: list[Column]) -> tuple[float, Vector, Vector]:
    """The linear program over ``columns``: x, weights, prices of the resources (scaled units)."""
    loads = np.stack([c.load for c in columns], axis=1) / np.maximum(problem.scaled, 1e-300)[:, None]
    rows = np.flatnonzero((loads > 0).any(axis=1))
    number = {g: i for i, g in enumerate(problem.groups)}
    member = np.zeros((len(number), len(columns)))
    member[[number[c.group] for c in columns], np.arange(len(columns))] = -1.0
    matrix = np.block([[np.ones((len(number), 1)), member], [np.zeros((len(rows), 1)), loads[rows]]])
    right = np.concatenate([np.zeros(len(number)), np.ones(len(rows))])
    gain = np.zeros(len(columns) + 1)
    gain[0] = -1.0
    result = linprog(gain, A_ub=matrix, b_ub=right, bounds=(0, None), method="highs")
    if result.status != 0:
        raise InternalError(
            f"packing {problem.topology.name!r}: the linear program ended with {result.message!r}"
        )
    price = np.zeros(len(problem.names))
    price[rows] = np.maximum(0.0, -result.ineqlin.marginals[len(number) :]) / problem.scaled[rows]
    return float(result.x[0]), np.maximum(0.0, result.x[1:]), price


def feasible(problem: PackingProblem, columns: list[Column], weights: Vector) -> tuple[float, Vector]:
    """Scale ``weights`` into the capacities, and every group down to the slowest one; returns the total rate."""
    load = np.stack([c.load for c in columns], axis=1) @ weights
    used = load > 0
    over = float((load[used] / problem.scaled[used]).max(initial=1.0))
    weights = weights / over
    rate_of = dict.fromkeys(problem.groups, 0.0)
    for column, weight in zip(columns, weights.tolist(), strict=True):
        rate_of[column.group] += weight
    slowest = min(rate_of.values())
    if slowest > 0:
        weights = weights * np.array([slowest / rate_of[c.group] for c in columns])
    return slowest * problem.multiplicity, weights


def solve_exact(
    problem: PackingProblem,
    seeds: Iterable[Column] = (),
    tolerance: float = TOLERANCE,
    max_rounds: int = MAX_ROUNDS,
) -> tuple[Solution, ColumnPool]:
    """Column generation from ``seeds`` until the certificate is within ``tolerance``.

    Returns
    -------
    The solution and all columns met on the way (candidates for a packing of fewer trees).
    """
    pool = ColumnPool(problem)
    best = uniform_price(problem)
    offer = problem.price(best)
    bound = offer.bound
    pool.add(seeds)
    pool.add(offer.columns)
    pool.add(_burst(problem, best, offer.columns))
    weights: Vector = np.zeros(0)
    for _ in range(max_rounds):
        x, weights, price = solve_master(problem, pool.columns)
        rate = x * problem.multiplicity
        point = _tie_break(problem, problem.symmetric(price))
        if problem.pricing_is_dear and pool.add(_bargains(problem, point)):
            continue
        offer = problem.price(point)
        if offer.bound < bound:
            bound, best = offer.bound, point
        if rate >= bound * (1 - tolerance):
            break
        if not pool.add(offer.columns) + pool.add(_burst(problem, point, offer.columns)):
            break  # the solver's own tolerance is reached; the bound says how far that is from the optimum
    return _support(problem, pool.columns[: len(weights)], weights, bound, best), pool


def _support(
    problem: PackingProblem, columns: list[Column], weights: Vector, bound: float, price: Vector
) -> Solution:
    """The solution without the columns that carry nothing."""
    rate, weights = feasible(problem, columns, weights)
    used = np.flatnonzero(weights > 1e-9 * rate)
    kept = [columns[i] for i in used]
    rate, weights = feasible(problem, kept, weights[used])
    return Solution(rate, tuple(kept), weights, bound, price)


def uniform_price(problem: PackingProblem) -> Vector:
    """Prices at which every full resource costs the same: 1 / capacity, as multiplicative weights start."""
    price: Vector = np.zeros(len(problem.names))
    real = ~problem.negligible
    price[real] = 1.0 / (problem.scaled[real] * real.sum())
    return price


def _tie_break(problem: PackingProblem, price: Vector) -> Vector:
    """Free resources aren't alike: a trace of 1 / capacity prefers the wide ones.  Any price is a valid certificate."""
    worth = float(problem.scaled @ np.where(problem.negligible, 0.0, price))
    return price + _TIE * worth * uniform_price(problem)


def _bargains(problem: PackingProblem, point: Vector) -> list[Column]:
    """Columns cheaper than 1 from the quick oracles, so that the full one is asked only when they find nothing."""
    offers = problem.quick_columns(point)
    return [c for c in offers if float(c.load @ point) < 1 - 1e-6]


def _burst(problem: PackingProblem, price: Vector, found: Iterable[Column]) -> list[Column]:
    """More columns from one point: after each tree, what it used gets dearer (a short run of multiplicative weights).

    This is what keeps the number of linear programs small: 3 instead of 20 for a DGX-1V.
    """
    if len(problem.groups) > 1:
        return []
    columns: list[Column] = []
    last = next(iter(found))
    for _ in range(_BURST):
        price = problem.symmetric(price * (1 + 0.3 * last.load / max(1.0, float(last.load.max()))))
        again = problem.quick_column(price)
        if again is None:
            break
        columns.append(again)
        last = again
    return columns
