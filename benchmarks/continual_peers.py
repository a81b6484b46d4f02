"""Peers of continual training: LightGBM, River and TorchRec, which score each day before they learn
from it.

*LightGBM* is fitted again each day on the last three days. Settings and number of trees are chosen
on the third day, with trees of the first two; every later day is scored by trees of the three days
before it.

*River* learns a logistic regression sample by sample. Each value of a feature has a weight, the
values of a history share a weight of 1, and numbers are standardised ``log1p`` values. The second
day chooses the learning rate.

*TorchRec* is its own DLRM with FBGEMM's row-wise Adagrad, warm-started: rows, network and the
states of both optimizers are kept, and tables grow by the values that `stratarec prepare` with
``data.vocabulary.base`` admits. Schedules restart each day, as in StrataRec. The learning rate is
the one that validation chose in `globo`.

All peers use the samples and features of the continued run. Seconds are processor time of learning,
scoring and converting the file, without choosing settings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from benchmarks import trees
from benchmarks.clicks import TorchRecSide
from benchmarks.globo import TREES
from benchmarks.registry import import_peer
from stratarec.batch.batch import Batch
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema
from stratarec.models.metrics import evaluate_logits
from stratarec.recipe import Recipe
from stratarec.training.raw_logs import make_encoder
from stratarec.training.trainer import Trainer

WINDOW = 3
"""Number of days that trees are fitted on."""
RIVER_RATES = (0.005, 0.01, 0.02, 0.05)
TORCHREC_RATE = 0.005
_SCORED = 8192
Rows = dict[int, dict[str, float]]
"""Day -> `auc`, `log_loss` and `seconds`."""


def _metrics_of(frame: pl.DataFrame, logits: NDArray[Any], seconds: float) -> dict[str, float]:
    metrics = evaluate_logits(frame["label"].to_numpy().astype(np.float32), logits.astype(np.float32))
    return {"auc": metrics["auc"], "log_loss": metrics["log_loss"], "seconds": seconds}


def lightgbm(days: Sequence[pl.DataFrame], schema: Schema, *, seed: int, threads: int, quick: bool) -> Rows:
    """Score each day by trees of the last three days; `quick` grows few trees, of two days."""
    library, window = import_peer("lightgbm"), WINDOW - 1 if quick else WINDOW
    samples, rows = _tree_samples(days, schema)
    chosen = trees.grow(
        {
            "train": _joined(samples[: window - 1]),
            "valid": samples[window - 1],
            "test": samples[window - 1],
        },
        rows,
        seed=seed,
        threads=threads,
        quick=quick,
        grid=TREES,
    )
    tuned = {name: value for name, value in chosen.settings.items() if name != "encoded"}
    results = {}
    for day in range(window, len(days)):
        began, train = time.process_time(), _joined(samples[day - window : day])
        encoder = trees.Encoder(train, rows, seed)
        columns, later = (
            encoder.columns(each) if chosen.settings["encoded"] else each.dense
            for each in (train, samples[day])
        )
        settings = {
            **trees.FIXED,
            **tuned,
            "learning_rate": trees.RATE,
            "seed": seed,
            "num_threads": threads,
        }
        booster = library.train(settings, library.Dataset(columns, label=train.label), chosen.trees)
        logits = booster.predict(later, raw_score=True, num_threads=threads)
        results[day] = _metrics_of(days[day], logits, time.process_time() - began) | {"trees": chosen.trees}
    return results


def _tree_samples(days: Sequence[pl.DataFrame], schema: Schema) -> tuple[list[trees.Samples], list[int]]:
    """Return the samples of each day, with values numbered over all days, and the number of values
    of each feature.
    """
    edges = np.cumsum([len(day) for day in days])[:-1]
    ids, rows = [], []
    for feature in schema.sparse:
        column = pl.concat([day[feature.name] for day in days])
        column = column.list.last() if column.dtype == pl.List else column
        place = column.cast(pl.String).rank("dense").cast(pl.Int32) - 1
        ids.append(place.fill_null(-1).to_numpy())
        rows.append(int(ids[-1].max()) + 1)
    parts = np.split(np.stack(ids, axis=1), edges)
    names = [feature.name for feature in schema.dense]
    return [
        trees.Samples(
            day["label"].to_numpy().astype(np.float32), day.select(names).cast(pl.Float32).to_numpy(), part
        )
        for day, part in zip(days, parts, strict=True)
    ], rows


def _joined(samples: Sequence[trees.Samples]) -> trees.Samples:
    return trees.Samples(
        *(np.concatenate([getattr(each, name) for each in samples]) for name in ("label", "dense", "ids"))
    )


def river(days: Sequence[pl.DataFrame], schema: Schema) -> Rows:
    """Train a logistic regression sample by sample; the second day chooses the learning rate."""
    first = {rate: _Online(schema, rate) for rate in RIVER_RATES}
    scores = {rate: side.day(day) for day in days[:2] for rate, side in first.items()}
    best = min(first, key=lambda rate: scores[rate]["log_loss"])
    return {1: scores[best]} | {
        number: first[best].day(day) | {"rate": best} for number, day in enumerate(days[2:], 2)
    }


class _Online:
    """River's logistic regression, trained day by day."""

    def __init__(self, schema: Schema, rate: float) -> None:
        linear, optim = import_peer("river.linear_model"), import_peer("river.optim")
        self._schema = schema
        self._scaler = import_peer("river.preprocessing").StandardScaler()
        self._model = linear.LogisticRegression(optim.AdaGrad(rate))

    def day(self, frame: pl.DataFrame) -> dict[str, float]:
        """Score all samples of a day with the current model, then learn them in order of time."""
        began, rows = time.process_time(), list(self._rows(frame))
        logits = [math.log(max(p, 1e-12) / max(1 - p, 1e-12)) for p in map(self._probability, rows)]
        labels = frame["label"].to_list()
        for place in np.argsort(frame[self._schema.time].to_numpy(), kind="stable"):
            numbers, values = rows[place]
            self._scaler.learn_one(numbers)
            self._model.learn_one({**self._scaler.transform_one(numbers), **values}, bool(labels[place]))
        return _metrics_of(frame, np.array(logits), time.process_time() - began)

    def _probability(self, row: tuple[Mapping[str, float], Mapping[str, float]]) -> float:
        probability: float = self._model.predict_proba_one(
            {**self._scaler.transform_one(row[0]), **row[1]}
        )[True]
        return probability

    def _rows(self, frame: pl.DataFrame) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
        dense = [feature.name for feature in self._schema.dense]
        numbers = frame.select(pl.col(name).cast(pl.Float64).fill_null(0).log1p() for name in dense)
        lists = [f.name for f in self._schema.sparse if f.kind != "single"]
        single = [f.name for f in self._schema.sparse if f.kind == "single"]
        values = frame.select(single).iter_rows()
        for row, named, *many in zip(
            numbers.iter_rows(named=True), values, *(frame[name] for name in lists), strict=True
        ):
            bag = {
                f"{name}={value}": 1.0
                for name, value in zip(single, named, strict=True)
                if value is not None
            }
            for name, listed in zip(lists, many, strict=True):
                for value in listed:
                    key = f"{name}={value}"
                    bag[key] = bag.get(key, 0.0) + 1 / len(listed)
            yield row, bag


class TorchRecDays:
    """TorchRec's model, warm-started each day.

    Parameters
    ----------
    first : Recipe
        Recipe of the first day.
    next_recipe : callable
        Returns the recipe of a file that extends the given data set.
    """

    def __init__(self, first: Recipe, next_recipe: Callable[[Path, Path], Recipe]) -> None:
        self._next = next_recipe
        self._side = None
        self._dataset = prepare(first.data)
        self._learn(first)

    def day(self, file: Path, frame: pl.DataFrame) -> dict[str, float]:
        """Score a file with the current model, then train on it once."""
        began = time.process_time()
        logits = self._score(frame)
        recipe = self._next(file, self._dataset.path)
        self._dataset = prepare(recipe.data)
        self._learn(recipe)
        return _metrics_of(frame, logits, time.process_time() - began)

    def _score(self, frame: pl.DataFrame) -> NDArray[np.float32]:
        dense, sparse = make_encoder(self._dataset).encode(frame)
        parts = []
        assert self._side is not None
        with torch.no_grad():
            for first in range(0, len(dense), _SCORED):
                chosen = torch.arange(first, min(first + _SCORED, len(dense)))
                batch = Batch(
                    label=torch.zeros(len(chosen)), dense=dense[chosen], sparse=sparse.take(chosen)
                )
                parts.append(self._side(batch).numpy().copy())
        return np.concatenate(parts)

    def _learn(self, recipe: Recipe) -> None:
        content, dataset = recipe.to_dict(), self._dataset
        steps = -(-dataset.samples("train") // content["train"]["batch_size"])
        for part in ("dense", "embedding"):
            content["train"][part]["schedule"]["total_steps"] = steps
        content["train"]["dense"]["learning_rate"] = TORCHREC_RATE
        content["train"]["deduplicate"] = False
        recipe = Recipe.from_dict(content)
        run = Trainer(recipe, dataset).build()
        side = TorchRecSide(recipe, run)
        if self._side is not None:
            _warm_start(side, self._side)
        for batch in run.loader.epoch(0):
            side.step(batch)
        run.close()
        self._side = side


def _warm_start(side: TorchRecSide, before: TorchRecSide) -> None:
    """Copy weights and the states of both optimizers; rows that are new in this period keep their
    initial values.
    """
    old, new = before.model.state_dict(), side.model.state_dict()
    with torch.no_grad():
        for name, value in new.items():
            value[: len(old[name])].copy_(old[name]) if value.dim() else value.copy_(old[name])
        theirs, mine = (each.rows.state_dict()["state"] for each in (before, side))
        for name, state in mine.items():
            for key, value in state.items():
                _local(value)[: len(_local(theirs[name][key]))].copy_(_local(theirs[name][key]))
    side.optimizer.load_state_dict(before.optimizer.state_dict())


def _local(value: Any) -> torch.Tensor:
    """Return the tensor of this rank, also if it is wrapped as a sharded tensor."""
    tensor: torch.Tensor = value.local_tensor() if hasattr(value, "local_tensor") else value
    return tensor
