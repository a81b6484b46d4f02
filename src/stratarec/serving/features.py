"""Raw columns -> what a network and its tables take, exactly as `prepare` makes it of a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import JaggedTensor, KeyedJagged, with_weights
from stratarec.data.column_names import weights_of
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.parse import cast_exactly
from stratarec.data.transforms import Spread, Standard
from stratarec.data.vocabulary import MISSING, Vocabulary
from stratarec.errors import DataError
from stratarec.serving.cells import CellEncoder
from stratarec.serving.frames import read_frame
from stratarec.serving.value_index import ValueIndex

# Of histories the last values are kept, and of other lists the first: reading a frame leaves them whole.
_WHOLE = 1 << 62


class FeatureEncoder:
    """The features of a data set, without the data set.

    Parameters
    ----------
    schema : Schema
    moments : mapping of str to Spread
        Of each dense column.
    vocabularies : mapping of str to Vocabulary
    """

    def __init__(self, schema: Schema, moments: Mapping[str, Spread], vocabularies: Mapping[str, Vocabulary]) -> None:
        whole = (replace(f, max_length=_WHOLE, separator="") if f.kind == "history" else f for f in schema.sparse)
        self._schema, self._standard = schema, Standard(schema.dense, moments)
        self._read = replace(schema, sparse=tuple(whole))
        self._index = {name: ValueIndex(vocabulary) for name, vocabulary in vocabularies.items()}
        self._cells = CellEncoder(schema, self._standard, self._index)

    def encode(self, frame: Any) -> tuple[Tensor, KeyedJagged]:
        """``[N, F_dense]`` numbers, and the ids of every sparse feature in the order of the schema, with weights where
        one of them has some.

        Raises
        ------
        DataError
            Where a column is missing or holds what it does not hold in a log.
        """
        few = self._cells.encode(frame)
        return few if few is not None else self.encode_columns(read_frame(frame, self._read), "the frame")

    def encode_columns(self, columns: Mapping[str, pl.Series], origin: str) -> tuple[Tensor, KeyedJagged]:
        """The same for columns that have the types that a source gives; messages call where they are from `origin`."""
        schema = self._schema
        rows = len(next(iter(columns.values())))
        raw = np.empty((len(schema.dense), rows), dtype=np.float64)
        for place, feature in enumerate(schema.dense):
            raw[place] = columns[feature.name].cast(pl.Float64).to_numpy()  # what is missing becomes NaN
        dense = self._standard.of(raw)
        bags = {feature.name: self._bags(columns[feature.name], feature, origin) for feature in schema.sparse}
        weights = {f.name: _flat_weights(columns[weights_of(f.name)]) for f in schema.weighted}
        return torch.from_numpy(dense), KeyedJagged.from_features(with_weights(bags, weights), len(dense))

    def _bags(self, column: pl.Series, feature: SparseFeature, origin: str) -> JaggedTensor:
        if feature.kind == "single":
            ids = self._ids(column, feature, origin)
            return _jagged(ids[ids != MISSING], ids != MISSING)
        if feature.kind == "history":
            column = column.list.tail(feature.max_length)
        lengths = column.list.len().fill_null(0).to_numpy()
        flat = column.drop_nulls().explode(empty_as_null=False)
        return _jagged(self._ids(flat, feature, origin), lengths)

    def _ids(self, values: pl.Series, feature: SparseFeature, origin: str) -> NDArray[np.int32]:
        index = self._index[feature.vocabulary]
        if values.dtype != index.type:
            try:
                values = cast_exactly(values, index.type)
            except pl.exceptions.PolarsError as error:
                raise DataError(
                    f"{origin}: column {feature.name!r} is {values.dtype}, with values that are no {index.type}, as "
                    f"they were in the log ({' '.join(str(error).split())[:200]})"
                ) from error
        return index.ids(values)


def _flat_weights(column: pl.Series) -> Tensor:
    return torch.tensor(column.drop_nulls().explode(empty_as_null=False).to_numpy(), dtype=torch.float32)


def _jagged(ids: NDArray[np.int32], lengths: NDArray[Any]) -> JaggedTensor:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return JaggedTensor(values=torch.from_numpy(ids), offsets=torch.from_numpy(offsets))
