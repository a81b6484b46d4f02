"""Costs of the engine beside bytes: the fit finds what lines were made of, and plans count it."""

from __future__ import annotations

import numpy as np
import pytest

from stratarec.planning.engine_costs import WorkCosts, _fitted, moved_in_level0
from stratarec.planning.memories import DramTier
from stratarec.planning.plan import Seconds
from stratarec.training.run import forecast
from stratarec.training.run.forecast import StepForecast


def test_the_fit_finds_the_costs_that_lines_were_made_of() -> None:
    draws = np.random.default_rng(0)
    costs = np.array([1.0, 2e-4, 3e-5, 4e-8, 5e-8])
    counts = draws.random((20, 5)) * [1e-2, 0, 30, 1e5, 1e5] + [0, 1, 0, 0, 0]
    found = WorkCosts(**_fitted(np.column_stack([counts, counts @ costs])))
    assert [found.bytes_factor, found.step, found.table, found.lookup, found.row] == pytest.approx(costs, rel=1e-3)


def test_bytes_alone_count_where_nothing_was_measured() -> None:
    assert WorkCosts().seconds(0.5, 1e6, 1e6) == 0.5


def test_more_rows_take_more_bytes_of_level0() -> None:
    from stratarec.planning.bytes import RowShape

    dram = DramTier(sequential_bytes_per_second=4e10, row_bytes_per_second=1e10, bytes=1 << 34)
    shape = RowShape(width=16, row_state=True, full_state=0)
    few, many = (moved_in_level0(shape, 1000, distinct, dram) for distinct in (10, 900))
    assert 0 < few < many


@pytest.mark.parametrize(
    ("cores", "threads", "lookahead", "expected"),
    [(2, 2, 1, 1 + 2 + 4), (2, 1, 1, 3.5), (4, 1, 1, 3.0), (2, 2, 0, 1 + 2 + 4 + 1.5), (2, 2, 1, 20.0)],
)
def test_work_ahead_takes_the_cores_that_training_leaves(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, lookahead: int, expected: float
) -> None:
    monkeypatch.setattr(forecast, "cores", lambda: cores)
    device = 20.0 if expected == 20 else 1.5
    tables = Seconds(compute=1.0, staging=4.0, device=device)
    step = StepForecast(samples=8, tables=tables, network=2.0, lookahead=lookahead, threads=threads).step
    assert step == expected
