"""A news portal's log day by day: a model that goes on with each day, against one trained anew on all days up to then.

Samples are made of the Globo.com click log once, as the `clicks` source makes them, and written as a log of a user's
own: a folder of Parquet files a day, histories as lists. Each day is scored before any model is trained on it. The one
model is prepared by `data.vocabulary.base` and trained with `--from`, on the day alone; the other is prepared and
trained anew on all days so far. Both take the same test samples, one pass over their training samples, and the
schedules of the recipe over as many steps as that takes. Seconds are of `prepare` and training with its final test.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import polars as pl

from benchmarks.sessions import recipe as shipped
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.clicks import ClicksConfig, ClicksSource
from stratarec.data.splits import SplitConfig
from stratarec.data.user_history import Events
from stratarec.recipe import Recipe
from stratarec.training.torch_settings import torch_settings
from stratarec.training.trainer import Trainer

DAY_MS = 86_400_000
DAYS, QUICK_DAYS = 6, 3
BATCH = 8192
# Of users, in per mille: the validation split, which nothing is chosen by.
_HELD = 10
_SPLITS = ("train", "valid", "test")
_ENDINGS = {split: f"-{split}" for split in _SPLITS}


def cut(config: ClicksConfig, folder: Path, days: int) -> ClicksConfig:
    """The click log as a file a day; neighbouring days have names of different splits."""
    clicks = pl.read_parquet(config.paths[0]).with_columns((pl.col(config.time) // DAY_MS).alias("day"))
    first = int(clicks["day"].min())  # type: ignore[arg-type]
    paths = []
    for day in range(days):
        paths.append(str(folder / f"{day:02d}{_ENDINGS[_SPLITS[day % 3]]}.parquet"))
        clicks.filter(pl.col("day") == first + day).drop("day").write_parquet(paths[-1])
    return ClicksConfig(**{**vars(config), "paths": tuple(paths)})


def make_logs(config: ClicksConfig, folder: Path) -> None:
    """Samples of all days, with histories, as ``<folder>/<day>/*.parquet``, and those of some users apart."""
    split = SplitConfig(by="file", valid=("*-valid.parquet",), test=("*-test.parquet",))
    source, spool = ClicksSource(config, "error", split), folder / "spool"
    chunks = []
    spool.mkdir(parents=True)
    for chunk in source.chunks(spool):
        chunks.append(spool / f"chunk-{chunk.index:05d}.parquet")
        chunk.frame.with_columns(pl.Series("day", chunk.file)).write_parquet(chunks[-1])
    events = Events(map(pl.read_parquet, chunks), source.schema)
    for number, path in enumerate(chunks):
        frame = pl.read_parquet(path)
        frame = frame.with_columns(events.histories(frame).values()).filter(pl.col("label").is_not_null())
        held = pl.col(config.user).hash(seed=0) % 1000 < _HELD
        for (day, apart), part in frame.with_columns(held.alias("held")).group_by("day", "held"):
            place = folder / f"{day:02d}{'-held' if apart else ''}"
            place.mkdir(exist_ok=True)
            part.drop("day", "held").write_parquet(place / f"{number:05d}.parquet")
    shutil.rmtree(spool)


class Days:
    """Data sets and runs of one way of keeping up with a log.

    Parameters
    ----------
    whole : Recipe
        The shipped one.
    logs, folder : Path
        What `make_logs` wrote; where data sets and runs go.
    """

    def __init__(self, whole: Recipe, logs: Path, folder: Path) -> None:
        self._content, self._logs, self._folder = whole.to_dict(), logs, folder
        source = whole.data.source
        assert isinstance(source, ClicksConfig)
        features = ClicksSource(source, "error", whole.data.split).schema
        self._schema = {
            "label": "label",
            "dense": [{"name": feature.name} for feature in features.dense],
            "sparse": [
                {"name": f.name, "vocabulary": f.vocabulary}
                | ({"kind": "multi", "max_length": f.max_length} if f.kind == "history" else {})
                for f in features.sparse
            ],
            "time": source.time,
            "time_unit": source.time_unit,
            "session": source.session,
            "user": source.user,
        }

    def recipe(self, name: str, first: int, day: int, base: str = "") -> Recipe:
        """Trained on the days `first` to `day`, tested on the one that follows."""
        folders = [*(f"{number:02d}" for number in range(first, day + 2)), f"{day:02d}-held"]
        data = {
            "path": str(self._folder / f"{name}-data"),
            "source": {
                "kind": "parquet",
                "paths": [str(self._logs / folder / "*.parquet") for folder in folders],
                "schema": self._schema,
            },
            "split": {"by": "file", "valid": ["*-held/*"], "test": [f"*/{day + 1:02d}/*"]},
            "vocabulary": {**self._content["data"]["vocabulary"], "base": base and str(self._folder / f"{base}-data")},
            "keep_rows": False,
        }
        train = {**self._content["train"], "run": str(self._folder / f"{name}-run"), "batch_size": BATCH}
        return Recipe.from_dict({**self._content, "name": name, "data": data, "train": train})

    def take(self, name: str, first: int, day: int, base: str = "") -> tuple[dict[str, Any], Dataset]:
        """Prepare, train and test; gives seconds and the metrics of the day that follows."""
        made = self.recipe(name, first, day, base)
        began = time.perf_counter()
        dataset = prepare(made.data)
        prepared = time.perf_counter()
        made = _one_pass(made, dataset)
        result = Trainer(made, dataset).train(earlier=self._folder / f"{base}-run" if base else None)
        trained = time.perf_counter()
        print(f"{name}: AUC {result['test']['auc']:.5f}, {trained - began:.0f} s", file=sys.stderr, flush=True)
        return {
            "auc": result["test"]["auc"],
            "prepare_s": prepared - began,
            "train_s": trained - prepared,
            "samples": dataset.samples("train"),
        }, dataset


def _one_pass(made: Recipe, dataset: Dataset) -> Recipe:
    """Schedules as long as one pass over the training samples is."""
    content, steps = made.to_dict(), -(-dataset.samples("train") // BATCH)
    for part in ("dense", "embedding"):
        content["train"][part]["schedule"]["total_steps"] = steps
    return Recipe.from_dict(content)


def gate(continued: Dataset, anew: Dataset, before: Dataset) -> None:
    """Both are tested on the same samples, and the values of the day before keep their ids."""
    found = [(each.samples("test"), each.positives["test"]) for each in (continued, anew)]
    if found[0] != found[1]:
        raise AssertionError(f"test samples and positives are {found[0]} continued and {found[1]} anew")
    for name, info in continued.vocabularies.items():
        known = before.vocabularies[name]
        if info.inherited != known.values or continued.vocabulary(name).digest_of(known.values) != known.digest:
            raise AssertionError(f"vocabulary {name!r} does not begin with that of the day before")


def days_of(way: Days, days: int) -> Iterator[dict[str, Any]]:
    """A row for each day that is trained on but the first, with which both begin."""
    _, before = way.take("day-00", 0, 0)
    for day in range(1, days - 1):
        order = ("continued", "anew") if day % 2 else ("anew", "continued")
        found = {}
        for kind in order:
            continues = kind == "continued"
            name, base = (f"day-{day:02d}", f"day-{day - 1:02d}") if continues else (f"anew-{day:02d}", "")
            found[kind] = way.take(name, day if continues else 0, day, base)
        gate(found["continued"][1], found["anew"][1], before)
        before = found["continued"][1]
        yield {"day": day + 1} | {f"{kind}_{key}": value for kind in order for key, value in found[kind][0].items()}


@torch_settings()
def run(quick: bool) -> dict[str, Any]:
    """The first days of the log; `quick` takes fewer."""
    days = QUICK_DAYS if quick else DAYS
    whole = shipped("globo", "auto")
    assert isinstance(whole.data.source, ClicksConfig)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config = cut(whole.data.source, root, days)
        make_logs(config, root / "logs")
        print("logs are made", file=sys.stderr, flush=True)
        rows = list(days_of(Days(whole, root / "logs", root), days))
    seconds = {
        kind: [row[f"{kind}_prepare_s"] + row[f"{kind}_train_s"] for row in rows] for kind in ("continued", "anew")
    }
    auc = {kind: [row[f"{kind}_auc"] for row in rows] for kind in ("continued", "anew")}
    return {
        "config": {"recipe": "globo", "days": days, "batch_size": BATCH, "passes": 1},
        "metrics": {
            "auc_continued": mean(auc["continued"]),
            "auc_anew": mean(auc["anew"]),
            "auc_delta": mean(auc["continued"]) - mean(auc["anew"]),
            "auc_delta_last_day": auc["continued"][-1] - auc["anew"][-1],
            "speed_over_anew": sum(seconds["anew"]) / sum(seconds["continued"]),
            "speed_over_anew_last_day": seconds["anew"][-1] / seconds["continued"][-1],
        },
        "samples": {"rows": rows},
    }
