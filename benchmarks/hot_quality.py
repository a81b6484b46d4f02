"""Test AUC of hot batches against batches as they come, on Globo's first days and on the synthetic Criteo shape.

The order of samples is what could cost quality, so all tables are float32 in DRAM but for the last two lines: hot are
the rows that `calibrate` chooses for a share of the bytes, and the orders are the two of ``hot.batches`` and two naive
ones, all hot batches of an epoch first and all mixed ones first. The last two lines are int8 rows under a cache,
without hot rows and with those that stay, in batches as they come. Whole runs with paired seeds; nothing is timed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import polars as pl

from benchmarks.sessions import recipe as shipped
from stratarec.batch import Batch
from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader
from stratarec.data.portions import Share
from stratarec.data.prepare import PrepareConfig, prepare
from stratarec.data.sources.clicks import ClicksConfig
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.hot.calibrator import calibrate
from stratarec.hot.classifier import classify
from stratarec.hot.loader import HotLoader
from stratarec.hot.order import rate_after, validation_losses
from stratarec.hot.parts import parts_of, row_bytes_of
from stratarec.recipe import Recipe, with_values
from stratarec.training.pipeline import Schedule, Stages
from stratarec.training.trainer import Trainer

DAY_MS = 86_400_000
DAYS = 4
# On Globo.
BATCH = 4096
REFERENCES = ("without", "int8")
ORDERS = ("without", "proportional", "adaptive", "hot_first", "mixed_first")
# Of all bytes, for hot rows.
BYTES_SHARE = {"globo": 0.03, "synthetic": 0.25}
INT8 = {"precision": "int8", "state": "bf16", "lookahead": 0, "cache": {"fraction": 0.05}}


@dataclass(frozen=True)
class OneKindFirst:
    """The `Schedule` of all hot batches of an epoch first, or last: every epoch's data is read twice."""

    loader: HotLoader
    hot_first: bool

    def __len__(self) -> int:
        return len(self.loader)

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        kinds = self.loader.kinds(epoch)
        each = (
            batch
            for wanted in (self.hot_first, not self.hot_first)
            for batch, hot in zip(self.loader.batches(epoch), kinds, strict=True)
            if hot == wanted
        )
        return islice(each, first, None)


def bytes_of_rows(made: Recipe, dataset: Dataset) -> dict[str, int]:
    """Vocabulary -> float32 weights and optimizer state of a row."""
    (width,) = {made.model.table_width(name) for name in dataset.vocabularies}
    return row_bytes_of(dataset, width, made.train.embedding)


def budget_of(made: Recipe, dataset: Dataset, share: float) -> int:
    """That share of the bytes of all rows."""
    return int(share * sum(part.nbytes for part in parts_of(dataset, bytes_of_rows(made, dataset))))


class OrderedTrainer(Trainer):
    """Trains the same samples in one of `ORDERS`."""

    def __init__(self, recipe: Recipe, dataset: Dataset, order: str, share: float) -> None:
        self._order, self._bytes_share = order, share
        super().__init__(recipe, dataset)

    def _new_loader(self, share: Share) -> Loader:
        made = super()._new_loader(share)
        if self._order == "without":
            return made
        row_bytes = bytes_of_rows(self.recipe, self.dataset)
        parts = parts_of(self.dataset, row_bytes)
        budget = budget_of(self.recipe, self.dataset, self._bytes_share)
        hot = calibrate(self.dataset, row_bytes, budget, curve=()).hot(parts)
        counts = classify(self.dataset, parts, hot, "train").shards

        def rate(epoch: int) -> float | None:
            if self._order != "adaptive":
                return None
            return rate_after(validation_losses(self.position.evaluations, epoch * len(made)))

        return HotLoader(self.dataset, "train", made.config, parts, hot, counts, rate)

    def _new_stages(self) -> Stages:
        found = super()._new_stages()
        if not self._order.endswith("_first"):
            return found
        assert isinstance(self.loader, HotLoader)
        schedule: Schedule = OneKindFirst(self.loader, self._order == "hot_first")
        return Stages(self.model, self.optimizer, self.config, schedule)


def globo(folder: Path, quick: bool) -> Recipe:
    """The first days of the click log: the last one is the test, the one before the validation."""
    made = shipped("globo", "auto")
    source = made.data.source
    assert isinstance(source, ClicksConfig)
    clicks, day = pl.read_parquet(source.paths[0]), pl.col(source.time) // DAY_MS
    path = folder / "clicks.parquet"
    clicks.filter(day - day.min() < (3 if quick else DAYS)).write_parquet(path)
    data = replace(made.data, source=replace(source, paths=(str(path),)), path=str(folder / "globo"))
    made = replace(made, data=data)
    steps = -(-prepare(data, name="globo").samples("train") // BATCH)
    values: dict[str, Any] = {f"train.{part}.schedule.total_steps": steps for part in ("dense", "embedding")}
    values["train.batch_size"] = BATCH
    return Recipe.from_dict(with_values(made.to_dict(), values))


def synthetic(folder: Path, quick: bool) -> Recipe:
    """The Criteo shape, with a validation split; two epochs, so that the adaptive rate can change."""
    samples, cap = (100_000, 50_000) if quick else (800_000, 400_000)
    source = SyntheticConfig(samples=samples, scale=1.0, max_rows=cap, session_length=1.0, missing=0.0, seed=7)
    vocabulary, split = VocabularyConfig(min_count=1, tail_buckets=16), SplitConfig(by="fraction", valid=0.1, test=0.2)
    data = PrepareConfig(source=source, path=str(folder / "synthetic"), vocabulary=vocabulary, split=split)
    prepare(data, name="synthetic")
    demo = Recipe.load(Path(__file__).parents[1] / "src" / "stratarec" / "recipes" / "demo.yaml", ["train.epochs=2"])
    return replace(demo, data=data)


def quality(name: str, made: Recipe, kinds: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A line for each kind; the first one is what the others are held against."""
    dataset, rows = Dataset.open(made.data.path), list[dict[str, Any]]()
    for kind in kinds:
        results, shares = [], []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as run:
                values = {"train.seed": seed, "train.run": f"{run}/run", "train.threads": 1}
                given = Recipe.from_dict(with_values(made.to_dict(), values))
                trainer = _trainer(given, dataset, kind, BYTES_SHARE[name])
                results.append(trainer.train()["test"])
                loader = trainer.loader
                shares.append(loader.hot_samples / loader.samples if isinstance(loader, HotLoader) else 0.0)
        aucs = [result["auc"] for result in results]
        delta = mean(aucs) - rows[0]["auc"] if rows else 0.0
        rows.append({
            "data": name, "kind": kind, "auc": mean(aucs), "auc_delta": delta, "auc_by_seed": aucs,
            "log_loss": mean(result["log_loss"] for result in results), "hot_inputs": mean(shares),
        })  # fmt: skip
        print(f"{name} {kind}: AUC {mean(aucs):.5f}, {delta:+.5f}", file=sys.stderr, flush=True)
    return rows


def _trainer(made: Recipe, dataset: Dataset, kind: str, share: float) -> Trainer:
    if kind in ORDERS:
        return OrderedTrainer(made, dataset, kind, share)
    budget = budget_of(made, dataset, share)
    hot = {"budget": budget, "batches": "none"} if kind == "int8_hot_rows" else {}
    return Trainer(Recipe.from_dict(with_values(made.to_dict(), {"memory": INT8, "hot": hot})), dataset)


def run(quick: bool) -> dict[str, Any]:
    """Three seeds each; `quick` has one, of less data."""
    seeds = (1,) if quick else (1, 2, 3)
    with tempfile.TemporaryDirectory() as folder:
        given = {"synthetic": synthetic(Path(folder), quick), "globo": globo(Path(folder), quick)}
        rows = [row for name, made in given.items() for row in quality(name, made, ORDERS, seeds)]
        rows += quality("synthetic", given["synthetic"], ("int8", "int8_hot_rows"), seeds)
    deltas = {f"{row['kind']}_{row['data']}": row["auc_delta"] for row in rows if row["kind"] not in REFERENCES}
    own = [delta for kind, delta in deltas.items() if kind.startswith(("proportional", "adaptive"))]
    return {
        "config": {"seeds": seeds, "bytes_share": BYTES_SHARE, "globo_days": DAYS, "int8": INT8},
        "metrics": {"auc_delta_hot": min(own), **{f"auc_delta_{kind}": delta for kind, delta in deltas.items()}},
        "samples": {"rows": rows},
    }
