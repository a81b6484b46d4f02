"""Convert raw columns or rows to the inputs of a model. The inputs equal what `prepare` makes of the same values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate, chain
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import JaggedTensor, KeyedJagged, with_weights
from stratarec.data.column_names import weights_of
from stratarec.data.columns.frames import FRAME, PlainRowReader, read_frame
from stratarec.data.columns.text_values import cast_exactly
from stratarec.data.hashing import hash_integer, hash_integers, hash_text, hash_texts
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.transforms import Spread, Standardizer
from stratarec.data.vocabulary import MISSING, Vocabulary
from stratarec.errors import DataError

# Number of strings that are hashed at a time.
_HASH_BATCH = 1 << 16


class FeatureEncoder:
    """Encoder of raw values, built from a schema, moments and vocabularies; it does not need the data set.

    Parameters
    ----------
    schema : Schema
    moments : mapping of str to Spread
        Moments of each dense column.
    vocabularies : mapping of str to Vocabulary
    """

    def __init__(self, schema: Schema, moments: Mapping[str, Spread], vocabularies: Mapping[str, Vocabulary]) -> None:
        self._schema, self._standard = schema, Standardizer(schema.dense, moments)
        self._indexes = {name: ValueIndex(vocabulary) for name, vocabulary in vocabularies.items()}
        self._keys = tuple(feature.name for feature in schema.sparse)
        self._plain_rows = PlainRowReader(schema, {name: index.type for name, index in self._indexes.items()})

    def encode(self, frame: Any) -> tuple[Tensor, KeyedJagged]:
        """Return ``[N, F_dense]`` standardized numbers, and the ids (and weights, if any) of every sparse feature.

        Raises
        ------
        DataError
            If a column is missing or has a value that `prepare` would refuse in a log.
        """
        encoded = self._encode_plain_rows(frame)
        return encoded if encoded is not None else self.encode_columns(read_frame(frame, self._schema), FRAME)

    def _encode_plain_rows(self, frame: Any) -> tuple[Tensor, KeyedJagged] | None:
        """Encode a few rows cell by cell, which is faster. None if a value needs conversion, or rows are too many."""
        rows = self._plain_rows.read(frame)
        if rows is None:
            return None
        numbers, values = rows
        id_of = [self._indexes[feature.vocabulary].id_of for feature in self._schema.sparse]
        try:
            bags = [[id_of[place](cell) for cell in cells] for place, lists in enumerate(values) for cells in lists]
        except UnicodeError:  # a text that cannot be hashed
            return None
        ids = np.array(list(chain.from_iterable(bags)), dtype=np.int32)
        offsets = np.array([0, *accumulate(map(len, bags))], dtype=np.int64)
        sparse = KeyedJagged(
            keys=self._keys,
            values=torch.from_numpy(ids),
            offsets=torch.from_numpy(offsets),
            batch_size=numbers.shape[1],
        )
        return torch.from_numpy(self._standard.transform(numbers)), sparse

    def encode_columns(self, columns: Mapping[str, pl.Series], origin: str) -> tuple[Tensor, KeyedJagged]:
        """Encode columns that already have the types of the schema. Error messages name `origin` as their origin."""
        schema = self._schema
        rows = len(next(iter(columns.values())))
        raw = np.empty((len(schema.dense), rows), dtype=np.float64)
        for place, feature in enumerate(schema.dense):
            raw[place] = columns[feature.name].cast(pl.Float64).to_numpy()  # a missing value becomes NaN
        dense = self._standard.transform(raw)
        bags = {feature.name: self._bags(columns[feature.name], feature, origin) for feature in schema.sparse}
        weights = {f.name: _flat_weights(columns[weights_of(f.name)]) for f in schema.weighted}
        return torch.from_numpy(dense), KeyedJagged.from_features(with_weights(bags, weights), len(dense))

    def _bags(self, column: pl.Series, feature: SparseFeature, origin: str) -> JaggedTensor:
        if feature.kind == "single":
            ids = self._ids(column, feature, origin)
            return _jagged(ids[ids != MISSING], ids != MISSING)
        if feature.kind == "history":  # which a frame may have at any length
            column = column.list.tail(feature.max_length)
        lengths = column.list.len().fill_null(0).to_numpy()
        flat = column.drop_nulls().explode(empty_as_null=False)
        return _jagged(self._ids(flat, feature, origin), lengths)

    def _ids(self, values: pl.Series, feature: SparseFeature, origin: str) -> NDArray[np.int32]:
        index = self._indexes[feature.vocabulary]
        if values.dtype != index.type:
            try:
                values = cast_exactly(values, index.type)
            except pl.exceptions.PolarsError as error:
                raise DataError(
                    f"{origin}: column {feature.name!r} is {values.dtype}, with values that are no {index.type}, "
                    f"the type in the log ({' '.join(str(error).split())[:200]})"
                ) from error
        return index.ids(values)


def _flat_weights(column: pl.Series) -> Tensor:
    return torch.tensor(column.drop_nulls().explode(empty_as_null=False).to_numpy(), dtype=torch.float32)


def _jagged(ids: NDArray[np.int32], lengths: NDArray[Any]) -> JaggedTensor:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return JaggedTensor(values=torch.from_numpy(ids), offsets=torch.from_numpy(offsets))


class ValueIndex:
    """Index of a vocabulary that gives the same ids as `Vocabulary.encode` and is faster for a few values.

    `Vocabulary.encode` is a join, which reads the whole vocabulary in each call. This index looks up integers, or
    hashes of strings, by binary search. If the hash of a string matches, the strings themselves are compared.

    Notes
    -----
    The index takes 12 bytes per value, in addition to the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._values = vocabulary, vocabulary.values
        self._is_text = self._values.dtype == pl.String
        keys = self._keys_of(self._values.drop_nulls())
        order = np.argsort(keys, kind="stable")
        places = np.flatnonzero(self._values.is_not_null().to_numpy())
        self._keys, self._places = keys[order], places[order].astype(np.int32)
        # Single values are read from memory views, which takes a tenth of the time of reading from a NumPy array.
        self._key_view, self._place_view = self._keys.data, self._places.data
        repeated = np.flatnonzero(self._keys[1:] == self._keys[:-1]) + 1
        self._same_hash = {self._values[int(place)]: int(place) for place in self._places[repeated]}

    @property
    def type(self) -> pl.DataType:
        """Type of the values."""
        return self._values.dtype

    def ids(self, values: pl.Series) -> NDArray[np.int32]:
        """Return the ``[N]`` ids of values, whose type must be `type`; null becomes `MISSING`."""
        if not values.null_count():
            return self._ids_of_present(values)
        ids = np.full(len(values), MISSING, dtype=np.int32)
        ids[values.is_not_null().to_numpy()] = self._ids_of_present(values.drop_nulls())
        return ids

    def id_of(self, value: int | str) -> int:
        """Return the id of one value that the type of the vocabulary can hold."""
        key = hash_text(value) if isinstance(value, str) else value
        place = bisect_left(self._key_view, key)
        if place < len(self._key_view) and self._key_view[place] == key:
            value_place, buckets = self._place_view[place], self._vocabulary.tail_buckets
            if not isinstance(value, str) or self._values[value_place] == value:
                return buckets + value_place
            if value in self._same_hash:
                return buckets + self._same_hash[value]
        hashed = key if isinstance(value, str) else hash_integer(value)
        return hashed % self._vocabulary.tail_buckets

    def _ids_of_present(self, values: pl.Series) -> NDArray[np.int32]:
        keys = self._keys_of(values)
        if not len(self._keys):
            return self._tail_ids(keys)
        nearest = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        places: NDArray[np.int32] = self._places[nearest]
        differs = (self._values[places] != values).to_numpy() if self._is_text else self._keys[nearest] != keys
        ids: NDArray[np.int32] = places + np.int32(self._vocabulary.tail_buckets)
        unseen = np.flatnonzero(differs)
        ids[unseen] = self._tail_ids(keys[unseen])
        if self._same_hash:
            for place in unseen.tolist():
                if values[place] in self._same_hash:
                    ids[place] = self._vocabulary.tail_buckets + self._same_hash[values[place]]
        return ids

    def _tail_ids(self, keys: NDArray[Any]) -> NDArray[np.int32]:
        hashes = keys if self._is_text else hash_integers(keys)
        return (hashes % np.uint64(self._vocabulary.tail_buckets)).astype(np.int32)

    def _keys_of(self, values: pl.Series) -> NDArray[Any]:
        """Return ``[N]`` keys for the binary search: the integers, or ``uint64`` hashes of strings."""
        if not self._is_text:
            return values.to_numpy()
        hashes = np.empty(len(values), dtype=np.uint64)
        for first in range(0, len(values), _HASH_BATCH):
            texts = values[first : first + _HASH_BATCH].to_list()
            hashes[first : first + len(texts)] = hash_texts(texts)
        return hashes
