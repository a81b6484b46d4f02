"""Score the same samples repeatedly, each time with changed values of a feature.

A *column* is the unit that is changed: a dense feature, a sparse feature, or a history or sequence
with its companion columns. To remove a column, its ids are removed, or, for a dense feature, its
value is replaced by the mean.

Shapes: N samples; T labels.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import split_rows
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.models import CTRModel
from stratarec.models.base import autocast
from stratarec.training.evaluate import score

_BATCH = 8192
# Batch size for reading a single sample.
_NEAR = 256
# Maximum number of names or files that a message lists.
_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class Column:
    """One feature, or several features that are changed together."""

    name: str
    dense: int | None = None
    """Index among the dense features, if the column is a dense feature."""
    sparse: tuple[str, ...] = ()
    """Names of the sparse features, if the column is not a dense feature."""


def columns_of(schema: Schema, names: Sequence[str] = ()) -> tuple[Column, ...]:
    """Return the columns with these names, or all columns without names; `ConfigError` if a name is
    unknown.
    """
    companions = {main: tuple(key.name for key in columns) for main, columns in schema.behaviours.items()}
    others = {name for features in companions.values() for name in features[1:]}
    columns = [Column(name=feature.name, dense=place) for place, feature in enumerate(schema.dense)]
    columns += [
        Column(name=feature.name, sparse=companions.get(feature.name, (feature.name,)))
        for feature in schema.sparse
        if feature.name not in others
    ]
    by_name = {column.name: column for column in columns}
    for name in names:
        if name not in by_name:
            main = next((key for key, features in companions.items() if name in features), "")
            close = difflib.get_close_matches(name, by_name, 1)
            hint = (
                f"it is part of {main}"
                if main
                else f"did you mean {close[0]}?"
                if close
                else _some(by_name)
            )
            raise ConfigError(f"--feature {name}: the run has no such feature; {hint}")
    return tuple(by_name[name] for name in dict.fromkeys(names)) if names else tuple(columns)


def _some(names: Sequence[str] | dict[str, Column]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"there are {', '.join(list(names)[:_NAMED])}{more}"


class Probe:
    """Samples, and a model that scores them with changed values.

    Parameters
    ----------
    model : CTRModel
        Model that scores the samples.
    dataset : Dataset
        Training data set of the model, or one with the same features.
    batch : Batch
        The N samples, without groups.
    precision : str
        Number format in which the network computes.
    """

    def __init__(self, model: CTRModel, dataset: Dataset, batch: Batch, precision: str) -> None:
        self.dataset = dataset
        self.batch = batch
        self._model = model
        self._precision = precision
        self._bags = {key: batch.sparse[key] for key in batch.sparse.keys}
        moments = dataset.about.moments
        self._means = [
            0.0 if feature.standardize else moments[feature.name].mean for feature in dataset.schema.dense
        ]

    def of(self, batch: Batch) -> Probe:
        """Return a probe with the same model and other samples."""
        return Probe(self._model, self.dataset, batch, self._precision)

    def scores(self, batch: Batch | None = None) -> NDArray[np.float32]:
        """Return the logits ``[N, T]`` of a changed `batch`, or by default of the unchanged
        samples.
        """
        batch, training, parts = batch or self.batch, self._model.training, []
        self._model.eval()
        try:
            with torch.no_grad(), autocast(self._precision, self._model.device):
                for first in range(0, batch.size, _BATCH):
                    is_whole = batch.size <= _BATCH
                    rows = torch.arange(first, min(first + _BATCH, batch.size))
                    parts.append(score(self._model, batch if is_whole else rows_of(batch, rows)))
        finally:
            self._model.train(training)
        return np.concatenate(parts).reshape(batch.size, -1)

    def permuted(self, column: Column, order: NDArray[np.int64]) -> Batch:
        """Return the batch in which sample i has the value of sample ``order[i]`` in a column."""
        rows = torch.from_numpy(order)
        if column.dense is not None:
            return self.with_numbers(column, self.batch.dense[rows, column.dense])
        return self._with(self.batch.sparse.select(column.sparse).take(rows))

    def with_numbers(self, column: Column, values: torch.Tensor | float) -> Batch:
        """Return the batch with new values of a dense feature: one for each sample, or one for all
        samples.
        """
        assert column.dense is not None
        dense = self.batch.dense.clone()
        dense[:, column.dense] = values
        return self.batch.replace(dense=dense)

    def without(self, columns: Sequence[Column]) -> Batch:
        """Return the batch in which the values of these columns are missing."""
        dense, names = self.batch.dense.clone(), [name for column in columns for name in column.sparse]
        for place in (column.dense for column in columns if column.dense is not None):
            dense[:, place] = self._means[place]
        batch = self.batch.replace(dense=dense)
        if not names:
            return batch
        sparse, size = self.batch.sparse, self.batch.size
        weights = None if sparse.weights is None else sparse.weights[:0]
        offsets = torch.zeros(len(names) * size + 1, dtype=torch.int64)
        nothing = KeyedJagged(
            keys=tuple(names), values=sparse.values[:0], offsets=offsets, batch_size=size, weights=weights
        )
        return batch.replace(sparse=self._with(nothing).sparse)

    def _with(self, features: KeyedJagged) -> Batch:
        """Return the batch in which these features replace the features of the same names."""
        changed: dict[str, JaggedTensor] = {key: features[key] for key in features.keys}
        return self.batch.replace(
            sparse=KeyedJagged.from_features({**self._bags, **changed}, self.batch.size)
        )


def rows_of(batch: Batch, rows: torch.Tensor) -> Batch:
    """Return a batch with these samples of a batch without groups."""
    user, weight = (None if column is None else column[rows] for column in (batch.user, batch.weight))
    return replace(
        batch,
        label=batch.label[rows],
        dense=batch.dense[rows],
        sparse=batch.sparse.take(rows),
        user=user,
        weight=weight,
    )


def draw_samples(dataset: Dataset, split: str, samples: int, seed: int) -> Batch:
    """Draw `samples` samples from up to eight row groups of a split, or all samples if it has
    fewer.

    The batch has no deduplication groups.
    """
    config = LoaderConfig(batch_size=samples, unit="sample", expand=True, prefetch_batches=1, seed=seed)
    with closing(Loader(dataset, split, config).batches(0)) as batches:  # type: ignore[type-var]
        return next(batches)


def row_of_split(dataset: Dataset, split: str, file: str, row: int) -> Batch:
    """Return the sample of a split that comes from one row of the log. Rows have the numbers that
    `predict` writes.

    Raises
    ------
    ConfigError
        If no sample comes from that row, or if several files have a row with that number and `file`
        is empty.
    """
    files = dataset.about.rows.files
    chosen = [place for place, name in enumerate(files) if not file or f"/{name}".endswith(f"/{file}")]
    if file and not chosen:
        raise ConfigError(
            f"--row {file}:{row}: no such file; {_some(files) if files else 'rows have no file names'}"
        )
    of_file, of_row = split_rows(np.concatenate([np.zeros(0, dtype=np.int64), *dataset.row_numbers(split)]))
    matches = np.flatnonzero((of_row == row) & (np.isin(of_file, chosen) if files else True))
    if not len(matches):
        raise ConfigError(
            f"--row {f'{file}:' if file else ''}{row}: no sample of the split {split} comes from that row; "
            "`stratarec predict` writes the row numbers"
        )
    if len(matches) > 1:
        raise ConfigError(
            f"--row {row}: {len(matches)} files have such a row in the split {split}; name one, as in "
            f"--row {files[int(of_file[matches[0]])]}:{row}"
        )
    place = int(matches[0])
    config = LoaderConfig(batch_size=_NEAR, shuffle=False, expand=True, prefetch_batches=1)
    with closing(Loader(dataset, split, config).batches(0, place // _NEAR)) as batches:  # type: ignore[type-var]
        return rows_of(next(batches), torch.tensor([place % _NEAR]))
