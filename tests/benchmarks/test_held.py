"""The predictions of steps beside measured ones: what a made-up machine takes is found again from its cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.held import CALIBRATING, Cell, Network, distinct_rows, held, workload_of
from benchmarks.towers_ranks import PROBED
from stratarec.planning.step_model import step_time

MODEL: dict[str, Any] = {"width": 64, "ids": 1, "bottom_mlp": (32,), "top_mlp": (64,)}
TRUTH = {
    "flops_per_second": 4e10, "fixed_seconds": 0.03, "sptt_seconds": 0.01, "packed_seconds": 1e-9,
    "parameter_seconds": 2e-8,
}  # fmt: skip
OTHERS = ("flat", "flat, int8", "flat, towers 4", "towers 4", "towers 4, fp16")
RATES = {"unshaped": 1e9, "1 Gbit/s": 1.2e8}


def probes(rate: float) -> dict[str, list[float]]:
    """Of hosts with a link of so many bytes a second; a host has 1e9 inside."""
    size = PROBED[1]
    large = {"all": 4 * size / rate, "inside": size / 1e9, "between": 2 * size / rate}
    small = {"all": 3e-3, "inside": 1e-3, "between": 2e-3}
    return {name: [small[name], small[name] + large[name]] for name in small}


def test_other_cells_follow_from_those_that_calibrate(tmp_path: Path) -> None:
    """All networks, wires, distinct rows and another compression; without noise, to the bit of a float or so."""
    rows, distinct = [], distinct_rows(MODEL, 50)
    for name, rate in RATES.items():
        for contender in (*CALIBRATING, *OTHERS):
            cell, network = Cell.of(contender), Network(probes(rate))
            workload = workload_of(MODEL, cell, distinct)
            step = step_time(workload, network.machine(**TRUTH), exchange=cell.exchange)
            rows.append({"model": "m", "network": name, "contender": contender, "step_ms": 1e3 * step.total})
    given = [{"model": "m", "network": name, **probes(rate)} for name, rate in RATES.items()]
    path = tmp_path / "towers.json"
    path.write_text(json.dumps({
        "config": {"models": {"m": MODEL}, "most_rows_a_table": 50}, "samples": {"rows": rows, "probes": given},
    }))  # fmt: skip
    metrics, lines = held(path, one="m")
    assert len(lines) == 2 * (len(rows) - len(CALIBRATING))  # by both ways
    assert metrics["held_error_max_each_model"] == pytest.approx(0, abs=1e-6)
    assert metrics["share_within_15"] == metrics["held_choice_right_one_model"] == 1


def test_names_of_contenders() -> None:
    assert Cell.of("flat").distinct
    assert not Cell.of("flat, bags").distinct
    flat, towers = Cell.of("flat, towers 4"), Cell.of("towers 4, fp16")
    assert (flat.exchange.kind, flat.compression, flat.distinct) == ("flat", 4.0, True)
    assert (towers.exchange.kind, towers.exchange.compression, towers.exchange.wire) == ("sptt", 4.0, "fp16")
    assert Cell.of("sptt").exchange.compression == 1
    # Gradients of all modules are added by all ranks where rows travel by the flat exchange.
    modules = workload_of(MODEL, towers)
    assert workload_of(MODEL, flat).parameters == modules.parameters + modules.tower_parameters
