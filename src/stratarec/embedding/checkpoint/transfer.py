"""Rows of checkpoints, one by one: read from any layout, and given to the tables that hold them now.

That is how tables go on under another layout, and how they begin with the rows of an earlier run whose vocabularies
theirs begin with: every row keeps its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.cache.saved_slots import saved_slots
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.stores.deltas import files_of
from stratarec.embedding.stores.dram import allocate_bits, row_chunks
from stratarec.embedding.stores.log import LogRecords
from stratarec.embedding.stores.log.segments import SegmentEntry
from stratarec.embedding.stores.row_file import read_rows, verify_file
from stratarec.embedding.tables.base import TableGroup
from stratarec.embedding.tables.numbering import TableNumbers
from stratarec.embedding.tables.row_arrays import FloatRows, Indices
from stratarec.io.scratch import ScratchDirectory
from stratarec.kernels.bit_rows import set_bits, test_bits
from stratarec.kernels.random import fill_uniform, table_key
from stratarec.kernels.update import Missed, Slots, apply_missed_steps_to_range

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
        self.group.put(own[held] + first, found, places[held], write)


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
