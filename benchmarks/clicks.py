"""Quality on the last day of a real click log: this library, TorchRec, logistic regression, trees
and popularity.

One pass over the training split trains all models on the same batches. `Trainer` trains the
recipe's model. TorchRec's own DLRM starts from the same weights and uses FBGEMM's exact row-wise
Adagrad and the same dense optimizer. Several logistic regressions use the same features and
schedule; validation chooses one of them. Boosted trees on a sample of the split show what the
counts of earlier clicks are worth without ids: all counts, and popularity alone. The test split is
scored once, at the end.

The recipe is the shipped ``globo``. ``--data`` names a data set that was prepared with it, or the
click log itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier
from torch import Tensor, nn
from torch.nn import functional

import stratarec
from benchmarks.peers import TorchRecDLRM, fused_collection
from benchmarks.train import copy_dense
from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import MANIFEST
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.embedding import ScheduleConfig
from stratarec.errors import ConfigError
from stratarec.models import DLRMConfig
from stratarec.models.metrics import Metrics, evaluate_logits
from stratarec.recipe import Recipe
from stratarec.training.run.build_run import Run
from stratarec.training.torch_setup import build_optimizer, peak_rss_bytes, torch_settings
from stratarec.training.trainer import Trainer

RECIPE = Path(stratarec.__file__).parent / "recipes" / "globo.yaml"
PLAIN = ["train.deduplicate=false"]
# Learning rate of Adam and L2 of each logistic regression; validation chooses one.
LOGISTIC = ((0.03, 0.0), (0.01, 0.0), (0.01, 1e-5), (0.002, 0.0))
QUICK_STEPS, QUICK_BATCHES = 300, 20
# Number of batches in the training sample of the trees.
TREE_BATCHES = 150
GATE = 1e-4
Scores = tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]


def open_data(data: Path | None) -> tuple[Recipe, Dataset]:
    """Return the recipe and its data set, which is prepared if only the log exists.

    Peers need plain batches, so deduplication is off for all.
    """
    recipe = Recipe.load(RECIPE, PLAIN)
    prepared = Path(recipe.data.path) if data is None or data.is_file() else data
    if (prepared / MANIFEST).is_file() and not (data and data.is_file()):
        return Recipe.load(RECIPE, [*PLAIN, f"data.path={prepared}"]), Dataset.open(prepared)
    log = data or Path(recipe.data.source.paths[0])  # type: ignore[union-attr]
    if not log.is_file():
        raise ConfigError(
            f"the Globo.com click log {log} does not exist; pass --data with the Parquet file or a data "
            "set prepared from it"
        )
    recipe = Recipe.load(RECIPE, [*PLAIN, f"data.source.paths=[{log}]"])
    return recipe, prepare(recipe.data, name=recipe.name)


class TorchRecSide:
    """TorchRec's model and optimizers, with the initial weights of a run."""

    def __init__(self, recipe: Recipe, run: Run) -> None:
        config, rows = recipe.model, run.config.embedding
        if not isinstance(config, DLRMConfig) or config.history.pooling != "mean":
            raise ConfigError(
                "TorchRec's own DLRM pools histories by their mean; set model.history.pooling to mean"
            )
        ours = run.model
        tables = list(ours.embeddings.tables)
        initial = {table.name: ours.embeddings.table(table.name)["weight"] for table in tables}
        collection = fused_collection(tables, rate=rows.learning_rate, eps=rows.eps, initial=initial)
        self.rows = collection.fused_optimizer()
        self.row_schedule = rows
        width = config.embedding_dim
        self.model = TorchRecDLRM(
            collection, len(run.dataset.schema.dense), [*config.bottom_mlp, width], [*config.top_mlp, 1]
        )
        copy_dense(ours, self.model)
        self.dense_schedule = run.config.dense
        dense = [*self.model.dlrm.dense_arch.parameters(), *self.model.dlrm.over_arch.parameters()]
        self.optimizer = build_optimizer(run.config.dense, nn.ParameterList(dense))
        self.steps = 0

    def step(self, batch: Batch) -> None:
        dense, rows = self.dense_schedule, self.row_schedule
        _set_rate(self.optimizer, dense.learning_rate * dense.schedule.factor(self.steps))
        _set_rate(self.rows, rows.learning_rate * rows.schedule.factor(self.steps))
        self.rows.step()  # passes the learning rate to FBGEMM; rows are updated in backward
        self.optimizer.zero_grad(set_to_none=True)
        functional.binary_cross_entropy_with_logits(self.model(batch), batch.label).backward()
        self.optimizer.step()
        self.steps += 1

    def __call__(self, batch: Batch) -> Tensor:
        logits: Tensor = self.model(batch)
        return logits


class Logistic:
    """Logistic regression on the values of all features (a history shares a weight of 1) and the
    dense features.
    """

    def __init__(self, dataset: Dataset, schedule: ScheduleConfig, rate: float, decay: float) -> None:
        self.sizes = [dataset.vocabularies[feature.vocabulary].rows for feature in dataset.schema.sparse]
        self.base = torch.tensor([0, *np.cumsum(self.sizes)[:-1]])
        self.values = nn.EmbeddingBag(sum(self.sizes), 1, mode="sum", include_last_offset=True)
        self.dense = nn.Linear(len(dataset.schema.dense), 1)
        click_rate = dataset.positives["train"] / dataset.samples("train")
        with torch.no_grad():
            self.values.weight.zero_()
            self.dense.weight.zero_()
            self.dense.bias.fill_(float(np.log(click_rate / (1 - click_rate))))
        self.settings = {"rate": rate, "decay": decay}
        weights = [*self.values.parameters(), *self.dense.parameters()]
        self.optimizer = torch.optim.Adam(weights, lr=rate, weight_decay=decay, fused=True)
        self.schedule = schedule
        self.rate = rate
        self.steps = 0

    def step(self, batch: Batch) -> None:
        _set_rate(self.optimizer, self.rate * self.schedule.factor(self.steps))
        self.optimizer.zero_grad(set_to_none=True)
        functional.binary_cross_entropy_with_logits(self(batch), batch.label).backward()
        self.optimizer.step()
        self.steps += 1

    def __call__(self, batch: Batch) -> Tensor:
        features = len(self.sizes)
        lengths = batch.sparse.bag_offsets().diff()
        base = self.base.repeat_interleave(batch.size).repeat_interleave(lengths)
        share = (1 / lengths.clamp(min=1).float()).repeat_interleave(lengths)
        ids = batch.sparse.values.long() + base
        bags = self.values(ids, batch.sparse.bag_offsets(), per_sample_weights=share)
        logits: Tensor = bags.view(features, batch.size).sum(0) + self.dense(batch.dense).squeeze(-1)
        return logits


class Ours:
    """The run, with the interface of its peers."""

    def __init__(self, run: Run) -> None:
        self.pipeline = run.pipeline
        self.steps = 0

    def step(self, batch: Batch) -> None:
        self.pipeline.train(self.steps, batch)
        self.steps += 1


class Trees:
    """Boosted trees on some of the dense features, grown on a sample of the training split."""

    def __init__(self, run: Run, columns: list[int], batches: int) -> None:
        self.columns = columns
        sample = list(islice(run.loader.epoch(1), batches))
        values = np.concatenate([self._values(batch) for batch in sample])
        label = np.concatenate([batch.label.numpy() for batch in sample])
        self.trees = HistGradientBoostingClassifier(max_iter=300, random_state=0).fit(values, label)

    def _values(self, batch: Batch) -> NDArray[np.float32]:
        values: NDArray[np.float32] = batch.dense.numpy()[:, self.columns]
        return values

    def __call__(self, batch: Batch) -> Tensor:
        return torch.from_numpy(self.trees.decision_function(self._values(batch)).astype(np.float32))


def grow_trees(run: Run, batches: int) -> dict[str, Trees]:
    """Grow trees on all dense features, and on popularity alone."""
    names = [feature.name for feature in run.dataset.schema.dense]
    popularity = [position for position, name in enumerate(names) if name.endswith("popularity")]
    return {
        "trees": Trees(run, list(range(len(names))), batches),
        "trees_popularity": Trees(run, popularity, batches),
    }


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def score(
    dataset: Dataset, split: str, models: dict[str, Callable[[Batch], Tensor]], limit: int | None
) -> Scores:
    """Return the labels of a split and the logits of each model."""
    loader = Loader(dataset, split, LoaderConfig(batch_size=8192, shuffle=limit is not None, expand=True))
    labels: list[NDArray[np.float32]] = []
    logits: dict[str, list[NDArray[np.float32]]] = {name: [] for name in models}
    with torch.no_grad():
        for batch in islice(loader.epoch(0), limit):
            labels.append(batch.label.numpy())
            for name, model in models.items():
                logits[name].append(model(batch).numpy().copy())
    return np.concatenate(labels), {name: np.concatenate(parts) for name, parts in logits.items()}


def metrics_of(scores: Scores) -> dict[str, Metrics]:
    label, logits = scores
    return {name: evaluate_logits(label, logit) for name, logit in logits.items()}


def train_all(sides: dict[str, Any], run: Run, steps: int, minutes: float) -> dict[str, float]:
    """Train every model on every batch until `minutes` have passed; return the seconds of each
    model.
    """
    seconds, began = dict.fromkeys(sides, 0.0), time.monotonic()
    for number, batch in enumerate(islice(run.loader.epoch(0), steps)):
        for name in list(sides) if number % 2 else list(reversed(sides)):
            start = time.perf_counter()
            sides[name].step(batch)
            seconds[name] += time.perf_counter() - start
        passed = (time.monotonic() - began) / 60
        if number % 50 == 0:
            print(f"step {number + 1} of {steps}, {passed:.1f} minutes", file=sys.stderr)
        if minutes and passed > minutes:
            break
    return seconds


def gate(run: Run, peer: TorchRecSide) -> float:
    """Check that the untrained models agree, and return the largest difference of their logits."""
    batch = next(iter(run.loader.epoch(0)))
    with torch.no_grad():
        difference = float((run.model(batch) - peer(batch)).abs().max())
    if difference > GATE:
        raise AssertionError(f"untrained logits differ by {difference}, expected at most {GATE}")
    return difference


@torch_settings()
def run(quick: bool, data: Path | None = None, minutes: float = 0) -> dict[str, Any]:
    """Train on all days but the last two, choose the logistic regression on the second last day,
    and test on the last.

    If `minutes` end the training early, all models have seen the same samples, drawn uniformly from
    all days.
    """
    recipe, dataset = open_data(data)
    trainer = Trainer(recipe, dataset)
    parts = trainer.build()
    total = parts.cadence.total_steps
    steps = min(QUICK_STEPS, total) if quick else total
    ours, peer = Ours(parts), TorchRecSide(trainer.recipe, parts)
    difference = gate(parts, peer)
    schedule = parts.config.dense.schedule
    linear = {f"logistic {n}": Logistic(dataset, schedule, *pair) for n, pair in enumerate(LOGISTIC)}
    seconds = train_all({"ours": ours, "torchrec": peer, **linear}, parts, steps, minutes)
    limit = QUICK_BATCHES if quick else None
    valid = metrics_of(score(dataset, "valid", {"ours": parts.model, "torchrec": peer, **linear}, limit))
    best = min(linear, key=lambda name: valid[name]["log_loss"])
    print("growing trees", file=sys.stderr)
    trees = grow_trees(parts, QUICK_BATCHES if quick else TREE_BATCHES)
    place = [feature.name for feature in dataset.schema.dense].index("popularity")
    contenders = {
        "ours": parts.model,
        "torchrec": peer,
        "logistic": linear[best],
        **trees,
        "popularity": lambda batch: batch.dense[:, place],
    }
    test = metrics_of(score(dataset, "test", contenders, limit))
    rows = [
        {
            "model": name,
            "test_auc": test[name]["auc"],
            # Popularity orders samples but is not a probability.
            "log_loss": test[name]["log_loss"] if name != "popularity" else None,
            "normalized_entropy": test[name]["normalized_entropy"] if name != "popularity" else None,
            "calibration": test[name]["calibration"] if name != "popularity" else None,
            "valid_auc": valid[best if name == "logistic" else name]["auc"]
            if name in ("ours", "torchrec", "logistic")
            else None,
            "train_seconds": seconds.get(best if name == "logistic" else name),
        }
        for name in contenders
    ]
    auc = {name: values["auc"] for name, values in test.items()}
    return {
        "config": {
            "recipe": recipe.to_dict()
            | {"data": {**recipe.to_dict()["data"], "path": "", "source": _source(recipe)}},
            "steps": ours.steps,
            "steps_of_whole_pass": total,
            "samples": {split: dataset.samples(split) for split in dataset.splits},
            "logistic": {"tried": LOGISTIC, "chosen": linear[best].settings},
            "initial_logit_difference": difference,
        },
        "metrics": {
            **{f"auc_{name}": value for name, value in auc.items()},
            "auc_delta_torchrec": auc["ours"] - auc["torchrec"],
            "auc_delta_logistic": auc["ours"] - auc["logistic"],
            "normalized_entropy_ours": test["ours"]["normalized_entropy"],
            "normalized_entropy_torchrec": test["torchrec"]["normalized_entropy"],
            "normalized_entropy_logistic": test["logistic"]["normalized_entropy"],
            "log_loss_ours": test["ours"]["log_loss"],
            "peak_rss_gib": peak_rss_bytes() / 2**30,
        },
        "samples": {
            "rows": rows,
            "logistic": [
                {
                    **side.settings,
                    "valid_auc": valid[name]["auc"],
                    "valid_log_loss": valid[name]["log_loss"],
                }
                for name, side in linear.items()
            ],
        },
    }


def _source(recipe: Recipe) -> dict[str, Any]:
    """Return the data source without its paths."""
    return {**recipe.to_dict()["data"]["source"], "paths": []}
