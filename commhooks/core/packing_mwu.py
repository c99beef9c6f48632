"""Multiplicative weights: packing by making what is used dearer.

Where in the flow: ``packing_problem`` -> **here** -> ``packing_paper`` (Blink's driver) and ``packing_fewest`` (which
wants many different good trees to choose from).

1. Every resource has a length, 1 / capacity at first.
2. Take the shortest tree (of each group), send as much over it as its narrowest resource takes, make what it used
   longer by (1 + epsilon x share of the capacity); repeat.
3. Scale all weights into the capacities.  The lengths are prices, so they prove how far from the optimum this is:
   stop within epsilon.

Invariants: same problem, same pricing oracle, same certificate as the exact driver.

Source: Garg and Koenemann 1998; Blink 3.2.
"""

from __future__ import annotations

import numpy as np

from commhooks.core.packing_exact import Solution, feasible, uniform_price
from commhooks.core.packing_problem import Column, PackingProblem

EPSILON = 0.05
MAX_STEPS = 20_000
_GOLDEN = 0.618033988749895


def multiplicative_weights(
    problem: PackingProblem,
    epsilon: float = EPSILON,
    patience: int = MAX_STEPS,
    minimum: int = 0,
    tilt: float = 0.0,
) -> Solution:
    """A packing within ``epsilon`` of the bound that its own lengths prove.

    Parameters
    ----------
    epsilon
        How far from the bound to stop; also the step of the lengths.
    patience, minimum
        Most and fewest steps.
    tilt
        Begin with lengths up to this much longer, by no pattern: on symmetric networks ties would otherwise give the
        same few trees over and over.
    """
    price = uniform_price(problem) * (1 + tilt * (np.arange(len(problem.names)) * _GOLDEN % 1))
    number: dict[tuple[int, object], int] = {}
    columns: list[Column] = []
    weights: list[float] = []
    bound, best = np.inf, price
    total, sent = np.zeros(len(problem.names)), 0.0
    for step in range(patience):
        offer = problem.price(price)
        if offer.bound < bound:
            bound, best = offer.bound, price
        cheapest = offer.columns[: len(problem.groups)]
        load = np.sum([c.load for c in cheapest], axis=0)
        used = load > 0
        amount = float((problem.scaled[used] / load[used]).min())
        for column in cheapest:
            at = number.setdefault((column.group, column.pair), len(columns))
            if at == len(columns):
                columns.append(column)
                weights.append(0.0)
            weights[at] += amount
        total, sent = total + amount * load, sent + amount
        rate = sent * problem.multiplicity / float((total / np.maximum(problem.scaled, 1e-300)).max())
        if rate >= bound * (1 - epsilon) and step >= minimum:
            break
        price = price.copy()
        price[used] *= 1 + epsilon * amount * load[used] / problem.scaled[used]
        price /= price.max()
    rate, scaled = feasible(problem, columns, np.array(weights))
    return Solution(rate, tuple(columns), scaled, float(bound), best)
