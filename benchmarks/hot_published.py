"""Hot batches (FAE) compared with their published baseline, and with the cache of this library.

Published: 2.3 times the speed of tables in CPU DRAM, with hot rows in GPU memory. This machine has
no GPU: the disk is the slow memory (rows in an SSD store, float32, direct reads) and DRAM the fast
one. All rungs train the same DLRM (the published sizes for Criteo Kaggle) on the same samples
within the same bytes of DRAM:

- ``fetched``: each batch fetches its rows when it starts and writes them back when it ends; no
  cache, no lookahead.
- ``fetched + FAE``: hot rows stay in DRAM, inputs that need only hot rows form hot batches, other
  rows are fetched.
- ``cache``: the planned cache of this library with lookahead; hot inputs are mixed with others.
- ``cache + FAE``: the same with 15 % of the budget for hot rows, and with hot batches.

The first two rungs are faster than the published baseline: a batch reads each row once even if it
is looked up often, and a batch with cold inputs reads only rows that are not hot. Steps are timed
in alternation, in stretches that contain hot and mixed batches in proportion. `shares` uses the
budgets of the paper. `fetch_ms` is the part of a step that waits for rows, `home_ms` the part that
waits for write-back.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.hot_single import shares
from benchmarks.kept import FOLDER
from benchmarks.precision_quality import criteo_shape
from benchmarks.registry import PeerMissing
from benchmarks.sessions import prepared, row_bytes_of
from benchmarks.tiers import fill
from benchmarks.train import EPS, RATE, Side
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.embedding import RowOptimizerConfig
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.hot.calibrator import calibrate
from stratarec.hot.config import HotConfig
from stratarec.hot.hot_loader import HotLoader, classify
from stratarec.hot.selection import parts_of
from stratarec.models import DLRMConfig, build_model
from stratarec.models.base import build_tables
from stratarec.planning.config import BlockConfig, MemoryConfig
from stratarec.planning.placement import hot_rows, make_hot_plan
from stratarec.planning.plan import tier_config
from stratarec.progress import timed

WIDTH, BATCH, LOOKAHEAD = 16, 1024, 1
MODEL = DLRMConfig(embedding_dim=WIDTH, bottom_mlp=(512, 256, 64), top_mlp=(512, 256), pooling="sum")
OPTIMIZER = RowOptimizerConfig(learning_rate=RATE, eps=EPS)
SHARE = 0.124
"""Share of the bytes of all rows for hot rows of FAE. `cache` gets the same DRAM, `OURS_HOT` of it
for hot rows.
"""
OURS_HOT = 0.15
GATE_STEPS = 4
SIZES = (300_000, 200_000), (600_000, 400_000)
"""Samples of the synthetic log, and the largest number of rows of a table."""
LEAST_ROWS = 100_000
"""Smallest number of rows of a log; a share of fewer rows does not hold a batch."""
RUNGS = ("fetched", "fetched + FAE", "cache", "cache + FAE")


class FetchedSide(Side):
    """Side that evicts all rows but hot ones after each step, and flushes the write buffer of the
    log.
    """

    def step(self) -> float:
        loss, engine = super().step(), self.model.embeddings.engine  # type: ignore[operator, union-attr]
        with timed(engine.seconds, "send home"):  # type: ignore[union-attr]
            for tables in engine.tables:  # type: ignore[union-attr]
                if isinstance(tables, CachedTables):
                    evict_all(tables)
        return loss


def evict_all(tables: CachedTables) -> None:
    """Write back every cached row and empty the cache."""
    directory = tables.directory
    slots = np.flatnonzero(directory.state.tags[: directory.layout.slots] > 0)
    if not len(slots):
        return
    tables.write_rows(
        directory.rows_in(slots), tables.memory.read(slots), np.arange(len(slots), dtype=np.int64), 0
    )
    directory.clear()
    tables.store.flush()


class Ladder:
    """The four rungs (configurations) on one data set."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.dataset = dataset
        self.folder = folder
        self.row_bytes = row_bytes_of(dataset, WIDTH, OPTIMIZER)
        self.parts = parts_of(dataset, self.row_bytes)
        self.total = sum(part.nbytes for part in self.parts)
        self.budget = int(SHARE * self.total)
        self.ids = {
            table: sum(1 if feature.kind == "single" else feature.max_length for feature in features)
            for table, features in dataset.schema.vocabularies().items()
        }

    def fetched(self, name: str) -> Side:
        """Build a side with tables in the log and slots for one batch; hot rows are added for
        FAE.
        """
        hot = calibrate(self.dataset, self.row_bytes, self.budget).hot(self.parts)
        with_fae = name.endswith("FAE")
        heads = {
            part.table: rows if with_fae else 0 for part, rows in zip(self.parts, hot.tolist(), strict=True)
        }
        rows = self.dataset.table_rows()
        # A quarter more slots than a batch needs, because sets fill unevenly.
        slots = {table: min(BATCH * ids, rows[table]) for table, ids in self.ids.items()}
        tables = {
            table: TableTier(home="log", cache_rows=5 * slots[table] // 4 + 64, hot_rows=hot_of)
            for table, hot_of in heads.items()
        }
        tiers = TierConfig(tables=tables, log_path=self.folder / name.replace(" ", ""), lookahead=0)
        return self._side(tiers, hot if with_fae else None, FetchedSide)

    def ours(self, name: str, dram: int) -> Side:
        """Build a side of this library, with the plan for `dram` bytes."""
        block = BlockConfig(path=str(self.folder))
        memory = MemoryConfig(dram=dram, block=block, precision="fp32", lookahead=LOOKAHEAD)
        with_fae = name.endswith("FAE")
        config = HotConfig(budget=int(OURS_HOT * dram), batches="proportional") if with_fae else HotConfig()
        tables = build_tables(MODEL, self.dataset.schema, self.dataset.table_rows())
        plan = make_hot_plan(tables, self.dataset, OPTIMIZER, memory, config, batch_size=BATCH)
        hot = hot_rows(plan, self.dataset)[1] if with_fae else None
        return self._side(tier_config(plan, memory, name.replace(" ", "")), hot, Side)

    def _side(self, tiers: TierConfig, hot: Any, kind: type[Side]) -> Side:
        loading = LoaderConfig(batch_size=BATCH)
        loader = Loader(self.dataset, "train", loading)
        if hot is not None:
            counts = classify(self.dataset, self.parts, hot, "train")
            loader = HotLoader(self.dataset, "train", loading, self.parts, hot, counts)
        schema, rows = self.dataset.schema, self.dataset.table_rows()
        model = build_model(MODEL, schema, rows, optimizer=OPTIMIZER, tiers=tiers)
        dense = torch.optim.Adagrad(model.network.parameters(), lr=0.01, fused=True)
        return kind(model, dense, loader, "float32", tiers.lookahead)


def gate(sides: dict[str, Side]) -> None:
    """Check that the first losses with fetched and with cached rows are bitwise equal."""
    losses = [[sides[name].step() for _ in range(GATE_STEPS)] for name in ("fetched", "cache")]
    if losses[0] != losses[1]:
        raise AssertionError(f"losses of fetched and of cached rows differ: {losses}")


def ladder(dataset: Dataset, folder: Path, rounds: int, stretch: int) -> list[dict[str, Any]]:
    """Measure all rungs and return a row for each; ratios are relative to the first rung."""
    rungs = Ladder(dataset, folder)
    sides = {name: rungs.fetched(name) for name in RUNGS[:2]}
    for side in sides.values():
        fill(side)
        side.step()  # allocates the work buffers of the update
    dram = _engine(sides["fetched + FAE"]).nbytes
    for name in RUNGS[2:]:
        sides[name] = rungs.ours(name, dram)
        fill(sides[name])
        sides[name].step()
    gate(sides)
    torch.set_num_threads(1)  # must follow the work on data sets, which changes it
    measured: dict[str, list[tuple[float, ...]]] = {name: [] for name in RUNGS}
    for round_ in range(-1, rounds):
        for name in RUNGS if round_ % 2 else RUNGS[::-1]:
            began = _now(sides[name])
            for _ in range(stretch):
                sides[name].step()
            if round_ >= 0:
                now = _now(sides[name])
                measured[name].append(
                    tuple((after - before) / stretch for before, after in zip(began, now, strict=True))
                )
    rows = []
    for name, side in sides.items():
        clock, processor, moved, fetch, home = zip(*measured[name], strict=True)
        ratios = sorted(slow / fast for (slow, *_), fast in zip(measured["fetched"], clock, strict=True))
        rows.append(
            {
                "data": dataset.name,
                "rung": name,
                "step_ms": 1e3 * median(clock),
                "ratio": median(ratios),
                "ratio_low": ratios[len(ratios) // 4],
                "ratio_high": ratios[3 * len(ratios) // 4],
                "processor_ms": 1e3 * median(processor),
                "fetch_ms": 1e3 * median(fetch),
                "home_ms": 1e3 * median(home),
                "rows_in_a_step": sum(moved) / len(moved),
                "dram_mib": _engine(side).nbytes / 2**20,
                "hot_inputs": side.loader.hot_samples / side.loader.samples
                if isinstance(side.loader, HotLoader)
                else None,
            }
        )
    for side in sides.values():
        side.close()
        _engine(side).close()
    return rows


def _now(side: Side) -> tuple[float, ...]:
    """Return clock and processor seconds, rows fetched so far, and seconds of fetching and writing
    back.
    """
    engine = _engine(side)
    moved = sum(tables.traffic.rows_in for tables in engine.tables)
    return (
        time.perf_counter(),
        time.process_time(),
        moved,
        *(engine.seconds.get(part, 0.0) for part in ("bring in", "send home")),
    )


def _engine(side: Side) -> Any:
    return side.model.embeddings.engine  # type: ignore[union-attr]


def datasets(quick: bool, folder: Path) -> list[Dataset]:
    """Return a synthetic log of Criteo's shape, and Trivago's and Globo's logs if they are
    available.
    """
    available = [Dataset.open(criteo_shape(folder / "synthetic", *(SIZES[0] if quick else SIZES[1])).path)]
    with suppress(PeerMissing):  # without the logs
        available += [prepared(name, "none") for name in (() if quick else ("trivago", "globo"))]
    return available


def run(quick: bool) -> dict[str, Any]:
    """Measure all logs; `quick` uses only the synthetic one."""
    rows, hot_shares = [], []
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        for dataset in datasets(quick, Path(folder)):
            hot_shares += shares(dataset)
            if sum(dataset.table_rows().values()) < LEAST_ROWS:
                continue
            rows += ladder(dataset, Path(folder) / f"{dataset.name}-rows", *((4, 8) if quick else (7, 16)))
    ratio = {(row["data"], row["rung"]): row["ratio"] for row in rows}
    return {
        "config": {"width": WIDTH, "batch": BATCH, "share": SHARE, "targets": {"ratio_fae_single": 2.3}},
        "metrics": {
            "ratio_fae_single": max(value for (_, rung), value in ratio.items() if rung == "fetched + FAE"),
            **{
                f"ratio_{data}_{rung.replace(' + ', '_').lower()}": v
                for (data, rung), v in ratio.items()
                if v != 1
            },
            **{
                f"processor_{r['data']}_{r['rung'].replace(' + ', '_').lower()}": r["processor_ms"]
                for r in rows
            },
            **{
                f"hot_inputs_{row['data']}_{100 * row['bytes_share']:g}": row["inputs"]
                for row in hot_shares
            },
        },
        "samples": {"shares": hot_shares, "rows": rows},
    }
