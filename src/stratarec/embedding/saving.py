"""Tables in checkpoints: rows by number, so that another layout, cache, home or codec can take them up again.

A checkpoint has a directory for each group: its records (a chain of files of rows, or a log's segments and locations)
and, for a cached group, the rows that were in level 0. The same layout goes on with the same bits. Any other takes the
rows over one by one, encoding them anew where the codec differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.cache.slot_records import saved_slots
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.health import Health
from stratarec.embedding.rows import FloatRows
from stratarec.embedding.stores.log import LogRecords
from stratarec.embedding.stores.rowfile import read_rows, verify_file
from stratarec.embedding.stores.scratch import Scratch
from stratarec.embedding.tables import Tables
from stratarec.errors import CheckpointError

_CHUNK_ROWS = 1 << 16


def save_tables(
    groups: Sequence[Tables], directory: Path, previous: Path | None, settled: int
) -> list[dict[str, Any]]:  # fmt: skip
    """Write every group under `directory`; returns the manifests. `previous` is the last checkpoint's directory."""
    manifests = []
    for number, group in enumerate(groups):
        name = f"group-{number:02d}"
        manifest = group.save(directory / name, None if previous is None else previous / name, settled)
        tables = [[table.name, table.num_embeddings] for table in group.configs]
        manifests.append({"name": name, "tables": tables, "codec": group.codec.identity, **manifest})
    return manifests


def load_tables(
    groups: Sequence[Tables],
    directory: Path,
    manifests: Sequence[Mapping[str, Any]],
    batches: int,
    stamp: int,
    *,
    fresh: bool,
    health: Health,
) -> bool:
    """Take all rows from a checkpoint; returns whether they lie as they did.

    Parameters
    ----------
    batches, stamp : int
        The two clocks where the checkpoint was written.
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
    same = len(groups) == len(manifests) and all(map(_same_layout, groups, manifests))
    if not same and not fresh:
        raise CheckpointError(
            f"{directory} has other tiers than these tables, which were trained; load it into new ones"
        )
    try:
        if same:
            for group, manifest in zip(groups, manifests, strict=True):
                group.restore(directory / manifest["name"], manifest, stamp)
        else:
            _take_over(groups, directory, manifests, batches)
    except BaseException:
        health.fail(f"loading {directory} did not finish")
        raise
    return same


def _take_over(
    groups: Sequence[Tables], directory: Path, manifests: Sequence[Mapping[str, Any]], write: int
) -> None:  # fmt: skip
    """Give every row of a checkpoint to the group that holds its table now."""
    targets = {name: (group, first) for group in groups for name, first in group.first_row.items()}
    for manifest in manifests:
        for rows, found in saved_rows(directory / manifest["name"], manifest):
            _distribute(manifest["tables"], rows, found, targets, write)


def _same_layout(group: Tables, manifest: Mapping[str, Any]) -> bool:
    tables = [[table.name, table.num_embeddings] for table in group.configs]
    return tables == manifest["tables"] and group.codec.identity == manifest["codec"] and group.fits(manifest)


def _check_tables(groups: Sequence[Tables], manifests: Sequence[Mapping[str, Any]]) -> None:
    there = {name: rows for manifest in manifests for name, rows in manifest["tables"]}
    for group in groups:
        for table in group.configs:
            if there.get(table.name) != table.num_embeddings:
                found = f"{there[table.name]} rows" if table.name in there else "no such table"
                raise CheckpointError(f"table {table.name!r} has {table.num_embeddings} rows here, {found} there")
        for manifest in manifests:
            width = manifest["codec"]["width"]
            if {name for name, _ in manifest["tables"]} & set(group.first_row) and width != group.width:
                raise CheckpointError(f"tables of width {width} there, {group.width} here")


def saved_rows(directory: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[NDArray[np.int64], FloatRows]]:
    """Rows of a group of a checkpoint, decoded, piece by piece; a later piece overrides an earlier one."""
    codec = RecordCodec.from_identity(manifest["codec"])
    home = manifest["home"]
    pieces = _log_records if home["layout"] == "log" else _chain_records
    for rows, records in pieces(directory / "home", home):
        found = FloatRows.allocate(
            len(rows), codec.width, row_state=codec.layout.row_state, full_state=codec.layout.full_state
        )  # fmt: skip
        order = np.arange(len(rows), dtype=np.int64)
        codec.decode(records, order, found, order)
        yield rows, found
    if "slots" in manifest:
        shape = manifest["cache"]
        slots = shape["ways"] * sum(own + extra for own, extra in shape["sets"])
        yield from saved_slots(directory, manifest["slots"], codec, slots=slots, rows=home["rows"])


def _chain_records(
    directory: Path, manifest: Mapping[str, Any]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    for entry in manifest["files"]:
        verify_file(directory / entry["name"], entry["hash"])
        yield from read_rows(directory / entry["name"], entry["rows"], manifest["record_bytes"], manifest["rows"])


def _log_records(directory: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    rows, size = int(manifest["rows"]), int(manifest["record_bytes"])
    opened = Scratch(directory.parent, ".reading-")
    with opened as scratch, closing(LogRecords(scratch, rows=rows, record_bytes=size)) as store:
        store.restore(directory, dict(manifest))
        for first in range(0, store.rows, _CHUNK_ROWS):
            chunk = np.arange(first, min(first + _CHUNK_ROWS, store.rows), dtype=np.int64)
            chunk = chunk[store.written(chunk)]
            if len(chunk):
                records = np.empty((len(chunk), store.record_bytes), dtype=np.uint8)
                store.read(chunk, records)
                yield chunk, records


def _distribute(
    tables: Sequence[Sequence[Any]],
    rows: NDArray[np.int64],
    found: FloatRows,
    targets: Mapping[str, tuple[Tables, int]],
    write: int,
) -> None:
    """Give rows of a checkpoint's group to the groups that hold their tables now."""
    first = 0
    for name, size in tables:
        mine = np.flatnonzero((rows >= first) & (rows < first + size))
        if len(mine) and name in targets:
            group, start = targets[name]
            group.put(rows[mine] - first + start, found, mine, write)
        first += size
