"""What copies of hot rows are predicted to save: identities of bytes, and which rows are copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from stratarec.distributed.hot_traffic import Rates, RowWires, copy_flows, flat_flows
from stratarec.distributed.wire import Wire
from stratarec.hot.parts import Part
from stratarec.planning.copies import Copies, Ranks, choose_copies

WIDTH = 16
EVERY, NEVER = np.array([50.0]), np.array([1e-9])
"""Lookups of a row in a rank's batch."""
SLOW = Rates(inside=1e10, between=1e7, rows=1e10)


def test_bytes_between_hosts_are_those_of_the_formulas() -> None:
    row = 4 * WIDTH
    for hosts, ranks in ((2, 1), (2, 4), (4, 8), (8, 2)):
        flat, copied = (flows(EVERY, WIDTH, hosts, ranks, RowWires()) for flows in (flat_flows, copy_flows))
        assert flat.between == pytest.approx(ranks * (2 * row + 4) * (hosts - 1) / hosts)
        assert copied.between == pytest.approx((row + 1 / 8) * (hosts - 1))
        assert (copied.between < flat.between) == (2 * ranks * (1 + 2 / row) > hosts * (1 + 1 / (8 * row)))
        assert copied.touched > flat.touched
    rare = copy_flows(NEVER, WIDTH, 2, 2, RowWires())
    assert rare.between == pytest.approx(1 / 8, rel=1e-4)


def test_a_host_of_one_rank_tells_itself_nothing_and_one_host_none() -> None:
    for flows in (flat_flows, copy_flows):
        assert flows(EVERY, WIDTH, 4, 1, RowWires()).inside == 0
        assert flows(EVERY, WIDTH, 1, 4, RowWires()).between == 0


def test_wires_of_rows_and_gradients_count_by_themselves() -> None:
    narrow = Wire("int8", 0, 0).row_bytes(WIDTH)
    mixed = RowWires(rows="int8", gradients="fp32")
    assert flat_flows(EVERY, WIDTH, 2, 2, mixed).between == pytest.approx(narrow + 4 * WIDTH + 4)
    assert copy_flows(EVERY, WIDTH, 2, 2, mixed).between == pytest.approx(4 * WIDTH + 1 / 8)


def chosen(counts: Sequence[int], rates: Rates | None, budget: int | None = None, latency: float = 1e-6) -> Copies:
    part = Part(
        table="t", first=0, rows=len(counts), row_bytes=4 * WIDTH, whole=False, counts=np.array(counts, dtype=np.int64)
    )
    ranks = Ranks(hosts=2, local=2, batch=100, samples=1000, wires=RowWires())
    return choose_copies([part], [WIDTH], budget, ranks, rates, latency)


def test_rows_are_copied_where_they_save_bytes_of_a_slow_link() -> None:
    counts = [1000, 300, 100, 20, 0, 0, 0]
    found = chosen(counts, SLOW)
    assert 2 <= found.rows[0] < 7
    assert float(found.copied.between) < float(found.flat.between)
    assert found.saved_seconds > 0
    assert chosen(counts, SLOW, budget=2 * 4 * WIDTH).rows.tolist() == [2]
    assert chosen(counts, None).rows.tolist() == [7]


def test_no_rows_are_copied_where_the_link_is_fast_or_a_collective_is_dear() -> None:
    assert chosen([1000, 300], SLOW._replace(between=1e12)).rows.tolist() == [0]
    assert chosen([1000, 300], SLOW).saved_seconds > 0
    assert chosen([1000, 300], SLOW, latency=1.0).saved_seconds < 0
