"""Some row groups in memory, the order in which to hand their samples out, and the batches cut from them.

Pointers make a deduplicated batch without hashing: an array as long as the group's table numbers the pointers that a
batch uses, and windows that overlap are joined by sorting their starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from stratarec.data.blocks import SESSIONS, Block, events, pointer
from stratarec.data.dataset import Dataset
from stratarec.jagged import Batch, InverseJagged, JaggedWindows, KeyedJagged
from stratarec.kernels.dedup import gather_column, join_windows, renumber


@dataclass(frozen=True, kw_only=True)
class Lists:
    """A list column: row r holds ``values[start[r]:start[r] + length[r]]``; rows may overlap."""

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    values: NDArray[np.int32]

    def take(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Lengths and values of the chosen rows."""
        start, length = self.start[rows], self.length[rows]
        return length, self.values[slice_places(start, length)]


Unit: TypeAlias = Literal["auto", "session", "run", "sample"]
Column: TypeAlias = NDArray[np.int32] | Lists


@dataclass(frozen=True, kw_only=True)
class Table:
    """The distinct values of a group in all row groups of a window, and each sample's pointer to them."""

    pointers: NDArray[np.int32]
    sparse: dict[str, Column]
    dense: dict[str, NDArray[np.float32]]
    place: NDArray[np.int32]
    """Scratch of `renumber`; the one thread that makes batches uses it."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Columns of some row groups, their tables, and the order of samples."""

    label: NDArray[np.float32]
    dense: dict[str, NDArray[np.float32]]
    sparse: dict[str, Column]
    groups: dict[str, Table]
    windows: dict[str, Table]
    """Each history as a table of one column; its rows may overlap."""
    user: NDArray[np.int64] | None
    order: NDArray[np.int64]

    @classmethod
    def of(cls, blocks: Sequence[Block], dataset: Dataset, draws: np.random.Generator | None, unit: Unit) -> Window:
        """Join blocks; `draws` permutes their units, None leaves samples as they are stored."""
        samples = pa.concat_tables([block.samples for block in blocks])
        own = set(samples.column_names)
        sessions = [block.tables[SESSIONS] for block in blocks if SESSIONS in block.tables]
        sizes = [part["samples"].to_numpy() for part in sessions]
        users = [np.repeat(part["user"].to_numpy(), size) for part, size in zip(sessions, sizes, strict=True)]
        if "__group" in own:
            users = [samples["__group"].to_numpy()]
        schema = dataset.schema
        groups = {name: _group_table(name, features, blocks, dataset) for name, features in dataset.groups.items()}
        windows = {name: _window_table(name, blocks) for name in dataset.windows}
        starts = np.concatenate(sizes).cumsum(dtype=np.int64)[:-1] if sizes else None
        tables = [table for table in (*groups.values(), *windows.values()) if table.sparse]
        return cls(
            label=samples["label"].to_numpy().astype(np.float32),
            dense={f.name: samples[f.name].to_numpy() for f in schema.dense if f.name in own},
            sparse={f.name: _column(samples[f.name]) for f in schema.sparse if f.name in own},
            groups=groups,
            windows=windows,
            user=np.concatenate(users) if users else None,
            order=_order(samples.num_rows, starts, tables, draws, unit),
        )


def _order(
    size: int,
    sessions: NDArray[np.int64] | None,
    tables: Sequence[Table],
    draws: np.random.Generator | None,
    unit: Unit,
) -> NDArray[np.int64]:
    """Samples in the order of permuted units; `sessions` is where all but the first begin."""
    if draws is None:
        return np.arange(size)
    if sessions is None or unit == "sample":
        return draws.permutation(size)
    first = np.zeros(size, dtype=bool)
    first[:1] = first[sessions] = True
    if unit != "session":
        for table in tables:
            first[1:] |= table.pointers[1:] != table.pointers[:-1]
    starts = np.flatnonzero(first)
    chosen = draws.permutation(len(starts))
    return slice_places(starts[chosen], np.diff(starts, append=size)[chosen])


def slice_places(start: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places of the slices ``start[i]:start[i] + length[i]``, one after another."""
    ends = length.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(start - (ends - length), length)


def _pointers(name: str, blocks: Sequence[Block]) -> tuple[NDArray[np.int32], int]:
    """Pointers into the block's tables one after another, and how many rows those have."""
    parts = [block.samples[pointer(name)].to_numpy() for block in blocks]
    pointers = np.empty(sum(len(part) for part in parts), dtype=np.int32)
    shift = first = 0
    for part, block in zip(parts, blocks, strict=True):
        np.add(part, np.int32(shift), out=pointers[first : first + len(part)])
        first, shift = first + len(part), shift + block.tables[name].num_rows
    return pointers, shift


def _group_table(name: str, features: Sequence[str], blocks: Sequence[Block], dataset: Dataset) -> Table:
    table = pa.concat_tables([block.tables[name] for block in blocks])
    dense = {feature.name for feature in dataset.schema.dense}
    pointers, rows = _pointers(name, blocks)
    return Table(
        pointers=pointers,
        sparse={feature: _column(table[feature]) for feature in features if feature not in dense},
        dense={feature: table[feature].to_numpy() for feature in features if feature in dense},
        place=np.full(rows, -1, dtype=np.int32),
    )


def _window_table(name: str, blocks: Sequence[Block]) -> Table:
    pointers, rows = _pointers(name, blocks)
    start, shift = [], 0
    for block in blocks:
        start.append(block.tables[name]["start"].to_numpy().astype(np.int64) + shift)
        shift += block.tables[events(name)].num_rows
    length = np.concatenate([block.tables[name]["length"].to_numpy() for block in blocks]).astype(np.int64)
    values = np.concatenate([block.tables[events(name)]["id"].to_numpy() for block in blocks])
    lists = Lists(start=np.concatenate(start), length=length, values=values)
    return Table(pointers=pointers, sparse={name: lists}, dense={}, place=np.full(rows, -1, dtype=np.int32))


def _column(column: pa.ChunkedArray) -> Column:
    if not pa.types.is_list(column.type):
        ids: NDArray[np.int32] = column.to_numpy()
        return ids
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # an empty column stays chunked
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], column.type)
    offsets = whole.offsets.to_numpy().astype(np.int64)
    return Lists(start=offsets[:-1], length=np.diff(offsets), values=whole.values.to_numpy())


def assemble(held: Sequence[tuple[Window, NDArray[np.int64]]], dataset: Dataset, *, expand: bool) -> Batch:
    """A batch of the given rows of one or several windows."""
    schema, size = dataset.schema, sum(len(rows) for _, rows in held)
    dense, first = np.empty((size, len(schema.dense)), dtype=np.float32), 0
    for window, rows in held:
        _fill_dense(window, rows, [feature.name for feature in schema.dense], dense[first : first + len(rows)])
        first += len(rows)
    users = [window.user[rows] for window, rows in held if window.user is not None]
    if expand:
        parts = [[_resolve(window, feature.name, rows) for window, rows in held] for feature in schema.sparse]
        names = [feature.name for feature in schema.sparse]
        groups: list[InverseJagged] = []
    else:
        names = [feature.name for feature in schema.sparse if feature.name in held[0][0].sparse]
        parts = [[(window.sparse[name], rows) for window, rows in held] for name in names]
        groups = [group for name in dataset.groups if (group := _group(name, held)) is not None]
        groups += [_history(name, held) for name in dataset.windows]
    return Batch(
        label=torch.from_numpy(np.concatenate([window.label[rows] for window, rows in held])),
        dense=torch.from_numpy(dense),
        sparse=_jagged(names, parts, size),
        groups=tuple(groups),
        group=torch.from_numpy(np.concatenate(users)) if users else None,
    )


def _fill_dense(window: Window, rows: NDArray[np.int64], names: Sequence[str], out: NDArray[np.float32]) -> None:
    """``out[i, f]`` = feature f of sample ``rows[i]``."""
    pointers = {key: table.pointers[rows] for key, table in window.groups.items() if table.dense}
    for f, name in enumerate(names):
        if name in window.dense:
            gather_column(window.dense[name], rows, out, f)
        else:
            key = next(key for key in pointers if name in window.groups[key].dense)
            gather_column(window.groups[key].dense[name], pointers[key], out, f)


def _resolve(window: Window, name: str, rows: NDArray[np.int64]) -> tuple[Column, NDArray[Any]]:
    """The column of a feature, and the rows of it that samples `rows` have."""
    if name in window.sparse:
        return window.sparse[name], rows
    tables = (*window.groups.values(), *window.windows.values())
    table = next(table for table in tables if name in table.sparse)
    return table.sparse[name], table.pointers[rows]


def _group(name: str, held: Sequence[tuple[Window, NDArray[np.int64]]]) -> InverseJagged | None:
    """A group's sparse features; None where it has dense ones alone."""
    tables = [window.groups[name] for window, _ in held]
    names = list(tables[0].sparse)
    if not names:
        return None
    inverse, used = _numbered([(table, rows) for table, (_, rows) in zip(tables, held, strict=True)])
    parts = [[(table.sparse[name], rows) for table, rows in zip(tables, used, strict=True)] for name in names]
    unique = _jagged(names, parts, sum(len(rows) for rows in used))
    return InverseJagged(unique=unique, inverse=inverse)


def _history(name: str, held: Sequence[tuple[Window, NDArray[np.int64]]]) -> InverseJagged:
    tables = [window.windows[name] for window, _ in held]
    inverse, used = _numbered([(table, rows) for table, (_, rows) in zip(tables, held, strict=True)])
    starts, lengths, values, shift = [], [], [], 0
    for table, rows in zip(tables, used, strict=True):
        lists = table.sparse[name]
        assert isinstance(lists, Lists)
        length = lists.length[rows]
        moved, begin, size = join_windows(lists.start[rows], length)
        needed = lists.values[slice_places(begin, size)]
        starts.append(moved + shift)
        lengths.append(length)
        values.append(needed)
        shift += len(needed)
    unique = JaggedWindows(
        key=name,
        values=torch.from_numpy(np.concatenate(values)),
        start=torch.from_numpy(np.concatenate(starts)),
        length=torch.from_numpy(np.concatenate(lengths)),
    )
    return InverseJagged(unique=unique, inverse=inverse)


def _numbered(parts: Sequence[tuple[Table, NDArray[np.int64]]]) -> tuple[torch.Tensor, list[NDArray[np.int64]]]:
    """The inverse map of a batch, and the rows of each part's table that it uses."""
    inverses, used, shift = [], [], np.int32(0)
    for table, rows in parts:
        inverse, needed = renumber(table.pointers[rows], table.place)
        inverses.append(inverse + shift)
        used.append(needed)
        shift += np.int32(len(needed))
    return torch.from_numpy(np.concatenate(inverses)), used


def _jagged(names: Sequence[str], parts: Sequence[Sequence[tuple[Column, NDArray[Any]]]], size: int) -> KeyedJagged:
    """Features side by side, each of the given rows of one or several columns."""
    lengths: list[NDArray[Any]] = []
    values: list[NDArray[np.int32]] = []
    plain = True
    for columns in parts:
        for column, rows in columns:
            if isinstance(column, Lists):
                count, ids = column.take(rows)
                plain = False
            else:
                ids = column.take(rows)
                known = ids >= 0
                count = known.astype(np.int64)
                if not known.all():
                    plain, ids = False, ids[known]
            lengths.append(count)
            values.append(ids)
    flat = np.concatenate(values) if values else np.zeros(0, dtype=np.int32)
    offsets = None
    if not plain:
        offsets = np.zeros(size * len(names) + 1, dtype=np.int64)
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return KeyedJagged(
        keys=tuple(names),
        values=torch.from_numpy(flat),
        offsets=None if offsets is None else torch.from_numpy(offsets),
        batch_size=size,
    )
