"""What a checkpoint says of its tables: files that their format allows, and numbers that agree with each other.

A checkpoint may come from somebody else. Names of files are patterns, so that none leads out of its directory; sizes
are bounded by each other, so that no allocation follows from a number alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from stratarec.embedding.codecs import RecordCodec
from stratarec.errors import CheckpointError
from stratarec.io.sealed import Count, Hash, Model, validated

ADVICE = "use another checkpoint"

_Positive = Annotated[int, pydantic.Field(ge=1, lt=1 << 48)]
_Small = Annotated[int, pydantic.Field(ge=1, lt=1 << 31)]


class RowsFile(Model):
    """A file of rows; see `stores.row_file`."""

    name: Annotated[str, pydantic.Field(pattern=r"^rows-\d{6,12}\.safetensors$")]
    rows: Count
    hash: Hash


class Segment(Model):
    """A segment of a log; see `stores.log.segments`."""

    slot: Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]
    sequence: Annotated[int, pydantic.Field(ge=1, lt=10**10)]
    blocks: Annotated[int, pydantic.Field(ge=0, lt=1 << 40)]


class _Files(Model):
    files: tuple[RowsFile, ...]

    @pydantic.model_validator(mode="after")
    def _check_files(self) -> _Files:
        if not self.files or len({entry.name for entry in self.files}) != len(self.files):
            raise ValueError("no file, or one that is named twice")
        return self


class RowsHome(_Files):
    """Records in memory that is addressed directly."""

    format: Literal[1]
    layout: Literal["rows", "tables"]
    """Whether files number rows in the order of the group, or those of each table (`tables.numbering`)."""
    rows: _Positive
    record_bytes: _Small


class LogHome(_Files):
    """Records in a log; see `stores.log.layout`."""

    format: Literal[1]
    layout: Literal["log"]
    rows: _Positive
    record_bytes: _Small
    tag_bytes: Literal[4, 8]
    block_bytes: _Small
    per_block: _Small
    segment_blocks: _Positive
    slots: _Positive
    buffer_blocks: _Positive
    segments: tuple[Segment, ...]

    @pydantic.model_validator(mode="after")
    def _check(self) -> LogHome:
        for what in ("slot", "sequence"):
            if len({getattr(entry, what) for entry in self.segments}) != len(self.segments):
                raise ValueError(f"two segments of one {what}")
        for entry in self.segments:
            if entry.slot >= self.slots or entry.blocks > self.segment_blocks:
                raise ValueError(f"segment {entry.sequence} lies beyond {self.slots} slots or its length")
        return self


class SlotFiles(_Files):
    """The rows that were in slots; see `cache.saved_slots`."""

    record_bytes: _Small


class CacheShape(Model):
    """See `cache.directory.Directory.shape`."""

    ways: _Small
    policy: str
    sets: tuple[tuple[Count, Count], ...]
    hot: tuple[Count, ...] = ()


class Codec(Model):
    """See `RecordCodec.identity`."""

    format: Count
    kind: str
    rounding: str | None = None
    parameters: str | None = None
    state: str | None = None
    width: Annotated[int, pydantic.Field(ge=1, le=1 << 20)]
    row_state: bool
    full_state: Annotated[int, pydantic.Field(ge=0, le=2)]
    clock: bool = False


TablePart = tuple[str, _Positive, Count, Annotated[int, pydantic.Field(ge=1, le=1 << 16)], _Positive]


class GroupManifest(Model):
    """Tables that lie together."""

    name: Annotated[str, pydantic.Field(pattern=r"^group-\d{2,8}$")]
    tables: tuple[TablePart, ...]
    """Name and rows of each, and which rows of the whole table these are: the first, the step from one to the next, and
    how many there are in all. Without other parts: 0, 1, and as many."""
    codec: Codec
    home: Annotated[RowsHome | LogHome, pydantic.Field(discriminator="layout")]
    cache: CacheShape | None = None
    slots: SlotFiles | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> GroupManifest:
        rows = sum(rows for _, rows, *_ in self.tables)
        if rows != self.home.rows:
            raise ValueError(f"{self.name} has tables of {rows} rows and a home of {self.home.rows}")
        found = RecordCodec.from_identity(self.codec.model_dump(exclude_unset=True)).record_bytes
        if found != self.home.record_bytes:
            raise ValueError(f"{self.name} has records of {self.home.record_bytes} bytes, its codec makes {found}")
        # Later code takes one for the other.
        if (self.cache is None) != (self.slots is None):
            raise ValueError(f"{self.name} has slots without a cache, or a cache without slots")
        return self


class TablesManifest(Model):
    """All tables of a collection."""

    step: Count
    earlier: Count
    """Steps of the runs before that the optimizer's state is of, too."""
    batches: Count
    origin: Count
    lookahead: Annotated[int, pydantic.Field(ge=0, le=1 << 20)]
    changes: tuple[tuple[Count, Annotated[float, pydantic.Field(gt=0)]], ...] = ()
    """Of the learning rate: see `step_clock.StepClock`."""
    groups: tuple[GroupManifest, ...]

    @pydantic.model_validator(mode="after")
    def _check(self) -> TablesManifest:
        if self.step > self.batches or self.earlier >= 1 << 48:
            raise ValueError(f"{self.step} steps and {self.earlier} before them, of {self.batches} batches")
        if self.origin > self.batches or self.batches - self.origin >= 1 << 31:
            raise ValueError(f"clocks at {self.origin} and {self.batches}, expected less than 2**31 between them")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"a group stands twice in {sorted(names)}")
        parts: dict[str, list[TablePart]] = {}
        for group in self.groups:
            for part in group.tables:
                parts.setdefault(part[0], []).append(part)
        for name, found in parts.items():
            _check_parts(name, found)
        return self


def _check_parts(name: str, parts: Sequence[TablePart]) -> None:
    """`ValueError` unless every row of a table is in exactly one part."""
    _, _, _, stride, whole = parts[0]
    expected = [(first, -(-(whole - first) // stride), stride, whole) for first in range(min(stride, whole))]
    if sorted((first, rows, step, total) for _, rows, first, step, total in parts) != expected:
        raise ValueError(f"table {name!r} lacks rows, or has some twice: {len(parts)} parts, expected {len(expected)}")


def checked(directory: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of the tables in `directory`, found to be one; `CheckpointError` names what is wrong with it."""
    found = validated(TablesManifest, manifest, f"the tables in {directory}", ADVICE, CheckpointError)
    # Without what was left out: identities are compared as they were written, defaults or not.
    return found.model_dump(mode="json", exclude_unset=True)
