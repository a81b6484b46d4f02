"""Duplication of values within sessions and batches, and the work that deduplication saves.

Each deduplication group is measured as it is stored. A feature without a group is measured alone, which shows what a
group would save. RecD's formula (arXiv 2211.05239) predicts the factor for a batch of complete sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
import polars as pl
import pyarrow as pa

from stratarec.batch.jagged import JaggedTensor
from stratarec.data.column_names import SESSION, USER
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dedup_groups import as_before, dedup_factor
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError

_ROW_GROUPS = 16


@dataclass(frozen=True, kw_only=True)
class Duplication:
    """Duplication of one group, or of one feature without a group."""

    name: str
    features: tuple[str, ...]
    grouped: bool
    """Whether the data set stores it as a deduplication group."""
    stays: float
    """d, the share of adjacent samples of a session with equal values."""
    session_factor: float
    """Samples per distinct value within a session."""
    batch_factor: float
    """Samples per distinct value within a batch, with the default shuffling of training."""
    whole_factor: float
    """Samples per distinct value within a batch of complete sessions."""
    predicted: float
    """`whole_factor` as predicted by RecD's formula, from d and the average number of samples per user in a batch."""
    shuffled_factor: float
    """Samples per distinct value within a batch of individually shuffled samples."""
    ids: float
    """Number of ids that a sample looks up."""

    @property
    def saved(self) -> float:
        """Share of this group's lookups in a batch that repeat another lookup of the batch."""
        return 1 - 1 / self.batch_factor


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Duplication of a split."""

    dataset: str
    split: str
    batch_size: int
    samples_per_session: float
    """Mean over the row groups that were read; 1 if the data set has no sessions."""
    batch_samples_per_session: float
    rows: tuple[Duplication, ...]

    @property
    def lookups_saved(self) -> float:
        """Share of all lookups in a batch that deduplication saves, with the groups of the data set."""
        total = sum(row.ids for row in self.rows)
        return sum(row.ids * row.saved for row in self.rows if row.grouped) / total if total else 0.0


def profile(dataset: Dataset, split: str = "train", *, batch_size: int = 4096, batches: int = 20) -> Profile:
    """Measure the duplication of a split.

    Parameters
    ----------
    batches : int
        Number of batches to measure for each order of samples.

    Raises
    ------
    ConfigError
        If a size is below 1.

    Notes
    -----
    Reads up to 16 row groups, spread over the split, and shuffle buffers for the batches.
    """
    if batch_size < 1 or batches < 1:
        raise ConfigError(f"batch size and batches are {batch_size} and {batches}, expected at least 1")
    parts = _parts(dataset)
    session = _SessionCounts(parts)
    for shard, group in _spread(dataset, split):
        frame = pl.from_arrow(dataset.read_row_group(split, shard, group))
        assert isinstance(frame, pl.DataFrame)
        session.add(frame)
    session_unit = "session" if dataset.deduplicated and dataset.schema.session_keys else "auto"
    trained, together, apart = (
        _batch_factors(dataset, split, parts, batch_size, batches, unit) for unit in ("auto", session_unit, "sample")
    )
    rows = []
    for name, features in parts.items():
        stays = session.stays(name)
        rows.append(
            Duplication(
                name=name,
                features=features,
                grouped=name in dataset.groups or name in dataset.windows,
                stays=stays,
                session_factor=dedup_factor(session.samples_per_session, stays),
                batch_factor=trained.factors[name],
                whole_factor=together.factors[name],
                predicted=dedup_factor(together.samples_per_session, stays),
                shuffled_factor=apart.factors[name],
                ids=session.ids(name),
            )
        )
    return Profile(
        dataset=dataset.name,
        split=split,
        batch_size=batch_size,
        samples_per_session=session.samples_per_session,
        batch_samples_per_session=together.samples_per_session,
        rows=tuple(rows),
    )


def _parts(dataset: Dataset) -> dict[str, tuple[str, ...]]:
    """Return the groups, and each feature without a group as a group of one."""
    grouped = {name for names in dataset.groups.values() for name in names}
    names = [*(feature.name for feature in dataset.schema.sparse), *(feature.name for feature in dataset.schema.dense)]
    return {**dataset.groups, **{name: (name,) for name in names if name not in grouped}}


def _spread(dataset: Dataset, split: str) -> list[tuple[int, int]]:
    """Return (shard, row group) of row groups that are evenly spread over the split."""
    places = [
        (number, group) for number, shard in enumerate(dataset.shards(split)) for group in range(len(shard.row_groups))
    ]
    return places[:: max(-(-len(places) // _ROW_GROUPS), 1)]


class _SessionCounts:
    """Counts of adjacent samples with equal values, over row groups in stored order."""

    def __init__(self, parts: Mapping[str, tuple[str, ...]]) -> None:
        self._parts = parts
        self._same = dict.fromkeys(parts, 0)
        self._ids = dict.fromkeys(parts, 0)
        self._samples = self._sessions = 0

    def add(self, frame: pl.DataFrame) -> None:
        inside = as_before(frame, [name for name in (USER, SESSION) if name in frame.columns])
        self._samples += len(frame)
        self._sessions += len(frame) - int(inside.sum())
        for name, features in self._parts.items():
            for values in (frame[feature] for feature in features):
                if values.dtype == pl.List:
                    self._ids[name] += int(values.list.len().sum())
                elif values.dtype.is_integer():
                    self._ids[name] += int((values >= 0).sum())
            self._same[name] += int((inside & as_before(frame, features)).sum())

    @property
    def samples_per_session(self) -> float:
        return self._samples / max(self._sessions, 1)

    def stays(self, name: str) -> float:
        pairs = self._samples - self._sessions
        return self._same[name] / pairs if pairs else 0.0

    def ids(self, name: str) -> float:
        return self._ids[name] / max(self._samples, 1)


def _column(name: str, bags: JaggedTensor) -> pl.Series:
    """Return the id of each sample, -1 if it has none; lists of ids if some samples have several."""
    offsets, values = bags.offsets.numpy(), bags.values.numpy()
    lengths = np.diff(offsets)
    if lengths.max(initial=0) > 1:
        return pl.Series(name, pa.LargeListArray.from_arrays(offsets, values))
    ids = np.full(len(lengths), -1, dtype=values.dtype)
    ids[lengths == 1] = values
    return pl.Series(name, ids)


@dataclass(frozen=True, kw_only=True)
class _BatchFactors:
    samples_per_session: float
    factors: dict[str, float]


def _batch_factors(
    dataset: Dataset, split: str, parts: Mapping[str, Sequence[str]], size: int, most: int, unit: str
) -> _BatchFactors:
    """Samples for each distinct value in batches, values compared by content over the whole batch."""
    config = LoaderConfig(batch_size=size, unit=unit, expand=True)  # type: ignore[arg-type]
    sizes: dict[str, list[float]] = {name: [] for name in parts}
    users: list[float] = []
    batches = Loader(dataset, split, config).epoch(0)
    for _, batch in zip(range(most), batches, strict=False):
        columns = [
            pl.Series(feature.name, batch.dense[:, place].numpy()) for place, feature in enumerate(dataset.schema.dense)
        ]
        columns += [_column(key, batch.sparse[key]) for key in batch.sparse.keys]
        # Columns are named by number, because Polars would interpret a name such as * as many columns.
        places = {column.name: str(place) for place, column in enumerate(columns)}
        frame = pl.DataFrame([column.alias(places[column.name]) for column in columns])
        distinct = frame.select(
            pl.struct([places[feature] for feature in features]).n_unique().alias(str(number))
            for number, features in enumerate(parts.values())
        )
        for name, count in zip(parts, distinct.row(0), strict=True):
            sizes[name].append(batch.size / max(count, 1))
        users.append(1.0 if batch.user is None else batch.size / len(np.unique(batch.user.numpy())))
    batches.close()  # type: ignore[attr-defined]
    return _BatchFactors(
        samples_per_session=mean(users), factors={name: mean(values) for name, values in sizes.items()}
    )
