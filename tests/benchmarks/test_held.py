"""The predictions of steps beside measured ones: what a made-up machine takes is found again from one of its cells."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.held import Machine, exchange_of, predictable, workload_of
from stratarec.distributed.measure import Collective
from stratarec.distributed.simulate import Cluster, MeasuredCosts, step_time

MODEL = {"width": 64, "ids": 1, "bottom_mlp": (32,), "top_mlp": (64,)}
LATENCY = Collective(alpha=2e-3, alpha_peer=0.0)
TRUTH = MeasuredCosts(
    flops_per_second=4e10, row_bytes_per_second=2e9, inside=LATENCY, between=LATENCY, fixed_seconds=0.03
)
# Links that bytes pass at the rate of memory and then at that of 1 Gbit/s.
CLUSTER = Cluster(
    hosts=2, ranks=2, inside_bytes_per_second=5e8, between_bytes_per_second=1 / (1 / 1e9 + 1 / 1.2e8)
)  # fmt: skip


def cell(contender: str, compression: float) -> dict[str, Any]:
    """What the made-up machine takes."""
    row = {"contender": contender, "network": "1 Gbit/s"}
    step = step_time(CLUSTER, workload_of(MODEL, 1024, compression, by_towers=True), exchange_of(row), TRUTH)
    parts = {"compute": step.compute, "dense": step.reduction, "inside": step.inside, "exchange": step.between}
    return row | {f"{name}_ms": 1e3 * seconds for name, seconds in parts.items()} | {"step_ms": 1e3 * step.total}


def test_another_cell_follows_from_the_one_that_calibrates() -> None:
    """Rates are known; copying, latency and the rest of compute are found."""
    found = Machine(cell("sptt", 1.0), workload_of(MODEL, 1024, 1.0, by_towers=True), (4e10, 2e9))
    assert found.calibration.fixed_seconds == pytest.approx(0.03, rel=1e-6)
    other = cell("towers 4, int8", 4.0)
    workload = workload_of(MODEL, 1024, 4.0, by_towers=True)
    step = step_time(found.cluster("1 Gbit/s"), workload, exchange_of(other), found.calibration)
    assert 1e3 * step.total == pytest.approx(other["step_ms"], rel=0.1)


def test_cells_by_distinct_rows_are_not_predicted() -> None:
    names = ["flat", "flat, bags", "flat, int8", "sptt", "towers 2", "towers 4, fp16"]
    assert [name for name in names if predictable({"contender": name})] == [
        "flat, bags", "sptt", "towers 2", "towers 4, fp16"
    ]  # fmt: skip
    assert exchange_of({"contender": "towers 4, fp16"}).wire == "fp16"
