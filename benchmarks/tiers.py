"""Tables larger than their DRAM budget, in an SSD store, compared with the same tables all in DRAM.

The budget is 1/8 and 1/37 of the float32 bytes of the tables (weights and optimizer state). The
planner places the tables within it, int8 at rest. The budget covers the float32 slots, tags and
stamps, and the locations of the log, and is checked at the end. Reads of the log are direct, so
that the page cache does not add memory. Before timing, every row is written once, so that each miss
is a read. Whole training steps, including data loading, are timed in alternation.
`processor_us_per_row` is the processor time of the thread that stages batches, per fetched row.

`benchmarks.tier_alternatives` compares 1/8 with alternatives within the same memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.kept import FOLDER
from benchmarks.precision_quality import criteo_shape
from benchmarks.train import EPS, RATE, Side, take_turns, tiered_sides
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tiers import TierConfig
from stratarec.models import CTRModel
from stratarec.planning.config import BlockConfig, MemoryConfig
from stratarec.planning.placement import make_plan
from stratarec.planning.plan import tier_config

# The width of the published benchmark model on this data (MLPerf DLRM).
WIDTH, BATCH = 128, 4096
# Batch size for small tables, 1/37 of which must hold the rows of several batches.
QUICK_BATCH = 128
ROW_BYTES = 4 * WIDTH + 4
_CHUNK = 1 << 16


def float32_bytes(dataset: Dataset) -> int:
    """Return the bytes of all tables in float32, with the state of row-wise Adagrad."""
    return sum(dataset.table_rows().values()) * ROW_BYTES


def planned(
    tables: Sequence[EmbeddingBagConfig],
    *,
    dataset: Dataset,
    times: float,
    lookahead: int,
    path: Path,
    batch: int,
) -> TierConfig:
    """Return the tiers that `stratarec plan` chooses for 1/`times` of the tables' float32 bytes."""
    memory = MemoryConfig(
        dram=int(float32_bytes(dataset) / times),
        block=BlockConfig(path=str(path)),
        precision="int8",
        state="bf16",
        lookahead=lookahead,
    )
    optimizer = RowOptimizerConfig(learning_rate=RATE, eps=EPS)
    plan = make_plan(tables, dataset, optimizer, memory, batch_size=batch)
    return tier_config(plan, memory, f"{times}-{lookahead}")


def fill(side: Side) -> None:
    """Write every row of the log once, with its initial value."""
    model = side.model
    assert isinstance(model, CTRModel)
    for tables in model.embeddings.engine.tables:
        if isinstance(tables, CachedTables):
            for first in range(0, tables.rows, _CHUNK):
                rows = np.arange(first, min(first + _CHUNK, tables.rows), dtype=np.int64)
                positions = np.arange(len(rows), dtype=np.int64)
                tables.write_rows(rows, tables.copy(rows).read(positions), positions, 0)
            tables.store.flush()


def criteo(quick: bool) -> tuple[PrepareConfig, Dataset, int]:
    """Return the log, its data set and the batch size."""
    samples, cap, batch = (800_000, 400_000, QUICK_BATCH) if quick else (6_000_000, 40_000_000, BATCH)
    log = criteo_shape(FOLDER / "tiers" / f"criteo-{samples}", samples, cap)
    return log, Dataset.open(log.path), batch


def run(quick: bool) -> dict[str, Any]:
    """Measure 1/8 and 1/37 of the bytes with lookahead, and 1/8 without."""
    _, dataset, batch = criteo(quick)
    rows = compare_with_dram(dataset, batch, quick)
    speed = {row["tables"]: row["speed"] for row in rows}
    processor = {row["tables"]: row["processor_us_per_row"] for row in rows[1:]}
    return {
        "config": {
            "width": WIDTH,
            "batch": batch,
            "tables": dataset.table_rows(),
            "precision": "int8",
            "state": "bf16",
            "targets": {"speed_at_8x": 0.85, "speed_at_37x": 0.68},
        },
        "metrics": {
            "speed_at_8x": speed["8x_lookahead_2"],
            "speed_at_37x": speed["37x_lookahead_1"],
            "speed_at_8x_without_lookahead": speed["8x_lookahead_0"],
            "processor_us_per_row_at_8x": processor["8x_lookahead_2"],
            "processor_us_per_row_at_37x": processor["37x_lookahead_1"],
        },
        "samples": {"rows": rows},
    }


def compare_with_dram(dataset: Dataset, batch: int, quick: bool) -> list[dict[str, Any]]:
    """Time steps with all tables in DRAM, and with parts of their bytes."""
    cells = ((8, 2), (37, 1), (8, 0))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        contenders: dict[str, Any] = {"dram": None}
        for times, lookahead in cells:
            name = f"{times}x_lookahead_{lookahead}"
            path = Path(folder) / "rows"
            contenders[name] = partial(
                planned, dataset=dataset, times=times, lookahead=lookahead, path=path, batch=batch
            )
        pair = tiered_sides(dataset, WIDTH, batch, contenders)
        for name, side in pair.items():
            measure_processor(side)
            if name != "dram":
                fill(side)
        seconds = take_turns(
            pair, rounds=4 if quick else 8, stretch=5 if quick else 10, warmup=20 if quick else 50
        )
        rows = [
            _row(name, side, median(seconds[name]), median(seconds["dram"])) for name, side in pair.items()
        ]
        budgets = {
            f"{times}x_lookahead_{lookahead}": float32_bytes(dataset) / times for times, lookahead in cells
        }
        for row in rows[1:]:
            check_budget(row, budgets[row["tables"]])
        for side in pair.values():
            close(side)
    return rows


def measure_processor(side: Side) -> None:
    """Count the processor time of staging in `side.staging_seconds`."""
    assert isinstance(side.model, CTRModel)
    side.staging_seconds = spent = [0.0]  # type: ignore[attr-defined]
    for tables in side.model.embeddings.engine.tables:
        if isinstance(tables, CachedTables):
            tables.stage = partial(_timed_stage, tables.stage, spent)  # type: ignore[method-assign]


def _timed_stage(stage: Callable[..., Any], spent: list[float], *arguments: Any) -> Any:
    began = time.thread_time()
    try:
        return stage(*arguments)
    finally:
        spent[0] += time.thread_time() - began


def close(side: Any) -> None:
    """Stop the threads of a side and close its stores."""
    side.close()
    if isinstance(getattr(side, "model", None), CTRModel):
        side.model.embeddings.close()


def check_budget(row: dict[str, Any], budget: float) -> None:
    """Check that a cell stayed within its budget."""
    row["budget_mib"] = budget / 2**20
    if row["dram_mib"] > row["budget_mib"]:
        raise AssertionError(
            f"{row['tables']} uses {row['dram_mib']:.1f} MiB; its budget is {row['budget_mib']:.1f} MiB"
        )


def _row(name: str, side: Side, seconds: float, in_dram: float) -> dict[str, Any]:
    model = side.model
    assert isinstance(model, CTRModel)
    parts = model.embeddings.engine.bytes_by_part()
    traffic = [tables.traffic for tables in model.embeddings.engine.tables]
    steps = max(model.embeddings.step, 1)
    return {
        "tables": name,
        "step_ms": 1e3 * seconds,
        "speed": in_dram / seconds,
        "dram_mib": model.embeddings.engine.nbytes / 2**20,
        "block_mib": parts.get("home_block", 0) / 2**20,
        "rows_in_a_step": sum(each.rows_in for each in traffic) / steps,
        "processor_us_per_row": 1e6
        * side.staging_seconds[0]
        / max(sum(each.rows_in for each in traffic), 1),  # type: ignore[attr-defined]
    }
