"""Duplication of values within batches, and the lookups that deduplication saves.

Each deduplication group is measured as a whole. A feature without a group is measured alone, which
shows how much a group of this feature would save.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import JaggedTensor
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Duplication:
    """Duplication of one group, or of one feature without a group."""

    name: str
    features: tuple[str, ...]
    grouped: bool
    """Whether the data set stores it as a deduplication group."""
    factor: float
    """Samples per distinct value within a batch, with the default shuffling of training."""
    ids: float
    """Number of ids that a sample looks up."""

    @property
    def saved(self) -> float:
        """Share of this group's lookups in a batch that repeat another lookup of the batch."""
        return 1 - 1 / self.factor


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Duplication of a split."""

    dataset: str
    split: str
    batch_size: int
    rows: tuple[Duplication, ...]

    @property
    def lookups_saved(self) -> float:
        """Share of all lookups in a batch that deduplication saves, with the groups of the data
        set.
        """
        total = sum(row.ids for row in self.rows)
        return sum(row.ids * row.saved for row in self.rows if row.grouped) / total if total else 0.0


def profile(
    dataset: Dataset, split: str = "train", *, batch_size: int = 4096, batches: int = 20
) -> Profile:
    """Measure the duplication of a split.

    Parameters
    ----------
    batches : int
        Number of batches to measure.

    Raises
    ------
    ConfigError
        If a size is below 1.
    """
    if batch_size < 1 or batches < 1:
        raise ConfigError(f"batch size and batches are {batch_size} and {batches}, expected at least 1")
    grouped = {name for names in dataset.groups.values() for name in names}
    names = [
        *(feature.name for feature in dataset.schema.sparse),
        *(feature.name for feature in dataset.schema.dense),
    ]
    parts = {**dataset.groups, **{name: (name,) for name in names if name not in grouped}}
    ids, distinct, samples = Counter[str](), Counter[str](), 0
    epoch = Loader(dataset, split, LoaderConfig(batch_size=batch_size, expand=True)).epoch(0)
    for _, batch in zip(range(batches), epoch, strict=False):
        samples += batch.size
        ids.update({key: batch.sparse[key].values.numel() for key in batch.sparse.keys})
        columns = _columns(batch, dataset)
        for name, features in parts.items():
            distinct[name] += pl.DataFrame([columns[feature] for feature in features]).n_unique()
    epoch.close()  # type: ignore[attr-defined]
    rows = (
        Duplication(
            name=name,
            features=features,
            grouped=name in dataset.groups or name in dataset.windows,
            factor=samples / max(distinct[name], 1),
            ids=sum(ids[feature] for feature in features) / samples,
        )
        for name, features in parts.items()
    )
    return Profile(dataset=dataset.name, split=split, batch_size=batch_size, rows=tuple(rows))


def _columns(batch: Batch, dataset: Dataset) -> dict[str, pl.Series]:
    """Return the values of each feature; columns are named by number, as Polars reads * as many
    columns.
    """
    dense = {
        feature.name: batch.dense[:, place].numpy() for place, feature in enumerate(dataset.schema.dense)
    }
    values = {**dense, **{key: _ids(batch.sparse[key]) for key in batch.sparse.keys}}
    return {name: pl.Series(str(number), column) for number, (name, column) in enumerate(values.items())}


def _ids(bags: JaggedTensor) -> np.ndarray | pa.Array:
    """Return the id of each sample, -1 if it has none; lists of ids if some samples have
    several.
    """
    offsets, values = bags.offsets.numpy(), bags.values.numpy()
    lengths = np.diff(offsets)
    if lengths.max(initial=0) > 1:
        return pa.LargeListArray.from_arrays(offsets, values)
    ids = np.full(len(lengths), -1, dtype=values.dtype)
    ids[lengths == 1] = values
    return ids
