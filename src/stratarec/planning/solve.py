"""Choose one candidate for each table so that the total cost is smallest and no memory exceeds its
budget.

This is a multiple-choice knapsack problem with fixed charges. SciPy's HiGHS (Huangfu and Hall,
"Parallelizing the dual revised simplex method", 2018) solves it as a mixed-integer program.
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
# HiGHS may exceed a budget by its tolerance. Then the budget is lowered, each time by more, and
# solved for again.
_REPAIRS = 8
_GROWTH = 16


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Groups of candidates that share a cost and bytes, which count once if any candidate of the
    group is chosen.
    """

    member: Sequence[NDArray[np.int64]]
    """For each table, the group of each candidate or -1, ``[candidates]``."""
    sizes: Sizes
    """Bytes of each group in each memory, ``[groups, memories]``."""
    costs: Floats
    """Cost of each group, ``[groups]``."""

    @classmethod
    def none(cls, costs: Sequence[Floats], memories: int) -> Groups:
        """Return an empty set of groups.

        Parameters
        ----------
        costs : sequence of ndarray
            Costs of the candidates of each table.
        memories : int
            Number of memories.
        """
        member = [np.full(len(cost), -1, dtype=np.int64) for cost in costs]
        return cls(member=member, sizes=np.zeros((0, memories), dtype=np.int64), costs=np.zeros(0))

    def used(self, chosen: Sequence[int]) -> list[int]:
        """Return the sorted groups of the chosen candidates."""
        return sorted(
            {int(table[choice]) for table, choice in zip(self.member, chosen, strict=True)} - {-1}
        )


def solve(
    costs: Sequence[Floats],
    sizes: Sequence[Sizes],
    budgets: Sequence[int | None],
    groups: Groups | None = None,
) -> list[int] | None:
    """Return the candidate of each table with which the total cost is smallest.

    Parameters
    ----------
    costs : sequence of ndarray
        For each table, the cost of each candidate, ``[candidates]``.
    sizes : sequence of ndarray
        For each table, the int64 bytes of each candidate, ``[candidates, memories]``.
    budgets : sequence of int or None
        Available bytes of each memory; None for no limit.
    groups : Groups
        Costs and bytes that candidates share.

    Returns
    -------
    list of int or None
        Index of the chosen candidate of each table. Their total cost is within `GAP` of the
        optimum. None if no choice fits.
    """
    groups = groups or Groups.none(costs, len(budgets))
    # Subtract the bytes that every choice needs. HiGHS checks constraints relative to their bound,
    # so with a smaller bound the check is more exact.
    least = np.sum([size.min(axis=0) for size in sizes], axis=0)
    remaining = [
        None if budget is None else int(budget - used) for budget, used in zip(budgets, least, strict=True)
    ]
    if any(bound is not None and bound < 0 for bound in remaining):
        return None
    more = [size - size.min(axis=0) for size in sizes]
    bounds = list(remaining)
    for repair in range(_REPAIRS):
        chosen = _solve(costs, more, bounds, groups)
        if chosen is None:
            return None
        used = np.sum([size[choice] for size, choice in zip(more, chosen, strict=True)], axis=0)
        used = used + groups.sizes[groups.used(chosen)].sum(axis=0)
        over = [
            0 if bound is None else int(size - bound) for size, bound in zip(used, remaining, strict=True)
        ]
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
    """Solve the integer program once. It has a binary variable per candidate, table by table, then
    one per group.
    """
    ends = np.cumsum([0, *(len(cost) for cost in costs)])
    flat = np.concatenate([*costs, groups.costs])
    scale = max(float(sum(cost.min() for cost in costs)), float(flat.max()) * 1e-6, 1e-300)
    constraints = [_one_each(ends, len(flat)), *_paid(ends, len(flat), groups)]
    for size, bound in zip(np.concatenate([*sizes, groups.sizes]).T, bounds, strict=True):
        if bound is not None and size.max() > 0:
            # With a bound of 0, no candidate that needs this memory may be chosen. Otherwise sizes
            # are shares of it.
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
    """Discard the process's standard output: HiGHS 1.12 sometimes prints a line there despite its
    options, and `plan --json` must print only JSON."""
    sys.stdout.flush()
    stdout, devnull = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(devnull)


def _one_each(ends: NDArray[np.int64], variables: int) -> LinearConstraint:
    tables = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    matrix = csr_array(
        (np.ones(len(tables)), (tables, np.arange(len(tables)))), shape=(len(ends) - 1, variables)
    )
    return LinearConstraint(matrix, 1, 1)


def _paid(ends: NDArray[np.int64], variables: int, groups: Groups) -> list[LinearConstraint]:
    """Return constraints by which a chosen candidate also requires that its group is paid for."""
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
