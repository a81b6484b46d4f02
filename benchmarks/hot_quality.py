"""Test AUC of hot batches compared with ordinary batches, on Globo's first days and on the
synthetic Criteo shape.

Only the order of samples can cost quality, so all tables are float32 in DRAM except in the last two
rows. `calibrate` chooses hot rows for a share of the bytes. The orders are the two of
``hot.batches`` and two naive ones: all hot batches of an epoch first, or all mixed batches first.
The last two rows use int8 rows and a cache, without hot rows and with hot rows that are never
evicted, in ordinary batches. Whole runs have paired seeds; nothing is timed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import polars as pl

from benchmarks.sessions import recipe as shipped
from benchmarks.sessions import row_bytes_of
from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.clicks import ClicksConfig
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.hot.calibrator import calibrate
from stratarec.hot.hot_loader import HotLoader, classify
from stratarec.hot.selection import parts_of
from stratarec.recipe import Recipe, with_values
from stratarec.training.run import build_run
from stratarec.training.run.build_run import Run
from stratarec.training.steps.step import loader_config
from stratarec.training.trainer import Trainer

DAY_MS = 86_400_000
DAYS = 4
WORKERS = 3
# On Globo: the batch size, and one in USERS users.
BATCH, USERS = 2048, 2
REFERENCES = ("without", "int8")
ORDERS = ("without", "proportional", "hot_first", "mixed_first")
# Number of orders to train on each data set; naive orders matter only if many inputs are hot.
KINDS = {"globo": 4, "synthetic": 2}
# Share of all bytes for hot rows.
BYTES_SHARE = {"globo": 0.03, "synthetic": 0.25}
Line = Callable[[], dict[str, Any]]
"""Waits for the runs of a row and returns their means."""
INT8 = {"precision": "int8", "state": "bf16", "lookahead": 0, "cache": {"fraction": 0.05}}


class OneKindFirst(HotLoader):
    """A loader with all hot batches of an epoch first, or last; it reads the data of an epoch
    twice.
    """

    hot_first = True

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        kinds = self.kinds(epoch)
        each = (
            batch
            for wanted in (self.hot_first, not self.hot_first)
            for batch, hot in zip(super(OneKindFirst, self).batches(epoch), kinds, strict=True)
            if hot == wanted
        )
        return islice(each, start_batch, None)


def bytes_of_rows(recipe: Recipe, dataset: Dataset) -> dict[str, int]:
    """Return the bytes of float32 weights and optimizer state of a row, by vocabulary."""
    (width,) = {recipe.model.table_width(name) for name in dataset.vocabularies}
    return row_bytes_of(dataset, width, recipe.train.embedding)


def budget_of(recipe: Recipe, dataset: Dataset, share: float) -> int:
    """Return `share` of the bytes of all rows."""
    return int(share * sum(part.nbytes for part in parts_of(dataset, bytes_of_rows(recipe, dataset))))


class OrderedTrainer(Trainer):
    """Trainer that trains the same samples in one of `ORDERS`."""

    def __init__(self, recipe: Recipe, dataset: Dataset, order: str, share: float) -> None:
        self._order = order
        self._bytes_share = share
        super().__init__(recipe, dataset)

    def build(self) -> Run:
        if self._order == "without":
            return super().build()
        with mock.patch.object(build_run, "build_loader", self._ordered):
            return super().build()

    def _ordered(self, recipe: Recipe, dataset: Dataset, *_: Any) -> Loader:
        row_bytes = bytes_of_rows(recipe, dataset)
        parts = parts_of(dataset, row_bytes)
        hot = calibrate(dataset, row_bytes, budget_of(recipe, dataset, self._bytes_share)).hot(parts)
        kind = OneKindFirst if self._order.endswith("_first") else HotLoader
        counts = classify(dataset, parts, hot, "train")
        loader = kind(dataset, "train", loader_config(recipe.train), parts, hot, counts)
        if isinstance(loader, OneKindFirst):
            loader.hot_first = self._order == "hot_first"
        return loader


def globo(folder: Path, quick: bool) -> Recipe:
    """Prepare the first days of some users of the click log; the last two days are validation and
    test.
    """
    recipe = shipped("globo", "auto")
    source = recipe.data.source
    assert isinstance(source, ClicksConfig)
    clicks, day = pl.read_parquet(source.paths[0]), pl.col(source.time) // DAY_MS
    path = folder / "clicks.parquet"
    some = pl.col(source.user).hash(seed=1) % USERS == 0
    clicks.filter(some & (day - day.min() < (3 if quick else DAYS))).write_parquet(path)
    data = replace(recipe.data, source=replace(source, paths=(str(path),)), path=str(folder / "globo"))
    recipe = replace(recipe, data=data)
    steps = -(-prepare(data, name="globo").samples("train") // BATCH)
    values: dict[str, Any] = {
        f"train.{part}.schedule.total_steps": steps for part in ("dense", "embedding")
    }
    values["train.batch_size"] = BATCH
    return Recipe.from_dict(with_values(recipe.to_dict(), values))


def synthetic(folder: Path, quick: bool) -> Recipe:
    """Prepare the Criteo shape, with a validation split."""
    samples, cap = (100_000, 50_000) if quick else (1_000_000, 400_000)
    source = SyntheticConfig(
        samples=samples, scale=1.0, max_rows=cap, session_length=1.0, missing=0.0, seed=7
    )
    vocabulary = VocabularyConfig(min_count=1, tail_buckets=16)
    split = SplitConfig(by="fraction", valid=0.1, test=0.2)
    data = PrepareConfig(source=source, path=str(folder / "synthetic"), vocabulary=vocabulary, split=split)
    prepare(data, name="synthetic")
    demo = Recipe.load(Path(__file__).parents[1] / "src" / "stratarec" / "recipes" / "demo.yaml")
    return replace(demo, data=data)


def measure(name: str, recipe: Recipe, kind: str, seed: int) -> dict[str, Any]:
    """Train one run and return its test metrics."""
    with tempfile.TemporaryDirectory() as run:
        values = {"train.seed": seed, "train.run": f"{run}/run", "train.threads": 1}
        seeded = Recipe.from_dict(with_values(recipe.to_dict(), values))
        trainer = _trainer(seeded, Dataset.open(recipe.data.path), kind, BYTES_SHARE[name])
        test, loader = trainer.train()["test"], trainer.parts.loader
    hot = loader.hot_samples / loader.samples if isinstance(loader, HotLoader) else 0.0
    print(f"{name} {kind} {seed}: AUC {test['auc']:.5f}", file=sys.stderr, flush=True)
    return {"auc": test["auc"], "log_loss": test["log_loss"], "hot_inputs": hot}


def quality(
    name: str, recipe: Recipe, kinds: Sequence[str], seeds: Sequence[int], pool: Executor
) -> list[Line]:
    """Start the runs of all kinds; AUC differences are relative to the first kind."""
    runs = {kind: [pool.submit(measure, name, recipe, kind, seed) for seed in seeds] for kind in kinds}

    def line(kind: str) -> dict[str, Any]:
        results = [each.result() for each in runs[kind]]
        first = mean(each.result()["auc"] for each in runs[kinds[0]])
        means = {key: mean(result[key] for result in results) for key in results[0]}
        by_seed = [result["auc"] for result in results]
        return {
            "data": name,
            "kind": kind,
            **means,
            "auc_delta": means["auc"] - first,
            "auc_by_seed": by_seed,
        }

    return [partial(line, kind) for kind in kinds]


def _trainer(recipe: Recipe, dataset: Dataset, kind: str, share: float) -> Trainer:
    if kind in ORDERS:
        return OrderedTrainer(recipe, dataset, kind, share)
    budget = budget_of(recipe, dataset, share)
    hot = {"budget": budget, "batches": "none"} if kind == "int8_hot_rows" else {}
    return Trainer(Recipe.from_dict(with_values(recipe.to_dict(), {"memory": INT8, "hot": hot})), dataset)


def run(quick: bool) -> dict[str, Any]:
    """Measure three seeds of each kind; `quick` has one seed and less data."""
    seeds = (1,) if quick else (1, 2, 3)
    with tempfile.TemporaryDirectory() as folder:
        recipes = {"globo": globo(Path(folder), quick), "synthetic": synthetic(Path(folder), quick)}
        with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
            lines = [
                line
                for name, recipe in recipes.items()
                for line in quality(name, recipe, ORDERS[: KINDS[name]], seeds, pool)
            ]
            lines += quality("synthetic", recipes["synthetic"], ("int8", "int8_hot_rows"), seeds, pool)
            rows = [line() for line in lines]
    deltas = {
        f"{row['kind']}_{row['data']}": row["auc_delta"] for row in rows if row["kind"] not in REFERENCES
    }
    own = [delta for kind, delta in deltas.items() if kind.startswith("proportional")]
    return {
        "config": {
            "seeds": seeds,
            "bytes_share": BYTES_SHARE,
            "globo_days": DAYS,
            "globo_users": f"one in {USERS}",
            "int8": INT8,
        },
        "metrics": {
            "auc_delta_hot": min(own),
            **{f"auc_delta_{kind}": delta for kind, delta in deltas.items()},
        },
        "samples": {"rows": rows},
    }
