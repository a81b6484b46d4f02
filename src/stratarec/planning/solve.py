"""One candidate for each table, so that the cost is least and every memory's budget holds.

A multiple-choice knapsack, solved as a mixed-integer program by HiGHS (Huangfu and Hall, "Parallelizing the dual
revised simplex method", 2018) through SciPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Floats = NDArray[np.float64]

GAP = 1e-4
"""Relative distance from the optimum at which the solver may stop."""
_SECONDS = 30.0
# HiGHS holds a constraint to 1e-6 of its bound; a budget that is exceeded by that much is lowered and solved again.
_REPAIRS = 8


def solve(
    costs: Sequence[Floats], sizes: Sequence[NDArray[np.int64]], budgets: Sequence[int | None]
) -> list[int] | None:
    """The choice of least total cost.

    Parameters
    ----------
    costs : sequence of ndarray
        For each table ``[candidates]``.
    sizes : sequence of ndarray
        For each table ``[candidates, memories]`` int64 bytes.
    budgets : sequence of int or None
        Bytes of each memory; None for no limit.

    Returns
    -------
    list of int or None
        The candidate of each table, whose total cost is within `GAP` of the optimum; None when nothing fits.
    """
    bounds = [None if budget is None else float(budget) for budget in budgets]
    for _ in range(_REPAIRS):
        chosen = _solve(costs, sizes, bounds)
        if chosen is None:
            return None
        used = np.sum([table[choice] for table, choice in zip(sizes, chosen, strict=True)], axis=0)
        over = [0 if budget is None else int(size) - budget for size, budget in zip(used, budgets, strict=True)]
        if max(over) <= 0:
            return chosen
        for place, excess in enumerate(over):
            bound = bounds[place]
            if bound is not None and excess > 0:
                bounds[place] = bound - 2 * excess
    return None


def _solve(
    costs: Sequence[Floats], sizes: Sequence[NDArray[np.int64]], bounds: Sequence[float | None]
) -> list[int] | None:
    lengths = [len(cost) for cost in costs]
    ends = np.cumsum([0, *lengths])
    total = int(ends[-1])
    # The difference from a table's cheapest candidate is what the choice is about; the gap refers to the whole.
    flat = np.concatenate(costs)
    scale = max(float(sum(cost.min() for cost in costs)), float(flat.max()) * 1e-6, 1e-300)
    one_each = csr_array(
        (np.ones(total), (np.repeat(np.arange(len(costs)), lengths), np.arange(total))), shape=(len(costs), total)
    )
    constraints = [LinearConstraint(one_each, 1, 1)]
    size = np.concatenate(sizes)
    for place, bound in enumerate(bounds):
        if bound is not None:
            if bound <= 0:
                constraints.append(LinearConstraint((size[:, place] > 0).astype(float), -np.inf, 0))
            else:
                constraints.append(LinearConstraint(size[:, place] / bound, -np.inf, 1))
    result = milp(
        flat / scale * 1e3,
        integrality=np.ones(total),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": GAP / 2, "time_limit": _SECONDS},
    )
    if result.x is None:
        return None
    return [int(np.argmax(result.x[first:last])) for first, last in pairwise(ends)]
