"""Low-precision homes with a float32 cache: bytes and speed compared with float32.

Bytes: a child process builds the tables, writes every row, fills the cache, and compares the bytes
that the collection reports with the growth of the process. Speed: the embedding step against
FBGEMM's float32, and whole training steps against float32 of this library, in alternation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import EPS, RATE, Contenders, Shape
from benchmarks.precision_quality import SHARES, criteo_shape
from benchmarks.timing import alternate, spread
from benchmarks.train import take_turns, tiered_sides
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.sources.synthetic import CRITEO_ROWS
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, TieredEmbeddingBagCollection
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.tiers import TableTier, TierConfig

CODECS = {kind: CodecConfig(kind=kind, state="bf16") for kind in SHARES}
# Smaller tables stay whole in float32, because their cache could not hold the rows of the batches
# in flight.
_LEAST_ROWS = 50_000
_GIB = 1 << 30


def tiers_of(tables: Sequence[EmbeddingBagConfig], kind: str, share: float) -> TierConfig:
    """Return tiers with large tables encoded in DRAM, and a cache of `share` of their rows."""
    large = [table for table in tables if table.num_embeddings >= _LEAST_ROWS]
    return TierConfig(
        tables={
            table.name: TableTier(
                codec=CODECS[kind], cache_rows=max(int(table.num_embeddings * share), 16_384)
            )
            for table in large
        }
    )


def bytes_cell(kind: str, width: int, float32_bytes: int) -> dict[str, Any]:
    """Measure one row of the table of bytes in a child process."""
    command = [sys.executable, "-m", "benchmarks.precision", kind, str(width), str(float32_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if abs(row["resident_over_stated"] - 1) > 0.05:
        raise AssertionError(
            f"the process grew by {row['resident_over_stated']:.3f} of the reported "
            "bytes; expected 0.95 to 1.05"
        )
    return row


def _resident_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("Rss")).split()[1])


def measure_bytes(kind: str, width: int, float32_bytes: int) -> dict[str, Any]:
    """Fill one table and its cache, and compare its bytes with the growth of the process."""
    rows, share = float32_bytes // (4 * width + 4), SHARES[kind]
    # Train a small table first, so that compiling and loading kernels does not count.
    _filled(kind, width, 100_000, share)
    before = _resident_bytes()
    collection = _filled(kind, width, rows, share)
    grown = _resident_bytes() - before
    parts = collection.engine.bytes_by_part()
    reported = sum(parts.values())
    return {
        "kind": kind,
        "width": width,
        "rows": rows,
        "cache_share": share,
        "parts": parts,
        # Outputs of lookups are activations, which tables in memory also have.
        "bytes_ratio": rows * (4 * width + 4) / (reported - parts["outputs"]),
        "resident_over_stated": grown / reported,
    }


def _filled(kind: str, width: int, rows: int, share: float) -> TieredEmbeddingBagCollection:
    """Return a table whose rows have all been trained, with a full cache."""
    table = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=width, feature_names=("f",))
    tiers = TierConfig(tables={"t": TableTier(codec=CODECS[kind], cache_rows=int(rows * share))})
    collection = TieredEmbeddingBagCollection(
        [table], optimizer=RowOptimizerConfig(learning_rate=RATE), tiers=tiers
    )
    batch = min(8192, int(rows * share) // 2)
    # Looking up as many rows again evicts the rows that filled the cache last.
    for first in (*range(0, rows, batch), *range(0, int(1.5 * rows * share), batch)):
        _look_up(collection, first, min(first + batch, rows))
    return collection


def _look_up(collection: TieredEmbeddingBagCollection, first: int, last: int) -> None:
    ids = torch.arange(first, last, dtype=torch.int64)
    jagged = KeyedJagged(keys=("f",), values=ids, offsets=None, batch_size=last - first)
    collection(jagged).pooled.sum().backward()


def embedding_cell(width: int, batch: int, rounds: int, cap: int) -> dict[str, Any]:
    """Time the embedding step: int8 with a cache of 5 %, FBGEMM's float32, and float32 of this
    library.
    """
    sizes = [min(rows, cap) for rows in CRITEO_ROWS]
    pair = Contenders(Shape(sizes=sizes, width=width, batch=batch), batches=64)
    tiered = TieredEmbeddingBagCollection(
        pair.ours.tables,
        optimizer=RowOptimizerConfig(learning_rate=RATE, eps=EPS),
        tiers=tiers_of(pair.ours.tables, "int8", SHARES["int8"]),
    )

    def step_int8(step: int) -> None:
        jagged = KeyedJagged(
            keys=pair.keys, values=pair.batches[step % 64][0], offsets=None, batch_size=batch
        )
        tiered(jagged).pooled.backward(pair.gradient)

    for step in range(64):
        step_int8(step)
    times = alternate({"int8": step_int8, "fp32": pair.step_ours, "fbgemm": pair.step_fbgemm}, rounds)
    medians = {name: spread(values)["median_ms"] for name, values in times.items()}
    rows_in = sum(tables.traffic.rows_in for tables in tiered.engine.tables)
    return {
        "width": width,
        "batch": batch,
        **{f"{name}_ms": value for name, value in medians.items()},
        "rows_in_a_step": rows_in / tiered.step,
        "ratio_fbgemm": medians["fbgemm"] / medians["int8"],
        "ratio_fp32": medians["fp32"] / medians["int8"],
    }


def train_cell(dataset: Dataset, rounds: int, stretch: int) -> dict[str, Any]:
    """Time training steps at D = 64 and batch 4,096: int8 with a cache of 5 % against float32."""
    contenders = {"fp32": None, "int8": lambda tables: tiers_of(tables, "int8", SHARES["int8"])}
    pair = tiered_sides(dataset, 64, 4096, contenders)
    # The warm-up fills the cache; an empty cache evicts nothing, so its steps would be too fast.
    seconds = take_turns(pair, rounds, stretch, warmup=60)
    for side in pair.values():
        side.close()
    medians = {name: 1e3 * median(values) for name, values in seconds.items()}
    return {
        **{f"{name}_ms": value for name, value in medians.items()},
        "ratio_fp32": medians["fp32"] / medians["int8"],
    }


def run(quick: bool) -> dict[str, Any]:
    """Measure bytes and speed; `precision_quality` measures the loss of quality."""
    size = _GIB // 2 if quick else 17 * _GIB // 4
    by_kind = [bytes_cell(kind, width, size) for kind, width in (("int8", 64), ("int4", 64), ("int4", 256))]
    rounds, cap = (6, 100_000) if quick else (25, 1_000_000)
    cells = [embedding_cell(64, batch, rounds, cap) for batch in (2048, 16384)]
    with tempfile.TemporaryDirectory() as folder:
        dataset = Dataset.open(
            criteo_shape(Path(folder) / "data", 200_000 if quick else 1_000_000, cap).path
        )
        speed = train_cell(dataset, rounds=4 if quick else 20, stretch=5 if quick else 10)
    return {
        "config": {"shares": SHARES, "state": "bf16", "parameters": "fp16", "float32_bytes": size},
        "metrics": {
            "bytes_ratio_int8_d64": by_kind[0]["bytes_ratio"],
            "bytes_ratio_int4_d64": by_kind[1]["bytes_ratio"],
            "bytes_ratio_int4_d256": by_kind[2]["bytes_ratio"],
            "embedding_ratio_int8_fbgemm_fp32": min(cell["ratio_fbgemm"] for cell in cells),
            "embedding_ratio_int8_fp32": min(cell["ratio_fp32"] for cell in cells),
            "train_ratio_int8_fp32": speed["ratio_fp32"],
        },
        "samples": {"rows": cells, "bytes": by_kind, "train": speed},
    }


if __name__ == "__main__":
    print(json.dumps(measure_bytes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
