"""Rows of checkpoints, one by one: read from any layout, and given to the tables that hold them now.

That is how tables go on under another layout, and how they begin with the rows of an earlier run whose vocabularies
theirs begin with: values keep their rows, and the tail buckets behind them move by as many rows as there are new ones.
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
from stratarec.embedding.stores.dram import allocate_bits
from stratarec.embedding.stores.log import LogRecords
from stratarec.embedding.stores.log.segments import SegmentEntry
from stratarec.embedding.stores.row_file import read_rows, verify_file
from stratarec.embedding.tables.base import TableGroup
from stratarec.embedding.tables.row_arrays import FloatRows, Indices
from stratarec.io.scratch import ScratchDirectory
from stratarec.kernels.bit_rows import set_bits, test_bits
from stratarec.kernels.random import fill_uniform, table_key
from stratarec.kernels.update import Missed, Slots, settle

_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Renumbering:
    """Where the rows of an earlier table lie in the one that begins with them."""

    rows: int
    """Of the earlier table."""
    kept: int
    """Rows that keep their number, the first ones; the others are its tail."""
    shift: int
    """Rows by which the tail moves."""

    @classmethod
    def none(cls, rows: int) -> Renumbering:
        """Every row keeps its number."""
        return cls(rows=rows, kept=rows, shift=0)

    def __call__(self, rows: Indices) -> Indices:
        """The numbers now of rows of the earlier table."""
        return np.where(rows < self.kept, rows, rows + self.shift)


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A table, or the part of one, that takes rows."""

    group: TableGroup
    table: EmbeddingBagConfig
    moved: Renumbering

    def take(self, rows: Indices, found: FloatRows, places: Indices, write: int) -> None:
        """Give it those of the `rows` of the whole earlier table that it holds: rows `places` of `found`."""
        part, first = self.table.numbering, self.group.first_row[self.table.name]
        own, rest = np.divmod(self.moved(rows) - part.first, part.stride)
        # `divmod` rounds down, so rows before the part come out negative.
        held = (rest == 0) & (own >= 0) & (own < self.table.num_embeddings)
        self.group.put(own[held] + first, found, places[held], write)


def take_over(
    groups: Sequence[TableGroup], directory: Path, manifests: Sequence[Mapping[str, Any]], write: int
) -> None:  # fmt: skip
    """Give every row of a checkpoint to the group that holds its table now."""
    targets = {
        table.name: _Target(group=group, table=table, moved=Renumbering.none(table.numbering.rows))
        for group in groups
        for table in group.configs
    }
    for name, rows, found, places in _rows_by_table(directory, manifests):
        if name in targets:
            targets[name].take(rows, found, places, write)


def begin_with(
    groups: Sequence[TableGroup],
    directory: Path,
    manifests: Sequence[Mapping[str, Any]],
    moved: Mapping[str, Renumbering],
    seed: int,
    missed: Missed | None,
) -> None:
    """Give every row of an earlier run's tables to the group that holds it now.

    A row that the earlier run has no record of, because nothing ever looked it up, has the initial value that it has
    there: so what tables begin with does not depend on where that run had its rows.

    Parameters
    ----------
    moved : mapping of str to Renumbering
        Of every table.
    seed : int
        Of the earlier run.
    missed : Missed or None
        The steps of the earlier run, where its rows have clocks. All rows take them; the clocks begin anew.
    """

    def anew(found: FloatRows) -> FloatRows:
        if missed is not None:
            settle(Slots(*found.parts), found.width, 0, found.slots, missed)
        return replace(found, clock=np.zeros(found.slots, dtype=np.int32))

    targets = {
        table.name: _Target(group=group, table=table, moved=moved[table.name])
        for group in groups
        for table in group.configs
    }
    seen = {name: allocate_bits(target.moved.rows) for name, target in targets.items()}
    for name, rows, found, places in _rows_by_table(directory, manifests, anew):
        if name in targets:
            targets[name].take(rows, found, places, 0)
            set_bits(seen[name], rows)
    for name, target in targets.items():
        for rows, found in _initial_rows(target, seen[name], table_key(seed, name)):
            target.take(rows, anew(found), np.arange(len(rows), dtype=np.int64), 0)


def _initial_rows(target: _Target, seen: NDArray[np.uint8], key: int) -> Iterator[tuple[Indices, FloatRows]]:
    """The rows of an earlier table that were not `seen`, as its run would have made them."""
    total, layout = target.moved.rows, target.group.codec.layout
    for first in range(0, total, _CHUNK_ROWS):
        rows = np.arange(first, min(first + _CHUNK_ROWS, total), dtype=np.int64)
        absent = ~test_bits(seen, rows)
        if not absent.any():
            continue
        # All of a chunk, though some are absent: the kernel fills neighbouring rows.
        weights = np.empty((len(rows), target.group.width), dtype=np.float32)
        bound = target.table.initial or float(total**-0.5)
        fill_uniform(weights, key=key, first_row=first, low=-bound, high=bound)
        # With clocks, of 0, whatever the codec keeps: these rows missed every step.
        found = FloatRows.allocate(int(absent.sum()), target.group.width, **{**layout.kept, "clock": 1})
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
    for rows, records in pieces(directory / "home", home):
        found = FloatRows.allocate(len(rows), codec.width, **codec.layout.kept)
        order = np.arange(len(rows), dtype=np.int64)
        codec.decode(records, order, found, order)
        yield rows, found
    if "slots" in manifest:
        shape = manifest["cache"]
        hot = sum(head + tail for head, tail in shape.get("hot", ()))
        slots = shape["ways"] * sum(own + extra for own, extra in shape["sets"]) + hot
        yield from saved_slots(directory, manifest["slots"], codec, slots=slots, rows=home["rows"])


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
