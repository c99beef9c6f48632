"""The packing as Blink published it: multiplicative weights, then as few trees as possible.

Where in the flow: ``packing_problem`` -> **here** -> ``treegen`` (driver ``paper``).

1. Multiplicative weights give many trees (``packing_mwu``).
2. An integer program chooses among them: weights of nothing or one unit, most rate, then fewest.
3. If that is more than 5 % below step 1, weights may be fractions: as few trees as keep 95 % of the bound.

Invariants: same problem, same certificate as the exact driver; within epsilon and the 5 % of it.

Source: Blink 3.2 and 3.2.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commhooks.core.packing_exact import Solution
from commhooks.core.packing_fewest import sparser, whole_trees, whole_units
from commhooks.core.packing_mwu import EPSILON, multiplicative_weights
from commhooks.core.packing_problem import Column, PackingProblem

THRESHOLD = 0.05  # how much rate the paper gives up for fewer trees
_CANDIDATES = 64  # the heaviest trees; the light ones are there by chance of the order


def solve_paper(problem: PackingProblem, epsilon: float = EPSILON) -> Solution:
    """All three steps (for many roots at once without the second, which the paper has for one root only)."""
    found = multiplicative_weights(problem, epsilon)
    enough = (1 - THRESHOLD) * found.bound
    if len(found.columns) == 1:
        return found
    if len(problem.groups) == 1:
        heaviest = [found.columns[i] for i in np.argsort(-found.weights, kind="stable")[:_CANDIDATES]]
        whole = whole_trees(problem, found, heaviest, one_unit(problem, heaviest), at_most=True)
        if whole is not None and whole.rate >= enough:
            return whole
    part = sparser(problem, found, found.columns, enough)
    return found if part is None or part.rate < enough * (1 - 1e-6) else part


def one_unit(problem: PackingProblem, columns: Sequence[Column]) -> float:
    """The paper's one link: what every capacity is a multiple of, otherwise what the widest tree takes."""
    unit = float(problem.scaled[~problem.negligible].min())
    if whole_units(problem, unit) is not None:
        return unit
    return max(float((problem.scaled[c.load > 0] / c.load[c.load > 0]).min()) for c in columns)
