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
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.health import Health
from stratarec.embedding.rows import FloatRows
from stratarec.embedding.stores.log import LogRecords
from stratarec.embedding.stores.rowfile import read_rows, verify_file
from stratarec.embedding.stores.scratch import Scratch
from stratarec.embedding.tables import Tables
from stratarec.errors import CheckpointError

_CHUNK_ROWS = 1 << 16


RANK_GROUPS = 1000
"""Numbers of groups that each process has for its own."""


def save_tables(
    groups: Sequence[Tables], directory: Path, previous: Path | None, settled: int, rank: int = 0
) -> list[dict[str, Any]]:  # fmt: skip
    """Write every group under `directory`; returns the manifests. `previous` is the last checkpoint's directory."""
    manifests = []
    for name, group in zip(_names(len(groups), rank), groups, strict=True):
        manifest = group.save(directory / name, None if previous is None else previous / name, settled)
        manifests.append({"name": name, "tables": _parts(group), "codec": group.codec.identity, **manifest})
    return manifests


def _names(groups: int, rank: int) -> list[str]:
    return [f"group-{rank * RANK_GROUPS + number:02d}" for number in range(groups)]


def _parts(group: Tables) -> list[list[Any]]:
    """As `manifest.TablePart`."""
    return [
        [table.name, table.num_embeddings, part.first, part.stride, part.rows]
        for table in group.configs
        for part in (table.numbering,)
    ]


def lie_alike(groups: Sequence[Tables], manifests: Sequence[Mapping[str, Any]], rank: int = 0) -> bool:
    """Whether the groups of a process are laid out as the ones that this process, or another one, wrote as `rank`."""
    theirs = [found for found in manifests if int(found["name"].removeprefix("group-")) // RANK_GROUPS == rank]
    names = [found["name"] for found in theirs]
    return names == _names(len(groups), rank) and all(map(_same_layout, groups, theirs))


def load_tables(
    groups: Sequence[Tables],
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
            _take_over(groups, directory, manifests, batches)
    except BaseException:
        health.fail(f"loading {directory} did not finish")
        raise


def _take_over(
    groups: Sequence[Tables], directory: Path, manifests: Sequence[Mapping[str, Any]], write: int
) -> None:  # fmt: skip
    """Give every row of a checkpoint to the group that holds its table now."""
    targets = {
        table.name: (group, group.first_row[table.name], table) for group in groups for table in group.configs
    }  # fmt: skip
    for manifest in manifests:
        for rows, found in saved_rows(directory / manifest["name"], manifest):
            _distribute(manifest["tables"], rows, found, targets, write)


def _same_layout(group: Tables, manifest: Mapping[str, Any]) -> bool:
    tables = [list(part) for part in manifest["tables"]]
    return tables == _parts(group) and group.codec.identity == manifest["codec"] and group.fits(manifest)


def _check_tables(groups: Sequence[Tables], manifests: Sequence[Mapping[str, Any]]) -> None:
    there = {name: rows for manifest in manifests for name, _, _, _, rows in manifest["tables"]}
    for group in groups:
        for table in group.configs:
            rows = table.numbering.rows
            if there.get(table.name) != rows:
                found = f"{there[table.name]} rows" if table.name in there else "no such table"
                raise CheckpointError(f"table {table.name!r} has {rows} rows here, {found} there")
        for manifest in manifests:
            width = manifest["codec"]["width"]
            if {name for name, *_ in manifest["tables"]} & set(group.first_row) and width != group.width:
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
    targets: Mapping[str, tuple[Tables, int, EmbeddingBagConfig]],
    write: int,
) -> None:
    """Give rows of a checkpoint's group to the groups that hold them now, by their numbers in the whole tables."""
    begin = 0
    for name, size, first, stride, _ in tables:
        mine = np.flatnonzero((rows >= begin) & (rows < begin + size))
        if len(mine) and name in targets:
            group, start, table = targets[name]
            part = table.numbering
            own, rest = np.divmod((rows[mine] - begin) * stride + first - part.first, part.stride)
            held = (rest == 0) & (own >= 0) & (own < table.num_embeddings)
            group.put(own[held] + start, found, mine[held], write)
        begin += size
