"""Tables in checkpoints: rows by number, so that another layout, cache, home or codec can take them up again.

A checkpoint has a directory for each group: its records (a chain of files of rows, or a log's segments and locations)
and, for a cached group, the rows that were in level 0. The same layout goes on with the same bits. Any other takes the
rows over one by one, encoding them anew where the codec differs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.cache.row_cache import put_rows, read_resident
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.groups import DenseGroup, TieredGroup
from stratarec.embedding.rows import FloatRows
from stratarec.embedding.stores.log import LogRecords
from stratarec.embedding.stores.rowfile import read_rows, verify_file
from stratarec.errors import CheckpointError

AnyGroup = DenseGroup | TieredGroup
_CHUNK_ROWS = 1 << 16


def save_groups(groups: Sequence[AnyGroup], directory: Path, previous: Path | None) -> list[dict[str, Any]]:
    """Write every group under `directory`; returns the manifests. `previous` is the last checkpoint's directory."""
    manifests = []
    for number, group in enumerate(groups):
        name = f"group-{number:02d}"
        manifest = group.save(directory / name, None if previous is None else previous / name)
        tables = [[table.name, table.num_embeddings] for table in group.tables]
        manifests.append({"name": name, "tables": tables, "codec": group.codec.identity, **manifest})
    return manifests


def load_groups(
    groups: Sequence[AnyGroup], directory: Path, manifests: Sequence[Mapping[str, Any]], write: int, *, fresh: bool
) -> bool:
    """Take all rows from a checkpoint; returns whether they lie as they did, so that training goes on bit by bit.

    Raises
    ------
    CheckpointError
        When a file is missing or damaged, a table is not in the checkpoint or has another size, or the layout is
        another and the groups are not `fresh` from their constructor.
    """
    _check_tables(groups, manifests)
    if len(groups) == len(manifests) and all(map(_same_layout, groups, manifests)):
        for group, manifest in zip(groups, manifests, strict=True):
            group.restore(directory / manifest["name"], manifest)
        return True
    if not fresh:
        raise CheckpointError(
            f"{directory} has other tiers than these tables, which were trained; load it into new ones"
        )
    targets = {table.name: (group, first) for group in groups for table, first in _first_rows(group)}
    for manifest in manifests:
        for rows, level0 in saved_rows(directory / manifest["name"], manifest):
            _distribute(manifest["tables"], rows, level0, targets, write)
    return False


def _same_layout(group: AnyGroup, manifest: Mapping[str, Any]) -> bool:
    tables = [[table.name, table.num_embeddings] for table in group.tables]
    return tables == manifest["tables"] and group.codec.identity == manifest["codec"] and group.fits(manifest)


def _check_tables(groups: Sequence[AnyGroup], manifests: Sequence[Mapping[str, Any]]) -> None:
    there = {name: rows for manifest in manifests for name, rows in manifest["tables"]}
    for group in groups:
        for table in group.tables:
            if there.get(table.name) != table.num_embeddings:
                found = f"{there[table.name]} rows" if table.name in there else "no such table"
                raise CheckpointError(f"table {table.name!r} has {table.num_embeddings} rows here, {found} there")
        for manifest in manifests:
            width = manifest["codec"]["width"]
            if {name for name, _ in manifest["tables"]} & {table.name for table in group.tables} and (
                width != group.level0.width
            ):
                raise CheckpointError(f"tables of width {width} there, {group.level0.width} here")


def _first_rows(group: AnyGroup) -> Iterator[tuple[Any, int]]:
    first = 0
    for table in group.tables:
        yield table, first
        first += table.num_embeddings


def saved_rows(directory: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[NDArray[np.int64], FloatRows]]:
    """Rows of a group of a checkpoint, decoded, piece by piece; a later piece overrides an earlier one."""
    codec = RecordCodec.from_identity(manifest["codec"])
    home = manifest["home"]
    pieces = _log_records if home["layout"] == "log" else _chain_records
    for rows, records in pieces(directory / "home", home):
        level0 = _empty(codec, len(rows))
        codec.decode(records, np.arange(len(rows), dtype=np.int64), level0, np.arange(len(rows), dtype=np.int64))
        yield rows, level0
    if "resident" in manifest:
        parts = read_resident(directory, manifest)
        level0 = _empty(codec, len(parts["rows"]))
        put_rows(parts, level0, np.arange(len(parts["rows"]), dtype=np.int64))
        yield parts["rows"], level0


def _empty(codec: RecordCodec, slots: int) -> FloatRows:
    return FloatRows.allocate(slots, codec.width, row_state=codec.layout.row_state, full_state=codec.layout.full_state)


def _chain_records(
    directory: Path, manifest: Mapping[str, Any]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    for entry in manifest["files"]:
        verify_file(directory / entry["name"], entry["hash"])
        yield from read_rows(directory / entry["name"], entry["rows"], manifest["record_bytes"])


def _log_records(directory: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    with tempfile.TemporaryDirectory(prefix=".reading-", dir=directory.parent) as scratch:
        store = LogRecords(Path(scratch), rows=manifest["rows"], record_bytes=manifest["record_bytes"])
        store.restore(directory, dict(manifest))
        for first in range(0, store.rows, _CHUNK_ROWS):
            rows = np.arange(first, min(first + _CHUNK_ROWS, store.rows), dtype=np.int64)
            rows = rows[store.written(rows)]
            if len(rows):
                records = np.empty((len(rows), store.record_bytes), dtype=np.uint8)
                store.read(rows, records)
                yield rows, records
        store.close()


def _distribute(
    tables: Sequence[Sequence[Any]],
    rows: NDArray[np.int64],
    level0: FloatRows,
    targets: Mapping[str, tuple[AnyGroup, int]],
    write: int,
) -> None:
    """Give rows of a checkpoint's group to the groups that hold their tables now."""
    first = 0
    for name, size in tables:
        mine = np.flatnonzero((rows >= first) & (rows < first + size))
        if len(mine) and name in targets:
            group, start = targets[name]
            group.put(rows[mine] - first + start, level0, mine, write)
        first += size
