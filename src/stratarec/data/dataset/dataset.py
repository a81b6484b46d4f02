"""A prepared data set on disk. It is checked when it is opened and when its files are read.

    stratarec.json                      marker of a data set of StrataRec
    dataset.json                        the manifest
    vocabulary/0000-<name>.parquet      value, id, count
    carried/0000-<name>.parquet         value, count, recent, last of every value, with or without a
                                        row
    carried/events-00000.parquet        the last positive events of users
    carried/clicks-<part>.parquet       only for a log of clicks: see `click_memory`
    <split>/shard-00000.parquet         @label, dense (float32), ids (int32, or lists of int32),
                                        @time, @row, @weights/<feature> (lists of float32) if values
                                        have weights
    <split>/shard-00000.tables.parquet  tables with distinct values, to which samples point. One row
                                        for each row group of samples; column ``<table>/<column>``
                                        has a whole column as one list

Without deduplication groups there are no tables: histories are lists, and @user and @session are
columns of the samples. Only `writer`, `row_group_reader` and `row_group` know this layout. Names
that begin with @ are defined in `column_names`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.click_memory import ClickMemory, read_click_memory
from stratarec.data.column_names import ROW, SESSION, TIME, USER, WEIGHT, label_names, weights_of
from stratarec.data.dataset.manifest import (
    ADVICE,
    DATASET,
    MANIFEST,
    DatasetManifest,
    Shard,
    StoredFile,
    VocabularyInfo,
)
from stratarec.data.dataset.row_group import RowGroup
from stratarec.data.dataset.row_group_reader import RowGroupReader, ShardLayout
from stratarec.data.splits import SPLITS
from stratarec.data.user_history import read_events
from stratarec.data.vocabulary import (
    Vocabulary,
    add_counts,
    buckets_of,
    lower_counts,
    read_counts,
    read_held_out,
    read_vocabulary,
)
from stratarec.errors import DatasetError
from stratarec.io.atomic import reporting_damage
from stratarec.io.hashes import file_hashes
from stratarec.io.names import as_html
from stratarec.io.owned_directory import MARKER, directory_lock, kind_of
from stratarec.io.sealed import regular_file_below

Verify = Literal["full", "all", "used"]
Item = TypeVar("Item")

# Ratio of the shares of positive samples at which a split by time is reported, and the fewest
# samples of each class.
_ODD, _FEW = 2.0, 20
# Number of attempts to open a data set that another process replaces at the same time.
_TRIES = 3


class Dataset:
    """A prepared data set, open for reading.

    Use `Dataset.open`.

    Examples
    --------
    >>> from stratarec import Dataset
    >>> dataset = Dataset.open("data/clicks")
    >>> {split: dataset.samples(split) for split in dataset.splits}
    {'train': 1611, 'valid': 193, 'test': 206}
    >>> dataset.suspicions
    []
    """

    def __init__(
        self,
        path: Path,
        manifest: DatasetManifest,
        untouched: Collection[str] = (),
        *,
        rare_share: float = 1.0,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._untouched = untouched
        self._rare_share = rare_share
        self.is_complete = rare_share < 1
        """Whether held-out values have rows (`complete`)."""
        self.name = manifest.name
        self.schema = manifest.columns
        self.about = manifest.about
        self.deduplicated = manifest.deduplicated
        self.groups = dict(manifest.groups or {})
        self.splits = {split: manifest.splits[split] for split in SPLITS}
        self.positives = manifest.positives
        self.vocabularies = {
            name: info.in_phase(refit=self.is_complete) for name, info in manifest.vocabularies.items()
        }
        self.label_counts = manifest.label_counts
        self.fingerprint = manifest.fingerprint
        """Hash of the content; data sets with equal files have equal fingerprints."""
        self._verified: set[str] = set()

    @classmethod
    def open(cls, path: str | Path, *, verify: Verify = "all", untouched: Collection[str] = ()) -> Dataset:
        """Open and check a prepared data set.

        Parameters
        ----------
        path : path
            Directory of the data set.
        verify : {"full", "all", "used"}
            When hashes are checked. ``full`` hashes all files. ``all`` hashes the files whose size,
            times or inode have changed since this user last hashed them. ``used`` does the same,
            but only when a file is first used.
        untouched : collection of str
            Splits that will not be read; their files are not checked.

        Raises
        ------
        DatasetError
            If the data set is missing or of another format version, or a file was changed. The
            message names the file.

        Examples
        --------
        >>> Dataset.open("data/clicks", verify="full").name
        'clicks'
        """
        path = Path(path)
        for tries in range(_TRIES):
            stamp = _stamp(path)
            try:
                return cls._opened(path, verify, untouched)
            except DatasetError:
                # If the data set was replaced during the check, it is not damaged.
                if tries == _TRIES - 1 or _stamp(path) == stamp:
                    raise
        raise AssertionError

    @classmethod
    def _opened(cls, path: Path, verify: Verify, untouched: Collection[str]) -> Dataset:
        if not os.path.lexists(path / MANIFEST):
            what = "it does not exist"
            if path.exists():
                what = f"it is a {kind_of(path)}" if kind_of(path) else f"it has no {MANIFEST}"
            raise DatasetError(f"{path} is not a prepared data set: {what}; run `stratarec prepare` first")
        dataset = cls(path, DatasetManifest.read(path), untouched)
        if kind_of(path) != DATASET.name:
            raise DatasetError(f"{path / MARKER} is missing or damaged; {ADVICE}")
        left_out = {entry.path for split in untouched for entry in dataset.manifest.files(split)}
        files = [entry for entry in dataset.manifest.files() if entry.path not in left_out]
        for entry in files:
            dataset._check_size(entry)
        if verify != "used":
            dataset._require(files, fresh=verify == "full")
        return dataset

    @property
    def suspicions(self) -> list[str]:
        """Remarks on features that seem to reveal the label, on held-out samples that repeat
        training samples, and on a split by time whose times were perhaps read in a wrong format.
        """
        leaks = [f"a leak? {leak.feature}: {leak.text}" for leak in self.about.leaks]
        leaks += [f"times? {self.odd_split}"] if self.odd_split else []
        if not self.about.repeated:
            return leaks
        shares = " and ".join(
            f"{share:.1%} of {split} samples" for split, share in self.about.repeated.items()
        )
        return [
            f"duplicates? {shares} repeat a training sample, label included, so their metrics are too "
            "good: remove copies from the log, or split it by user or session",
            *leaks,
        ]

    @property
    def odd_split(self) -> str:
        """Advice if the share of positive samples of a split by time changes by a factor of two;
        empty if not.

        A log whose times were read with a wrong format is divided at random places, often by season
        or hour.
        """
        split = self.about.origin.settings.get("split")
        if not isinstance(split, dict) or split.get("by") != "time":
            return ""
        rates = {}
        for name in self.splits:
            count = self.label_counts(name)[self.schema.label_column]
            if min(count.positives, count.known - count.positives) >= _FEW:
                rates[name] = count.positives / count.known
        if len(rates) < 2 or max(rates.values()) < _ODD * min(rates.values()):
            return ""
        shares = ", ".join(f"{rate:.2%} of {name}" for name, rate in rates.items())
        return (
            f"the share of positive samples differs by a factor of {_ODD:g} between splits by time "
            f"({shares} samples): "
            f"check that {self.schema.time!r} is the time of the event and that schema.time_format reads "
            "it correctly, or split by fraction"
        )

    def joined(self, splits: Sequence[str]) -> Dataset:
        """Return a view whose training split has the samples of `splits`, and whose other splits
        are empty.

        Values have the rows of `complete`, but half of the lookups of held-out values, drawn at
        random, go to their tail buckets. So the buckets learn from new values of any frequency, as
        a served model sees them. Everything else is that of this data set: files, fingerprint and
        moments.
        """
        return self._view(self.manifest.joined(splits), 0.5)

    def complete(self) -> Dataset:
        """Return a view in which held-out values have rows, for a model of all rows
        (`train.refit`).
        """
        return self._view(self.manifest, 0.0)

    def _view(self, manifest: DatasetManifest, rare_share: float) -> Dataset:
        view = Dataset(self.path, manifest, self._untouched, rare_share=rare_share)
        view.fingerprint = self.fingerprint
        view._verified = self._verified
        return view

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager that prevents other processes from replacing the data set while it is
        read.

        Raises
        ------
        StorageError
            If the data set is being replaced at this moment.
        DatasetError
            If the data set was replaced by other content since it was opened.
        """
        with directory_lock(self.path, shared=True):
            if DatasetManifest.read(self.path).fingerprint != self.fingerprint:
                raise DatasetError(f"{self.path} was replaced while it was being opened; start again")
            yield

    def _check_size(self, entry: StoredFile) -> None:
        try:
            size = regular_file_below(self.path, entry.path).stat().st_size
        except (OSError, ValueError) as error:
            raise DatasetError(f"{error}; {ADVICE}") from error
        if size != entry.bytes:
            raise DatasetError(
                f"{self.path / entry.path} has {size} bytes, expected {entry.bytes}; {ADVICE}"
            )

    def _require(self, files: Sequence[StoredFile], *, fresh: bool = False) -> None:
        """Raise `DatasetError` if a file was changed; each file is hashed at most once."""
        files = [entry for entry in files if entry.path not in self._verified]
        with reporting_damage(self.path):
            hashes = file_hashes([self.path / entry.path for entry in files], fresh=fresh)
        for entry, digest in zip(files, hashes, strict=True):
            if digest != entry.hash:
                raise DatasetError(
                    f"{self.path / entry.path} is damaged: its hash does not match; {ADVICE}"
                )
            self._verified.add(entry.path)

    def inputs(self) -> dict[str, Any]:
        """Return JSON that defines what ids and dense values mean. A model needs data sets with the
        same inputs.

        It has the labels if there are several, the features in order, the values of each vocabulary
        (without counts), and mean and deviation of the standardized columns.
        """
        features = self.schema.inputs()
        labels = {"labels": list(self.schema.label_columns)} if self.schema.labels else {}
        return {
            **labels,
            "sparse": features["sparse"],
            "dense": list(map(self._dense_input, features["dense"])),
            "vocabularies": {
                name: {
                    "values": info.values,
                    "tail_buckets": info.tail_buckets,
                    "first_rows": info.first_rows,
                    "digest": info.digest,
                }
                for name, info in self.vocabularies.items()
            },
        }

    def _dense_input(self, feature: dict[str, Any]) -> dict[str, Any]:
        if not feature["standardize"]:
            return feature
        moments = self.about.moments[feature["name"]]
        return {**feature, "mean": moments.mean, "deviation": moments.deviation}

    def _repr_html_(self) -> str:
        rows = []
        for split in self.splits:
            first = self.label_counts(split)[self.schema.label_column]
            rate = f", {first.positives / first.known:.2%} positive" if first.known else ""
            rows.append((split, f"{self.samples(split):,} samples{rate}"))
        tables = ", ".join(f"{name} {count:,}" for name, count in self.table_rows().items())
        rows += [("rows of tables", tables), *(("look at", line) for line in self.suspicions)]
        return as_html(f"Dataset {self.name}", rows)

    def samples(self, split: str) -> int:
        """Return the number of samples of a split: ``train``, ``valid`` or ``test``.

        Examples
        --------
        >>> dataset.samples("valid")
        193
        """
        return sum(shard.samples for shard in self.shards(split))

    def shards(self, split: str) -> tuple[Shard, ...]:
        """Return the shards of a split."""
        if split not in self.splits:
            raise DatasetError(f"{self.path} has no split {split!r}; it has {', '.join(self.splits)}")
        return self.splits[split]

    def table_rows(self) -> dict[str, int]:
        """Return vocabulary -> number of rows of its table.

        Examples
        --------
        >>> dataset.table_rows()
        {'country': 20, 'device': 19, 'item': 223, 'user': 152}
        """
        return {name: info.rows for name, info in self.vocabularies.items()}

    def first_rows(self) -> dict[str, int]:
        """Return vocabulary -> number of rows that its table had in the very first data set, the
        base of all others.
        """
        return {name: info.first_rows for name, info in self.vocabularies.items()}

    def _checked(self, name: str) -> VocabularyInfo:
        """Return the manifest's entry for a vocabulary; the first call verifies the files of all
        vocabularies.
        """
        info = self.vocabularies[name]
        if info.path not in self._verified:
            self._require(list(self.vocabularies.values()))
        return info

    def vocabulary(self, name: str) -> Vocabulary:
        """Read the values of a vocabulary and their counts.

        Examples
        --------
        >>> countries = dataset.vocabulary("country")
        >>> countries.values.to_list(), countries.tail_buckets
        (['fr', 'it', 'pl', 'de'], 16)
        """
        path = self.path / self._checked(name).path
        vocabulary = read_vocabulary(path, self.manifest.vocabularies[name], str(path))
        return replace(vocabulary, held_out=0) if self.is_complete else vocabulary.without_held_out()

    def held_out_values(self, name: str) -> pl.Series:
        """Read the held-out values of a vocabulary. In the data set `complete`, their ids follow
        all other ids.
        """
        return read_held_out(self.path / self._checked(name).path, self.manifest.vocabularies[name])

    @cached_property
    def _held_out_buckets(self) -> dict[str, NDArray[np.int64]]:
        """Vocabulary -> tail buckets of its held-out values. Vocabularies without held-out values
        are left out.
        """
        infos = {name: info for name, info in self.manifest.vocabularies.items() if info.held_out}
        return {
            name: buckets_of(self.held_out_values(name), info.tail_buckets) for name, info in infos.items()
        }

    def carried_counts(self, name: str) -> pl.DataFrame:
        """Read the counts of all values of a vocabulary of kind ``count``, including values without
        a row.
        """
        stored, info = self.manifest.carried.counts[name], self.vocabularies[name]
        self._require([stored])
        counts = read_counts(self.path / stored.path, info.type)
        if not (self.is_complete and self.manifest.vocabularies[name].held_out):
            return counts
        # Lookups in validation and test rows are not stored. One at the end of the log prevents an
        # early eviction.
        times, values = self.manifest.carried.times, self.held_out_values(name).to_frame()
        last = pl.lit(None if times is None else times[1], pl.Int64)
        seen = add_counts(
            counts, values.with_columns(count=pl.lit(1, pl.Int64), recent=pl.lit(1.0), last=last)
        )
        return seen.sort("count", "value", descending=[True, False])

    def events(self) -> pl.DataFrame | None:
        """Read the last positive events of each user, sorted by user and time; None if there are no
        histories.

        The columns are user, time and the features of histories.
        """
        stored = self.manifest.carried.events
        if not stored:
            return None
        self._require(stored)
        return pl.concat(
            [read_events(self.path / file.path, self.schema) for file in stored], how="vertical_relaxed"
        )

    def clicks(self) -> ClickMemory | None:
        """Read the clicks that a later log of clicks needs; None for other sources and earlier
        versions.
        """
        stored = self.manifest.carried.clicks
        if stored is None:
            return None
        self._require(list(stored.files.values()))
        paths = {part: self.path / file.path for part, file in stored.files.items()}
        return read_click_memory(paths, stored.clicks, self.schema.time)

    def access_counts(self, vocabulary: str) -> NDArray[np.int64]:
        """Return the number of training lookups of each id, ``[rows]`` int64.

        Examples
        --------
        >>> dataset.access_counts("country")[-4:]
        array([640, 392, 309, 270])
        """
        ids, counts = self.counted_ids(vocabulary)
        if ids is None:
            return counts
        dense = np.zeros(self.vocabularies[vocabulary].rows, dtype=np.int64)
        dense[ids] = counts
        return dense

    def counted_ids(self, vocabulary: str) -> tuple[NDArray[np.int32] | None, NDArray[np.int64]]:
        """Return ascending ids, or None for all ids, and the number of training lookups of each.

        Ids of kind ``hash`` without lookups are left out.
        """
        info = self._checked(vocabulary)
        if info.kind == "hash":
            stored = self.vocabulary(vocabulary)
            return stored.counted_ids, stored.counts
        path = self.path / info.path
        with reporting_damage(path):
            column = pq.read_table(path, columns=["count"])["count"]
            rows = self.manifest.vocabularies[vocabulary].rows
            if column.type != pa.int64() or len(column) != rows or column.null_count:
                raise DatasetError(
                    f"{path}: {len(column)} counts of {column.type}, expected {rows} of int64"
                )
            counts: NDArray[np.int64] = column.to_numpy()
            if counts.min() < 0 or counts.max() >= 1 << 53:
                raise DatasetError(
                    f"{path}: counts of {counts.min()} to {counts.max()}, expected 0 to 2**53"
                )
        return None, counts if info.rows == rows else lower_counts(
            counts, self._held_out_buckets[vocabulary]
        )

    def row_numbers(self, split: str) -> Iterator[NDArray[np.int64]]:
        """Yield, for each row group in stored order, the log row of each sample; `split_rows`
        decodes it.

        Raises
        ------
        DatasetError
            If the data set was prepared without rows.
        """
        if not self.about.rows.kept:
            raise DatasetError(
                f"{self.path} does not store rows of the log; prepare it again with data.keep_rows"
            )
        yield from self._by_row_group(split, RowGroupReader.row_numbers)

    def session_keys(self, split: str) -> Iterator[NDArray[np.int64]]:
        """Yield, for each row group, a number per sample that identifies its session. The schema
        must have sessions.
        """
        return self._by_row_group(split, RowGroupReader.sessions)

    def _by_row_group(self, split: str, read: Callable[[RowGroupReader, int, int], Item]) -> Iterator[Item]:
        with self.reader(split) as reader:
            for number, shard in enumerate(self.shards(split)):
                for group in range(len(shard.row_groups)):
                    yield read(reader, number, group)

    @property
    def windows(self) -> tuple[str, ...]:
        """Names of the histories that are stored as windows."""
        return tuple(feature.name for feature in self.schema.histories) if self.deduplicated else ()

    def reader(self, split: str, *, unused: bool = True) -> RowGroupReader:
        """Open a reader of a split's row groups; the caller closes it.

        Parameters
        ----------
        unused : bool
            Whether to also read the columns that training does not use, such as times and sessions.
        """
        shards = self.shards(split)
        if split in self._untouched:
            raise DatasetError(
                f"{self.path} was opened without its split {split!r}: open it again to read that split"
            )
        self._require(self.manifest.files(split))
        buckets, sparse = self._held_out_buckets if self._rare_share else {}, self.schema.sparse
        rare = {
            feature.name: buckets[feature.vocabulary] for feature in sparse if feature.vocabulary in buckets
        }
        layout = ShardLayout.of(self.manifest)
        return RowGroupReader(
            self.path, shards, layout, unused=unused, rare=rare, rare_share=self._rare_share
        )

    def row_group(self, split: str, shard: int, group: int) -> RowGroup:
        """Read one row group with its tables."""
        with self.reader(split) as reader:
            return reader.read(shard, group)

    def read_row_group(self, split: str, shard: int, group: int) -> pa.Table:
        """Read one row group with a column for every feature, without deduplication.

        Parameters
        ----------
        split : str
            ``train``, ``valid`` or ``test``.
        shard, group : int
            Number of a shard of the split, and of a row group in this shard, both from 0.

        Examples
        --------
        >>> dataset.read_row_group("test", 0, 0).select(["item", "country"]).slice(0, 2).to_pylist()
        [{'item': 8, 'country': 16}, {'item': 16, 'country': 16}]
        """
        columns = self.row_group(split, shard, group).expand(self.groups, self.windows)
        names = [
            *label_names(len(self.schema.label_columns)),
            *([WEIGHT] if self.schema.weight else []),
            *self.schema.names,
            *(weights_of(feature.name) for feature in self.schema.weighted),
        ]
        names += [name for name in (TIME, USER, SESSION, ROW) if name in columns]
        return pa.table({name: columns[name] for name in names})


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a key that changes when the data set at a path is replaced; None if there is no data
    set.
    """
    try:
        status = os.lstat(path / MANIFEST)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
