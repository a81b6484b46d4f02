"""The second and third pass of `prepare`. Each piece of these passes processes one partition of the
spilled log.

*count* computes the statistics that encoding needs and that the spilled files do not have: moments
of dense columns, repeats within sessions, and counts of values in histories. If the split depends
on the log's last time, all values are counted here. The pass is skipped if nothing is needed.
*encode* writes each partition as one shard of each split, and statistics of its rows for the
manifest. Results are added in the order of partitions, so that floating-point sums are the same
whether or not work was interrupted.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.column_names import PARTITION, ROW, SPLIT
from stratarec.data.data_quality import (
    HeldOut,
    Leak,
    find_leaks,
    hash_rows,
    looked_at,
    repeated_shares,
    sample_rows,
)
from stratarec.data.dataset.manifest import LabelCount, Shard
from stratarec.data.dataset.writer import write_shard
from stratarec.data.dedup_groups import Repeats
from stratarec.data.prepare.executor import Executor
from stratarec.data.prepare.partition import Partition
from stratarec.data.prepare.value_counts import CountSum, count_values, count_windows, value_type
from stratarec.data.prepare.workspace import Place, Spill, SpilledFile, read_streams, write_streams
from stratarec.data.schema import Schema
from stratarec.data.splits import SPLITS, Span, Splitter
from stratarec.data.threads import map_threads
from stratarec.data.transforms import Moments
from stratarec.data.vocabulary import Vocabulary, VocabularyConfig
from stratarec.errors import DataError
from stratarec.io.atomic import read_frame, read_json, reporting_damage, write_atomic, write_json
from stratarec.progress import Progress

# Memory of a process without data in bytes, and how many copies of a partition's rows exist during
# sorting and encoding.
_PROCESS_BYTES, _COPIES = 300 << 20, 6

Item = TypeVar("Item")


class Partitions:
    """The partitions of a log, read one at a time.

    Parameters
    ----------
    spill : Spill
        Spilled rows of the log.
    files : sequence of SpilledFile
        All spilled files of the log.
    schema : Schema
        Columns of the data set.
    splitter : Splitter
        Chooses the split of each row.
    shard_samples : int
        Approximate number of samples in a partition if the schema has no shard key.
    events : DataFrame, optional
        Events from earlier logs, sorted by user and time. They are used only in histories.
    """

    def __init__(
        self,
        spill: Spill,
        files: Sequence[SpilledFile],
        schema: Schema,
        splitter: Splitter,
        shard_samples: int,
        events: pl.DataFrame | None = None,
    ) -> None:
        self.files = files
        self.schema = schema
        self.splitter = splitter
        self._events = (
            None if events is None else events.with_columns(spill.assign_partitions(events[schema.user]))
        )
        self._spill = spill
        self._parts = spill.shards(files, shard_samples)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def span(self) -> Span | None:
        """First and last time of the log, without rows after `split.last`; None if it has no
        times.
        """
        times = [file.times for file in self.files if file.times]
        if not times:
            return None
        first, last = min(time for time, _ in times), max(time for _, time in times)
        return Span(first=first, last=self.splitter.last_time(last), unit=self.schema.time_unit)

    @property
    def columns(self) -> Mapping[str, pl.DataType]:
        """Type of each spilled column."""
        return self._spill.columns(self.files)

    def counts(self) -> Iterator[pl.DataFrame]:
        """Yield the value counts of every file."""
        for file in self.files:
            yield from self._spill.read_counts(file)

    def read(
        self, number: int, columns: Sequence[str] | None = None, order: NDArray[np.uint32] | None = None
    ) -> Partition:
        """Read a partition, or some of its columns. It is sorted by `order`; without `order`, the
        order is computed.
        """
        frame = self._spill.read(self.files, self._parts[number], columns)
        if self.splitter.needs_last_time:
            frame = frame.with_columns(
                pl.Series(SPLIT, self.splitter.split(frame, self.span.last if self.span else 0))
            )
        if self._events is not None:
            frame = self._with_events(frame, self._parts[number])
        return Partition(frame, self.schema, order)

    def _with_events(self, frame: pl.DataFrame, parts: Sequence[int]) -> pl.DataFrame:
        """Put the earlier events of the partition before the rows of the log. Earlier events are in
        no split.
        """
        assert self._events is not None
        events = self._events.filter(self._events[PARTITION].is_in(parts)).drop(PARTITION)
        for name in events.columns:
            if events[name].dtype != frame[name].dtype:
                raise DataError(
                    f"column {name!r} has values of type {frame[name].dtype} in the log, but of "
                    f"{events[name].dtype} in data.vocabulary.base: set `type` of the feature, "
                    "or the type of the column"
                )
        numbers = pl.Series(ROW, np.arange(-len(events), 0, dtype=np.int64))
        events = events.with_columns(numbers, pl.lit(-1, pl.Int8).alias(SPLIT))
        return pl.concat([events, frame], how="diagonal").select(frame.columns)

    @property
    def other_events(self) -> pl.DataFrame | None:
        """Return the earlier events of users whose partitions have no rows in this log."""
        if self._events is None:
            return None
        present = [part for parts in self._parts for part in parts]
        return self._events.filter(~self._events[PARTITION].is_in(present)).drop(PARTITION)

    def memory(self, number: int) -> int:
        """Estimate the memory in bytes for processing a partition."""
        stored = sum(self._stored[part] for part in self._parts[number])
        return _PROCESS_BYTES + _COPIES * int(stored * self._growth)

    @cached_property
    def _growth(self) -> float:
        """Bytes of the rows in memory, divided by their bytes in the spilled files."""
        return sum(file.frame_bytes for file in self.files) / max(self._stored.total(), 1)

    @cached_property
    def _stored(self) -> Counter[int]:
        """Partition -> its spilled bytes."""
        total: Counter[int] = Counter()
        for file in self.files:
            total.update({part: place.size for part, place in file.places.items()})
        return total


@dataclass(frozen=True, kw_only=True)
class PartitionPass(ABC):
    """A pass with one piece for each partition; it can be pickled."""

    name: ClassVar[str]
    folder: Path
    """Directory of the results. It has a note (a JSON file) for each processed partition."""
    partitions: Partitions

    @abstractmethod
    def process(self, number: int) -> Callable[[], dict[str, Any]]:
        """Process a partition, and return a function that writes the results and returns the note.
        The caller writes the note, which marks the partition as processed.
        """

    @property
    def bytes(self) -> int:
        """Memory that the pass needs in addition to the partition."""
        return 0

    def __call__(self, number: int) -> Iterator[int]:
        return self._write_results(number, self.process(number))

    def _write_results(self, number: int, write: Callable[[], dict[str, Any]]) -> Iterator[int]:
        write_json(self._note(number), write())
        # Return freed memory of Arrow to the system, so that the peaks of different partitions do
        # not add up.
        pa.default_memory_pool().release_unused()
        yield 1

    def memory(self, number: int) -> int:
        return self.partitions.memory(number) + self.bytes

    def run(self, executor: Executor, progress: Progress) -> None:
        """Process all partitions that have no note yet."""
        pending = [number for number in range(len(self.partitions)) if not self._note(number).exists()]
        progress.start(self.name, len(self.partitions), "shards", len(self.partitions) - len(pending))
        executor.run(self, pending, progress)
        progress.finish()

    def _note(self, number: int) -> Path:
        return self.folder / f"{number:05d}.json"

    def _read_notes(self, read: Callable[[dict[str, Any]], Item]) -> list[Item]:
        """Apply `read` to the note of each partition; `DatasetError` names a damaged note."""
        items = []
        for number in range(len(self.partitions)):
            with reporting_damage(self._note(number)):
                items.append(read(read_json(self._note(number))))
        return items


@dataclass(frozen=True, kw_only=True)
class PartitionStatistics(PartitionPass):
    """The *count* pass, and the sums of its results."""

    name = "count"
    config: VocabularyConfig
    repeats_counted: bool
    """Whether to count how features repeat within sessions."""

    def run(self, executor: Executor, progress: Progress) -> None:
        if self._needed:
            super().run(executor, progress)

    @property
    def _needed(self) -> bool:
        schema, splitter = self.partitions.schema, self.partitions.splitter
        return bool(schema.dense or schema.histories or self.repeats_counted or splitter.needs_last_time)

    def _columns(self) -> list[str] | None:
        """Return the names of the columns that counting reads; None for all columns."""
        schema = self.partitions.schema
        if self.repeats_counted or self.partitions.splitter.needs_last_time:
            return None
        keys = (
            schema.shard_key,
            schema.session,
            schema.time if schema.shard_key else "",
            schema.label_column,
        )
        of = (feature.of for feature in schema.histories)
        return list(
            dict.fromkeys(filter(None, (*keys, *of, *(column.name for column in schema.dense), ROW, SPLIT)))
        )

    def process(self, number: int) -> Callable[[], dict[str, Any]]:
        part = self.partitions.read(number, self._columns())
        schema = self.partitions.schema
        counts = count_windows(part.windows, part.split == 0, schema, self.partitions.columns, self.config)
        if self.partitions.splitter.needs_last_time:
            counts += count_values(part.frame, schema, self.config)
        order = [] if part.order is None else [pl.DataFrame({"row": part.order})]
        note: dict[str, Any] = {
            "moments": {
                feature.name: asdict(moments)
                for feature, moments in zip(
                    schema.dense, map_threads(part.moments, schema.dense), strict=True
                )
            },
            "repeats": part.repeats().to_dict() if self.repeats_counted else None,
        }

        def write() -> dict[str, Any]:
            places = write_streams(self._file(number), [*order, *counts])
            return {**note, "order": places[: len(order)], "counts": places[len(order) :]}

        return write

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:05d}.arrow"

    def _read_notes(self, read: Callable[[dict[str, Any]], Item]) -> list[Item]:
        return super()._read_notes(read) if self._needed else []

    def order(self, number: int) -> NDArray[np.uint32] | None:
        """Return the order of a partition's rows that was computed before; None if none was. It
        saves sorting again.
        """
        if not self._needed:
            return None
        with reporting_damage(self._note(number)):
            places = [Place(*place) for place in read_json(self._note(number))["order"]]
        if not places:
            return None
        order: NDArray[np.uint32] = read_streams(self._file(number), places)[0]["row"].to_numpy()
        return order

    def values(self) -> dict[str, pl.DataFrame]:
        """Return vocabulary -> its values, and how often rows look up each, in the form of
        `count_values`.
        """
        total = CountSum()
        for counts in self.partitions.counts():
            total.add(counts)
        notes = self._read_notes(lambda note: [Place(*place) for place in note["counts"]])
        for number, places in enumerate(notes):
            for table in read_streams(self._file(number), places) if places else ():
                total.add(pl.DataFrame(table))
        sums, vocabularies = total.by_vocabulary(), self.partitions.schema.vocabularies()
        empty = pl.DataFrame(schema=dict.fromkeys(("value", "count", "held_out", "last"), pl.Int64))
        return {name: sums.get(number, empty) for number, name in enumerate(vocabularies)}

    def value_types(self) -> dict[str, pl.DataType]:
        """Return vocabulary -> Polars type of its values in the partitions."""
        columns = self.partitions.columns
        return {
            name: value_type(features, columns)
            for name, features in self.partitions.schema.vocabularies().items()
        }

    def moments(self) -> dict[str, Moments]:
        """Return the moments of each dense feature."""
        total = {feature.name: Moments() for feature in self.partitions.schema.dense}
        parts = self._read_notes(
            lambda note: {name: Moments(**values) for name, values in note["moments"].items()}
        )
        for part in parts:
            total = {name: moments + part[name] for name, moments in total.items()}
        return total

    def repeats(self) -> Repeats:
        """Return the counts of how features repeat within sessions."""
        total = Repeats.none(self.partitions.schema)
        if self.repeats_counted:
            total = sum(self._read_notes(lambda note: Repeats.from_dict(note["repeats"])), total)
        return total


@dataclass(frozen=True, kw_only=True)
class ShardWriter(PartitionPass):
    """The *encode* pass: it writes shards and computes the statistics of rows for the manifest."""

    name = "encode"
    output: Path
    """Directory of the data set."""
    statistics: PartitionStatistics
    vocabularies: Mapping[str, Vocabulary]
    moments: Mapping[str, Moments]
    groups: Mapping[str, Sequence[str]] | None
    keep_rows: bool
    hash_share: int
    """One in this many row hashes is kept, to find duplicate rows; 0 to keep none."""

    @property
    def bytes(self) -> int:
        """Bytes of the vocabularies in memory."""
        return sum(
            int(part.values.estimated_size()) + part.counts.nbytes for part in self.vocabularies.values()
        )

    def process(self, number: int) -> Callable[[], dict[str, Any]]:
        part = self.partitions.read(number, order=self.statistics.order(number))
        schema = self.partitions.schema
        encoded = part.encode(self.vocabularies, self.moments, self.groups, keep_rows=self.keep_rows)
        frames = {"events": part.events()} if schema.histories else {}
        rows = math.ceil(sample_rows(schema) / len(self.partitions))
        frames["sample"] = part.sample(looked_at(schema), rows)
        if self.hash_share:
            frames["hashes"] = hash_rows(part.frame, schema, part.split, self.hash_share)
        note = {
            "labels": [part.labels(split) for split in range(len(SPLITS))],
            "weights": [part.weight(split) for split in range(len(SPLITS))],
        }

        # The function keeps no raw rows, because the next partition is read while it writes.
        def write() -> dict[str, Any]:
            shards = {
                name: write_shard(self.output, name, number, encoded.pop(name)).to_dict()
                for name in list(encoded)
            }
            for name, frame in frames.items():
                write_atomic(self._file(name, number), frame.write_parquet)
            return {**note, "shards": shards}

        return write

    def _file(self, name: str, number: int) -> Path:
        return self.folder / f"{number:05d}.{name}.parquet"

    def _frames(self, name: str) -> Iterator[pl.DataFrame]:
        for number in range(len(self.partitions)):
            with reporting_damage(self._file(name, number)):
                yield read_frame(self._file(name, number))

    def shards(self) -> dict[str, tuple[Shard, ...]]:
        """Return the shards of each split."""
        notes = self._read_notes(
            lambda note: {
                name: Shard.model_validate_json(json.dumps(shard)) for name, shard in note["shards"].items()
            }
        )
        return {name: tuple(note[name] for note in notes if name in note) for name in SPLITS}

    def events(self) -> Iterator[pl.DataFrame]:
        """Yield the last events of users, by partition; nothing if there are no histories."""
        return self._frames("events") if self.partitions.schema.histories else iter(())

    def leaks(self) -> list[Leak]:
        """Return the features that seem to reveal a label in the sample of the training rows."""
        return find_leaks(pl.concat(list(self._frames("sample"))), self.partitions.schema)

    def repeated_shares(self) -> dict[HeldOut, float]:
        """Return, for each held-out split, the share of samples that repeat training samples beyond
        chance.
        """
        return repeated_shares(list(self._frames("hashes"))) if self.hash_share else {}

    def labels(self) -> dict[str, dict[str, LabelCount]]:
        """Return split -> label -> number of samples with a known label, and number of
        positives.
        """
        names = self.partitions.schema.label_columns
        total = np.sum(self._read_notes(lambda note: np.array(note["labels"], dtype=np.int64)), axis=0)
        return {
            split: {
                name: LabelCount(known=labelled, positives=positives)
                for name, (labelled, positives) in zip(names, counts, strict=True)
            }
            for split, counts in zip(SPLITS, total.tolist(), strict=True)
        }

    def weights(self) -> dict[str, float]:
        """Return the sum of the weights of the samples of each split."""
        notes = self._read_notes(
            lambda note: [float(note["weights"][split]) for split in range(len(SPLITS))]
        )
        return dict(zip(SPLITS, map(sum, zip(*notes, strict=True)), strict=True))
