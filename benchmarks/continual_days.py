"""Daily files of samples from the Globo.com click log, and data sets and runs that are trained on
them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import polars as pl

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.clicks import ClicksConfig, ClicksSource
from stratarec.data.splits import SplitConfig
from stratarec.data.user_history import Events
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer

DAY_MS = 86_400_000
BATCH = 1024
# One in USERS users is kept.
USERS = 20
# Users of the validation split, per mille. No setting is chosen on this split.
_VALIDATION_USERS = 10
_SPLITS = ("train", "valid", "test")
_ENDINGS = {split: f"-{split}" for split in _SPLITS}


def write_daily_clicks(config: ClicksConfig, folder: Path, days: int, users: int = USERS) -> ClicksConfig:
    """Write the clicks of one in `users` users as a file a day; the file name assigns the day to a
    split.
    """
    clicks = pl.read_parquet(config.paths[0]).filter(pl.col(config.user).hash(seed=0) % users == 0)
    clicks = clicks.with_columns((pl.col(config.time) // DAY_MS).alias("day"))
    first = int(clicks["day"].min())  # type: ignore[arg-type]
    paths = []
    for day in range(days):
        paths.append(str(folder / f"{day:02d}{_ENDINGS[_SPLITS[day % 3]]}.parquet"))
        clicks.filter(pl.col("day") == first + day).drop("day").write_parquet(paths[-1])
    return ClicksConfig(**{**vars(config), "paths": tuple(paths)})


def write_samples(config: ClicksConfig, folder: Path) -> None:
    """Write samples with histories as ``<folder>/<day>/*.parquet``, and those of validation users
    as ``<day>-held``.
    """
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
        held = pl.col(config.user).hash(seed=0) % 1000 < _VALIDATION_USERS
        for (day, apart), part in frame.with_columns(held.alias("held")).group_by("day", "held"):
            place = folder / f"{day:02d}{'-held' if apart else ''}"
            place.mkdir(exist_ok=True)
            part.drop("day", "held").write_parquet(place / f"{number:05d}.parquet")
    shutil.rmtree(spool)


class Days:
    """Data sets and runs on the days of a log.

    Parameters
    ----------
    whole : Recipe
        Shipped recipe.
    logs, folder : Path
        Directory that `write_samples` wrote, and directory for data sets and runs.
    limits : dict
        Fields of `data.vocabulary` that replace those of the recipe.
    """

    def __init__(self, whole: Recipe, logs: Path, folder: Path, **limits: Any) -> None:
        self._content = whole.to_dict()
        self._logs = logs
        self.folder = folder
        self._limits = limits
        folder.mkdir()
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

    def recipe(self, name: str, day: int, *, tested: bool = True, first: int = 0, base: str = "") -> Recipe:
        """Return a recipe that trains on the days `first` to `day`, and tests on the next day if
        `tested`.

        If `base` is given, the ids of the data set of that name are kept and extended.
        """
        folders = [*(f"{number:02d}" for number in range(first, day + 1 + tested)), f"{day:02d}-held"]
        continued = {"base": str(self.folder / f"{base}-data")} if base else {}
        data = {
            "path": str(self.folder / f"{name}-data"),
            "source": {
                "kind": "parquet",
                "paths": [str(self._logs / folder / "*.parquet") for folder in folders],
                "schema": self._schema,
            },
            "split": {
                "by": "file",
                "valid": ["*-held/*"],
                "test": [f"*/{day + 1:02d}/*"] if tested else [],
            },
            "vocabulary": {**self._content["data"]["vocabulary"], **self._limits, **continued},
            "keep_rows": False,
        }
        train = {**self._content["train"], "run": str(self.folder / f"{name}-run"), "batch_size": BATCH}
        return Recipe.from_dict({**self._content, "name": name, "data": data, "train": train})

    def train(self, name: str, day: int, *, tested: bool = True) -> dict[str, Any]:
        """Prepare and train; return the metrics of the next day if `tested`."""
        recipe = self.recipe(name, day, tested=tested)
        dataset = prepare(recipe.data)
        result = Trainer(_one_pass(recipe, dataset), dataset).train()
        metrics: dict[str, Any] = result.get("test", {})
        if tested:
            print(f"{name}: AUC {metrics['auc']:.5f}", file=sys.stderr, flush=True)
        return metrics

    def following(self, file: Path, base: Path) -> Recipe:
        """Return a recipe for a later day's file that extends the vocabularies of the data set
        `base`.
        """
        content = self.recipe(f"hand-{file.stem}", 0, tested=False).to_dict()
        content["data"]["source"]["paths"] = [str(file)]
        content["data"]["split"] = {"by": "fraction", "valid": 0.0, "test": 0.0}
        content["data"]["vocabulary"]["base"] = str(base)
        content["train"]["calibration"] = "none"  # there is no validation split
        return Recipe.from_dict(content)


def _one_pass(recipe: Recipe, dataset: Dataset) -> Recipe:
    """Set the length of all schedules to one pass over the training samples."""
    content, steps = recipe.to_dict(), -(-dataset.samples("train") // BATCH)
    for part in ("dense", "embedding"):
        content["train"][part]["schedule"]["total_steps"] = steps
    return Recipe.from_dict(content)


def merge_days(logs: Path, days: int, folder: Path) -> list[Path]:
    """Merge the samples of each day after the first into one file, and return the files."""
    folder.mkdir()
    for day in range(1, days):
        parts = [pl.read_parquet(path) for path in sorted((logs / f"{day:02d}").glob("*.parquet"))]
        pl.concat(parts).write_parquet(folder / f"day-{day:02d}.parquet")
    return sorted(folder.iterdir())
