"""Tables in checkpoints: their manifest, saving, loading, and transfer into another layout or another run.

A checkpoint has a directory for each table group: its records (a chain of files of rows, or a log's segments and
locations) and, for a cached group, the rows that were in slots. If the layout is unchanged, training resumes with the
same bits. Otherwise rows are transferred one by one, by table and row number, and re-encoded if the codec differs. The
same transfer initializes a new run with the rows of an earlier one.

A checkpoint may come from an untrusted source. File names must match patterns, so that none leads out of its directory;
sizes are bounded by each other, so that no allocation follows from a single number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from numpy.typing import NDArray

from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.lookup_engine import Health
from stratarec.embedding.stores.arrays import allocate_bits, row_chunks
from stratarec.embedding.stores.log import LogRecords
from stratarec.embedding.stores.log_segments import SegmentEntry
from stratarec.embedding.stores.row_files import files_of, read_rows, verify_file
from stratarec.embedding.tables.base import TableGroup, TableNumbers
from stratarec.embedding.tables.mover import saved_slots
from stratarec.errors import CheckpointError
from stratarec.io.scratch import ScratchDirectory
from stratarec.io.sealed import Count, Hash, Model, validated
from stratarec.kernels.bit_rows import set_bits, test_bits
from stratarec.kernels.random import fill_uniform, table_key
from stratarec.kernels.update import Missed, Slots, apply_missed_steps_to_range

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


RANK_GROUPS = 1000
"""Numbers of groups that each process has for its own."""


def save_tables(
    groups: Sequence[TableGroup], directory: Path, previous: Path | None, settled: int, rank: int = 0
) -> list[dict[str, Any]]:  # fmt: skip
    """Write every group under `directory`; returns the manifests. `previous` is the last checkpoint's directory."""
    manifests = []
    for name, group in zip(_names(len(groups), rank), groups, strict=True):
        manifest = group.save(directory / name, None if previous is None else previous / name, settled)
        manifests.append({"name": name, "tables": _parts(group), "codec": group.codec.identity, **manifest})
    return manifests


def _names(groups: int, rank: int) -> list[str]:
    # A rank writes beside others into one folder: its groups have a range of numbers of their own.
    return [f"group-{rank * RANK_GROUPS + number:02d}" for number in range(groups)]


def _parts(group: TableGroup) -> list[list[Any]]:
    """As `tables_manifest.TablePart`."""
    return [
        [table.name, table.num_embeddings, part.first, part.stride, part.rows]
        for table in group.configs
        for part in (table.numbering,)
    ]


def lie_alike(groups: Sequence[TableGroup], manifests: Sequence[Mapping[str, Any]], rank: int = 0) -> bool:
    """Whether the groups of a process are laid out as the ones that this process, or another one, wrote as `rank`."""
    theirs = [found for found in manifests if int(found["name"].removeprefix("group-")) // RANK_GROUPS == rank]
    names = [found["name"] for found in theirs]
    return names == _names(len(groups), rank) and all(map(_same_layout, groups, theirs))


def load_tables(
    groups: Sequence[TableGroup],
    directory: Path,
    manifests: Sequence[Mapping[str, Any]],
    batches: int,
    stamp: int,
    *,
    rank: int | None,
    fresh: bool,
    health: Health,
) -> None:
    """Take all rows of the groups from a checkpoint.

    Parameters
    ----------
    batches, stamp : int
        The two clocks where the checkpoint was written.
    rank : int or None
        Whose groups lie alike, for all of them; None where rows are taken over one by one.
    fresh : bool
        Whether the tables are as their constructor made them.
    health : Health
        Fails when loading ends in the middle.

    Raises
    ------
    CheckpointError
        When a file is missing or damaged, a table is not in the checkpoint or has another size, or the layout is
        another and the tables are not `fresh`.
    """
    _check_tables(groups, manifests)
    # Rows that the checkpoint lacks keep what they have, which must be their initial values.
    if rank is None and not fresh:
        raise CheckpointError(
            f"{directory} has other tiers than these tables, which were trained; load it into new ones"
        )
    try:
        if rank is not None:
            found = {manifest["name"]: manifest for manifest in manifests}
            for name, group in zip(_names(len(groups), rank), groups, strict=True):
                group.restore(directory / name, found[name], stamp)
        else:
            take_over(groups, directory, manifests, batches)
    except BaseException:
        health.fail(f"loading {directory} did not finish")
        raise


def begin_tables(
    groups: Sequence[TableGroup],
    directory: Path,
    manifests: Sequence[Mapping[str, Any]],
    seed: int,
    missed: Missed | None,
    *,
    health: Health,
) -> None:
    """Take all rows of an earlier run's tables into tables that are as their constructor made them.

    Parameters
    ----------
    seed, missed
        As `transfer.begin_with`.
    health : Health
        Fails when that ends in the middle.

    Raises
    ------
    CheckpointError
        When a file is missing or damaged, or a table is not in the checkpoint or has more rows there.
    """
    _check_tables(groups, manifests, growing=True)
    try:
        if missed is None and _have_grown(groups, manifests):
            for group, manifest in zip(groups, manifests, strict=True):
                group.restore(directory / manifest["name"], manifest, 0)
        else:
            begin_with(groups, directory, manifests, seed, missed)
    except BaseException:
        health.fail(f"taking rows from {directory} did not finish")
        raise


def _have_grown(groups: Sequence[TableGroup], manifests: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the groups are those of a checkpoint but for rows behind those that tables had there."""
    if [manifest["name"] for manifest in manifests] != _names(len(groups), 0):
        return False
    for group, manifest in zip(groups, manifests, strict=True):
        alike = group.grows and group.codec.identity == manifest["codec"] and group.fits(manifest)
        names = [table.name for table in group.configs]
        whole = all(part[1] == part[4] for part in (*_parts(group), *manifest["tables"]))
        if not alike or not whole or names != [name for name, *_ in manifest["tables"]]:
            return False
    return True


def _same_layout(group: TableGroup, manifest: Mapping[str, Any]) -> bool:
    tables = [list(part) for part in manifest["tables"]]
    return tables == _parts(group) and group.codec.identity == manifest["codec"] and group.fits(manifest)


def _check_tables(
    groups: Sequence[TableGroup], manifests: Sequence[Mapping[str, Any]], *, growing: bool = False
) -> None:
    there = {name: rows for manifest in manifests for name, _, _, _, rows in manifest["tables"]}
    for group in groups:
        for table in group.configs:
            rows, saved = table.numbering.rows, there.get(table.name, 0)
            if not 0 < saved <= rows or (saved < rows and not growing):
                found = f"{there[table.name]} rows" if table.name in there else "no such table"
                raise CheckpointError(f"table {table.name!r} has {rows} rows here, {found} there")
        for manifest in manifests:
            width = manifest["codec"]["width"]
            if {name for name, *_ in manifest["tables"]} & set(group.first_row) and width != group.width:
                raise CheckpointError(f"tables of width {width} there, {group.width} here")


_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A table, or the part of one, that takes rows."""

    group: TableGroup
    table: EmbeddingBagConfig

    def take(self, rows: Indices, found: FloatRows, places: Indices, write: int) -> None:
        """Give it those of the `rows` of the whole table that it holds: rows `places` of `found`."""
        part, first = self.table.numbering, self.group.first_row[self.table.name]
        own, rest = np.divmod(rows - part.first, part.stride)
        # `divmod` rounds down, so rows before the part come out negative.
        held = (rest == 0) & (own >= 0) & (own < self.table.num_embeddings)
        self.group.write_rows(own[held] + first, found, places[held], write)


def take_over(
    groups: Sequence[TableGroup], directory: Path, manifests: Sequence[Mapping[str, Any]], write: int
) -> None:  # fmt: skip
    """Give every row of a checkpoint to the group that holds its table now."""
    _take(groups, _rows_by_table(directory, manifests), write)


def _take(groups: Sequence[TableGroup], found: Iterator[tuple[str, Indices, FloatRows, Indices]], write: int) -> None:
    targets = {table.name: _Target(group=group, table=table) for group in groups for table in group.configs}
    for name, rows, values, places in found:
        if name in targets:
            targets[name].take(rows, values, places, write)


def begin_with(
    groups: Sequence[TableGroup],
    directory: Path,
    manifests: Sequence[Mapping[str, Any]],
    seed: int,
    missed: Missed | None,
) -> None:
    """Give every row of an earlier run's tables to the group that holds it now.

    A row that the earlier run has no record of, because nothing ever trained it, begins as the new tables have it, and
    takes the steps that it missed: so what tables begin with does not depend on where that run had its rows.

    Parameters
    ----------
    seed : int
        Of these tables.
    missed : Missed or None
        The steps of the earlier run, where its rows have clocks. All its rows take them; the clocks begin anew.
    """

    def anew(found: FloatRows) -> FloatRows:
        if missed is not None:
            apply_missed_steps_to_range(Slots(*found.parts), found.width, 0, found.slots, missed)
        return replace(found, clock=np.zeros(found.slots, dtype=np.int32))

    seen = {name: allocate_bits(rows) for manifest in manifests for name, _, _, _, rows in manifest["tables"]}

    def marked() -> Iterator[tuple[str, Indices, FloatRows, Indices]]:
        for name, rows, found, places in _rows_by_table(directory, manifests, anew):
            set_bits(seen[name], rows)
            yield name, rows, found, places

    _take(groups, marked(), 0)
    if missed is not None:
        there = {name: rows for manifest in manifests for name, _, _, _, rows in manifest["tables"]}
        for group in groups:
            for table in group.configs:
                key = table_key(seed, table.name)
                for rows, found in _initial_rows(group, table, seen[table.name], there[table.name], key):
                    _Target(group=group, table=table).take(rows, anew(found), np.arange(len(rows)), 0)


def _initial_rows(
    group: TableGroup, table: EmbeddingBagConfig, seen: NDArray[np.uint8], total: int, key: int
) -> Iterator[tuple[Indices, FloatRows]]:
    """The rows of an earlier table, of so many, that were not `seen`, as they began."""
    for rows in row_chunks(total):
        absent = ~test_bits(seen, rows)
        if not absent.any():
            continue
        # All of a chunk, though some are absent: the kernel fills neighbouring rows.
        weights = np.empty((len(rows), group.width), dtype=np.float32)
        fill_uniform(weights, key=key, first_row=int(rows[0]), low=-table.bound, high=table.bound)
        # With clocks, of 0, whatever the codec keeps: these rows missed every step.
        found = FloatRows.allocate(int(absent.sum()), group.width, **{**group.codec.layout.kept, "clock": 1})
        found.weights[:] = weights[absent].reshape(-1)
        yield rows[absent], found


def _rows_by_table(
    directory: Path,
    manifests: Sequence[Mapping[str, Any]],
    ready: Callable[[FloatRows], FloatRows] = lambda found: found,
) -> Iterator[tuple[str, Indices, FloatRows, Indices]]:
    """Table, rows of the whole table, and where each of them is among some float32 rows, made `ready`."""
    for manifest in manifests:
        for rows, saved in saved_rows(directory / manifest["name"], manifest):
            begin, found = 0, ready(saved)
            for name, size, first, stride, _ in manifest["tables"]:
                mine = np.flatnonzero((rows >= begin) & (rows < begin + size))
                if len(mine):
                    yield name, (rows[mine] - begin) * stride + first, found, mine
                begin += size


def saved_rows(directory: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[NDArray[np.int64], FloatRows]]:
    """Rows of a group of a checkpoint, decoded, piece by piece; a later piece overrides an earlier one."""
    codec = RecordCodec.from_identity(manifest["codec"])
    home = manifest["home"]
    pieces = _log_records if home["layout"] == "log" else _chain_records
    spread = TableNumbers([rows for _, rows, *_ in manifest["tables"]]) if home["layout"] == "tables" else None
    home = home if spread is None else {**home, "rows": spread.end}
    for numbers, records in pieces(directory / "home", home):
        rows = numbers if spread is None else spread.to_group(numbers)
        found = FloatRows.allocate(len(rows), codec.width, **codec.layout.kept)
        order = np.arange(len(rows), dtype=np.int64)
        codec.decode(records, order, found, order)
        yield rows, found
    if "slots" in manifest:
        shape = manifest["cache"]
        slots = shape["ways"] * sum(own + extra for own, extra in shape["sets"]) + sum(shape.get("hot", ()))
        yield from saved_slots(directory, manifest["slots"], codec, slots=slots, rows=manifest["home"]["rows"])


def saved_files(directory: Path, manifest: Mapping[str, Any]) -> Iterator[Path]:
    """Every file of a group of a checkpoint, of which `saved_rows` reads all but the notes, which are read here."""
    home = manifest["home"]
    yield from files_of(directory / "home", home["files"])
    for entry in home.get("segments", ()):
        yield directory / "home" / SegmentEntry(**entry).name
    if "slots" in manifest:
        yield from files_of(directory / "slots", manifest["slots"]["files"])


def _chain_records(
    directory: Path, manifest: Mapping[str, Any]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    for entry in manifest["files"]:
        verify_file(directory / entry["name"], entry["hash"])
        yield from read_rows(directory / entry["name"], entry["rows"], manifest["record_bytes"], manifest["rows"])


def _log_records(directory: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    rows, size = int(manifest["rows"]), int(manifest["record_bytes"])
    opened = ScratchDirectory(directory.parent, ".reading-")
    with opened as scratch, closing(LogRecords(scratch, rows=rows, record_bytes=size)) as store:
        # Segments are linked, not copied; the scratch directory keeps the checkpoint from being written.
        store.restore(directory, dict(manifest))
        for first in range(0, store.rows, _CHUNK_ROWS):
            chunk = np.arange(first, min(first + _CHUNK_ROWS, store.rows), dtype=np.int64)
            chunk = chunk[store.written(chunk)]
            if len(chunk):
                records = np.empty((len(chunk), store.record_bytes), dtype=np.uint8)
                store.read(chunk, records)
                yield chunk, records
