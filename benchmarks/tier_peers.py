"""Alternatives to tiers within the same memory.

- The peer's float32 tables (TorchRec with FBGEMM) in a memory-mapped file, in a child process. A
  memory cgroup limits its page cache and new memory to the bytes of the tiers, in addition to what
  training needs anyway.
- RocksDB in place of the log, with the same cache and lookahead, and with the DRAM that the log
  needs.
- Float32 tables in DRAM with so few rows that they fit: frequent values share rows with others by
  their hash.

``python -m benchmarks.tier_peers DATA WIDTH BATCH BUDGET FOLDER GROUP`` is the child process of the
first.
"""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.__main__ import give_everyone_good_memory
from benchmarks.blockstore import RocksRecords
from benchmarks.kept import FOLDER, kept
from benchmarks.peers import TorchRecDLRM, fused_collection
from benchmarks.registry import PeerMissing
from benchmarks.train import BOTTOM, EPS, RATE, TOP, Side
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.vocabulary import VocabularyOverride
from stratarec.embedding.stores.base import StoreBytes
from stratarec.embedding.stores.ssd_layout import location_bytes
from stratarec.embedding.tables.cached import CachedTables
from stratarec.models import CTRModel, DLRMConfig
from stratarec.models.base import build_tables
from stratarec.planning.bytes import SSD_BUFFER_BYTES
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer

_SMALL_TABLE = 4096
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "rss", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "anon", "memory.peak"),
)


class MappedPeer:
    """TorchRec's side in a child process with limited memory. It runs a step on request, so sides
    can alternate.
    """

    def __init__(self, dataset: Dataset, width: int, batch: int, budget: int, folder: Path) -> None:
        self._group = _cgroup() / f"stratarec-{os.getpid()}-mapped"
        self._group.mkdir()
        arguments = [str(dataset.path), str(width), str(batch), str(budget), str(folder), str(self._group)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tier_peers", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        self.limit_bytes = int(self._answer())

    def step(self) -> float:
        """Train on a batch; return its loss."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the process of the mapped tables ended with code {self._process.wait()}")
        return line

    def close(self) -> None:
        """End the process and remove its cgroup, which must have been full; else the page cache was
        not limited.
        """
        self._process.communicate()
        peak = next(
            int((self._group / name).read_text()) for *_, name in _CGROUPS if (self._group / name).exists()
        )
        if not 0.95 * self.limit_bytes < peak <= self.limit_bytes:
            raise AssertionError(
                f"the process of the mapped tables used {peak} of {self.limit_bytes} "
                "bytes; expected more than 95 %"
            )
        self._group.rmdir()


def _cgroup() -> Path:
    for root, limit, *_ in _CGROUPS:
        if os.access(root, os.W_OK) and any(root.glob(f"*/{limit}")):
            return root
    raise PeerMissing("cannot create a memory cgroup; run as root on a system with memory cgroups")


def mapped_side(data: str, width: int, batch: int, folder: Path) -> Side:
    """Return TorchRec's DLRM with table weights and optimizer state in memory-mapped files."""
    dataset = Dataset.open(data)
    config = DLRMConfig(embedding_dim=width, bottom_mlp=BOTTOM, top_mlp=TOP, pooling="sum")
    tables = list(build_tables(config, dataset.schema, dataset.table_rows()))
    collection = fused_collection(tables, rate=RATE, eps=EPS, initial={})
    model = TorchRecDLRM(collection, len(dataset.schema.dense), [*BOTTOM, width], [*TOP, 1])
    loader = Loader(dataset, "train", LoaderConfig(batch_size=batch))
    batch_0 = next(iter(loader.epoch(0)))
    with torch.no_grad():
        before = model(batch_0)
    for number, lookup in enumerate(collection._emb_modules):
        for name in ("weights_host", "momentum1_host"):
            tensor = getattr(lookup._emb_module, name)
            tensor.data = _mapped(tensor.data, folder / f"{name}-{number}")
    gc.collect()
    with torch.no_grad():
        if not torch.equal(before, model(batch_0)):
            raise AssertionError("logits with tables in a file differ from logits with tables in memory")
    dense = [*model.dlrm.dense_arch.parameters(), *model.dlrm.over_arch.parameters()]
    return Side(model, torch.optim.Adagrad(dense, lr=0.01, fused=True), loader, "float32")


def _mapped(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """Move a tensor to a file and map it, with no page of it in memory."""
    values = tensor.numpy()
    with path.open("w+b") as file:
        values.tofile(file)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        view = mmap.mmap(file.fileno(), values.nbytes)
    # Rows are read at random, so pages of a read-ahead would only evict others.
    view.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape)


def limit_memory(group: Path, side: Side, budget: int) -> int:
    """Limit the page cache and new memory of this process to `budget` bytes more than some steps
    allocate.
    """
    limit, used = next((limit, used) for _, limit, used, _ in _CGROUPS if (group / limit).exists())
    (group / "cgroup.procs").write_text(str(os.getpid()))
    for _ in range(5):
        side.step()
    parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    allowed = int(parts[used]) + budget
    (group / limit).write_text(str(allowed))
    return allowed


class RocksHome:
    """RocksDB as the home of rows."""

    kind = "log"
    array = bits = None

    def __init__(self, folder: Path, *, rows: int, record_bytes: int, dram_bytes: int) -> None:
        self.rows = rows
        self.record_bytes = record_bytes
        self._dram_bytes = dram_bytes
        self._written = np.zeros(rows, np.bool_)
        folder.mkdir()
        # `blockstore` was fastest with this number of threads.
        self.records = RocksRecords(folder, dram_bytes, threads=32)
        self.flush = self.records.flush
        self.close = self.records.close

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Fill `out` with the records of `rows`, of which all or none must have been written."""
        written = self._written[rows]
        if written.any():
            self.records.read(rows, out)
        return written

    def write(self, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        """Write the records of `rows`."""
        self.records.write(rows, records)
        self._written[rows] = True

    def memory(self) -> StoreBytes:
        """Return the DRAM budget of the database."""
        return StoreBytes(dram_bytes=self._dram_bytes, block_bytes=0)


def use_rocksdb(model: CTRModel, folder: Path) -> dict[str, Any]:
    """Replace each log by RocksDB with the same DRAM, before any row is written; return the
    settings.
    """
    config: dict[str, Any] = {}
    for number, tables in enumerate(model.embeddings.engine.tables):
        if isinstance(tables, CachedTables) and tables.store.kind == "log":
            log = tables.store
            frequent = log._frequent.rows * log.record_bytes  # type: ignore[attr-defined]
            dram = location_bytes(log.rows, log.record_bytes) + log.rows // 8 + SSD_BUFFER_BYTES + frequent
            home = RocksHome(
                folder / f"{number}", rows=log.rows, record_bytes=log.record_bytes, dram_bytes=dram
            )
            log.close()
            tables.store = tables.mover.store = home  # type: ignore[assignment]
            config = {**home.records.config, "threads": home.records.threads}
    return config


def hashed(config: PrepareConfig, rows: dict[str, int], times: int, path: Path) -> PrepareConfig:
    """Prepare the same log with its larger vocabularies hashed, so that all tables have 1/`times`
    of their rows.
    """
    small = sum(count for count in rows.values() if count <= _SMALL_TABLE)
    share = (sum(rows.values()) / times - small) / (sum(rows.values()) - small)
    overrides = {
        name: VocabularyOverride(kind="hash", buckets=int(count * share))
        for name, count in rows.items()
        if count > _SMALL_TABLE
    }
    changed = replace(config, path=str(path), vocabulary=replace(config.vocabulary, overrides=overrides))
    prepare(changed)
    return changed


def hashing_delta(
    name: str, data: PrepareConfig, recipe: Path, changes: Sequence[str], times: int, seeds: Sequence[int]
) -> dict[str, Any]:
    """Return the test AUC of hashing into 1/`times` of the rows (float32), minus that of int8 rows
    with a cache of 5 %.

    The int8 rows need about as many bytes of DRAM if their home is a log. The home does not change
    results.
    """
    rows = Dataset.open(data.path).table_rows()
    sides = {
        "int8 under a cache": (
            data,
            ["memory.precision=int8", "memory.state=bf16", "memory.cache.fraction=0.05"],
        ),
        "hashed": (hashed(data, rows, times, FOLDER / "tiers" / f"{name}-hashed"), []),
    }
    aucs: dict[str, list[float]] = {side: [] for side in sides}
    fixed = [*changes, "train.eval_every=0", "train.checkpoint.every_minutes=0"]
    for side, (config, memory) in sides.items():
        for seed in seeds:
            with tempfile.TemporaryDirectory() as run:
                loaded = Recipe.load(
                    recipe, [*fixed, *memory, f"train.seed={seed}", f"train.run={run}/run"]
                )
                about = {
                    "recipe": {**loaded.to_dict(), "train": None},
                    "data": Dataset.open(config.path).fingerprint,
                }
                about |= {"seed": seed, "changes": fixed}
                auc = kept(
                    FOLDER / "tiers" / f"{name}-{side}-{seed}.json".replace(" ", "-"),
                    about,
                    lambda loaded=loaded, config=config: {  # type: ignore[misc]
                        "auc": Trainer(replace(loaded, data=config), Dataset.open(config.path)).train()[
                            "test"
                        ]["auc"]
                    },
                )["auc"]
            aucs[side].append(auc)
            print(f"{name}, {side}, seed {seed}: AUC {auc:.5f}", file=sys.stderr, flush=True)
    delta = mean(aucs["hashed"]) - mean(aucs["int8 under a cache"])
    return {"data": name, "auc_delta": delta, "auc_by_seed": aucs, "times": times}


@contextmanager
def _stdout_for_answers() -> Iterator[Any]:
    """Yield a copy of standard output for answers, and redirect the output of libraries to standard
    error.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def main() -> None:
    """Train a step for each line of the standard input and answer with its loss."""
    data, width, batch, budget, folder, group = sys.argv[1:]
    give_everyone_good_memory()
    with _stdout_for_answers() as answers:
        side = mapped_side(data, int(width), int(batch), Path(folder))
        print(limit_memory(Path(group), side, int(budget)), file=answers, flush=True)
        for _ in sys.stdin:
            print(side.step(), file=answers, flush=True)
        side.close()


if __name__ == "__main__":
    main()
