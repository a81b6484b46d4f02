"""How speed grows with the number of threads, up to 16: embedding, training, `prepare`, `predict`
and the scorer.

- `embedding`: the step of `embedding` (26 tables of Criteo's sizes, D = 16, batch 16,384), and
  FBGEMM's.
- `train_D_B`: the step of `train`, with loading, for D = 16 and 64 and several batch sizes B, and
  TorchRec's.
- `prepare` and `predict`: the whole commands, with the start of Python, in processes that may use
  some processors.
- `scorer`: calls with one row from several threads.
- `machine_products`, `machine_rows`: what the processors allow. Each thread computes matrix
  products that fit its cache, or reads random rows of 64 bytes, and shares nothing with the others.
  Two virtual processors may be one core.

All numbers of threads and both sides alternate. `efficiency_T` is the speed with T threads, divided
by T times that with one; `serial` is the part of a step that only one thread does by Amdahl's law,
from the largest T. Where the peers are not installed, only StrataRec is measured.

Gate: the checks of `embedding` and `train`, and equal predictions with every number of processors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
import torch

from benchmarks.contenders import Contenders
from benchmarks.contenders import Shape as Tables
from benchmarks.embedding import gate as gate_embedding
from benchmarks.registry import PeerMissing, import_peer
from benchmarks.scorer import batches, make_export, make_log, rows_per_second
from benchmarks.train import Shape, gate, sides, tiered_sides
from stratarec import Scorer
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.synthetic import CRITEO_ROWS, SyntheticConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.training.run.run_directory import read_recipe

MOST_THREADS = 16
PARTS = ("machine", "embedding", "train", "serving")
SHAPES = ((16, 1024), (16, 16_384), (64, 4096))
LARGE = ("embedding", "train_16_16384", "train_64_4096")
LEAST = {2: 0.95, 8: 0.7, 16: 0.6}
"""Efficiency that large cells should have, by the number of threads."""
MOST_SERIAL = 0.05
# Runs a command on the first processors that this process may use.
_COMMAND = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
from stratarec.cli import main
sys.exit(main(sys.argv[2:]))
"""
Work = Callable[[int], object]
Times = dict[int, list[float]]


def counts() -> list[int]:
    """Return the numbers of threads: powers of two up to the number of processors."""
    most = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    return [1 << power for power in range(most.bit_length())]


def scaled(works: Mapping[str, Work], rounds: int, calls: int) -> dict[str, Times]:
    """Return the seconds per call of `works`, by number of torch's threads; all alternate.

    The first call after a change of the number of threads is not timed.
    """
    before = torch.get_num_threads()
    seconds: dict[str, Times] = {name: {threads: [] for threads in counts()} for name in works}
    for round_ in range(rounds):
        for threads in counts() if round_ % 2 else reversed(counts()):
            for name, work in works.items():
                torch.set_num_threads(threads)
                work(0)
                began = time.perf_counter()
                for call in range(calls):
                    work(call + 1)
                seconds[name][threads].append((time.perf_counter() - began) / calls)
    torch.set_num_threads(before)
    return seconds


def summary(cell: str, side: str, times: Times) -> dict[str, Any]:
    """Return milliseconds and efficiency by number of threads, and the serial part."""
    spent = {threads: median(each) for threads, each in times.items()}
    most = max(spent)
    serial = (most * spent[most] / spent[1] - 1) / (most - 1) if most > 1 else None
    return {
        "cell": cell,
        "side": side,
        **{f"ms_{threads}": 1e3 * each for threads, each in spent.items()},
        **{
            f"efficiency_{threads}": spent[1] / each / threads
            for threads, each in spent.items()
            if threads > 1
        },
        "serial": serial,
    }


def machine(quick: bool) -> list[dict[str, Any]]:
    """Measure work of threads that share nothing but the processors and the memory."""
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(256, 256, generator=generator)
    table = torch.zeros(1 << (20 if quick else 22), 16)
    ids = torch.randint(len(table), (200_000,), generator=generator)
    works: dict[str, Callable[[], object]] = {
        "machine_products": lambda: [square @ square for _ in range(50)],
        "machine_rows": lambda: table[ids],
    }
    torch.set_num_threads(1)
    seconds: dict[str, Times] = {name: {threads: [] for threads in counts()} for name in works}
    with ThreadPoolExecutor(counts()[-1]) as pool:
        for round_ in range(-1, 3 if quick else 15):
            for threads in counts():
                for name, work in works.items():
                    began = time.perf_counter()
                    # Waits for all: as many calls on each thread as one thread makes alone.
                    list(pool.map(lambda _, work=work: work(), range(threads)))
                    if round_ >= 0:
                        seconds[name][threads].append((time.perf_counter() - began) / threads)
    return [summary(name, "ours", times) for name, times in seconds.items()]


def embedding(quick: bool) -> list[dict[str, Any]]:
    """Measure the embedding step of StrataRec and FBGEMM."""
    sizes = [min(rows, 20_000 if quick else 1_000_000) for rows in CRITEO_ROWS]
    gate_embedding(sizes)
    pair = Contenders(Tables(sizes=sizes, width=16, batch=16_384))
    works: dict[str, Work] = {"ours": pair.step_ours, "fbgemm": pair.step_fbgemm}
    return [
        summary("embedding", side, times)
        for side, times in scaled(works, *((3, 3) if quick else (9, 20))).items()
    ]


def training(folder: Path, quick: bool, peers: bool) -> list[dict[str, Any]]:
    """Measure the training step of StrataRec and, with `peers`, of TorchRec."""
    samples, most = (100_000, 20_000) if quick else (1_000_000, 1_000_000)
    source = SyntheticConfig(samples=samples, max_rows=most, session_length=1.0, missing=0.0, seed=7)
    vocabulary = VocabularyConfig(min_count=1, tail_buckets=16)
    dataset = prepare(PrepareConfig(source=source, path=str(folder / "criteo"), vocabulary=vocabulary))
    return [
        row
        for width, batch in SHAPES
        for row in _step(dataset, Shape(width, batch, "float32"), quick, peers)
    ]


def _step(dataset: Dataset, shape: Shape, quick: bool, peers: bool) -> list[dict[str, Any]]:
    if peers:
        gate(dataset, shape)
        pair = sides(dataset, shape, torch.optim.Adagrad)
    else:
        pair = tiered_sides(dataset, shape.width, shape.batch, {"ours": None})

    def work(side: Any) -> Work:
        return lambda call: side.step()

    calls = max(40_000 // shape.batch, 3) if quick else max(200_000 // shape.batch, 10)
    seconds = scaled({name: work(side) for name, side in pair.items()}, 3 if quick else 7, calls)
    for side in pair.values():
        side.close()
    return [summary(f"train_{shape.width}_{shape.batch}", name, times) for name, times in seconds.items()]


def commands(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure `prepare` and `predict` on several processors."""
    recipe, log, scores = folder / "recipe.yaml", folder / "log.parquet", folder / "scores.csv"
    recipe.write_text(json.dumps(read_recipe(folder / "run").to_dict()))
    works: dict[str, Sequence[str]] = {
        "prepare": ["prepare", "-q", str(recipe), "--overwrite", f"data.path={folder / 'again'}"],
        "predict": ["predict", "-q", str(folder / "run"), str(log), "-o", str(scores)],
    }
    seconds: dict[str, Times] = {name: {count: [] for count in counts()} for name in works}
    expected = None
    for round_ in range(-1, rounds):
        for count in counts() if round_ % 2 else reversed(counts()):
            for name, arguments in works.items():
                began = time.perf_counter()
                subprocess.run([sys.executable, "-c", _COMMAND, str(count), *arguments], check=True)
                if round_ >= 0:
                    seconds[name][count].append(time.perf_counter() - began)
            found = pl.read_csv(scores)[:, -1].to_numpy()
            expected = found if expected is None else expected
            np.testing.assert_allclose(found, expected, atol=1e-6)
    return [summary(name, "ours", times) for name, times in seconds.items()]


def scorer(folder: Path, frame: pl.DataFrame, rounds: int) -> list[dict[str, Any]]:
    """Measure calls with one row from several threads of one scorer."""
    torch.set_num_threads(1)
    opened, requests, calls = Scorer.open(folder / "export"), batches(frame, 1, 200), 400
    seconds: Times = {threads: [] for threads in counts()}
    for round_ in range(-1, rounds):
        for threads in counts():
            speed = rows_per_second(opened, requests, threads, calls)
            if round_ >= 0:
                seconds[threads].append(1 / speed)
    return [summary("scorer", "ours", seconds)]


def run(quick: bool, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Measure some parts; embedding and the peers only if the peers are installed."""
    peers = False
    with suppress(PeerMissing):
        import_peer("torchrec")
        peers = True
    threads = torch.get_num_threads()
    rows = machine(quick) if "machine" in parts else []
    rows += embedding(quick) if peers and "embedding" in parts else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "train" in parts:
            rows += training(folder, quick, peers)
        if "serving" in parts:
            frame = make_log(folder / "log.parquet", 50_000 if quick else 1_000_000)
            make_export(folder, 5 if quick else 50)
            rows += commands(folder, 1 if quick else 3)
            rows += scorer(folder, frame, 3 if quick else 15)
        torch.set_num_threads(threads)
    most = counts()[-1]
    ours = [row for row in rows if row["side"] == "ours"]
    metrics = {
        f"efficiency_{count}_{row['cell']}": row[f"efficiency_{count}"]
        for row in ours
        for count in counts()
        if count > 1
    }
    metrics |= {f"serial_{row['cell']}": row["serial"] for row in ours if row["serial"] is not None}
    return {
        "config": {
            "threads": counts(),
            "peers": peers,
            "targets": {f"efficiency_{most}_{cell}": LEAST[most] for cell in LARGE if most in LEAST},
            "limits": {f"serial_{cell}": MOST_SERIAL for cell in LARGE},
        },
        "metrics": metrics,
        "samples": {"rows": rows},
    }
