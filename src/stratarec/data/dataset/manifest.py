"""The manifest ``dataset.json``: schema, counts, splits, groups, vocabularies, and size and hash of
every file.

A data set may come from another person, so everything is checked before it is used. Seal, fields,
sums and names are checked here, when the data set is opened. `dataset.py` checks sizes at that time
too, and checks hashes either then or at the first use of a file. The values of a row group are
checked when it is read (`row_group_reader.py`). No check can show whether the data set matches the
log.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from stratarec.data.click_memory import PARTS
from stratarec.data.column_names import SESSIONS, events, pointer
from stratarec.data.data_quality import HeldOut
from stratarec.data.schema import Schema
from stratarec.data.splits import SPLITS
from stratarec.data.transforms import Moments
from stratarec.data.vocabulary import Ids, Rows
from stratarec.errors import DatasetError
from stratarec.io.owned_directory import DirectoryKind
from stratarec.io.sealed import Count, Hash, Model, content_hash, read_sealed, write_sealed

FORMAT: Literal[11] = 11
ROW_GROUP = 1 << 16
MANIFEST = "dataset.json"
BASELINE, BASELINE_SCORES = "baseline.json", "baseline.npy"
"""Files that `stratarec baseline` adds. They do not belong to the data set, so they have no hash in
the manifest.
"""
DATASET = DirectoryKind(
    name="data set",
    field="data.path",
    content=(MANIFEST, BASELINE, BASELINE_SCORES, "vocabulary", "carried", *SPLITS),
)
ADVICE = "prepare the data again with --overwrite"

_Share = Annotated[float, pydantic.Field(gt=0, le=1)]
_Group = Annotated[int, pydantic.Field(ge=1, le=ROW_GROUP)]


class StoredFile(Model):
    """Path, size and hash of a file."""

    path: str
    """Relative to the data set."""
    bytes: Count
    hash: Hash
    """xxh3_128 of the file."""


class TablesFile(StoredFile):
    """File of a shard's tables, to whose rows the samples of the shard point."""

    path: Annotated[str, pydantic.Field(pattern=r"^(train|valid|test)/shard-\d{5,}\.tables\.parquet$")]


class Shard(StoredFile):
    """A shard: the file of its samples, and the file of its tables."""

    path: Annotated[str, pydantic.Field(pattern=r"^(train|valid|test)/shard-\d{5,}\.parquet$")]
    samples: Count
    row_groups: tuple[_Group, ...]
    """Number of samples in each row group."""
    tables: TablesFile | None = None
    """File of the tables; None if the data set has no deduplication groups."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Shard:
        if self.samples != sum(self.row_groups) or not self.row_groups:
            raise ValueError(
                f"{self.path} has {self.samples} samples, but its row groups {sum(self.row_groups)}"
            )
        return self


class LabelCount(Model):
    """Counts of one label in a split."""

    known: Count
    """Number of samples whose value of this label is known."""
    positives: Count

    @pydantic.model_validator(mode="after")
    def _check(self) -> LabelCount:
        if self.positives > self.known:
            raise ValueError(f"{self.positives} positive samples, expected at most {self.known}")
        return self


class VocabularyInfo(StoredFile, Ids):
    """One vocabulary and its file."""

    path: Annotated[str, pydantic.Field(pattern=r"^vocabulary/\d{4,}(-[A-Za-z0-9_-]+)?\.parquet$")]
    rows: Rows
    """Number of rows of the table: tail buckets and values."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> VocabularyInfo:
        if self.rows != self.values + self.tail_buckets:
            raise ValueError(
                f"{self.path}: {self.rows} rows, not {self.values} values + {self.tail_buckets} buckets"
            )
        return self

    def in_phase(self, *, refit: bool) -> VocabularyInfo:
        """Return the description for the models of a phase: in a refit, held-out values have rows;
        before, none.
        """
        if not self.held_out:
            return self
        unmeasured = (
            {}
            if refit
            else {
                "values": self.values - self.held_out,
                "rows": self.rows - self.held_out,
                "digest": self.trained_digest,
            }
        )
        return self.model_copy(update={**unmeasured, "held_out": 0, "trained_digest": None})


class MomentsInfo(Model):
    """`Moments` of a dense feature in the training split."""

    count: Count
    mean: float
    squares: Annotated[float, pydantic.Field(ge=0)]
    least: float
    most: float
    deviation: Annotated[float, pydantic.Field(gt=0)]

    @classmethod
    def of(cls, moments: Moments) -> MomentsInfo:
        return cls(**vars(moments), deviation=moments.deviation)

    @property
    def moments(self) -> Moments:
        """The moments as `Moments`, without the deviation."""
        return Moments(
            count=self.count, mean=self.mean, squares=self.squares, least=self.least, most=self.most
        )


class Origin(Model):
    """Inputs that determine the result of `prepare`."""

    format: Count
    settings: dict[str, pydantic.JsonValue]
    """Data section of the recipe."""
    source: pydantic.JsonValue
    """Fingerprint of the logs."""
    file_split: tuple[int, ...] | None
    """Split of each file; None unless the split is by file."""
    base: Hash | None
    """Fingerprint of the base, whose ids and moments are inherited; None without a base."""


class RowsInfo(Model):
    """Whether samples store their row in the log, and the files that the rows refer to."""

    kept: bool
    """Whether each sample stores its row of the log."""
    files: tuple[str, ...]
    """Files of the log; empty if rows are numbered in the order of the source."""


class CarriedFile(StoredFile):
    """File with counts of values, events of users, or clicks."""

    path: Annotated[
        str,
        pydantic.Field(
            pattern=r"^carried/(events-\d{5,}|clicks-[a-z]+|\d{4,}(-[A-Za-z0-9_-]+)?)\.parquet$"
        ),
    ]


class CarriedClicks(Model):
    """Files of a `ClickMemory`."""

    recent: CarriedFile
    waiting: CarriedFile
    first: CarriedFile
    clicks: Count

    @property
    def files(self) -> dict[str, CarriedFile]:
        """Part of the click memory -> its file."""
        return {part: getattr(self, part) for part in PARTS}


class Carried(Model):
    """State of all logs so far, which a data set with this one as its base needs."""

    counts: dict[str, CarriedFile]
    """Vocabulary -> file with the counts of all values, including values without a row."""
    events: tuple[CarriedFile, ...]
    """Files with the last positive events of each user (user, time and features), as many as
    histories need.
    """
    samples: Count
    """Number of training samples in all logs so far, in which values were counted."""
    times: tuple[int, int] | None
    """First time in this log, and last time in all logs so far. None if samples have no times."""
    clicks: Annotated[CarriedClicks | None, pydantic.Field(exclude_if=operator.not_)] = None
    """Clicks, if the source is a log of clicks; None for other sources and for data sets of earlier
    versions.
    """


class LeakInfo(Model):
    """A feature that seems to reveal the label."""

    feature: str
    text: str
    """The evidence, as a text for people."""


class Provenance(Model):
    """Inputs and software with which a data set was prepared."""

    origin: Origin
    paths: tuple[str, ...]
    bad_rows: Count
    bad_examples: tuple[str, ...]
    moments: dict[str, MomentsInfo]
    """Moments that standardize the dense features."""
    observed: dict[str, MomentsInfo]
    """Moments of this log's training split; they differ from `moments` in a data set with a
    base.
    """
    rows: RowsInfo
    leaks: tuple[LeakInfo, ...]
    repeated: Annotated[dict[HeldOut, _Share], pydantic.Field(exclude_if=operator.not_)] = pydantic.Field(
        default_factory=dict
    )
    """Held-out split -> share of its samples that repeat a training sample."""


class DatasetManifest(Model):
    """Content of ``dataset.json`` without its seal."""

    model_config = pydantic.ConfigDict(populate_by_name=True)

    format: Literal[11] = FORMAT
    name: str
    columns: Annotated[Schema, pydantic.Field(alias="schema")]
    groups: dict[str, tuple[str, ...]] | None
    """Deduplication group -> its features. None if nothing is deduplicated, not even histories."""
    splits: dict[str, tuple[Shard, ...]]
    positives: dict[str, Count]
    """Split -> positive samples, by the first label."""
    labels: dict[str, dict[str, LabelCount]] = pydantic.Field(default_factory=dict)
    """Split -> label -> its counts; empty with a single label, which every sample has."""
    vocabularies: dict[str, VocabularyInfo]
    carried: Carried
    about: Provenance

    @pydantic.model_validator(mode="after")
    def _check(self) -> DatasetManifest:
        for fault in (*self._counts(), *self._names(), *self._files()):
            raise ValueError(fault)
        return self

    def _counts(self) -> Iterator[str]:
        for part in (self.splits, self.positives):
            if set(part) != set(SPLITS):
                yield f"splits {sorted(part)}, expected {sorted(SPLITS)}"
                return
        yield from self._label_counts()
        for split, shards in self.splits.items():
            samples = sum(shard.samples for shard in shards)
            if self.positives[split] > samples:
                yield f"{self.positives[split]} positive samples in the {split} split, expected at most {samples}"
            if any(not shard.path.startswith(f"{split}/") for shard in shards):
                yield f"the {split} split has shards of another split"

    def _label_counts(self) -> Iterator[str]:
        names = set(self.columns.label_columns) if self.columns.labels else set()
        if set(self.labels) != (set(SPLITS) if names else set()):
            yield f"labels are counted in {sorted(self.labels)}, expected {sorted(SPLITS) if names else 'none'}"
            return
        for split, counts in self.labels.items():
            samples = sum(shard.samples for shard in self.splits[split])
            first = counts.get(self.columns.label_column)
            if set(counts) != names or any(count.known > samples for count in counts.values()):
                yield f"labels are {sorted(counts)} in {samples} samples of {split}, expected {sorted(names)}"
            elif first is not None and first.positives != self.positives[split]:
                yield f"{first.positives} positive samples of {split} by the first label, not {self.positives[split]}"

    def label_counts(self, split: str) -> dict[str, LabelCount]:
        """Return the counts of each label in a split."""
        if self.labels:
            return {name: self.labels[split][name] for name in self.columns.label_columns}
        samples = sum(shard.samples for shard in self.splits[split])
        return {self.columns.label_column: LabelCount(known=samples, positives=self.positives[split])}

    def joined(self, splits: Sequence[str]) -> DatasetManifest:
        """Return a copy whose training split has the samples of `splits`, and whose other splits
        are empty.
        """
        shards = tuple(shard for split in splits for shard in self.splits[split])
        labels = {
            name: LabelCount(
                known=sum(self.labels[split][name].known for split in splits),
                positives=sum(self.labels[split][name].positives for split in splits),
            )
            for name in (self.columns.label_columns if self.labels else ())
        }
        none = {name: LabelCount(known=0, positives=0) for name in labels}
        return self.model_copy(
            update={
                "splits": {**dict.fromkeys(SPLITS, ()), "train": shards},
                "positives": {
                    **dict.fromkeys(SPLITS, 0),
                    "train": sum(self.positives[split] for split in splits),
                },
                "labels": {**dict.fromkeys(SPLITS, none), "train": labels} if labels else {},
            }
        )

    def _names(self) -> Iterator[str]:
        expected = {
            "vocabularies": (set(self.vocabularies), set(self.columns.vocabularies())),
            "moments": (set(self.about.moments), {feature.name for feature in self.columns.dense}),
            "observed moments": (
                set(self.about.observed),
                {feature.name for feature in self.columns.dense},
            ),
            "carried counts": (
                set(self.carried.counts),
                {name for name, info in self.vocabularies.items() if info.kind == "count"},
            ),
            "leaks": (
                (features := set(self.columns.names)).union(leak.feature for leak in self.about.leaks),
                features,
            ),
        }
        for part, (present, names) in expected.items():
            if present != names:
                yield f"{part} has entries for {sorted(present)}, expected {sorted(names)}"
        members = [name for group in (self.groups or {}).values() for name in group]
        ungrouped = (*self.columns.histories, *self.columns.weighted)
        allowed = features - {feature.name for feature in ungrouped}
        if len(set(members)) != len(members) or not set(members) <= allowed:
            yield f"groups contain {sorted(members)}, expected each of {sorted(allowed)} at most once"
        for columns in self.columns.sequences.values():
            names = {feature.name for feature in columns}
            if any(names & set(group) not in (set(), names) for group in (self.groups or {}).values()):
                yield f"a group has some columns of the sequence {columns[0].name!r} and not others"
        tables = {*(self.groups or {}), *(feature.name for feature in self.columns.histories)}
        if tables & {SESSIONS, *map(pointer, tables), *map(events, tables)}:
            yield "the name of a group is also the name of another group's table"

    def _files(self) -> Iterator[str]:
        shards = [shard for shards in self.splits.values() for shard in shards]
        needed = self.deduplicated and bool(
            self.groups or self.columns.histories or self.columns.session_keys
        )
        for shard in shards:
            if (shard.tables is not None) != needed:
                yield f"{shard.path}: {'no' if needed else 'a'} file of tables, expected {'one' if needed else 'none'}"
        paths = [entry.path for entry in self.files()]
        if len(set(paths)) != len(paths):
            yield "a file is named twice"

    @property
    def deduplicated(self) -> bool:
        """Whether groups, histories and sessions are stored as tables."""
        return self.groups is not None

    def files(self, split: str | None = None) -> list[StoredFile]:
        """Return every file, or the files of one split."""
        chosen = SPLITS if split is None else (split,)
        shards = [shard for name, shards in self.splits.items() if name in chosen for shard in shards]
        tables = [shard.tables for shard in shards if shard.tables is not None]
        others = [*self.vocabularies.values(), *self.carried.counts.values(), *self.carried.events]
        others += [] if self.carried.clicks is None else self.carried.clicks.files.values()
        return [*shards, *tables, *(others if split is None else ())]

    @property
    def fingerprint(self) -> str:
        """Hash of the content: equal for data sets with equal files, however they were prepared."""
        content = self.to_dict()
        return content_hash({key: content[key] for key in content if key not in ("name", "about")})

    @classmethod
    def read(cls, root: Path) -> DatasetManifest:
        """Read the manifest of the data set in `root`; a `DatasetError` names its fault."""
        return read_sealed(root / MANIFEST, cls, ADVICE, DatasetError)

    def write(self, root: Path) -> None:
        """Write ``dataset.json``, after all other files."""
        write_sealed(root / MANIFEST, self.to_dict())
