"""Compile the kernels that tests and the demo use: the last step of `make venv`.

Numba compiles a kernel at its first call with arguments of a type, and stores the result in
`__pycache__` next to the source, for all later processes. This script calls the kernels: tables of
the usual widths, homes and optimizers, and tiny trainings with common recipe settings, each in its
own process. If another process compiles already, the script waits for it and then loads everything
from disk.
"""

from __future__ import annotations

import fcntl
import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import yaml
from numba.core.caching import IndexDataCacheFile

from stratarec import Scorer
from stratarec.batch.jagged import KeyedJagged
from stratarec.cli import main as stratarec
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.kernels import runtime

ROWS, BATCH = 1000, 32
# Kernels are compiled for each of these widths; 4 is what most tests use, 16 the demo.
WIDTHS = (4, 8, 16)
INT8 = {"precision": "int8", "cache": {"fraction": 0.3, "ways": 8}}


def exercise_tables(folder: Path) -> None:
    """Look up, train, save and load tables without a model."""
    for width in WIDTHS:
        for kind in ("rowwise_adagrad", "adam"):
            _train_tables(width, RowOptimizerConfig(kind=kind), None, folder / f"plain-{width}-{kind}")
    _train_tables(4, RowOptimizerConfig(kind="adam", rows="all", weight_decay=0.1), None, folder / "all")
    for home, codec in product(("dram", "mapped", "log"), ("fp32", "int8", "int4")):
        tier = TableTier(home=home, codec=CodecConfig(kind=codec), cache_rows=200)
        rows = folder / f"rows-{home}-{codec}"
        tiers = TierConfig(tables={"a": tier}, ways=8, mapped_path=rows, log_path=rows)
        _train_tables(4, RowOptimizerConfig(), tiers, folder / f"{home}-{codec}")


def _train_tables(
    width: int, optimizer: RowOptimizerConfig, tiers: TierConfig | None, folder: Path
) -> None:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=width, feature_names=(name,))
        for name in "ab"
    ]
    module = TieredEmbeddingBagCollection(tables, optimizer=optimizer, tiers=tiers)
    try:
        for features in _batches():
            module(features).pooled.square().sum().backward()
        manifest = module.save(folder)
        for features in _batches():
            module(features).pooled.square().sum().backward()
        module.load(folder, manifest)
        module.table("a")
    finally:
        module.close()


def _batches() -> Iterator[KeyedJagged]:
    """Yield batches with one id per sample and with bags; enough of them that a cache evicts
    rows.
    """
    for number in range(8):
        values = (torch.arange(2 * BATCH) * 7 + number * 131) % ROWS
        yield KeyedJagged(keys=("a", "b"), values=values, offsets=None, batch_size=BATCH)
    offsets = torch.tensor([0, *[2] * (2 * BATCH - 1), 2 * BATCH]).clamp(max=2 * BATCH)
    yield KeyedJagged(keys=("a", "b"), values=values, offsets=offsets, batch_size=BATCH)


def exercise_trainings(folder: Path) -> None:
    """Prepare, train, resume, test, predict and export by the commands."""
    draws = np.random.default_rng(5)
    clicks = folder / "clicks.parquet"
    pl.DataFrame(
        {
            "user_id": draws.integers(0, 60, 4000),
            "session_id": draws.integers(0, 400, 4000),
            "item_id": (200 * draws.random(4000) ** 2).astype(np.int64),
            "timestamp": 1_600_000_000 + np.sort(draws.integers(0, 86400 * 5, 4000)),
        }
    ).write_parquet(clicks)
    events = {
        "source": {"kind": "clicks", "paths": [str(clicks)], "negatives": 2},
        "split": {"by": "time", "valid": "1d", "test": "1d"},
        "vocabulary": {"min_count": 1},
    }
    log = {
        "source": {"kind": "synthetic", "samples": 6000, "scale": 0.0005, "seed": 3},
        "split": {"by": "fraction", "valid": 0.1, "test": 0.2},
        "shard_samples": 2000,
    }
    data = {"groups": log, "plain": {**log, "groups": "none"}, "clicks": events}
    dcn = {"kind": "dcnv2", "embedding_dim": 16, "deep_mlp": [16]}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        *(
            (name, {"embedding_dim": width}, {}, {})
            for name in ("groups", "plain", "clicks")
            for width in (4, 8)
        ),
        ("groups", {"embedding_dim": 16}, {}, {}),
        ("plain", dcn, {}, {"precision": "bf16"}),
        ("groups", {"embedding_dim": 4}, INT8, {}),
        ("clicks", {"embedding_dim": 4}, INT8, {}),
        ("clicks", {"embedding_dim": 8, "history": {"pooling": "target_attention"}}, {}, {}),
        ("clicks", {"embedding_dim": 8, "history": {"pooling": "transformer"}}, {}, {}),
    ]
    for number, (name, model, memory, train) in enumerate(cases):
        recipe = {
            "name": f"kernels-{number}",
            "data": {"path": str(folder / name), **data[name]},
            "model": model if "kind" in model else {"kind": "dlrm", "bottom_mlp": [8], "top_mlp": [16], **model},
            "memory": memory,
            "train": {
                "run": str(folder / f"run-{number}"), "batch_size": 128, "max_steps": 12, "report": False,
                "checkpoint": {"every_steps": 7}, **train,
            },
        }  # fmt: skip
        path = folder / f"{number}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        if not (folder / name).exists():
            _command("prepare", "-q", path)
        _command("train", "-q", path)
        _command("predict", "-q", folder / f"run-{number}", "-o", folder / f"scores-{number}.parquet")
    _command("export", "-q", folder / "run-0", "-o", folder / "exported")
    scorer = Scorer.open(folder / "exported")
    columns = scorer.manifest.columns
    # as a service does
    scorer.score({feature.name: [1, 2] for feature in (*columns.dense, *columns.sparse)})


def _command(*arguments: object) -> None:
    with redirect_stdout(StringIO()):
        code = stratarec([str(each) for each in arguments])
    if code:
        raise SystemExit(f"stratarec {' '.join(map(str, arguments))} failed")


PARTS = {"tables": exercise_tables, "trainings": exercise_trainings}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_part(name: str) -> None:
    """Call the functions of one part."""
    save = IndexDataCacheFile.save

    def save_alone(self: IndexDataCacheFile, *given: Any) -> None:
        # Numba reads, changes and writes the index of a kernel's files, so two processes at once
        # would corrupt it.
        with _alone(Path(runtime.__file__)):
            save(self, *given)

    IndexDataCacheFile.save = save_alone
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # a collection after compiling is slow and finds little garbage
    with tempfile.TemporaryDirectory(prefix="stratarec-kernels-") as folder:
        PARTS[name](Path(folder))


def main() -> None:
    """Compile each part in a process, when no other process compiles."""
    if len(sys.argv) > 1:
        compile_part(sys.argv[1])
        return
    with _alone(Path(__file__)):
        processes = [subprocess.Popen([sys.executable, __file__, name]) for name in PARTS]
        codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"kernels were not compiled: exit codes {codes}")


if __name__ == "__main__":
    main()
