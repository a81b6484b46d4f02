"""Tables in checkpoints: rows by number, so that another layout, cache, home or codec can take them up again.

A checkpoint has a directory for each group: its records (a chain of files of rows, or a log's segments and locations)
and, for a cached group, the rows that were in level 0. The same layout goes on with the same bits. Any other takes the
rows over one by one, encoding them anew where the codec differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratarec.embedding.checkpoint.transfer import begin_with, take_over
from stratarec.embedding.health import Health
from stratarec.embedding.tables.base import TableGroup
from stratarec.errors import CheckpointError
from stratarec.kernels.update import Missed

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
