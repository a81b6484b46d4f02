"""A few rows -> features, cell by cell in Python.

For so few rows a library's calls cost more than the work: 26 categories and 13 numbers of one row took Polars 30 ms.
Only plain cells are read here: integers and text where the vocabulary holds such, numbers, lists of them, and nothing.
Whatever else a frame has is left to `FeatureEncoder`, which converts it or says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.parse import split_text
from stratarec.data.transforms import Standard
from stratarec.serving.value_index import ValueIndex

# From about here on whole columns are faster.
MOST_ROWS = 32
_LARGEST = 3.0e38
_NOTHING = type(None)


class NotPlain(Exception):
    """A cell that is not read here."""


class CellEncoder:
    """What `FeatureEncoder` makes of a few plain rows.

    Parameters
    ----------
    schema : Schema
    standard : Standard
        Of its dense columns.
    index : mapping of str to ValueIndex
        Of each vocabulary.
    """

    def __init__(self, schema: Schema, standard: Standard, index: Mapping[str, ValueIndex]) -> None:
        self._names = [*(dense.name for dense in schema.dense), *(sparse.name for sparse in schema.sparse)]
        self._dense, self._standard = len(schema.dense), standard
        self._bags = [_Bags(feature, index[feature.vocabulary]) for feature in schema.sparse]
        # Sequences lose the items that columns beside them lack, as do values with weights: that is read by columns
        # alone.
        self._aligned = any(feature.kind == "sequence" or feature.weights for feature in schema.sparse)
        self._keys = tuple(feature.name for feature in schema.sparse)

    def encode(self, frame: Any) -> tuple[Tensor, KeyedJagged] | None:
        """Numbers and ids, or None where a cell is not plain or the rows are not few."""
        if self._aligned:
            return None
        try:
            columns = _columns(frame, self._names)
            rows = len(columns[0])
            if any(len(column) != rows for column in columns):
                return None
            dense = self._numbers(columns[: self._dense], rows)
            bags = [
                bag
                for column, feature in zip(columns[self._dense :], self._bags, strict=True)
                for bag in feature.of(column)
            ]
        except (NotPlain, UnicodeError):
            return None
        values = np.array([value for bag in bags for value in bag], dtype=np.int32)
        offsets = np.array([0, *accumulate(map(len, bags))], dtype=np.int64)
        sparse = KeyedJagged(
            keys=self._keys, values=torch.from_numpy(values), offsets=torch.from_numpy(offsets), batch_size=rows
        )
        return torch.from_numpy(dense), sparse

    def _numbers(self, columns: Sequence[Sequence[Any]], rows: int) -> NDArray[np.float32]:
        for column in columns:
            kind = _kind(column)
            if kind not in (float, int, _NOTHING) or (kind is int and not _fits(column, -(1 << 63), 1 << 63)):
                raise NotPlain
        raw = np.array(columns, dtype=np.float64).reshape(len(columns), rows)  # nothing becomes NaN
        if (np.abs(raw) > _LARGEST).any():
            raise NotPlain
        return self._standard.of(raw)


class _Bags:
    """Ids of one feature."""

    def __init__(self, feature: SparseFeature, index: ValueIndex) -> None:
        self._feature, self._id_of = feature, index.id_of
        self._type: type = str if index.is_text else int
        # Digits that are text, and text that is digits, are converted elsewhere.
        self._plain = feature.type in ("auto", "text" if index.is_text else "integer")
        self._range = (0, 1 << 64) if index.type == pl.UInt64 else (-(1 << 63), 1 << 63)

    def of(self, column: Sequence[Any]) -> list[list[int]]:
        """A bag for each row."""
        if self._feature.kind == "single":
            lists = [[] if cell is None else [cell] for cell in column]
        else:
            lists = [self._list(cell) for cell in column]
        cells = [cell for each in lists for cell in each]
        if cells and (not self._plain or _kind(cells) is not self._type):
            raise NotPlain
        if self._type is int and not _fits(cells, *self._range):
            raise NotPlain
        return [[self._id_of(cell) for cell in each] for each in lists]

    def _list(self, cell: Any) -> list[Any]:
        feature = self._feature
        if type(cell) is str:
            parts = split_text(cell, feature.separator)
            if parts is None:
                raise NotPlain
            return parts[: feature.max_length]
        if cell is None:
            return []
        if type(cell) is not list or feature.separator:
            raise NotPlain
        kept = [part for part in cell if part is not None]
        return kept[-feature.max_length :] if feature.kind == "history" else kept[: feature.max_length]


def _kind(cells: Sequence[Any]) -> type:
    """The type of all cells that hold something."""
    kinds = set(map(type, cells)) - {_NOTHING}
    if len(kinds) > 1:
        raise NotPlain
    return kinds.pop() if kinds else _NOTHING


def _fits(cells: Sequence[Any], least: int, end: int) -> bool:
    return all(cell is None or least <= cell < end for cell in cells)


def _columns(frame: Any, names: Sequence[str]) -> list[Sequence[Any]]:
    """Columns of a few rows as Python values."""
    try:
        if isinstance(frame, Mapping):
            found = [_listed(frame[name]) for name in names]
        elif isinstance(frame, pl.DataFrame) and frame.height <= MOST_ROWS:
            found = list(zip(*frame[list(names)].rows(), strict=True))
        elif isinstance(frame, pa.Table | pa.RecordBatch) and frame.num_rows <= MOST_ROWS:
            found = [frame.column(name).to_pylist() for name in names]
        else:
            raise NotPlain
    except (LookupError, TypeError, ValueError, ArithmeticError, pl.exceptions.PolarsError, pa.ArrowException) as error:
        raise NotPlain from error
    if not found or not 0 < len(found[0]) <= MOST_ROWS:
        raise NotPlain
    return found


def _listed(column: Any) -> Sequence[Any]:
    if isinstance(column, list | tuple):
        return column
    if isinstance(column, pl.Series) and len(column) <= MOST_ROWS:
        return column.to_list()
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iuf" and len(column) <= MOST_ROWS:
        listed: list[Any] = column.tolist()
        return listed
    raise NotPlain
