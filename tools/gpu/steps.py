"""Time training steps with rows in host memory, in GPU memory, and in both, in alternation.

``python tools/gpu/steps.py OUT.jsonl train|graph|cached|hot|dedup`` writes one line of JSON per
comparison. Ids follow `SyntheticConfig`: 6.8 % of a table's rows get 76 % of its lookups; Criteo's
tables have 33.8 million rows. Without a GPU, sizes are tiny.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from cells import GPU, MACHINE, SMALL, out_of_time, use_device_slots, write

from benchmarks.__main__ import give_everyone_good_memory
from stratarec.batch.batch import Batch
from stratarec.batch.jagged import InverseJagged, JaggedWindows, KeyedJagged
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.synthetic import CRITEO_ROWS, EXPONENT
from stratarec.embedding import RowOptimizerConfig
from stratarec.embedding.codecs import FloatRows
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tiers import HomeKind, TableTier, TierConfig
from stratarec.kernels.random import fill_uniform, table_key
from stratarec.kernels.runtime.accelerator import CPU, open_device
from stratarec.models import DLRMConfig, build_model
from stratarec.models.config import HistoryConfig
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.steps.graph_step import DevicePipeline, build_pipeline
from stratarec.training.torch_setup import build_optimizer, torch_settings

SEED, POOL = 1, ThreadPoolExecutor(16)
NAMES = [f"C{place}" for place in range(6 if SMALL else 26)]
ROWS = {
    name: min(rows, 97) if SMALL else rows
    for name, rows in zip(NAMES, CRITEO_ROWS[: len(NAMES)], strict=True)
}
SCHEMA = Schema(
    dense=tuple(DenseFeature(name=f"I{place}") for place in range(13)),
    sparse=tuple(SparseFeature(name=name) for name in NAMES),
)
LARGEST = max(ROWS, key=ROWS.__getitem__)
OPTIMIZER = RowOptimizerConfig(learning_rate=0.02)
# A stretch of steps: the first steps are not timed, nor the last ones, during which no batch is
# staged ahead. Short stretches would measure how a pause before them ends.
LEAD, TIMED, ROUNDS, WARM_UP = (1, 1, 1, 2) if SMALL else (30, 100, 2, 10)
# Share of samples that use only hot rows, if these have 12.4 % of the bytes: metric
# `hot_inputs_globo_12.4` of the benchmark `hot_published` on a real log.
HOT_BYTES, HOT_INPUTS = 0.124, 0.758
# Largest relative differences of the loss of the first step, and of the mean loss of the first
# steps.
FIRST, ROUNDED, MEAN = 1e-4, 2e-2, 2e-2


def dense_and_labels(draws: np.random.Generator, size: int) -> dict[str, torch.Tensor]:
    """Draw dense features, and labels that depend on the first feature and noise, so that losses
    stay comparable.
    """
    dense = draws.standard_normal((size, 13), dtype=np.float32)
    label = dense[:, 0] + draws.standard_normal(size, dtype=np.float32) > 0.5
    return {"dense": torch.from_numpy(dense), "label": torch.from_numpy(label.astype(np.float32))}


def batches(
    size: int, count: int, seed: int, hot: Mapping[str, int] = ROWS, share: float = 0.0
) -> list[Batch]:
    """Draw batches in which low ids are popular.

    A `share` of the samples draws from the `hot` first rows of each table. The other samples draw
    from all rows, except in the largest table, where they draw from rows that are not hot.
    """
    drawn = []
    for number in range(count):
        draws = np.random.default_rng([seed, number])
        in_hot, ids = draws.random(size) < share, []
        for name, rows in ROWS.items():
            uniform = draws.random(size)
            if name == LARGEST and hot[name] < rows:
                coldest = (hot[name] / rows) ** (1 / EXPONENT)
                uniform = np.where(in_hot, uniform, coldest + (1 - coldest) * uniform)
            ids.append((np.where(in_hot, hot[name], rows) * uniform**EXPONENT).astype(np.int64))
        values = torch.from_numpy(np.concatenate(ids))
        sparse = KeyedJagged(keys=tuple(NAMES), values=values, offsets=None, batch_size=size)
        drawn.append(Batch(sparse=sparse, **dense_and_labels(draws, size)))
    return drawn


def slots_within(share: float) -> dict[str, int]:
    """Divide a share of all rows equally among tables; smaller tables get all their rows.

    An equal division is best if all tables have the same skew and number of lookups.
    """
    slots, remaining = {}, (0.5 if SMALL else share) * sum(ROWS.values())
    for place, (name, rows) in enumerate(sorted(ROWS.items(), key=lambda item: item[1])):
        slots[name] = min(rows, int(remaining / (len(ROWS) - place)))
        remaining -= slots[name]
    return slots


def cached(kind: str, slots: Mapping[str, int], home: HomeKind = "dram") -> TierConfig:
    """Return tables at `home` with caches of `slots` rows; tables that fit their slots are in GPU
    memory.
    """
    codec = CodecConfig(kind=kind, state="fp32" if kind == "fp32" else "bf16")
    return TierConfig(
        tables={
            name: TableTier(home=home, codec=codec, cache_rows=slots[name])
            for name in NAMES
            if slots[name] < ROWS[name]
        },
        lookahead=2,
    )


def write_home(tables: CachedTables) -> None:
    """Write the initial value of every row to its home, so that a miss reads a record."""
    rows = FloatRows.allocate(1 << 18, tables.codec.width, **tables.codec.layout.state_shape)
    weights = rows.weights.reshape(rows.slots, -1)
    for table in tables.configs:
        for first in range(0, table.num_embeddings, rows.slots):
            places = np.arange(min(rows.slots, table.num_embeddings - first), dtype=np.int64)
            draw = partial(
                fill_uniform, key=table_key(SEED, table.name), low=-table.bound, high=table.bound
            )
            parts = filter(len, np.array_split(places, 16))
            list(
                POOL.map(
                    lambda part: draw(weights[part[0] : part[-1] + 1], first_row=first + int(part[0])),
                    parts,
                )
            )
            records = np.zeros((len(places), tables.codec.record_bytes), dtype=np.uint8)
            tables.codec.encode(rows, places, records, places, np.zeros(len(places), dtype=np.uint64), 0)
            tables.store.write(places + tables.first_row[table.name] + first, records)


class Side:
    """A model in training.

    Parameters
    ----------
    width : int
        D.
    rows, network : str
        ``cpu`` or ``gpu``: the device that trains rows, and the device of the network.
    """

    def __init__(
        self,
        width: int,
        rows: str,
        network: str = "gpu",
        *,
        tiers: TierConfig | None = None,
        precision: str = "float32",
        schema: Schema = SCHEMA,
        table_rows: Mapping[str, int] = ROWS,
    ) -> None:
        use_device_slots(rows == "gpu")
        config = DLRMConfig(
            embedding_dim=width,
            bottom_mlp=(512, 256, 64),
            top_mlp=(512, 256),
            pooling="sum",
            history=HistoryConfig(pooling="transformer"),
        )
        tiers = replace(tiers or TierConfig(), device="cuda" if GPU and rows == "gpu" else "cpu")
        self.model = build_model(config, schema, table_rows, seed=SEED, optimizer=OPTIMIZER, tiers=tiers)
        self.engine = self.model.embeddings.engine
        for tables in self.engine.tables:
            if not tables.resident:
                write_home(tables)
        self.model.place(open_device("cuda") if GPU and network == "gpu" else CPU)
        self.model.train()
        train = TrainConfig(precision=precision)
        self.pipeline = build_pipeline(
            self.model, build_optimizer(train.dense, self.model.network), train, None
        )
        self.exact = precision == "float32" and all(
            tier.codec.kind == "fp32" for tier in tiers.tables.values()
        )
        self.step = 0
        self._fill_caches(tiers.tables, size=32 if SMALL else 16_384)

    def _fill_caches(self, tiers: Mapping[str, TableTier], size: int) -> None:
        """Load a row into each slot of the caches, popular rows last, so that misses evict rows."""
        spans = {
            name: (tiers[name].hot_rows, tiers[name].cache_rows) if name in tiers else (0, 1)
            for name in ROWS
        }
        for first in reversed(range(0, max(slots for _, slots in spans.values()) if tiers else 0, size)):
            ids = [
                hot + (first + np.arange(size)) % min(slots, ROWS[name] - hot)
                for name, (hot, slots) in spans.items()
            ]
            values = torch.from_numpy(np.concatenate(ids))
            self.engine.stage(
                KeyedJagged(keys=tuple(NAMES), values=values, offsets=None, batch_size=size)
            ).release()

    def train(self, data: Iterable[Batch], depth: int) -> tuple[list[float], list[float]]:
        """Train batches, staged `depth` ahead; return their losses and the end time of each
        step.
        """
        items = [(batch, self.pipeline.request(batch)) for batch in data]
        losses, ends = [], []
        with self.pipeline.stage_ahead(iter(items), depth=depth) as ahead:
            queued = None
            for (batch, request), handle in ahead:
                # As in training: the loss of a step is read after the next step is queued.
                result = self.pipeline.train(self.step, batch, request, handle)
                losses += [] if queued is None else [queued.loss]
                queued = result
                ends.append(time.perf_counter())
                self.step += 1
            losses += [] if queued is None else [queued.loss]
        if GPU:
            torch.cuda.synchronize()
        return losses, ends

    def rows_in(self) -> int:
        """Return the number of rows fetched from homes so far."""
        return sum(tables.traffic.rows_in for tables in self.engine.tables if not tables.resident)


class Entry(NamedTuple):
    """One side of a comparison, with its batches for the gate and its timed batches."""

    side: Side
    warm_up: list[Batch]
    timed: list[Batch]


def compare(
    benchmark: str, case: str, entries: Mapping[str, Entry], depth: int | None = None, **more: Any
) -> None:
    """Time steps in alternation and write a cell, after checking that the first losses of all sides
    agree.

    `depth` is by default that of training. The losses of the first entry are the reference.
    """
    if out_of_time(f"{benchmark} {case}"):
        return
    depths = {
        name: entry.side.engine.lookahead if depth is None else depth for name, entry in entries.items()
    }
    losses = {name: entry.side.train(entry.warm_up, depths[name])[0] for name, entry in entries.items()}
    reference, apart, right = next(iter(losses.values())), {}, True
    for name, series in losses.items():
        if series:
            apart[name] = first, whole = (
                abs(series[0] / reference[0] - 1),
                abs(mean(series) / mean(reference) - 1),
            )
            right &= first <= (FIRST if entries[name].side.exact else ROUNDED) and whole <= MEAN
    if not right:
        write(cell="wrong", benchmark=benchmark, case=case, apart=apart, losses=losses)
        return
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    fetched = {name: [0, 0] for name in entries}
    for round_ in range(ROUNDS):
        for name, entry in list(entries.items())[:: 1 if round_ % 2 else -1]:
            count = LEAD + TIMED + depths[name]
            data = (entry.timed[(round_ * count + place) % len(entry.timed)] for place in range(count))
            before = entry.side.rows_in()
            _, ends = entry.side.train(data, depths[name])
            seconds[name].append((ends[LEAD + TIMED - 1] - ends[LEAD - 1]) / TIMED)
            fetched[name] = [fetched[name][0] + entry.side.rows_in() - before, fetched[name][1] + count]
    write(
        cell="steps",
        benchmark=benchmark,
        case=case,
        **MACHINE,
        ms={name: [1e3 * each for each in series] for name, series in seconds.items()},
        depths=depths,
        apart=apart,
        rows_in_a_step={name: rows / steps for name, (rows, steps) in fetched.items()},
        bytes={name: entry.side.engine.bytes_by_part() for name, entry in entries.items()},
        **more,
    )


def data_for(size: int, depth: int, seed: int, **hot: Any) -> tuple[list[Batch], list[Batch]]:
    """Draw batches for the gate and for the timed steps."""
    # Later rounds repeat the batches of the first one.
    drawn = batches(size, WARM_UP + LEAD + TIMED + depth, seed, **hot)
    return drawn[:WARM_UP], drawn[WARM_UP:]


def train() -> None:
    """Compare the CPU, the network on the GPU (hybrid), and also rows on the GPU, in float32 and in
    bf16.
    """
    for width, size in ((16, 8),) if SMALL else ((16, 1024), (16, 16_384), (64, 4096)):
        sides = {
            "cpu": Side(width, "cpu", "cpu"),
            "hybrid": Side(width, "cpu"),
            "hbm": Side(width, "gpu"),
            "hbm_bf16": Side(width, "gpu", precision="bf16"),
        }
        data = data_for(size, 1, size)
        compare(
            "gpu_train", f"d{width}_b{size}", {name: Entry(side, *data) for name, side in sides.items()}
        )
        close(sides)


def graph() -> None:
    """Compare steps as one CUDA graph with the same operations, queued one by one; rows are in GPU
    memory.
    """
    for width, size in ((16, 8),) if SMALL else ((16, 1024), (64, 4096)):
        sides = {"one_by_one": Side(width, "gpu"), "graph": Side(width, "gpu")}
        pipeline = sides["one_by_one"].pipeline
        assert isinstance(pipeline, DevicePipeline)
        pipeline._graph_step._captures = False
        data = data_for(size, 1, size)
        compare(
            "gpu_graph", f"d{width}_b{size}", {name: Entry(side, *data) for name, side in sides.items()}
        )
        close(sides)


def against_whole(benchmark: str, homes: Mapping[str, tuple[str, float, HomeKind]]) -> None:
    """Compare homes of a precision, with caches in GPU memory for a share of the rows, with all
    rows in GPU memory.
    """
    size = 8 if SMALL else 16_384
    sides = {"hbm": Side(64, "gpu")}
    for name, (kind, share, home) in homes.items():
        sides[name] = Side(64, "gpu", tiers=cached(kind, slots_within(share), home))
    for depth in (2, 0):
        warm_up, timed = data_for(size, depth, depth)
        # Compare losses only before rounding differences have grown.
        entries = {
            name: Entry(side, warm_up if side.step == 0 else [], timed) for name, side in sides.items()
        }
        compare(benchmark, f"depth{depth}", entries, depth)
    close(sides)


def precision_and_tiers() -> None:
    """MPE: homes of three precisions with caches of 5 % and 1 %, and int8 homes in GPU memory.
    MTrainS: int8 homes with caches of 1/8 and 1/37.
    """
    precisions: dict[str, tuple[str, float, HomeKind]] = {
        "fp32": ("fp32", 0.05, "dram"),
        "int8": ("int8", 0.05, "dram"),
        "int4": ("int4", 0.01, "dram"),
        "int8_hbm": ("int8", 0.05, "hbm"),
    }
    against_whole("gpu_precision", precisions)
    against_whole("gpu_tiers", {"8th": ("int8", 1 / 8, "dram"), "37th": ("int8", 1 / 37, "dram")})


def hot() -> None:
    """FAE: hot rows stay in GPU memory, and samples that use only hot rows form hot batches."""
    heads = slots_within(HOT_BYTES)
    tables = {
        name: TableTier(cache_rows=48 if SMALL else 65_536, hot_rows=heads[name])
        for name in NAMES
        if heads[name] < ROWS[name]
    }
    for size in (8,) if SMALL else (1024, 4096):
        warm_up, log = data_for(size, 1, size, hot=heads, share=HOT_INPUTS)
        _, only_hot = data_for(size, 1, size + 1, hot=heads, share=1.0)
        _, others = data_for(size, 1, size + 2, hot=heads)
        sides = {
            "cpu": Side(16, "cpu", "cpu"),
            "hybrid": Side(16, "cpu"),
            "fae": Side(16, "gpu", tiers=TierConfig(tables=tables)),
        }
        entries = {
            "cpu": Entry(sides["cpu"], warm_up, log),
            "hybrid": Entry(sides["hybrid"], warm_up, log),
            "fae_hot": Entry(sides["fae"], warm_up, only_hot),
            "fae_others": Entry(sides["fae"], [], others),
        }
        compare("gpu_hot", f"b{size}", entries, hot_inputs=HOT_INPUTS)
        close(sides)


def close(sides: Mapping[str, Side]) -> None:
    for side in sides.values():
        side.model.embeddings.close()
        del side.model, side.engine, side.pipeline
    if GPU:
        torch.cuda.empty_cache()


def sessions(
    size: int, count: int, rows: Mapping[str, int], length: int = 4 if SMALL else 20, samples: float = 16.5
) -> list[Batch]:
    """Draw batches of sessions, whose samples share a user and a history; each sample has an item
    and contexts.
    """
    drawn, distinct = [], max(int(size / samples), 1)

    def ids(draws: np.random.Generator, table: str, number: int) -> torch.Tensor:
        return torch.from_numpy((rows[table] * draws.random(number) ** EXPONENT).astype(np.int64))

    for number in range(count):
        draws = np.random.default_rng([2, number])
        inverse = torch.from_numpy(np.sort(draws.integers(0, distinct, size)))
        single = [ids(draws, table, size) for table in rows if table != "user"]
        alone = KeyedJagged(
            keys=tuple(table for table in rows if table != "user"),
            values=torch.cat(single),
            offsets=None,
            batch_size=size,
        )
        user = KeyedJagged(
            keys=("user",), values=ids(draws, "user", distinct), offsets=None, batch_size=distinct
        )
        history = JaggedWindows(
            key="history",
            values=ids(draws, "item", distinct * length),
            start=length * torch.arange(distinct),
            length=torch.full((distinct,), length),
        )
        groups = tuple(
            InverseJagged(unique=unique, inverse=inverse).compact() for unique in (user, history)
        )
        drawn.append(Batch(sparse=alone, groups=groups, **dense_and_labels(draws, size)))
    return drawn


def dedup() -> None:
    """RecD: a transformer on histories, computed once per session or once per sample."""
    size, context = 16 if SMALL else 4096, tuple(f"context{place}" for place in range(6))
    rows = dict.fromkeys(("item", "user"), 997 if SMALL else 1_000_000) | dict.fromkeys(context, 100)
    schema = Schema(
        user="user",
        time="time",
        dense=SCHEMA.dense,
        sparse=(
            *(SparseFeature(name=name) for name in rows),
            SparseFeature(name="history", kind="history", of="item", max_length=20),
        ),
    )
    drawn = sessions(size, WARM_UP + LEAD + TIMED + 1, rows)
    keys = [feature.name for feature in schema.sparse]
    plain = [batch.expanded(keys) for batch in drawn]
    for case, place in (("hbm", "gpu"), ("hybrid", "cpu")):
        sides = {name: Side(64, place, schema=schema, table_rows=rows) for name in ("plain", "dedup")}
        data = {"plain": plain, "dedup": drawn}
        entries = {
            name: Entry(side, data[name][:WARM_UP], data[name][WARM_UP:]) for name, side in sides.items()
        }
        compare("gpu_dedup", case, entries)
        close(sides)


if __name__ == "__main__":
    give_everyone_good_memory()
    with torch_settings(seed=SEED):
        {"train": train, "graph": graph, "cached": precision_and_tiers, "hot": hot, "dedup": dedup}[
            sys.argv[2]
        ]()
