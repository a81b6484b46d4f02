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
# A budget that is exceeded by as much as HiGHS allows is lowered and solved for again, by more each time.
_REPAIRS = 8
_GROWTH = 16


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
    # What every choice takes goes first: HiGHS holds constraints to a share of their bound, so small numbers count.
    least = np.sum([size.min(axis=0) for size in sizes], axis=0)
    left = [None if budget is None else int(budget - used) for budget, used in zip(budgets, least, strict=True)]
    if any(bound is not None and bound < 0 for bound in left):
        return None
    more = [size - size.min(axis=0) for size in sizes]
    bounds = list(left)
    for repair in range(_REPAIRS):
        chosen = _solve(costs, more, bounds)
        if chosen is None:
            return None
        used = np.sum([size[choice] for size, choice in zip(more, chosen, strict=True)], axis=0)
        over = [0 if bound is None else int(size - bound) for size, bound in zip(used, left, strict=True)]
        if max(over) <= 0:
            return chosen
        bounds = [
            bound if bound is None or excess <= 0 else max(bound - 2 * excess * _GROWTH**repair, 0)
            for bound, excess in zip(bounds, over, strict=True)
        ]
    return None


def _solve(
    costs: Sequence[Floats], sizes: Sequence[NDArray[np.int64]], bounds: Sequence[int | None]
) -> list[int] | None:
    lengths = [len(cost) for cost in costs]
    ends = np.cumsum([0, *lengths])
    total = int(ends[-1])
    flat = np.concatenate(costs)
    scale = max(float(sum(cost.min() for cost in costs)), float(flat.max()) * 1e-6, 1e-300)
    one_each = csr_array(
        (np.ones(total), (np.repeat(np.arange(len(costs)), lengths), np.arange(total))), shape=(len(costs), total)
    )
    constraints = [LinearConstraint(one_each, 1, 1)]
    for size, bound in zip(np.concatenate(sizes).T, bounds, strict=True):
        if bound is not None and size.max() > 0:
            # Without room every candidate that takes some is out; with room, only its share of it matters.
            row = size / bound if bound else (size > 0).astype(float)
            constraints.append(LinearConstraint(np.minimum(row, 2.0), -np.inf, 1 if bound else 0))
    result = milp(
        flat / scale * 1e3,
        integrality=np.ones(total),
        bounds=Bounds(0, 1),
        constraints=constraints,
        # Without presolve it is no slower here, and never prints: mapping a presolved solution back may, on the
        # process's standard output (seen with HiGHS 1.12), where `plan --json` writes.
        options={"mip_rel_gap": GAP / 2, "time_limit": _SECONDS, "presolve": False},
    )
    if result.x is None:
        return None
    return [int(np.argmax(result.x[first:last])) for first, last in pairwise(ends)]
