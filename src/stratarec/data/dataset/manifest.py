"""What ``dataset.json`` says: schema, counts, splits, groups, vocabularies, and size and hash of every file.

A data set may come from somebody else, so every field is checked before anything relies on it: here seal, fields, sums
and names when it is opened; sizes then, hashes then or when a file is first used (`dataset.py`); the values of each row
group when it is read (`row_group_reader.py`). Whether the log said so, nothing can tell.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
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

FORMAT: Literal[9] = 9
ROW_GROUP = 1 << 16
MANIFEST = "dataset.json"
BASELINE = "baseline.json"
"""What `stratarec baseline` adds; of no part of the data set."""
DATASET = DirectoryKind(
    name="data set", field="data.path", content=(MANIFEST, BASELINE, "vocabulary", "carried", *SPLITS)
)
ADVICE = "prepare the data again with --overwrite"

_Share = Annotated[float, pydantic.Field(gt=0, le=1)]
_Group = Annotated[int, pydantic.Field(ge=1, le=ROW_GROUP)]


class StoredFile(Model):
    """A file and what it must be."""

    path: str
    """Relative to the data set."""
    bytes: Count
    hash: Hash
    """xxh3_128 of the file."""


class TablesFile(StoredFile):
    """What the samples of a shard point into."""

    path: Annotated[str, pydantic.Field(pattern=r"^(train|valid|test)/shard-\d{5,}\.tables\.parquet$")]


class Shard(StoredFile):
    """Samples, and the tables that they point into."""

    path: Annotated[str, pydantic.Field(pattern=r"^(train|valid|test)/shard-\d{5,}\.parquet$")]
    samples: Count
    row_groups: tuple[_Group, ...]
    """Samples of each row group."""
    tables: TablesFile | None = None
    """Only where the data set has groups."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Shard:
        if self.samples != sum(self.row_groups) or not self.row_groups:
            raise ValueError(f"{self.path} has {self.samples} samples, its row groups {sum(self.row_groups)}")
        return self


class LabelCount(Model):
    """One of several labels in a split."""

    known: Count
    """Samples that have it."""
    positives: Count

    @pydantic.model_validator(mode="after")
    def _check(self) -> LabelCount:
        if self.positives > self.known:
            raise ValueError(f"{self.positives} positive ones of {self.known} samples")
        return self


class VocabularyInfo(StoredFile, Ids):
    """One vocabulary and its file."""

    path: Annotated[str, pydantic.Field(pattern=r"^vocabulary/\d{4,}(-[A-Za-z0-9_-]+)?\.parquet$")]
    rows: Rows
    """Rows that a table needs: tail buckets and values."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> VocabularyInfo:
        if self.rows != self.values + self.tail_buckets:
            raise ValueError(f"{self.path}: {self.rows} rows for {self.values} values and {self.tail_buckets} buckets")
        return self


class MomentsInfo(Model):
    """Moments of a dense feature in the training split; see `Moments`."""

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
        """What was added up."""
        return Moments(count=self.count, mean=self.mean, squares=self.squares, least=self.least, most=self.most)


class Origin(Model):
    """What the outcome of `prepare` depends on."""

    format: Count
    settings: dict[str, pydantic.JsonValue]
    """The recipe's data section."""
    source: pydantic.JsonValue
    """Content of the logs."""
    file_split: tuple[int, ...] | None
    """Split of each file, where files are dealt to splits."""
    base: Hash | None
    """Fingerprint of the data set whose ids and moments it keeps."""


class RowsInfo(Model):
    """Where samples came from."""

    kept: bool
    """Whether samples have a row of the log."""
    files: tuple[str, ...]
    """Of the log; none where rows are counted in the order of the source."""


class RepeatsInfo(Model):
    """See `dedup_groups.Repeats`."""

    names: tuple[str, ...]
    samples: Count
    sessions: Count
    same: tuple[tuple[Count, ...], ...]

    @pydantic.model_validator(mode="after")
    def _check(self) -> RepeatsInfo:
        if {len(self.same), *map(len, self.same)} != {len(self.names)} and self.names:
            raise ValueError(f"expected {len(self.names)} counts in each of {len(self.names)} lines")
        return self


class CarriedFile(StoredFile):
    """Counts of values without a row, or events of users."""

    path: Annotated[
        str, pydantic.Field(pattern=r"^carried/(events-\d{5,}|clicks-[a-z]+|\d{4,}(-[A-Za-z0-9_-]+)?)\.parquet$")
    ]


class CarriedClicks(Model):
    """See `ClickMemory`."""

    recent: CarriedFile
    waiting: CarriedFile
    first: CarriedFile
    clicks: Count

    @property
    def files(self) -> dict[str, CarriedFile]:
        """Of each of its parts."""
        return {part: getattr(self, part) for part in PARTS}


class Carried(Model):
    """What a data set that goes on from this one needs of its log, and those before it, beside the samples."""

    counts: dict[str, CarriedFile]
    """Vocabulary -> all its values with their counts, those that have no row of their own too."""
    events: tuple[CarriedFile, ...]
    """The last positive events of each user, as many as histories hold: user, time and what histories are of."""
    samples: Count
    """Of the training splits of all logs so far: those that counts are of."""
    times: tuple[int, int] | None
    """The first of this log, and the last of all so far; None where there are none."""
    clicks: Annotated[CarriedClicks | None, pydantic.Field(exclude_if=operator.not_)] = None
    """Of a log of clicks alone; None where there is another, or where an earlier version made the data set."""


class LeakInfo(Model):
    """A feature that seems to know the label; see `leaks`."""

    feature: str
    text: str
    """Why."""


class Provenance(Model):
    """How a data set was made."""

    origin: Origin
    paths: tuple[str, ...]
    bad_rows: Count
    bad_examples: tuple[str, ...]
    repeats: RepeatsInfo
    moments: dict[str, MomentsInfo]
    """Of dense features, which numbers are standardised by."""
    observed: dict[str, MomentsInfo]
    """Those of this log's training split alone, where the others are of an earlier data set."""
    rows: RowsInfo
    leaks: tuple[LeakInfo, ...]
    repeated: Annotated[dict[HeldOut, _Share], pydantic.Field(exclude_if=operator.not_)] = pydantic.Field(
        default_factory=dict
    )
    """Held-out split -> share of its samples that repeat a training sample; see `repeated_rows`."""


class DatasetManifest(Model):
    """All of ``dataset.json`` but its seal."""

    model_config = pydantic.ConfigDict(populate_by_name=True)

    format: Literal[9] = FORMAT
    name: str
    columns: Annotated[Schema, pydantic.Field(alias="schema")]
    groups: dict[str, tuple[str, ...]] | None
    """Group -> its features; None where nothing is deduplicated, histories neither."""
    splits: dict[str, tuple[Shard, ...]]
    positives: dict[str, Count]
    """Split -> positive samples, by the first label."""
    labels: dict[str, dict[str, LabelCount]] = pydantic.Field(default_factory=dict)
    """Split -> label -> its samples; empty where there is one label, which every sample has."""
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
                yield f"{self.positives[split]} positive ones of {samples} samples of the {split} split"
            if any(not shard.path.startswith(f"{split}/") for shard in shards):
                yield f"the {split} split has shards of another one"

    def _label_counts(self) -> Iterator[str]:
        names = set(self.columns.label_columns) if self.columns.labels else set()
        if set(self.labels) != (set(SPLITS) if names else set()):
            yield f"labels of {sorted(self.labels)}, expected {sorted(SPLITS) if names else 'none'}"
            return
        for split, counts in self.labels.items():
            samples = sum(shard.samples for shard in self.splits[split])
            first = counts.get(self.columns.label_column)
            if set(counts) != names or any(count.known > samples for count in counts.values()):
                yield f"labels of {sorted(counts)} in {samples} samples of {split}, expected {sorted(names)}"
            elif first is not None and first.positives != self.positives[split]:
                yield f"{first.positives} positive samples of {split} by the first label, and {self.positives[split]}"

    def label_counts(self, split: str) -> dict[str, LabelCount]:
        """Label -> its samples in a split."""
        if self.labels:
            return {name: self.labels[split][name] for name in self.columns.label_columns}
        samples = sum(shard.samples for shard in self.splits[split])
        return {self.columns.label_column: LabelCount(known=samples, positives=self.positives[split])}

    def _names(self) -> Iterator[str]:
        expected = {
            "vocabularies": (set(self.vocabularies), set(self.columns.vocabularies())),
            "moments": (set(self.about.moments), {feature.name for feature in self.columns.dense}),
            "observed moments": (set(self.about.observed), {feature.name for feature in self.columns.dense}),
            "carried counts": (
                set(self.carried.counts),
                {name for name, info in self.vocabularies.items() if info.kind == "count"},
            ),
            "leaks": ((known := set(self.columns.names)).union(leak.feature for leak in self.about.leaks), known),
        }
        for what, (found, names) in expected.items():
            if found != names:
                yield f"{what} of {sorted(found)}, expected of {sorted(names)}"
        members = [name for features in (self.groups or {}).values() for name in features]
        alone = (*self.columns.histories, *self.columns.weighted)
        known = set(self.columns.names) - {feature.name for feature in alone}
        if len(set(members)) != len(members) or not set(members) <= known:
            yield f"groups of {sorted(members)}, expected each of {sorted(known)} at most once"
        for columns in self.columns.sequences.values():
            names = {feature.name for feature in columns}
            if any(names & set(group) not in (set(), names) for group in (self.groups or {}).values()):
                yield f"a group has some columns of the sequence {columns[0].name!r} and not others"
        own = {*(self.groups or {}), *(feature.name for feature in self.columns.histories)}
        if own & {SESSIONS, *map(pointer, own), *map(events, own)}:
            yield "a group with the name of a table of another"

    def _files(self) -> Iterator[str]:
        shards = [shard for shards in self.splits.values() for shard in shards]
        needed = self.deduplicated and bool(self.groups or self.columns.histories or self.columns.session_keys)
        for shard in shards:
            if (shard.tables is not None) != needed:
                yield f"{shard.path} has {'no' if needed else 'a'} file of tables"
        paths = [entry.path for entry in self.files()]
        if len(set(paths)) != len(paths):
            yield "a file is named twice"

    @property
    def deduplicated(self) -> bool:
        """Whether groups, histories and sessions are stored as tables."""
        return self.groups is not None

    def files(self, split: str | None = None) -> list[StoredFile]:
        """Every file, or those of one split."""
        chosen = SPLITS if split is None else (split,)
        shards = [shard for name, shards in self.splits.items() if name in chosen for shard in shards]
        tables = [shard.tables for shard in shards if shard.tables is not None]
        others = [*self.vocabularies.values(), *self.carried.counts.values(), *self.carried.events]
        others += [] if self.carried.clicks is None else self.carried.clicks.files.values()
        return [*shards, *tables, *(others if split is None else ())]

    @property
    def fingerprint(self) -> str:
        """Hash of what the data set holds: equal for data sets whose every file is equal, however they were made."""
        content = self.to_dict()
        return content_hash({key: content[key] for key in content if key not in ("name", "about")})

    @classmethod
    def read(cls, root: Path) -> DatasetManifest:
        """The manifest of the data set in `root`; `DatasetError` names what is wrong with it."""
        return read_sealed(root / MANIFEST, cls, ADVICE, DatasetError)

    def write(self, root: Path) -> None:
        """Write ``dataset.json``, last of all."""
        write_sealed(root / MANIFEST, self.to_dict())
