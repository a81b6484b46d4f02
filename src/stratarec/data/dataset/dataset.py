"""A prepared data set on disk: it describes itself, and is checked when it is opened and read.

    stratarec.json                      says that this is a data set of StrataRec's pipeline
    dataset.json                        what `manifest` says
    vocabulary/0000-<name>.parquet      value, id, count
    carried/0000-<name>.parquet         value, count, recent, last: of all values, with an id of their own or not
    carried/events-00000.parquet        the last positive events of users
    carried/clicks-<part>.parquet       of a log of clicks alone what a later one needs: see `click_memory`
    <split>/shard-00000.parquet         @label, dense (float32), ids (int32, or lists of int32), @time, @row,
                                        @weights/<feature> (lists of float32) where values have weights
    <split>/shard-00000.tables.parquet  the tables that pointers point into: one row a row group of the samples, a
                                        column ``<table>/<column>`` holding the whole column as one list

Without groups there are no tables: histories are lists, and @user and @session columns of the samples. Only `writer`,
`row_group_reader` and `row_group` know the layout of files. What begins with @ is in `column_names`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

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
from stratarec.data.dataset.row_group import RowGroup, SlateKey
from stratarec.data.dataset.row_group_reader import RowGroupReader, ShardLayout
from stratarec.data.splits import SPLITS
from stratarec.data.user_history import read_events
from stratarec.data.vocabulary import Vocabulary, read_counts, read_vocabulary
from stratarec.errors import DatasetError
from stratarec.io.atomic import reporting_damage
from stratarec.io.hashes import file_hashes
from stratarec.io.names import as_html
from stratarec.io.owned_directory import MARKER, directory_lock, kind_of
from stratarec.io.sealed import regular_file_below

Verify = Literal["full", "all", "used"]

# How often a data set may be prepared anew while it is opened.
_TRIES = 3


class Dataset:
    """A prepared data set, open for reading.

    Use `Dataset.open`.
    """

    def __init__(self, path: Path, manifest: DatasetManifest, untouched: Collection[str] = ()) -> None:
        self.path, self.manifest, self._untouched = path, manifest, untouched
        self.name, self.schema, self.about = manifest.name, manifest.columns, manifest.about
        self.deduplicated = manifest.deduplicated
        self.groups = dict(manifest.groups or {})
        self.splits = {split: manifest.splits[split] for split in SPLITS}
        self.positives, self.vocabularies = manifest.positives, manifest.vocabularies
        self.label_counts = manifest.label_counts
        self.fingerprint = manifest.fingerprint
        """Hash of what the data set holds: equal for data sets whose every file is equal, however they were made."""
        self._right: set[str] = set()

    @classmethod
    def open(cls, path: str | Path, *, verify: Verify = "all", untouched: Collection[str] = ()) -> Dataset:
        """Open and check a prepared data set.

        Parameters
        ----------
        verify : {"full", "all", "used"}
            Which files are compared with their hash: ``full`` reads every one; ``all`` every one whose size, times or
            inode are not what they were when this user last hashed it; ``used`` likewise, each when it is first read.
        untouched : collection of str
            Splits of which no file is looked at, and which cannot be read.

        Raises
        ------
        DatasetError
            When it is missing, of another format, or a file is not what was written; the message names the file.
        """
        path = Path(path)
        for tries in range(_TRIES):
            stamp = _stamp(path)
            try:
                return cls._opened(path, verify, untouched)
            except DatasetError:
                # What was replaced meanwhile is no damage.
                if tries == _TRIES - 1 or _stamp(path) == stamp:
                    raise
        raise AssertionError

    @classmethod
    def _opened(cls, path: Path, verify: Verify, untouched: Collection[str]) -> Dataset:
        if not os.path.lexists(path / MANIFEST):
            what = "it does not exist"
            if path.exists():
                what = f"it is a {kind_of(path)}" if kind_of(path) else f"it has no {MANIFEST}"
            raise DatasetError(f"{path} is no prepared data set: {what}; run `stratarec prepare` first")
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
        """Features that seem to know the label, and held-out samples that repeat training samples, a line each."""
        leaks = [f"a leak? {leak.feature}: {leak.text}" for leak in self.about.leaks]
        if not self.about.repeated:
            return leaks
        shares = " and ".join(f"{share:.1%} of {split} samples" for split, share in self.about.repeated.items())
        return [
            f"duplicates? {shares} repeat a training sample, label included, so their metrics are too good: remove "
            "copies from the log, or split it by time, user or session",
            *leaks,
        ]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the data set from being replaced while it is read.

        Raises
        ------
        StorageError
            When it is being replaced.
        DatasetError
            When it was, since it was opened, by one that holds something else.
        """
        with directory_lock(self.path, shared=True):
            if DatasetManifest.read(self.path).fingerprint != self.fingerprint:
                raise DatasetError(f"{self.path} was prepared anew while it was opened; start again")
            yield

    def _check_size(self, entry: StoredFile) -> None:
        try:
            size = regular_file_below(self.path, entry.path).stat().st_size
        except (OSError, ValueError) as error:
            raise DatasetError(f"{error}; {ADVICE}") from error
        if size != entry.bytes:
            raise DatasetError(f"{self.path / entry.path} has {size} bytes, expected {entry.bytes}; {ADVICE}")

    def _require(self, files: Sequence[StoredFile], *, fresh: bool = False) -> None:
        """Refuse files that are not what was written; each is hashed at most once."""
        files = [entry for entry in files if entry.path not in self._right]
        with reporting_damage(self.path):
            hashes = file_hashes([self.path / entry.path for entry in files], fresh=fresh)
        for entry, digest in zip(files, hashes, strict=True):
            if digest != entry.hash:
                raise DatasetError(f"{self.path / entry.path} is damaged: its hash does not match; {ADVICE}")
            self._right.add(entry.path)

    def inputs(self) -> dict[str, Any]:
        """What ids and dense values of a batch mean, as JSON: a model is of use with equal inputs alone.

        Labels where there are several, features in order, the values of each vocabulary (not their counts), mean and
        deviation of standardised columns.
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
        """Samples of a split."""
        return sum(shard.samples for shard in self.shards(split))

    def shards(self, split: str) -> tuple[Shard, ...]:
        """ShardWriter of a split."""
        for name, shards in self.splits.items():
            if name == split:
                return shards
        raise DatasetError(f"{self.path} has no split {split!r}; it has {', '.join(self.splits)}")

    def table_rows(self) -> dict[str, int]:
        """Vocabulary -> rows that its table needs."""
        return {name: info.rows for name, info in self.vocabularies.items()}

    def first_rows(self) -> dict[str, int]:
        """The same of the first data set that this one goes on from, itself where it has no base."""
        return {name: info.first_rows for name, info in self.vocabularies.items()}

    def _checked(self, name: str) -> VocabularyInfo:
        """A vocabulary whose file is what was written: with the first one all are looked at, in one go."""
        info = self.vocabularies[name]
        if info.path not in self._right:
            self._require(list(self.vocabularies.values()))
        return info

    def vocabulary(self, name: str) -> Vocabulary:
        """The values of a vocabulary and their counts; `DatasetError` where its file is not what was written."""
        info = self._checked(name)
        return read_vocabulary(self.path / info.path, info, str(self.path / info.path))

    def carried_counts(self, name: str) -> pl.DataFrame:
        """What was counted of all values of a vocabulary by count: see `vocabulary.read_counts`."""
        stored, info = self.manifest.carried.counts[name], self.vocabularies[name]
        self._require([stored])
        return read_counts(self.path / stored.path, info.type)

    def events(self) -> pl.DataFrame | None:
        """The last positive events of each user, by user and time: user, time and what histories are of; None where
        there are no histories."""
        stored = self.manifest.carried.events
        if not stored:
            return None
        self._require(stored)
        return pl.concat([read_events(self.path / each.path, self.schema) for each in stored], how="vertical_relaxed")

    def clicks(self) -> ClickMemory | None:
        """What a log of clicks that goes on from this one needs; None where this one is of another kind, or was
        prepared by an earlier version."""
        stored = self.manifest.carried.clicks
        if stored is None:
            return None
        self._require(list(stored.files.values()))
        paths = {part: self.path / file.path for part, file in stored.files.items()}
        return read_click_memory(paths, stored.clicks, self.schema.time)

    def access_counts(self, vocabulary: str) -> NDArray[np.int64]:
        """``[rows]`` training lookups of each id."""
        info = self._checked(vocabulary)
        path = self.path / info.path
        with reporting_damage(path):
            column = pq.read_table(path, columns=["count"])["count"]
            if column.type != pa.int64() or len(column) != info.rows or column.null_count:
                raise DatasetError(f"{path}: {len(column)} counts of {column.type}, expected {info.rows} of int64")
            counts: NDArray[np.int64] = column.to_numpy()
            if counts.min() < 0 or counts.max() >= 1 << 53:
                raise DatasetError(f"{path}: counts of {counts.min()} to {counts.max()}, expected 0 to 2**53")
        return counts

    def row_numbers(self, split: str) -> Iterator[NDArray[np.int64]]:
        """Which row of the log each sample came from, row group by row group in the order of storage; see `split_rows`.

        Raises
        ------
        DatasetError
            Where the data set was prepared without.
        """
        if not self.about.rows.kept:
            raise DatasetError(f"{self.path} does not know rows of the log; prepare it with data.keep_rows")
        with self.reader(split) as reader:
            for number, shard in enumerate(self.shards(split)):
                for group in range(len(shard.row_groups)):
                    yield reader.row_numbers(number, group)

    def session_keys(self, split: str) -> Iterator[NDArray[np.int64]]:
        """A number for the session of each sample, in the same order, where the schema names sessions."""
        with self.reader(split) as reader:
            for number, shard in enumerate(self.shards(split)):
                for group in range(len(shard.row_groups)):
                    yield reader.sessions(number, group)

    def slates(self, split: str, by: SlateKey) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        """The first label of each sample, and where slates begin, row group by row group."""
        with self.reader(split) as reader:
            for number, shard in enumerate(self.shards(split)):
                for group in range(len(shard.row_groups)):
                    yield reader.slates(number, group, by)

    @property
    def windows(self) -> tuple[str, ...]:
        """The histories that are stored as windows."""
        return tuple(feature.name for feature in self.schema.histories) if self.deduplicated else ()

    def reader(self, split: str, *, unused: bool = True) -> RowGroupReader:
        """Reads row groups of a split; to be closed.

        Parameters
        ----------
        unused : bool
            Read what training makes no use of too: times, and sessions of samples.
        """
        shards = self.shards(split)
        if split in self._untouched:
            raise DatasetError(f"{self.path} was opened without its split {split!r}: open it anew to read that")
        self._require(self.manifest.files(split))
        return RowGroupReader(self.path, shards, ShardLayout.of(self.manifest), unused=unused)

    def row_group(self, split: str, shard: int, group: int) -> RowGroup:
        """One row group with its tables; see `RowGroupReader.read`."""
        with self.reader(split) as reader:
            return reader.read(shard, group)

    def read_row_group(self, split: str, shard: int, group: int) -> pa.Table:
        """One row group with a column for every feature, nothing deduplicated."""
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
    """Tells a data set from one that took its place; None while there is none."""
    try:
        status = os.lstat(path / MANIFEST)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
