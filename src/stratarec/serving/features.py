"""Convert raw columns or rows to the inputs of a model. The inputs equal what `prepare` makes of
the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import JaggedTensor, KeyedJagged, with_weights
from stratarec.data.column_names import weights_of
from stratarec.data.columns.frames import FRAME, PlainRowReader, read_frame
from stratarec.data.columns.text_values import cast_exactly
from stratarec.data.hashing import hash_integers
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.transforms import Spread, transform, transform_table
from stratarec.data.vocabulary import Vocabulary
from stratarec.errors import DataError
from stratarec.kernels.raw_values.row_features import RowFeatures, RowPlan, RowValues, compute_features
from stratarec.kernels.raw_values.text_hash import hash_texts
from stratarec.kernels.raw_values.value_index import NO_TEXTS, TextValues, ValueIndex, VocabularyKeys


class PooledTables(NamedTuple):
    """Tables from which every feature is pooled."""

    weights: NDArray[np.float32]
    """Elements of all tables."""
    columns: int
    """Number of columns of the pooled output."""
    features: Mapping[str, tuple[int, int, int, bool]]
    """Feature -> first element of its table in `weights`, width, first column, and whether it is
    pooled by the mean.
    """


class FeatureEncoder:
    """Encoder of raw values, built from a schema, moments and vocabularies; it does not need the
    data set.

    Parameters
    ----------
    schema : Schema
        Columns of a sample.
    moments : mapping of str to Spread
        Moments of each dense column.
    vocabularies : mapping of str to Vocabulary
        Name -> vocabulary, for the ids of values.
    tables : PooledTables or None
        Tables from which `encode_rows` pools; None to pool nothing.
    nulls : tuple of str
        Texts in frames that mean a missing value, in addition to an empty text.
    """

    def __init__(
        self,
        schema: Schema,
        moments: Mapping[str, Spread],
        vocabularies: Mapping[str, Vocabulary],
        tables: PooledTables | None = None,
        nulls: tuple[str, ...] = (),
    ) -> None:
        self._schema = schema
        self._moments = moments
        self._nulls = nulls
        self._types = {name: vocabulary.values.dtype for name, vocabulary in vocabularies.items()}
        self._index = ValueIndex([_vocabulary_keys(vocabulary) for vocabulary in vocabularies.values()])
        self._numbers = {name: number for number, name in enumerate(vocabularies)}
        self._keys = tuple(feature.name for feature in schema.sparse)
        self._plain_rows = PlainRowReader(schema, self._types, nulls)
        tables = tables or PooledTables(
            np.zeros(0, np.float32), 0, dict.fromkeys(self._keys, (0, 0, 0, False))
        )
        sparse = [
            (self._keys.index(f.name), self._numbers[f.vocabulary], *tables.features[f.name])
            for f in self._plain_rows.features
        ]
        self._plan = RowPlan(
            sparse=np.array(sparse, dtype=np.int64).reshape(-1, 6),
            dense=transform_table(schema.dense, moments),
            vocabularies=self._index.arrays,
            weights=tables.weights,
            columns=tables.columns,
        )

    def encode(self, frame: Any) -> tuple[Tensor, KeyedJagged]:
        """Return ``[N, F_dense]`` standardized numbers, and the ids (and weights, if any) of every
        sparse feature.

        Raises
        ------
        DataError
            If a column is missing or has a value that `prepare` would refuse in a log.
        """
        rows = self.encode_rows(frame)
        return self.encode_frame(frame) if rows is None else self.tensors(rows)

    def encode_frame(self, frame: Any) -> tuple[Tensor, KeyedJagged]:
        """Return the result of `encode` for a frame with any number of rows and any values."""
        return self.encode_columns(read_frame(frame, self._schema, self._nulls), FRAME)

    def encode_rows(self, frame: Any) -> RowFeatures | None:
        """Encode a few rows of plain Python values without Polars, which is faster. Return None if
        a value needs conversion, or if rows are too many.
        """
        plain = self._plain_rows.read(frame)
        if plain is None:
            return None
        joined = "".join(plain.texts)
        try:
            content = joined.encode()
            texts = plain.texts if len(content) == len(joined) else map(str.encode, plain.texts)
            words = np.array([*plain.integers, *map(len, texts), *plain.counts], dtype=np.int64)
        except (UnicodeError, OverflowError):  # a text that cannot be encoded, or an integer beyond 64 bits
            return None
        logarithms = np.abs(plain.numbers)
        np.log1p(logarithms, out=logarithms)
        # NumPy refuses empty buffers.
        values = RowValues(
            plain.rows,
            plain.numbers,
            logarithms,
            plain.limit,
            len(plain.integers),
            len(plain.texts),
            words,
            np.frombuffer(content or b"\0", dtype=np.uint8),
        )
        return compute_features(self._plan, values)

    def tensors(self, rows: RowFeatures) -> tuple[Tensor, KeyedJagged]:
        """Return the result of `encode_rows` in the form of `encode`."""
        ids, offsets = torch.from_numpy(rows.ids), torch.from_numpy(rows.offsets)
        sparse = KeyedJagged(keys=self._keys, values=ids, offsets=offsets, batch_size=len(rows.dense))
        return torch.from_numpy(rows.dense), sparse

    def encode_columns(self, columns: Mapping[str, pl.Series], origin: str) -> tuple[Tensor, KeyedJagged]:
        """Encode columns that already have the types of the schema. Error messages name `origin` as
        their origin.
        """
        schema = self._schema
        rows = len(next(iter(columns.values())))
        dense = np.empty((rows, len(schema.dense)), dtype=np.float32)
        for place, dense_feature in enumerate(schema.dense):
            name = dense_feature.name
            dense[:, place] = transform(columns[name], dense_feature, self._moments[name])
        bags = {
            feature.name: self._bags(columns[feature.name], feature, origin) for feature in schema.sparse
        }
        weights = {f.name: _flat_weights(columns[weights_of(f.name)]) for f in schema.weighted}
        return torch.from_numpy(dense), KeyedJagged.from_features(with_weights(bags, weights), len(dense))

    def _bags(self, column: pl.Series, feature: SparseFeature, origin: str) -> JaggedTensor:
        if feature.kind == "single":
            present = column.is_not_null().to_numpy()
            return _jagged(self._ids(column.drop_nulls(), feature, origin), present)
        if feature.kind == "history":  # which a frame may have at any length
            column = column.list.tail(feature.max_length)
        lengths = column.list.len().fill_null(0).to_numpy()
        flat = column.drop_nulls().explode(empty_as_null=False)
        return _jagged(self._ids(flat, feature, origin), lengths)

    def _ids(self, values: pl.Series, feature: SparseFeature, origin: str) -> NDArray[np.int32]:
        kind = self._types[feature.vocabulary]
        if values.dtype != kind:
            try:
                values = cast_exactly(values, kind)
            except pl.exceptions.PolarsError as error:
                raise DataError(
                    f"{origin}: column {feature.name!r} is {values.dtype}, with values that are no {kind}, "
                    f"the type in the log ({' '.join(str(error).split())[:200]})"
                ) from error
        number = self._numbers[feature.vocabulary]
        if kind != pl.String:
            return self._index.find(number, hash_integers(values.to_numpy()))
        texts = _texts(values)
        return self._index.find(number, hash_texts(*texts), texts)


def _texts(values: pl.Series) -> TextValues:
    column = pa.array(values.to_arrow(), type=pa.large_string())
    _, offsets, content = column.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64, count=len(column) + 1, offset=8 * column.offset)
    if ends[-1] == ends[0]:
        return TextValues(NO_TEXTS.content, ends - ends[0])
    return TextValues(np.frombuffer(content, dtype=np.uint8)[ends[0] : ends[-1]], ends - ends[0])


def _vocabulary_keys(vocabulary: Vocabulary) -> VocabularyKeys:
    values = vocabulary.values.drop_nulls()
    places = np.flatnonzero(vocabulary.values.is_not_null().to_numpy()).astype(np.int32)
    is_text = values.dtype == pl.String
    hashes = hash_texts(*_texts(values)) if is_text else hash_integers(values.to_numpy())
    order = np.argsort(hashes)
    texts = _texts(values.gather(order)) if is_text else None
    return VocabularyKeys(hashes[order], places[order], vocabulary.tail_buckets, texts)


def _flat_weights(column: pl.Series) -> Tensor:
    return torch.tensor(column.drop_nulls().explode(empty_as_null=False).to_numpy(), dtype=torch.float32)


def _jagged(ids: NDArray[np.int32], lengths: NDArray[Any]) -> JaggedTensor:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return JaggedTensor(values=torch.from_numpy(ids), offsets=torch.from_numpy(offsets))
