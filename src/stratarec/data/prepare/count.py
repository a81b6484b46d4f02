"""The second stage of `prepare`: what is counted in each partition, and the sums of it.

Only training rows are counted. Partitions are added by number, so that sums of floating-point numbers are the same
however often work was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stratarec.data.data_quality import HeldOut, Leak, find_leaks, looked_at, repeated_shares, sample_rows
from stratarec.data.dataset.manifest import LabelCount
from stratarec.data.dedup_groups import Repeats
from stratarec.data.prepare.executor import Executor
from stratarec.data.prepare.partition import Partition, Partitions, PerPartitionStage, note_path
from stratarec.data.schema import Schema
from stratarec.data.splits import SPLITS
from stratarec.data.transforms import Moments
from stratarec.data.vocabulary import VocabularyConfig, bounded, merge_counts
from stratarec.io.atomic import read_frame, read_json, reporting_damage, write_atomic
from stratarec.io.names import file_name
from stratarec.progress import Progress


class PartitionCounts:
    """Notes of the partitions in `folder`.

    Parameters
    ----------
    folder : Path
    schema : Schema
    vocabulary : VocabularyConfig
        Says which counts may be joined early.
    repeats : bool
        Whether to count how features repeat within sessions.
    hashed : int
        Which row hashes are kept, by `repeated_rows.hashed_share`; 0 for none.
    """

    def __init__(
        self, folder: Path, schema: Schema, vocabulary: VocabularyConfig, *, repeats: bool, hashed: int = 0
    ) -> None:
        self._folder, self._schema, self._count_repeats, self._hashed = folder, schema, repeats, hashed
        self._vocabulary = vocabulary
        self._shards = 0

    def count(self, partitions: Partitions, executor: Executor, progress: Progress) -> None:
        """Count what is not counted yet."""
        self._shards = len(partitions)
        stage = PerPartitionStage(partitions=partitions, notes=self._folder, make=self._count)
        stage.run("count", executor, progress)

    def _count(self, number: int, part: Partition) -> dict[str, Any]:
        for place, name in enumerate(self._schema.vocabularies()):
            counted = bounded(part.count(name), self._vocabulary.limits(name))
            write_atomic(self._values(number, place, name), counted.write_parquet)
        if self._schema.histories:
            write_atomic(self._events(number), part.events().write_parquet)
        rows = math.ceil(sample_rows(self._schema) / self._shards)
        write_atomic(self._sample(number), part.sample(looked_at(self._schema), rows).write_parquet)
        if self._hashed:
            write_atomic(self._hashes(number), part.row_hashes(self._hashed).write_parquet)
        moments = {feature.name: asdict(part.moments(feature.name)) for feature in self._schema.dense}
        labels = [part.labels(split) for split in range(len(SPLITS))]
        repeats = self._repeats(part).to_dict()
        return {"moments": moments, "labels": labels, "weight": part.weight(), "repeats": repeats}

    def _repeats(self, part: Partition) -> Repeats:
        return part.repeats() if self._count_repeats else Repeats.none(self._schema)

    def _events(self, shard: int) -> Path:
        return self._folder / f"{shard:05d}-events.parquet"

    def events(self) -> Iterator[pl.DataFrame]:
        """The last events of the users of each partition; none where there are no histories."""
        for number in range(self._shards if self._schema.histories else 0):
            with reporting_damage(self._events(number)):
                yield read_frame(self._events(number))

    def _values(self, shard: int, place: int, name: str) -> Path:
        """Where the counts of a vocabulary in one partition lie."""
        return self._folder / f"{shard:05d}-{file_name(name, place)}.parquet"

    def _sample(self, shard: int) -> Path:
        return self._folder / f"{shard:05d}.sample.parquet"

    def leaks(self) -> list[Leak]:
        """Features that seem to know a label, in a sample of all training rows."""
        frames = []
        for number in range(self._shards):
            with reporting_damage(self._sample(number)):
                frames.append(read_frame(self._sample(number)))
        return find_leaks(pl.concat(frames), self._schema)

    def _hashes(self, shard: int) -> Path:
        return self._folder / f"{shard:05d}.hashes.parquet"

    def repeated_shares(self) -> dict[HeldOut, float]:
        """Return the share of each held-out split that repeats training samples, if that is not by chance."""
        frames = []
        for number in range(self._shards if self._hashed else 0):
            with reporting_damage(self._hashes(number)):
                frames.append(read_frame(self._hashes(number)))
        return repeated_shares(frames) if frames else {}

    def values(self, place: int, name: str) -> pl.DataFrame:
        """Values of the vocabulary `name`, the one in that place, and how often they occur."""
        total: pl.DataFrame | None = None
        for number in range(self._shards):
            file = self._values(number, place, name)
            with reporting_damage(file):
                counted = read_frame(file)
                both = counted if total is None else merge_counts([total, counted])
                total = bounded(both, self._vocabulary.limits(name))
        assert total is not None
        return total

    def moments(self) -> dict[str, Moments]:
        """Of each dense feature."""
        total = {feature.name: Moments() for feature in self._schema.dense}
        for path in self._notes():
            with reporting_damage(path):
                for name, moments in read_json(path)["moments"].items():
                    total[name] = total[name] + Moments(**moments)
        return total

    def repeats(self) -> Repeats:
        """How features repeat within sessions."""
        total = Repeats.none(self._schema)
        for path in self._notes():
            with reporting_damage(path):
                total += Repeats.from_dict(read_json(path)["repeats"])
        return total

    def labels(self) -> dict[str, dict[str, LabelCount]]:
        """Of each split the samples that have a label, and positive ones, by label."""
        names = self._schema.label_columns
        total = np.zeros((len(SPLITS), len(names), 2), dtype=np.int64)
        for path in self._notes():
            with reporting_damage(path):
                total += np.array(read_json(path)["labels"], dtype=np.int64)
        return {
            split: {
                name: LabelCount(known=known, positives=positives)
                for name, (known, positives) in zip(names, counts, strict=True)
            }
            for split, counts in zip(SPLITS, total.tolist(), strict=True)
        }

    def weight(self) -> float:
        """Of all training samples together."""
        return sum(float(read_json(path)["weight"]) for path in self._notes())

    def _notes(self) -> Iterator[Path]:
        return (note_path(self._folder, number) for number in range(self._shards))
