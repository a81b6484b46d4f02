"""What other methods make of the same prepared splits: logistic regression and boosted trees, each at its usual best.

Both see what the model sees: ids (rare values share theirs), standardised numbers, and for lists which values are in
them (the regression) or how many (the trees). Both are chosen by the validation split: the regression's penalty, and
how many trees there are. Memory holds the training split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError, DatasetError
from stratarec.io.sealed import Model, read_sealed, write_sealed
from stratarec.models.metrics import evaluate_logits
from stratarec.progress import Progress

BASELINES = "baseline.json"
_FORMAT, _BATCH = 1, 65_536
# Penalties of the regression, of which validation chooses; trees: at most so many, and so many without a better one.
_PENALTIES = (0.03, 0.3, 3.0)
_TREES, _PATIENCE = 2000, 50
_TREE_SETTINGS = {
    "objective": "binary", "learning_rate": 0.05, "num_leaves": 31, "min_data_in_leaf": 20, "verbosity": -1,
    "deterministic": True, "force_row_wise": True,
}  # fmt: skip


class Baseline(Model):
    """One method on the test split."""

    name: str
    auc: float | None
    log_loss: float
    seconds: float


class Baselines(Model):
    """Of one prepared data set."""

    format: Literal[1]
    dataset: str
    """Its fingerprint."""
    found: tuple[Baseline, ...]


class _Split(NamedTuple):
    label: NDArray[np.float32]
    """``[N]``."""
    weight: NDArray[np.float32] | None
    dense: NDArray[np.float32]
    """``[N, F]``."""
    bags: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
    """Feature -> its ids, and ``[N]`` how many a sample has."""


Predict = Callable[[_Split], NDArray[np.float64]]


@dataclass(frozen=True)
class _Method:
    name: str
    fit: Callable[[_Split, _Split, Dataset, int], Predict]


def baselines(dataset: Dataset, progress: Progress, *, seed: int = 0) -> Baselines:
    """Fit every method on the training split, and test it; kept beside the data set.

    Raises
    ------
    ConfigError
        Where the extra ``baseline`` is not installed, or the data have several labels.
    DatasetError
        Where there is no validation, or no test split.
    """
    _check_installed()
    if dataset.schema.labels:
        raise ConfigError("baselines are of one label, and this data set has several: name one in the schema")
    for name in ("train", "valid", "test"):
        counts = dataset.label_counts(name)[dataset.schema.label_column]
        if not 0 < counts.positives < counts.known:
            raise DatasetError(f"{dataset.path}: its {name} split lacks samples of both classes; set data.split.{name}")
    train, valid, test = (_read(dataset, name, progress) for name in ("train", "valid", "test"))
    found = []
    for method in METHODS:
        progress.say(f"fitting {method.name} on {len(train.label):,} samples")
        began = time.perf_counter()
        probability = np.clip(method.fit(train, valid, dataset, seed)(test), 1e-7, 1 - 1e-7)
        seconds = time.perf_counter() - began
        logit = np.log(probability / (1 - probability))
        figures = evaluate_logits(test.label, logit, weight=test.weight)
        found.append(
            Baseline(name=method.name, auc=figures["auc"], log_loss=figures["log_loss"], seconds=round(seconds, 2))
        )
    result = Baselines(format=_FORMAT, dataset=dataset.fingerprint, found=tuple(found))
    write_sealed(Path(dataset.path) / BASELINES, result.to_dict())
    return result


def read_baselines(dataset: Dataset) -> Baselines | None:
    """What `baselines` kept beside a data set; None where there is nothing, or of other samples."""
    path = Path(dataset.path) / BASELINES
    if not path.is_file():
        return None
    found = read_sealed(path, Baselines, "run `stratarec baseline` again")
    return found if found.dataset == dataset.fingerprint else None


def _check_installed() -> None:
    try:
        import lightgbm  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed, which baselines need: pip install stratarec[baseline]"
        ) from error


def _read(dataset: Dataset, split: str, progress: Progress) -> _Split:
    loader = Loader(dataset, split, LoaderConfig(batch_size=_BATCH, shuffle=False, expand=True))
    progress.start(f"read {split}", loader.samples, "samples")
    labels, weights, dense, bags = [], [], [], dict[str, list[tuple[NDArray[Any], NDArray[Any]]]]()
    try:
        for batch in loader.epoch(0):
            labels.append(batch.label.cpu().numpy())
            dense.append(batch.dense.cpu().numpy())
            if batch.weight is not None:
                weights.append(batch.weight.cpu().numpy())
            for key in batch.sparse.keys:
                bag = batch.sparse[key]
                bags.setdefault(key, []).append((bag.values.cpu().numpy(), bag.lengths().cpu().numpy()))
            progress.advance(batch.size)
    finally:
        progress.finish()
    return _Split(
        label=np.concatenate(labels),
        weight=np.concatenate(weights) if weights else None,
        dense=np.concatenate(dense),
        bags={key: tuple(np.concatenate(part) for part in zip(*found, strict=True)) for key, found in bags.items()},  # type: ignore[misc]
    )


def _regression(train: _Split, valid: _Split, dataset: Dataset, seed: int) -> Predict:
    """Logistic regression on one-hot ids and numbers."""
    from sklearn.linear_model import LogisticRegression

    rows = _rows(dataset)
    known, seen = _one_hot(train, rows), _one_hot(valid, rows)
    best: tuple[float, Any] | None = None
    for penalty in _PENALTIES:
        model = LogisticRegression(C=penalty, max_iter=300, tol=1e-4, random_state=seed)
        model.fit(known, train.label, sample_weight=train.weight)
        loss = _log_loss(model.predict_proba(seen)[:, 1], valid)
        if best is None or loss < best[0]:
            best = loss, model
    assert best is not None
    chosen = best[1]
    return lambda split: chosen.predict_proba(_one_hot(split, rows))[:, 1]  # type: ignore[no-any-return]


def _trees(train: _Split, valid: _Split, dataset: Dataset, seed: int) -> Predict:
    """LightGBM with ids as its own categories."""
    import lightgbm

    singles = [key for key, (_, lengths) in train.bags.items() if (lengths == 1).all()]
    places = list(range(train.dense.shape[1], train.dense.shape[1] + len(singles)))

    def table(split: _Split) -> NDArray[np.float32]:
        others = [key for key in split.bags if key not in singles]
        columns = [*split.dense.T, *(split.bags[key][0] for key in singles), *(split.bags[key][1] for key in others)]
        return np.stack([np.asarray(column, dtype=np.float32) for column in columns], axis=1)

    data = lightgbm.Dataset(table(train), train.label, weight=train.weight, categorical_feature=places)
    seen = lightgbm.Dataset(table(valid), valid.label, weight=valid.weight, reference=data)
    model = lightgbm.train(
        {**_TREE_SETTINGS, "seed": seed},
        data,
        _TREES,
        valid_sets=[seen],
        callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)],
    )
    return lambda split: model.predict(table(split), num_iteration=model.best_iteration)


METHODS = (_Method("logistic regression", _regression), _Method("LightGBM", _trees))


def _rows(dataset: Dataset) -> dict[str, int]:
    """Feature -> how many ids it may have."""
    tables = dataset.table_rows()
    return {each.name: tables[each.vocabulary] for each in dataset.schema.sparse}


def _one_hot(split: _Split, rows: dict[str, int]) -> Any:
    """``[N, F + sum of rows]`` numbers, and how often each id is in a sample's bag over the bag's length."""
    from scipy import sparse

    parts = [sparse.csr_array(split.dense.astype(np.float64))] if split.dense.shape[1] else []
    for key, (ids, lengths) in split.bags.items():
        ends = np.concatenate([[0], np.cumsum(lengths)])
        share = np.repeat(1.0 / np.maximum(lengths, 1), lengths)
        parts.append(sparse.csr_array((share, ids, ends), shape=(len(lengths), rows[key])))
    return sparse.hstack(parts, format="csr")


def _log_loss(probability: NDArray[np.float64], split: _Split) -> float:
    found = np.clip(probability, 1e-7, 1 - 1e-7)
    each = -np.where(split.label > 0.5, np.log(found), np.log1p(-found))
    return float(np.average(each, weights=split.weight))


def beside(found: Baselines, auc: float | None) -> Iterator[str]:
    """A line a method, and whether it is better than a model's `auc` on the same test split."""
    for each in found.found:
        told = "-" if each.auc is None else f"{each.auc:.4f}"
        verdict = ""
        if auc is not None and each.auc is not None and each.auc > auc:
            verdict = f": better than this model by {each.auc - auc:.4f}"
        yield f"beside it: {each.name} AUC {told}, log loss {each.log_loss:.4f}, {each.seconds:.1f} s{verdict}"
