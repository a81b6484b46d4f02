"""Time training steps of a DLRM: on the CPU, with the network on a GPU, with rows there too, and cached there.

``python tools/gpu/steps.py OUT.jsonl whole|cached`` writes one line of JSON a configuration. Sizes are those of Criteo
Kaggle in the published code of FAE (D = 16), and D = 64; ids are synthetic. Without a GPU, sizes are tiny.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from cells import GPU, use_device_slots, write

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.synthetic import CRITEO_ROWS
from stratarec.embedding import Prefetcher, RowOptimizerConfig
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.kernels.runtime.accelerator import CPU, open_device
from stratarec.models import DLRMConfig, build_model
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.steps.step import Stages
from stratarec.training.torch_setup import build_optimizer, torch_settings

BUDGET, BEGAN = float(os.environ.get("SECONDS_LEFT", "150")), time.time()
TINY = not GPU
NAMES = [f"C{place}" for place in range(26)]
ROWS = {name: min(int(rows), 997) if TINY else int(rows) for name, rows in zip(NAMES, CRITEO_ROWS, strict=True)}
SCHEMA = Schema(
    dense=tuple(DenseFeature(name=f"I{place}") for place in range(13)),
    sparse=tuple(SparseFeature(name=name) for name in NAMES),
)
STEPS = 4 if TINY else 40


def batches(size, skew, count, hot=1.0):
    """Ids R * hot * u ** skew: popular rows come first."""
    found = []
    for number in range(count):
        draws = np.random.default_rng(number)
        ids = np.concatenate(
            [(max(int(rows * hot), 1) * draws.random(size) ** skew).astype(np.int64) for rows in ROWS.values()]
        )
        sparse = KeyedJagged(keys=tuple(NAMES), values=torch.from_numpy(ids), offsets=None, batch_size=size)
        dense = torch.from_numpy(draws.standard_normal((size, 13), dtype=np.float32))
        found.append(Batch(label=(dense[:, 0] > 0.5).float(), dense=dense, sparse=sparse))
    return found


def tiers_of(kind, share):
    large = {name: rows for name, rows in ROWS.items() if rows >= (500 if TINY else 100_000)}
    return TierConfig(
        tables={
            name: TableTier(codec=CodecConfig(kind=kind), cache_rows=max(int(rows * share), 300 if TINY else 65_536))
            for name, rows in large.items()
        },
    )


def fill(model):
    """Write every row of cached tables home, so that a miss is a read."""
    for tables in model.embeddings.engine.tables:
        if not tables.resident:
            array = tables.store.array
            array[:] = np.random.default_rng(0).integers(0, 60, (1, array.shape[1]), dtype=np.uint8)
            for first in range(0, tables.store.rows, 1 << 22):
                tables.store.mark_written(np.arange(first, min(first + (1 << 22), tables.store.rows), dtype=np.int64))


def run(name, width, size, data, *, network, rows, tiers=None, depth=None, precision="float32"):
    if time.time() - BEGAN > BUDGET:
        return
    on_device = rows == "gpu"
    use_device_slots(on_device)
    config = DLRMConfig(embedding_dim=width, bottom_mlp=(512, 256, 64), top_mlp=(512, 256), pooling="sum")
    train = TrainConfig(precision=precision)
    began = time.time()
    placed = replace(tiers or TierConfig(), device="cuda" if on_device and GPU else "cpu", lookahead=max(depth or 1, 1))
    model = build_model(config, SCHEMA, ROWS, seed=1, optimizer=RowOptimizerConfig(learning_rate=0.02), tiers=placed)
    if tiers:
        fill(model)
    depth = model.embeddings.engine.lookahead if depth is None else depth
    made = time.time() - began
    model.place(CPU if network == "cpu" or TINY else open_device("cuda"))
    model.train()
    stages = Stages(model, build_optimizer(train.dense, model.network), train, None)
    seconds, losses = [], []
    items = [(batch, model.request(batch)) for batch in data]
    source = (items[step % len(items)] for step in range(STEPS + len(items)))
    with (
        torch_settings(seed=1),
        Prefetcher(model.embeddings.engine, source, lambda item, stop: item[1].features, depth=depth) as ahead,
    ):
        # A step includes the wait for its rows.
        began = time.perf_counter()
        for step, ((batch, request), prepared) in enumerate(ahead):
            losses.append(stages.train(step, batch, request, prepared).loss)
            ended = time.perf_counter()
            seconds.append(ended - began)
            began = ended
    timed = seconds[len(items) :]
    parts = {key: round(1e3 * value / len(seconds), 3) for key, value in model.embeddings.engine.seconds.items()}
    moved = [tables.traffic.rows_in for tables in model.embeddings.engine.tables if not tables.resident]
    model.embeddings.close()
    write(
        cell="step",
        name=name,
        width=width,
        batch=size,
        network=network,
        rows=rows,
        depth=depth,
        precision=precision,
        median_ms=1e3 * median(timed),
        samples_s=size / median(timed),
        parts_ms=parts,
        rows_in=moved,
        last_loss=losses[-1],
        build_s=round(made, 1),
    )
    if GPU:
        torch.cuda.empty_cache()


def whole(gpu):
    """Time tables that are stored whole where their rows are looked up."""
    for width, sizes in ((16, (1024, 16_384)), (64, (4096,))):
        for size in sizes if not TINY else (64,):
            data = batches(size, 3.0, 12 if not TINY else 2)
            run("cpu", width, size, data, network="cpu", rows="cpu")
            run("hybrid", width, size, data, network=gpu, rows="cpu")
            run("rows in GPU memory", width, size, data, network=gpu, rows=gpu)
            run("rows in GPU memory, bf16", width, size, data, network=gpu, rows=gpu, precision="bf16")


def cached(gpu):
    """Time tables in host memory under a cache in GPU memory, and tables without one, on the same ids."""
    size = 16_384 if not TINY else 32
    data = batches(size, 1.5, 12 if not TINY else 2)
    for kind in ("fp32", "int8"):
        for depth in (0, 2):
            run(
                f"{kind} home, 5 % cache",
                64,
                size,
                data,
                network=gpu,
                rows=gpu,
                tiers=tiers_of(kind, 0.05),
                depth=depth,
            )
    run("hybrid, same ids", 64, size, data, network=gpu, rows="cpu")
    run("rows in GPU memory, same ids", 64, size, data, network=gpu, rows=gpu)


if __name__ == "__main__":
    {"whole": whole, "cached": cached}[sys.argv[2]]("gpu")
