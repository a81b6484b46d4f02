"""Measure parts of a step whose design depends on the machine; without a GPU, at tiny sizes.

``python tools/gpu/parts.py OUT.jsonl anatomy|directory|moves`` writes one line of JSON per cell.

    anatomy     where the host spends its time in a step that no graph repeats, and with more or
                fewer handovers
    directory   the directory of a cache by number of threads: if 8 take more than 1.5 ms, it
                belongs on the device
    moves       records between slots and homes in GPU memory and in host memory, and the host's
                copies by threads
"""

from __future__ import annotations

import sys
import time
from statistics import median

import numpy as np
import steps
import torch
from cells import DEVICE, GPU, MACHINE, SMALL, out_of_time, use_device_slots, write
from kernels import host_clock

from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig, EmbeddingBagConfig
from stratarec.embedding.slots import Level0
from stratarec.embedding.stores.arrays import DramRecords
from stratarec.embedding.stores.device import DeviceRecords
from stratarec.embedding.tables.base import group_layout
from stratarec.embedding.tables.cache import Directory
from stratarec.kernels import bit_rows
from stratarec.kernels.bags import BagBatch
from stratarec.kernels.runtime.accelerator import open_device
from stratarec.kernels.runtime.threads import limit_threads
from stratarec.training.steps.graph_step import DevicePipeline

CELL = {"cell": "parts", "benchmark": "gpu_parts", **MACHINE}
PLACE = open_device("cuda") if GPU else torch.device(DEVICE)
WIDTH, THREADS = 64, (1, 2) if SMALL else (1, 2, 4, 8, 16)


def anatomy() -> None:
    """Time steps without a graph, and list where the host's time goes."""
    size, count = (8, 6) if SMALL else (1024, 40)
    data = steps.batches(size, count, 5)
    for rows in ("gpu", "cpu"):
        if out_of_time(f"anatomy {rows}"):
            return
        side = steps.Side(16, rows)
        if isinstance(side.pipeline, DevicePipeline):
            side.pipeline._graph_step._captures = False
        side.train(data[: count // 2], side.engine.lookahead)
        for depth, interval in ((0, 5e-3), (1, 5e-3), (1, 1e-4)):
            sys.setswitchinterval(interval)
            before = dict(side.engine.seconds)
            _, ends = side.train(data, depth)
            spent = {
                name: 1e3 * (now - before.get(name, 0.0)) / count
                for name, now in side.engine.seconds.items()
            }
            write(
                **CELL,
                part="anatomy",
                rows=rows,
                depth=depth,
                switch_interval=interval,
                step_ms=1e3 * median(np.diff(ends[2:])),
                ms_by_stage=spent,
            )
        sys.setswitchinterval(5e-3)
        if GPU:
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=kinds) as profile:
                side.train(data[:10], side.engine.lookahead)
            top = sorted(profile.key_averages(), key=lambda each: -each.self_cpu_time_total)[:25]
            us = {each.key[:50]: [each.self_cpu_time_total / 10, each.count / 10] for each in top}
            write(
                cell="parts",
                benchmark="gpu_parts",
                part="anatomy",
                rows=rows,
                what="us of the host and calls a step",
                top=us,
            )
        steps.close({"side": side})


def directory() -> None:
    """Time the assignment of slots for batches of Criteo's tables that do not fit GPU memory."""
    size = 8 if SMALL else 16_384
    for share in (0.05, 1 / 37):
        tiers = steps.cached("int8", steps.slots_within(share))
        names = [name for name in steps.NAMES if name in tiers.tables]
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=steps.ROWS[name], embedding_dim=WIDTH, feature_names=(name,)
            )
            for name in names
        ]
        host = Directory(tables, tiers.tables, policy="lru", ways=32, seed=1)
        start = host.layout.slot_start
        group = group_layout(tables, {}, start[:-1].tolist(), np.diff(start).tolist())
        places = np.arange(len(names))
        columns = [steps.NAMES.index(name) for name in names]
        # The first batches fill the slots.
        filling = [THREADS[-1]] * (1 if SMALL else 10)
        times: dict[int, list[float]] = {}
        for number, threads in enumerate((*filling, *THREADS, *THREADS, *THREADS)):
            if out_of_time(f"directory {share}"):
                return
            (batch,) = steps.batches(size, 1, 7 + number)
            ids = np.ascontiguousarray(batch.sparse.values.numpy().reshape(-1, size)[columns]).ravel()
            bags = BagBatch(values=ids, offsets=None, weights=None, batch=size, key=places)
            limit_threads(threads)
            began = time.perf_counter()
            host.assign(group, bags, np.empty(len(ids), np.int32), number, max(number - 2, 0))
            if number >= len(filling):
                times.setdefault(threads, []).append(1e3 * (time.perf_counter() - began))
        write(
            **CELL,
            part="directory",
            share=share,
            tables=len(names),
            lookups=len(columns) * size,
            unit="ms",
            by_threads={threads: median(each) for threads, each in times.items()},
        )


def moves() -> None:
    """Time moves of the rows that a batch misses."""
    use_device_slots()
    count, rows = (20, 500) if SMALL else (28_377, 8_000_000)
    draws, level0 = np.random.default_rng(1), Level0(PLACE)
    for kind in ("int8", "fp32"):
        if out_of_time(f"moves {kind}"):
            return
        codec = RecordCodec.of(
            CodecConfig(kind=kind, state="fp32" if kind == "fp32" else "bf16"), WIDTH, steps.OPTIMIZER
        )
        memory = level0.slots(4 * count, WIDTH, steps.OPTIMIZER)
        slots, numbers = (draws.permutation(most)[:count].astype(np.int64) for most in (4 * count, rows))
        keys, order = draws.integers(0, 1 << 62, count).astype(np.uint64), np.arange(count)
        home = DeviceRecords(level0, rows=rows, record_bytes=codec.record_bytes)
        host = np.zeros((count, codec.record_bytes), np.uint8)
        ms = {
            "encode into GPU memory": host_clock(
                lambda: memory.encode(codec, slots, home.records, numbers, keys, 1)
            ),
            "decode from GPU memory": host_clock(
                lambda: memory.decode(codec, home.records, numbers, slots)
            ),
            "encode and copy down": host_clock(lambda: memory.encode(codec, slots, host, order, keys, 1)),
            "copy up and decode": host_clock(lambda: memory.decode(codec, host, order, slots)),
        }
        home.close()
        store = DramRecords(rows=rows, record_bytes=codec.record_bytes)
        assert store.array is not None
        assert store.bits is not None
        for threads in THREADS:
            limit_threads(threads, idle_cores=True)
            spent = []
            for _ in range(2 if SMALL else 6):
                outgoing, incoming = (draws.permutation(rows)[:count] for _ in range(2))
                began = time.perf_counter()
                bit_rows.exchange(store.array, store.bits, outgoing, host, incoming, host.copy())
                spent.append(1e3 * (time.perf_counter() - began))
            ms[f"exchange by {threads} threads"] = median(spent[1:])
        store.close()
        write(
            **CELL,
            part="moves",
            precision=kind,
            rows=count,
            record_bytes=codec.record_bytes,
            unit="ms",
            ms=ms,
        )


if __name__ == "__main__":
    {"anatomy": anatomy, "directory": directory, "moves": moves}[sys.argv[2]]()
