"""Raw logs -> a prepared data set, in three stages that each resume where they stopped.

1. *stage*: source chunks, checked and typed, are dealt to partitions by the hash of their user or session;
2. *count*: values and dense moments of the training rows, and how features repeat within sessions, partition by
   partition, then merged in a fixed order; groups are chosen here;
3. *encode*: each partition becomes one shard of each split.

Memory holds one chunk, or one partition, and the vocabularies. Everything happens in ``<path>.preparing``; the last act
renames its output to `path`. An earlier data set stays there until then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pyarrow as pa

from stratarec.checks import check_directory
from stratarec.data.blocks import Encoded
from stratarec.data.dataset import Dataset
from stratarec.data.groups import GroupMode, Repeats, choose_groups, describe
from stratarec.data.manifest import (
    DATASET,
    MANIFEST,
    About,
    Manifest,
    MomentsInfo,
    Origin,
    RepeatsInfo,
    RowsInfo,
    Shard,
    VocabularyInfo,
)
from stratarec.data.matching import settings, settings_difference
from stratarec.data.partition import Partition
from stratarec.data.sources import OnBadRow, Source, SourceConfig, open_source
from stratarec.data.sources.files import hash_logs
from stratarec.data.span import Span
from stratarec.data.splits import SPLITS, SplitConfig, Splitter
from stratarec.data.staging import StagedChunk, Staging
from stratarec.data.transforms import Moments
from stratarec.data.vocabulary import Vocabulary, VocabularyConfig, merge_counts
from stratarec.data.writing import write_shard, write_vocabulary
from stratarec.errors import ConfigError, DataError, DatasetError, StorageError
from stratarec.files import make_directory, read_frame, read_json, reading, storage_error, write_atomic, write_json
from stratarec.holding import held
from stratarec.naming import file_name
from stratarec.opening import remove_leftovers
from stratarec.ownership import Kind, check_replaceable, claim, entries, mark, named_directory, state
from stratarec.progress import Progress, SilentProgress
from stratarec.replacing import empty, recover, remove, replace

# Raise this when the same logs and settings give another data set.
_VERSION = 3
WORK = Kind(
    name="half-prepared data set",
    field="data.path",
    content=("plan.json", "source", "staged", "staged.done", "counts", "encoded", "output"),
)
# What a run leaves in its work directory; a later version whose notes have other fields starts anew.
_WORK_FORMAT = [
    6,
    *(entry.name for kind in (StagedChunk, Moments, Repeats) for entry in fields(kind)),
    *Shard.model_fields,
]


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Which logs become which data set."""

    source: SourceConfig
    """Raw logs."""
    path: str
    """Directory of the prepared data set."""
    on_bad_row: OnBadRow = "error"
    """``error`` stops at the first bad row; ``skip`` leaves bad rows out and reports how many."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """How samples are dealt to train, valid and test."""
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    """Which values get rows of their own."""
    shard_samples: int = 500_000
    """About how many samples a shard holds; bounds the memory of `prepare`."""
    groups: GroupMode = "auto"
    """Which features are stored once for each distinct value: the groups that the schema declares and those that repeat
    within sessions (``auto``), the declared ones (``declared``), or none, histories as copies (``none``)."""
    keep_rows: bool = True
    """Store which row of which file each sample came from, so that predictions can be joined to the log. Training does
    not read it; it takes 0.1 to 0.6 bytes a sample."""

    def __post_init__(self) -> None:
        if self.shard_samples < 1:
            raise ConfigError(f"data.shard_samples is {self.shard_samples}, expected at least 1")
        if not self.path:
            raise ConfigError("data.path is empty, expected a directory for the prepared data set")
        check_directory(self.path, "data.path")


def prepare(
    config: PrepareConfig, *, name: str = "", overwrite: bool = False, progress: Progress | None = None
) -> Dataset:
    """Prepare a data set, or return the finished one when nothing has changed.

    Raises
    ------
    DataError
        For raw logs that cannot be read as the recipe says: names the file, the row and the field.
    DatasetError
        When `path` holds a data set of other logs or settings and `overwrite` is false.
    StorageError
        When an output cannot be written, or `path` holds anything but a data set. It is then as it was.
    """
    run = _Run(config, name, progress or SilentProgress())
    with _storage_errors(run.final):
        return run.run(overwrite)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(path, error) from error


class _Measured(NamedTuple):
    """What counting the training rows gave."""

    repeats: Repeats
    moments: Mapping[str, Moments]


class _Run:
    """One call of `prepare`."""

    def __init__(self, config: PrepareConfig, name: str, progress: Progress) -> None:
        self.final = named_directory(config.path)
        self.config, self.name, self.progress = config, name or self.final.name, progress
        self.work = self.final.with_name(f"{self.final.name}.preparing")
        self.source: Source = open_source(config.source, on_bad_row=config.on_bad_row, split=config.split)
        self.schema = self.source.schema
        config.vocabulary.check(self.schema)
        self.splitter = Splitter(config.split, self.schema, self.source.files)

    def _plan(self) -> Origin:
        """What the outcome depends on; an interrupted run goes on under the same plan alone."""
        files = self.splitter.file_split
        return Origin(
            format=_VERSION,
            settings=settings(self.config),
            source=json.loads(json.dumps(self.source.fingerprint())),
            # Patterns may name folders, which the fingerprint leaves out.
            file_split=None if files is None else tuple(files.tolist()),
        )

    def run(self, overwrite: bool) -> Dataset:
        there = self._look(overwrite)
        self._hash_logs()
        self.plan = self._plan()
        if there and not overwrite:
            return self._finished()
        claim(self.work, WORK)
        with held(self.work):
            if not overwrite and self.final.exists():  # another process has just finished it
                remove(self.work)
                return self._finished()
            remove_leftovers(self.work)
            self._work()
        return Dataset.open(self.final, verify="used")

    def _look(self, overwrite: bool) -> bool:
        """Whether something is at `path`; refused unless it is a data set, which is all that is ever replaced."""
        recover(self.final, DATASET, lambda path: (path / MANIFEST).is_file())
        if overwrite:
            check_replaceable(self.final, DATASET)
            if state(self.final, DATASET) == "ours":
                with held(self.final):  # whoever reads it is in the way now, and not only in the end
                    pass
        elif state(self.final, DATASET) == "free" and self.final.exists():
            raise DatasetError(f"{self.final} exists and is no prepared data set; name another data.path")
        return self.final.exists()

    def _hash_logs(self) -> None:
        """Read logs that are not known yet once, so that their contents can be compared without reading them."""
        if self.source.files:
            self.progress.start("check", self.source.total_bytes, "B")
            hash_logs(self.source.files, self.progress.advance)
            self.progress.finish()

    def _work(self) -> None:
        resumed = self._open_workspace()
        try:
            self._write()
        except DatasetError as error:
            if not resumed:
                raise
            self._start_anew(str(error))
            self._open_workspace()
            self._write()

    def _write(self) -> None:
        """Every stage, each from where the work directory says it stopped."""
        chunks = self._stage()
        span = self._span(chunks)
        if span is not None:
            self.progress.say(f"times span {span}")
            span.check_split(self.config.split)
        shards = self.staging.shards(chunks, self.config.shard_samples)
        self._count(chunks, shards)
        vocabularies, infos = self._vocabularies(len(shards))
        moments, repeats = self._moments(len(shards)), self._repeats(len(shards))
        groups = choose_groups(self.config.groups, self.schema, repeats)
        for line in describe(groups or {}, self.schema, repeats):
            self.progress.say(line)
        keep = self.config.keep_rows
        self._encode(
            chunks, shards, lambda part, split: part.encode(split, vocabularies, moments, groups, keep_rows=keep)
        )
        self._finish(chunks, len(shards), infos, groups, _Measured(repeats, moments))

    def _finished(self) -> Dataset:
        if not (self.final / MANIFEST).is_file():
            raise DatasetError(f"{self.final} exists and is no prepared data set; name another data.path")
        dataset = Dataset.open(self.final)
        if dataset.about.plan != self.plan:
            raise DatasetError(f"{self._difference(dataset)}; name another data.path, or pass --overwrite")
        self.progress.say(f"{self.final} is up to date")
        return dataset

    def _difference(self, dataset: Dataset) -> str:
        before = dataset.about.plan
        found = settings_difference(self.plan.settings, before.settings)
        if found is not None:
            return f"{self.final} was prepared with data.{found.field} = {found.have!r}, and not {found.want!r}"
        if before.format != self.plan.format:
            return f"{self.final} was prepared by another version of StrataRec"
        return f"{self.final} was prepared from logs of other content, {', '.join(dataset.about.paths[:3])}"

    def _open_workspace(self) -> bool:
        """Make the work directory ready; true when an earlier run's work goes on."""
        path = self.work / "plan.json"
        resumed = self._is_ours(path) and not any(entry.is_symlink() for entry in self.work.rglob("*"))
        if not resumed and len(entries(self.work)) > 1:
            self._start_anew(f"{self.work} is of other logs, settings or another version")
        make_directory(self.work / "source")
        if not resumed:
            rows = self.source.estimate_rows()
            partitions = max(round(rows / self.config.shard_samples), 1)
            write_json(path, {"format": _WORK_FORMAT, "partitions": partitions, "plan": self.plan.to_dict()})
        self.staging = Staging(self.work / "staged", self.schema, read_json(path)["partitions"])
        self.output = self.work / "output"
        return resumed

    def _is_ours(self, path: Path) -> bool:
        try:
            found = read_json(path)
        except DatasetError:  # absent or damaged
            return False
        if not isinstance(found, dict) or not isinstance(found.get("partitions"), int):
            return False
        return found.get("format") == _WORK_FORMAT and found.get("plan") == self.plan.to_dict()

    def _start_anew(self, reason: str) -> None:
        self.progress.say(f"{reason}; starting anew")
        empty(self.work)

    def _stage(self) -> list[StagedChunk]:
        done = self.staging.done()
        finished = self.work / "staged.done"
        if finished.exists():
            if read_json(finished) != len(done):
                raise DatasetError(f"{self.work / 'staged'} is damaged: some of its chunks are missing")
            return done
        before, rows = done[-1].bytes_done if done else 0, sum(chunk.rows for chunk in done)
        self.progress.start("read", self.source.total_bytes, "" if not self.source.files else "B", before)
        for chunk in self.source.chunks(self.work / "source", start=len(done)):
            rows += chunk.frame.height
            done.append(self.staging.add(chunk, rows - chunk.frame.height))
            self.progress.advance(chunk.bytes_done - before)
            before = chunk.bytes_done
        self.progress.finish()
        notes = [chunk.note for chunk in done if chunk.note]
        if not any(chunk.samples for chunk in done):
            raise DataError("; ".join([f"{', '.join(self.source.files[:3])}: no usable row in the input", *notes]))
        for note in notes:
            self.progress.say(note)
        write_json(finished, len(done))
        return done

    def _span(self, chunks: Sequence[StagedChunk]) -> Span | None:
        """From the first to the last time of the log; None where it has no times."""
        times = [chunk.times for chunk in chunks if chunk.times]
        if not times:
            return None
        first, last = min(time for time, _ in times), max(time for _, time in times)
        return Span(first=first, last=last, unit=self.schema.time_unit)

    def _partition(self, chunks: Sequence[StagedChunk], partitions: Sequence[int]) -> Partition:
        frame, span = self.staging.read(chunks, partitions), self._span(chunks)
        return Partition(frame, self.schema, self.splitter.assign(frame, span.last if span else 0))

    def _count(self, chunks: Sequence[StagedChunk], shards: Sequence[Sequence[int]]) -> None:
        folder = self.work / "counts"
        make_directory(folder)
        self.progress.start("count", len(shards), "shards")
        for number, partitions in enumerate(shards):
            note = folder / f"{number:05d}.json"
            if not note.exists():
                part = self._partition(chunks, partitions)
                for place, name in enumerate(self.schema.vocabularies()):
                    write_atomic(self._counts(number, place, name), part.count(name).write_parquet)
                moments = {feature.name: asdict(part.moments(feature.name)) for feature in self.schema.dense}
                found = {"moments": moments, "positives": [part.positives(i) for i in range(len(SPLITS))]}
                write_json(note, {**found, "repeats": self._measure(part).to_dict()})
                del part
                _release_memory()
            self.progress.advance(1)
        self.progress.finish()

    def _counts(self, shard: int, number: int, name: str) -> Path:
        """Where the counts of a vocabulary in one shard lie."""
        return self.work / "counts" / f"{shard:05d}-{file_name(name, number)}.parquet"

    def _measure(self, part: Partition) -> Repeats:
        wanted = self.config.groups != "none" and self.schema.session_keys
        return part.repeats() if wanted else Repeats.none(self.schema)

    def _repeats(self, shards: int) -> Repeats:
        total = Repeats.none(self.schema)
        for number in range(shards):
            total += Repeats.from_dict(read_json(self.work / "counts" / f"{number:05d}.json")["repeats"])
        return total

    def _vocabularies(self, shards: int) -> tuple[dict[str, Vocabulary], dict[str, VocabularyInfo]]:
        """Counts of all partitions merged and ranked, one vocabulary after another."""
        ranked, infos = {}, {}
        for place, name in enumerate(self.schema.vocabularies()):
            files = [self._counts(number, place, name) for number in range(shards)]
            total: pl.DataFrame | None = None
            for file in files:
                with reading(file):
                    counted = read_frame(file)
                    total = counted if total is None else merge_counts([total, counted])
            assert total is not None
            vocabulary = Vocabulary.rank(total, self.config.vocabulary.limits(name))
            ranked[name] = vocabulary
            infos[name] = write_vocabulary(self.output, place, name, vocabulary)
        return ranked, infos

    def _moments(self, shards: int) -> dict[str, Moments]:
        total = {feature.name: Moments() for feature in self.schema.dense}
        for number in range(shards):
            path = self.work / "counts" / f"{number:05d}.json"
            with reading(path):
                for name, moments in read_json(path)["moments"].items():
                    total[name] = total[name] + Moments(**moments)
        return total

    def _encode(
        self,
        chunks: Sequence[StagedChunk],
        shards: Sequence[Sequence[int]],
        encode: Callable[[Partition, int], Encoded],
    ) -> None:
        folder = self.work / "encoded"
        make_directory(folder)
        self.progress.start("encode", len(shards), "shards")
        for number, partitions in enumerate(shards):
            note = folder / f"{number:05d}.json"
            if not note.exists():
                part = self._partition(chunks, partitions)
                written = {}
                for split, name in enumerate(SPLITS):
                    encoded = encode(part, split)
                    if encoded.samples.num_rows:
                        written[name] = write_shard(self.output, name, number, encoded).to_dict()
                    del encoded
                write_json(note, written)
                del part
                _release_memory()
            self.progress.advance(1)
        self.progress.finish()

    def _finish(
        self,
        chunks: Sequence[StagedChunk],
        shards: int,
        infos: Mapping[str, VocabularyInfo],
        groups: Mapping[str, Sequence[str]] | None,
        measured: _Measured,
    ) -> None:
        splits: dict[str, list[Shard]] = {name: [] for name in SPLITS}
        positives = dict.fromkeys(SPLITS, 0)
        for number in range(shards):
            encoded, counted = (self.work / stage / f"{number:05d}.json" for stage in ("encoded", "counts"))
            with reading(encoded):
                for name, shard in read_json(encoded).items():
                    splits[name].append(Shard.model_validate_json(json.dumps(shard)))
            with reading(counted):
                for name, count in zip(SPLITS, read_json(counted)["positives"], strict=True):
                    positives[name] += count
        samples = {name: sum(shard.samples for shard in found) for name, found in splits.items()}
        if not 0 < positives["train"] < samples["train"]:
            raise DataError(
                f"the training split has {samples['train']} samples, {positives['train']} of them positive; "
                "expected both classes: check data.split"
            )
        for name in ("valid", "test"):
            if self.config.split.asks_for(name) and not samples[name]:
                asked = getattr(self.config.split, name)
                span = f"; the log spans {self._span(chunks)}" if self.config.split.by == "time" else ""
                raise DataError(
                    f"no sample falls into the {name} split: check data.split.{name}, which is {asked!r}{span}"
                )
        bad = sum(chunk.bad_rows for chunk in chunks)
        examples = [text for chunk in chunks for text in chunk.bad_examples][:5]
        made = About(
            plan=self.plan,
            paths=tuple(getattr(self.config.source, "paths", ())),
            bad_rows=bad,
            bad_examples=tuple(examples),
            repeats=RepeatsInfo.model_validate_json(json.dumps(measured.repeats.to_dict())),
            moments={name: MomentsInfo.of(moments) for name, moments in measured.moments.items()},
            rows=RowsInfo(
                kept=self.config.keep_rows,
                files=tuple(self.source.files) if all(chunk.by_file for chunk in chunks) else (),
            ),
        )
        Manifest(
            name=self.name,
            columns=self.schema,
            groups=None if groups is None else {name: tuple(features) for name, features in groups.items()},
            splits={name: tuple(found) for name, found in splits.items()},
            positives=positives,
            vocabularies=dict(infos),
            about=made,
        ).write(self.output)
        mark(self.output, DATASET)
        Dataset.open(self.output, verify="used")
        old = replace(self.output, self.final, DATASET)
        remove(self.work)
        if old is not None:
            remove(old)
        if bad:
            self.progress.say(f"left out {bad} bad rows, such as {'; '.join(examples[:2])}")


def _release_memory() -> None:
    """Give Arrow's freed memory back, so that peaks of different partitions do not add up."""
    pa.default_memory_pool().release_unused()
