"""Tables in checkpoints: their manifest, saving, loading, and transfer into another layout or
another run.

A checkpoint has a directory for each table group: its records (a chain of files of rows, or an SSD
store's segments and locations) and, for a cached group, the rows that were in slots. If the layout
is unchanged, training resumes with the same bits. Otherwise rows are transferred one by one, by
table and row number, and re-encoded if the codec differs. The same transfer initializes a new run
with the rows of an earlier one.

A checkpoint may come from an untrusted source. File names must match patterns, so that no name
leads out of the directory. Sizes are checked against each other, so that no single number
determines how much memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from numpy.typing import NDArray

from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.lookup_engine import Health
from stratarec.embedding.stores.arrays import allocate_bits, row_chunks
from stratarec.embedding.stores.row_files import files_of, read_rows, verify_file
from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.embedding.stores.ssd_segments import SegmentEntry
from stratarec.embedding.tables.base import TableGroup, TableNumbers
from stratarec.embedding.tables.cache import saved_slots
from stratarec.errors import CheckpointError
from stratarec.io.scratch import ScratchDirectory
from stratarec.io.sealed import Count, Hash, Model, validate
from stratarec.kernels.bit_rows import set_bits, test_bits
from stratarec.kernels.random import fill_uniform, table_key
from stratarec.kernels.update import Missed, Slots, apply_missed_steps_to_range

ADVICE = "use another checkpoint"

_Positive = Annotated[int, pydantic.Field(ge=1, lt=1 << 48)]
_Small = Annotated[int, pydantic.Field(ge=1, lt=1 << 31)]


class RowsFile(Model):
    """A file of rows (`stores.row_files`)."""

    name: Annotated[str, pydantic.Field(pattern=r"^rows-\d{6,12}\.safetensors$")]
    rows: Count
    hash: Hash


class Segment(Model):
    """A segment of an SSD store; fields are those of `stores.ssd_segments.SegmentEntry`."""

    slot: Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]
    sequence: Annotated[int, pydantic.Field(ge=1, lt=10**10)]
    blocks: Annotated[int, pydantic.Field(ge=0, lt=1 << 40)]


class _Files(Model):
    files: tuple[RowsFile, ...]

    @pydantic.model_validator(mode="after")
    def _check_files(self) -> _Files:
        if not self.files or len({entry.name for entry in self.files}) != len(self.files):
            raise ValueError("the list of files is empty or repeats a name")
        return self


class RowsHome(_Files):
    """Records of a store in addressable memory."""

    format: Literal[1]
    layout: Literal["rows", "tables"]
    """Whether files number the rows of the group, or of each table separately (`TableNumbers`)."""
    rows: _Positive
    record_bytes: _Small


class SsdHome(_Files):
    """Records of an SSD store, in the layout that `stores.ssd_layout.SsdLayout` describes."""

    format: Literal[2]
    layout: Literal["log"]
    rows: _Positive
    record_bytes: _Small
    tag_bytes: Literal[4, 8]
    """Bytes of a cell's tag."""
    block_bytes: _Small
    per_block: _Small
    """Cells per block."""
    segment_blocks: _Positive
    """Blocks per segment."""
    slots: _Positive
    """Maximum number of segments at once."""
    buffer_blocks: _Positive
    segments: tuple[Segment, ...]

    @pydantic.model_validator(mode="after")
    def _check(self) -> SsdHome:
        for what in ("slot", "sequence"):
            if len({getattr(entry, what) for entry in self.segments}) != len(self.segments):
                raise ValueError(f"two segments have the same {what}")
        for entry in self.segments:
            if entry.slot >= self.slots or entry.blocks > self.segment_blocks:
                raise ValueError(
                    f"segment {entry.sequence} exceeds {self.slots} slots or the length of a segment"
                )
        return self


class SlotFiles(_Files):
    """Files of the rows that were in slots; see `tables.cache`."""

    record_bytes: _Small


class CacheShape(Model):
    """Layout of a cache in a checkpoint (ways, policy, sets, hot rows), from `Directory.shape`."""

    ways: _Small
    policy: str
    sets: tuple[tuple[Count, Count], ...]
    hot: tuple[Count, ...] = ()


class Codec(Model):
    """Codec of the records: the value of `RecordCodec.identity`."""

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
    """Manifest of a table group."""

    name: Annotated[str, pydantic.Field(pattern=r"^group-\d{2,8}$")]
    tables: tuple[TablePart, ...]
    """For each table: name, number of rows, and its part of the complete table as in `RowPart`
    (first row, stride, rows of the complete table). If the table is not partitioned, the part is 0,
    1 and its number of rows."""
    codec: Codec
    home: Annotated[RowsHome | SsdHome, pydantic.Field(discriminator="layout")]
    cache: CacheShape | None = None
    slots: SlotFiles | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> GroupManifest:
        rows = sum(rows for _, rows, *_ in self.tables)
        if rows != self.home.rows:
            raise ValueError(f"{self.name} has tables of {rows} rows but a home of {self.home.rows}")
        expected = RecordCodec.from_identity(self.codec.model_dump(exclude_unset=True)).record_bytes
        if expected != self.home.record_bytes:
            raise ValueError(
                f"{self.name} has records of {self.home.record_bytes} bytes, "
                f"expected {expected} by its codec"
            )
        # Later code relies on both being present or absent.
        if (self.cache is None) != (self.slots is None):
            raise ValueError(f"{self.name} has slots without a cache, or a cache without slots")
        return self


class TablesManifest(Model):
    """Manifest of all tables of a collection."""

    step: Count
    earlier: Count
    """Steps of earlier runs that the optimizer state includes."""
    batches: Count
    origin: Count
    lookahead: Annotated[int, pydantic.Field(ge=0, le=1 << 20)]
    changes: tuple[tuple[Count, Annotated[float, pydantic.Field(gt=0)]], ...] = ()
    """Changes of the learning rate; see `StepClock`."""
    groups: tuple[GroupManifest, ...]

    @pydantic.model_validator(mode="after")
    def _check(self) -> TablesManifest:
        if self.step > self.batches or self.earlier >= 1 << 48:
            raise ValueError(
                f"step {self.step} and {self.earlier} earlier steps do not fit {self.batches} batches"
            )
        if self.origin > self.batches or self.batches - self.origin >= 1 << 31:
            raise ValueError(
                f"origin {self.origin} and batches {self.batches} differ by 2**31 or more, or are reversed"
            )
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"groups have the same name: {sorted(names)}")
        parts: dict[str, list[TablePart]] = {}
        for group in self.groups:
            for part in group.tables:
                parts.setdefault(part[0], []).append(part)
        for name, parts_of_table in parts.items():
            _check_parts(name, parts_of_table)
        return self


def _check_parts(name: str, parts: Sequence[TablePart]) -> None:
    """Raise `ValueError` unless every row of a table is in exactly one part."""
    _, _, _, stride, total_rows = parts[0]
    expected = [
        (first, -(-(total_rows - first) // stride), stride, total_rows)
        for first in range(min(stride, total_rows))
    ]
    if sorted((first, rows, step, total) for _, rows, first, step, total in parts) != expected:
        raise ValueError(
            f"the {len(parts)} parts of table {name!r} do not cover each row once; "
            f"expected {len(expected)} parts"
        )


def checked(directory: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the `manifest` of the tables in `directory`, and return it.

    Raises
    ------
    CheckpointError
        If a field is invalid. The message names the field.
    """
    valid = validate(TablesManifest, manifest, f"the tables in {directory}", ADVICE, CheckpointError)
    # Fields that were left out are not set to their defaults: identities are compared as they were
    # written.
    return valid.model_dump(mode="json", exclude_unset=True)


RANK_GROUPS = 1000
"""Group numbers reserved for each process."""


def save_tables(
    groups: Sequence[TableGroup], directory: Path, previous: Path | None, oldest_stamp: int, rank: int = 0
) -> list[dict[str, Any]]:
    """Write every group into a directory below `directory`, and return the manifests of the groups.

    Parameters
    ----------
    groups : sequence of TableGroup
        Groups of tables of this process.
    directory : Path
        Directory of the tables in the new checkpoint.
    previous : Path or None
        The same directory in the last checkpoint, whose files are linked; None to write all rows.
    oldest_stamp : int
        Stamp of the oldest batch in flight: batches before it change nothing more.
    rank : int
        Rank of this process, which determines the names of its groups.
    """
    manifests = []
    for name, group in zip(_names(len(groups), rank), groups, strict=True):
        manifest = group.save(directory / name, None if previous is None else previous / name, oldest_stamp)
        manifests.append({"name": name, "tables": _parts(group), "codec": group.codec.identity, **manifest})
    return manifests


def _names(groups: int, rank: int) -> list[str]:
    # All ranks write into one folder: the groups of each rank have their own range of numbers.
    return [f"group-{rank * RANK_GROUPS + number:02d}" for number in range(groups)]


def _parts(group: TableGroup) -> list[list[Any]]:
    """Return the `TablePart` of each table of a group."""
    return [
        [table.name, table.num_embeddings, part.first, part.stride, part.rows]
        for table in group.configs
        for part in (table.numbering,)
    ]


def same_layout(
    groups: Sequence[TableGroup], manifests: Sequence[Mapping[str, Any]], rank: int = 0
) -> bool:
    """Whether the groups have the same layout as the groups that one rank has saved.

    Parameters
    ----------
    groups : sequence of TableGroup
        Groups of tables of this process.
    manifests : sequence of mapping
        Manifests of the groups of all ranks in a checkpoint.
    rank : int
        Rank that saved the groups to compare.
    """
    saved = [
        entry for entry in manifests if int(entry["name"].removeprefix("group-")) // RANK_GROUPS == rank
    ]
    names = [entry["name"] for entry in saved]
    if names != _names(len(groups), rank):
        return False
    return all(
        [list(part) for part in manifest["tables"]] == _parts(group)
        and group.codec.identity == manifest["codec"]
        and group.fits(manifest)
        for group, manifest in zip(groups, saved, strict=True)
    )


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
    """Load all rows of the groups from a checkpoint.

    Parameters
    ----------
    groups : sequence of TableGroup
        Groups of tables of this process.
    directory : Path
        Directory of the tables in the checkpoint.
    manifests : sequence of mapping
        Manifests of the groups of all ranks in the checkpoint.
    batches : int
        Number of batches staged before the checkpoint. If records are encoded again, the noise that
        rounds them is a function of it.
    stamp : int
        Stamp of the next batch.
    rank : int or None
        Rank whose files are restored as they are, if the checkpoint has the layout of these tables.
        None if the layout differs; rows are then transferred one by one.
    fresh : bool
        Whether all rows of the tables still have their initial values.
    health : Health
        Set to failed if loading is interrupted.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or a table is not in the checkpoint or has another size.
    """
    _check_tables(groups, manifests)
    try:
        if rank is not None:
            by_name = {manifest["name"]: manifest for manifest in manifests}
            for name, group in zip(_names(len(groups), rank), groups, strict=True):
                group.restore(directory / name, by_name[name], stamp)
        else:
            # Rows that the checkpoint lacks keep their values, which must be the initial ones.
            for group in () if fresh else groups:
                group.reset()
            _transfer(groups, _rows_by_table(directory, manifests), batches)
    except BaseException:
        health.fail(f"loading {directory} did not finish")
        raise


def initialize_tables(
    groups: Sequence[TableGroup],
    directory: Path,
    manifests: Sequence[Mapping[str, Any]],
    seed: int,
    missed: Missed | None,
    *,
    health: Health,
) -> None:
    """Load all rows of an earlier run's tables into tables that have their initial values.

    Parameters
    ----------
    groups : sequence of TableGroup
        Groups of the new tables, which may have more rows than the earlier ones.
    directory : Path
        Directory of the tables in the checkpoint.
    manifests : sequence of mapping
        Manifests of the groups of all ranks in the checkpoint.
    seed : int
        Seed of the new tables.
    missed : Missed or None
        Steps of the earlier run, which are applied to rows that missed them; None if its rows have
        no clocks.
    health : Health
        Set to failed if loading is interrupted.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, a table is not in the checkpoint, or the checkpoint has
        more rows of a table.
    """
    _check_tables(groups, manifests, growing=True)
    try:
        if missed is None and _have_grown(groups, manifests):
            for group, manifest in zip(groups, manifests, strict=True):
                group.restore(directory / manifest["name"], manifest, 0)
        else:
            _initialize_from(groups, directory, manifests, seed, missed)
    except BaseException:
        health.fail(f"loading rows from {directory} did not finish")
        raise


def _have_grown(groups: Sequence[TableGroup], manifests: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups equal those of the checkpoint, except for more rows at the end of tables."""
    if [manifest["name"] for manifest in manifests] != _names(len(groups), 0):
        return False
    for group, manifest in zip(groups, manifests, strict=True):
        fits = group.grows and group.codec.identity == manifest["codec"] and group.fits(manifest)
        names = [table.name for table in group.configs]
        complete = all(part[1] == part[4] for part in (*_parts(group), *manifest["tables"]))
        if not fits or not complete or names != [name for name, *_ in manifest["tables"]]:
            return False
    return True


def _check_tables(
    groups: Sequence[TableGroup], manifests: Sequence[Mapping[str, Any]], *, growing: bool = False
) -> None:
    saved_rows = {name: rows for manifest in manifests for name, _, _, _, rows in manifest["tables"]}
    for group in groups:
        for table in group.configs:
            rows, saved = table.numbering.rows, saved_rows.get(table.name, 0)
            if not 0 < saved <= rows or (saved < rows and not growing):
                content = f"has {saved} rows" if table.name in saved_rows else "does not have this table"
                raise CheckpointError(
                    f"table {table.name!r} has {rows} rows, but the checkpoint has {content}"
                )
        for manifest in manifests:
            width = manifest["codec"]["width"]
            if {name for name, *_ in manifest["tables"]} & set(group.first_row) and width != group.width:
                raise CheckpointError(
                    f"the tables have width {group.width}, but the checkpoint has {width}"
                )


_CHUNK_ROWS = 1 << 16


Transfer = Iterator[tuple[str, Indices, FloatRows, Indices]]
"""Table name, row numbers in the complete table, values, and each row's position in the values."""


def _write(
    group: TableGroup,
    table: EmbeddingBagConfig,
    rows: Indices,
    values: FloatRows,
    places: Indices,
    batch_number: int,
) -> None:
    """Write the `rows` of the complete table that are in `table`; ``rows[i]`` gets row
    ``places[i]`` of `values`.
    """
    part, first = table.numbering, group.first_row[table.name]
    own_rows, remainder = np.divmod(rows - part.first, part.stride)
    # `divmod` rounds down, so rows before the part are negative.
    inside = (remainder == 0) & (own_rows >= 0) & (own_rows < table.num_embeddings)
    group.write_rows(own_rows[inside] + first, values, places[inside], batch_number)


def _transfer(groups: Sequence[TableGroup], transfer: Transfer, batch_number: int) -> None:
    """Write every transferred row to the group that has its table."""
    targets = {table.name: (group, table) for group in groups for table in group.configs}
    for name, rows, values, places in transfer:
        if name in targets:
            _write(*targets[name], rows, values, places, batch_number)


def _initialize_from(
    groups: Sequence[TableGroup],
    directory: Path,
    manifests: Sequence[Mapping[str, Any]],
    seed: int,
    missed: Missed | None,
) -> None:
    """Initialize tables with the rows of an earlier run; apply the steps that they missed and reset
    their clocks.

    A row without a record, because it was never trained, starts with the initial value of the new
    tables, and the missed steps are applied to it too. So the result does not depend on where the
    earlier run stored its rows.

    Parameters
    ----------
    seed : int
        Seed of the new tables.
    missed : Missed or None
        Steps of the earlier run; None if its rows have no clocks.
    """

    def updated(values: FloatRows) -> FloatRows:
        if missed is not None:
            apply_missed_steps_to_range(Slots(*values.parts), values.width, 0, values.slots, missed)
        return replace(values, clock=np.zeros(values.slots, dtype=np.int32))

    seen = {
        name: allocate_bits(rows) for manifest in manifests for name, _, _, _, rows in manifest["tables"]
    }

    def marked() -> Transfer:
        for name, rows, values, places in _rows_by_table(directory, manifests, updated):
            set_bits(seen[name], rows)
            yield name, rows, values, places

    _transfer(groups, marked(), 0)
    if missed is not None:
        saved_rows = {name: rows for manifest in manifests for name, _, _, _, rows in manifest["tables"]}
        for group in groups:
            for table in group.configs:
                key = table_key(seed, table.name)
                for rows, values in _initial_rows(
                    group, table, seen[table.name], saved_rows[table.name], key
                ):
                    _write(group, table, rows, updated(values), np.arange(len(rows)), 0)


def _initial_rows(
    group: TableGroup, table: EmbeddingBagConfig, seen: NDArray[np.uint8], total: int, key: int
) -> Iterator[tuple[Indices, FloatRows]]:
    """Yield the earlier table's rows (of `total`) that `seen` lacks, with their initial values."""
    for rows in row_chunks(total):
        absent = ~test_bits(seen, rows)
        if not absent.any():
            continue
        # The complete chunk is filled, although only some rows are absent: the kernel fills
        # consecutive rows.
        weights = np.empty((len(rows), group.width), dtype=np.float32)
        fill_uniform(weights, key=key, first_row=int(rows[0]), low=-table.bound, high=table.bound)
        # Clocks are 0, even if the codec stores no clocks: these rows missed every step.
        values = FloatRows.allocate(
            int(absent.sum()), group.width, **{**group.codec.layout.state_shape, "clock": 1}
        )
        values.weights[:] = weights[absent].reshape(-1)
        yield rows[absent], values


def _rows_by_table(
    directory: Path,
    manifests: Sequence[Mapping[str, Any]],
    convert: Callable[[FloatRows], FloatRows] = lambda values: values,
) -> Transfer:
    """Yield all saved rows, with `convert` applied to the values."""
    for manifest in manifests:
        for rows, saved in saved_rows(directory / manifest["name"], manifest):
            begin, values = 0, convert(saved)
            for name, size, first, stride, _ in manifest["tables"]:
                places = np.flatnonzero((rows >= begin) & (rows < begin + size))
                if len(places):
                    yield name, (rows[places] - begin) * stride + first, values, places
                begin += size


def saved_rows(
    directory: Path, manifest: Mapping[str, Any]
) -> Iterator[tuple[NDArray[np.int64], FloatRows]]:
    """Yield the decoded rows of a saved group in pieces; a later piece overrides an earlier one.

    Parameters
    ----------
    directory : Path
        Directory of the group.
    manifest : mapping
        Its manifest (`GroupManifest`).

    Yields
    ------
    rows : ndarray
        ``[n]`` int64 rows of the group.
    values : FloatRows
        Weights and optimizer state of these rows.
    """
    codec = RecordCodec.from_identity(manifest["codec"])
    home = manifest["home"]
    pieces = _ssd_records if home["layout"] == "log" else _chain_records
    numbering = (
        TableNumbers([rows for _, rows, *_ in manifest["tables"]]) if home["layout"] == "tables" else None
    )
    home = home if numbering is None else {**home, "rows": numbering.end}
    for numbers, records in pieces(directory / "home", home):
        rows = numbers if numbering is None else numbering.to_group(numbers)
        values = FloatRows.allocate(len(rows), codec.width, **codec.layout.state_shape)
        order = np.arange(len(rows), dtype=np.int64)
        codec.decode(records, order, values, order)
        yield rows, values
    if "slots" in manifest:
        shape = manifest["cache"]
        slots = shape["ways"] * sum(regular + overflow for regular, overflow in shape["sets"]) + sum(
            shape.get("hot", ())
        )
        yield from saved_slots(
            directory, manifest["slots"], codec, slots=slots, rows=manifest["home"]["rows"]
        )


def saved_files(directory: Path, manifest: Mapping[str, Any]) -> Iterator[Path]:
    """Yield every file of the group that `manifest` describes, in `directory`.

    `saved_rows` reads all of them except ``chain.json``, which is read here.
    """
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
        yield from read_rows(
            directory / entry["name"], entry["rows"], manifest["record_bytes"], manifest["rows"]
        )


def _ssd_records(
    directory: Path, manifest: Mapping[str, Any]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    rows, size = int(manifest["rows"]), int(manifest["record_bytes"])
    opened = ScratchDirectory(directory.parent, ".reading-")
    with opened as scratch, closing(SsdRecords(scratch, rows=rows, record_bytes=size)) as store:
        # Segments are linked, not copied; the scratch directory protects the checkpoint from
        # writes.
        store.restore(directory, dict(manifest))
        for first in range(0, store.rows, _CHUNK_ROWS):
            chunk = np.arange(first, min(first + _CHUNK_ROWS, store.rows), dtype=np.int64)
            chunk = chunk[store.written(chunk)]
            if len(chunk):
                records = np.empty((len(chunk), store.record_bytes), dtype=np.uint8)
                store.read(chunk, records)
                yield chunk, records
