"""Tables larger than the DRAM given to them, on an append-only log, against the same tables all in DRAM.

The DRAM budget is the float32 bytes of the tables (weights and optimizer state) over 8, and over 37. It holds the
float32 slots, tags and stamps, the locations of the log, and a second cache of encoded rows; reads of the log are
direct, so the page cache gives nothing for free. Before timing, every row is written once, so that a miss is a read.
Whole training steps, data loading included, in alternation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.precision_quality import criteo_shape
from benchmarks.train import Side, take_turns, tiered_sides
from stratarec.embedding import EmbeddingBagConfig
from stratarec.embedding.codecs import CodecConfig
from stratarec.embedding.level0 import Level0
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.models import CTRModel

WIDTH, BATCH = 64, 4096
ROW_BYTES = 4 * WIDTH + 4
SLOT_BYTES = ROW_BYTES + 8
# Record, row number, tag, stamp and recency list of a row in the second cache.
LEVEL1_OVERHEAD = 40
LOCATION_BYTES = 4
# Tables of fewer rows stay whole in float32.
_LEAST_ROWS = 20_000
_CHUNK = 1 << 16


def budgeted(
    tables: Sequence[EmbeddingBagConfig], *, times: float, codec: CodecConfig, path: Path, lookahead: int
) -> TierConfig:
    """Caches that keep all DRAM together within a `times`-th of the tables' float32 bytes.

    Level 0 gets what the batches in flight need and no more; the second cache gets the rest, since an encoded row takes
    a fraction of a slot.
    """
    total = sum(table.num_embeddings for table in tables) * ROW_BYTES
    large = [table for table in tables if table.num_embeddings >= _LEAST_ROWS]
    rows = sum(table.num_embeddings for table in large)
    slots = {table.name: min(BATCH * (lookahead + 2), table.num_embeddings) for table in large}
    whole = total - rows * ROW_BYTES
    left = total / times - whole - rows * LOCATION_BYTES - sum(slots.values()) * SLOT_BYTES
    record = {"fp32": ROW_BYTES, "int8": WIDTH + 4 + 2, "int4": WIDTH // 2 + 4 + 2}[codec.kind]
    level1 = max(int(left / (record + LEVEL1_OVERHEAD)), 0)
    return TierConfig(
        tables={
            table.name: TableTier(
                home="log",
                codec=codec,
                cache_rows=slots[table.name],
                level1_rows=level1 * table.num_embeddings // rows,
            )
            for table in large
        },
        lookahead=lookahead,
        log_path=path,
    )


def fill(side: Side) -> None:
    """Write every row of the log once, with its initial value."""
    model = side.model
    assert isinstance(model, CTRModel)
    for group in model.embeddings.stager.groups:
        total = sum(table.num_embeddings for table in group.tables)
        for first in range(0, total, _CHUNK):
            rows = np.arange(first, min(first + _CHUNK, total), dtype=np.int64)
            level0: Level0 = group.cache.read(rows)
            group.cache.put(rows, level0, np.arange(len(rows), dtype=np.int64), 0)
        group.cache.store.flush()


def run(quick: bool) -> dict[str, Any]:
    """8 and 37 times the budget, with lookahead, and 8 times without."""
    cap = 200_000 if quick else 4_000_000
    codec = CodecConfig(kind="int8", state="bf16")
    cells = ((8, 2), (37, 2), (8, 0))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        dataset = criteo_shape(Path(folder) / "data", 200_000 if quick else 1_500_000, cap)
        contenders: dict[str, Any] = {"dram": None}
        for times, lookahead in cells:
            name = f"{times}x_lookahead_{lookahead}"
            path = Path(folder) / name
            contenders[name] = partial(budgeted, times=times, codec=codec, path=path, lookahead=lookahead)
        pair = tiered_sides(dataset, WIDTH, BATCH, contenders)
        for name, side in pair.items():
            if name != "dram":
                fill(side)
        seconds = take_turns(pair, rounds=4 if quick else 10, stretch=5 if quick else 20, warmup=20 if quick else 100)
        rows = [_row(name, side, median(seconds[name]), median(seconds["dram"])) for name, side in pair.items()]
        for side in pair.values():
            side.close()
            side.model.embeddings.close()  # type: ignore[operator,union-attr]
        tables = dataset.table_rows()
    speed = {row["tables"]: row["speed"] for row in rows}
    return {
        "config": {"width": WIDTH, "batch": BATCH, "tables": tables, "codec": vars(codec), "cap": cap},
        "metrics": {
            "speed_at_8x": speed["8x_lookahead_2"],
            "speed_at_37x": speed["37x_lookahead_2"],
            "speed_at_8x_without_lookahead": speed["8x_lookahead_0"],
        },
        "samples": {"rows": rows},
    }


def _row(name: str, side: Side, seconds: float, in_dram: float) -> dict[str, Any]:
    model = side.model
    assert isinstance(model, CTRModel)
    parts = model.embeddings.bytes_by_part()
    traffic = [group.cache.traffic for group in model.embeddings.stager.groups]
    steps = max(model.embeddings.step, 1)
    return {
        "tables": name,
        "step_ms": 1e3 * seconds,
        "speed": in_dram / seconds,
        "dram_mib": sum(size for part, size in parts.items() if part != "home_block") / 2**20,
        "block_mib": parts.get("home_block", 0) / 2**20,
        "rows_in_a_step": sum(each.rows_in for each in traffic) / steps,
    }
