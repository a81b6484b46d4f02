"""One candidate for each table, so that the cost is least and every memory's budget holds.

A multiple-choice knapsack with fixed charges, solved as a mixed-integer program by HiGHS (Huangfu and Hall,
"Parallelizing the dual revised simplex method", 2018) through SciPy.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Floats = NDArray[np.float64]
Sizes = NDArray[np.int64]

GAP = 1e-4
"""Relative distance from the optimum at which the solver may stop."""
_SECONDS = 30.0
# A budget that is exceeded by as much as HiGHS allows is lowered and solved for again, by more each time.
_REPAIRS = 8
_GROWTH = 16


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Candidates that share something: it is paid for once, when any of them is chosen."""

    member: Sequence[NDArray[np.int64]]
    """For each table ``[candidates]`` the group of each, or -1."""
    sizes: Sizes
    """``[groups, memories]`` bytes."""
    costs: Floats
    """``[groups]``."""

    @classmethod
    def none(cls, costs: Sequence[Floats], memories: int) -> Groups:
        """No groups at all."""
        member = [np.full(len(cost), -1, dtype=np.int64) for cost in costs]
        return cls(member=member, sizes=np.zeros((0, memories), dtype=np.int64), costs=np.zeros(0))

    def used(self, chosen: Sequence[int]) -> list[int]:
        """The groups of the chosen candidates."""
        return sorted({int(table[choice]) for table, choice in zip(self.member, chosen, strict=True)} - {-1})


def solve(
    costs: Sequence[Floats], sizes: Sequence[Sizes], budgets: Sequence[int | None], groups: Groups | None = None
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
    groups : Groups
        What candidates share.

    Returns
    -------
    list of int or None
        The candidate of each table, whose total cost is within `GAP` of the optimum; None when nothing fits.
    """
    groups = groups or Groups.none(costs, len(budgets))
    # What every choice takes goes first: HiGHS holds constraints to a share of their bound, so small numbers count.
    least = np.sum([size.min(axis=0) for size in sizes], axis=0)
    left = [None if budget is None else int(budget - used) for budget, used in zip(budgets, least, strict=True)]
    if any(bound is not None and bound < 0 for bound in left):
        return None
    more = [size - size.min(axis=0) for size in sizes]
    bounds = list(left)
    for repair in range(_REPAIRS):
        chosen = _solve(costs, more, bounds, groups)
        if chosen is None:
            return None
        used = np.sum([size[choice] for size, choice in zip(more, chosen, strict=True)], axis=0)
        used = used + groups.sizes[groups.used(chosen)].sum(axis=0)
        over = [0 if bound is None else int(size - bound) for size, bound in zip(used, left, strict=True)]
        if max(over) <= 0:
            return chosen
        bounds = [
            bound if bound is None or excess <= 0 else max(bound - 2 * excess * _GROWTH**repair, 0)
            for bound, excess in zip(bounds, over, strict=True)
        ]
    return None


def _solve(
    costs: Sequence[Floats], sizes: Sequence[Sizes], bounds: Sequence[int | None], groups: Groups
) -> list[int] | None:
    """Variables: a binary for each candidate, table after table, then one for each group."""
    ends = np.cumsum([0, *(len(cost) for cost in costs)])
    flat = np.concatenate([*costs, groups.costs])
    scale = max(float(sum(cost.min() for cost in costs)), float(flat.max()) * 1e-6, 1e-300)
    constraints = [_one_each(ends, len(flat)), *_paid(ends, len(flat), groups)]
    for size, bound in zip(np.concatenate([*sizes, groups.sizes]).T, bounds, strict=True):
        if bound is not None and size.max() > 0:
            # Without room every candidate that takes some is out; with room, only its share of it matters.
            row = size / bound if bound else (size > 0).astype(float)
            constraints.append(LinearConstraint(np.minimum(row, 2.0), -np.inf, 1 if bound else 0))
    with quiet():
        result = milp(
            flat / scale * 1e3,
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            constraints=constraints,
            # Eight placements of 26 tables took 10.2 s without presolve and 12.8 s with it.
            options={"mip_rel_gap": GAP / 2, "time_limit": _SECONDS, "presolve": False},
        )
    if result.x is None:
        return None
    return [int(np.argmax(result.x[first:last])) for first, last in pairwise(ends)]


@contextmanager
def quiet() -> Iterator[None]:
    """Send the process's standard output nowhere: HiGHS 1.12 prints a line of its own there now and then, whatever its
    options say, and `plan --json` must print JSON alone."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _one_each(ends: NDArray[np.int64], variables: int) -> LinearConstraint:
    tables = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    matrix = csr_array((np.ones(len(tables)), (tables, np.arange(len(tables)))), shape=(len(ends) - 1, variables))
    return LinearConstraint(matrix, 1, 1)


def _paid(ends: NDArray[np.int64], variables: int, groups: Groups) -> list[LinearConstraint]:
    """For each table and group: the table's candidates in the group are chosen only when the group is."""
    member = np.concatenate(groups.member)
    candidate = np.flatnonzero(member >= 0)
    if not len(candidate):
        return []
    table = np.searchsorted(ends, candidate, side="right") - 1
    pairs, row = np.unique(np.stack([table, member[candidate]]), axis=1, return_inverse=True)
    rows = np.concatenate([row.ravel(), np.arange(pairs.shape[1])])
    columns = np.concatenate([candidate, ends[-1] + pairs[1]])
    values = np.concatenate([np.ones(len(candidate)), -np.ones(pairs.shape[1])])
    matrix = csr_array((values, (rows, columns)), shape=(pairs.shape[1], variables))
    return [LinearConstraint(matrix, -np.inf, 0)]
