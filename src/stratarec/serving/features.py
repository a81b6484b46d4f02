"""Convert raw columns or rows to the inputs of a model. The inputs equal what `prepare` makes of the same values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

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
from stratarec.data.hashing import hash_encoded, hash_integers, hash_texts
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.transforms import Spread, Standardizer
from stratarec.data.vocabulary import Vocabulary
from stratarec.errors import DataError
from stratarec.kernels.value_index import Query, TextValues, ValueIndex, VocabularyKeys

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
        self._types = {name: vocabulary.values.dtype for name, vocabulary in vocabularies.items()}
        self._index = ValueIndex([_vocabulary_keys(vocabulary) for vocabulary in vocabularies.values()])
        numbers = {name: number for number, name in enumerate(vocabularies)}
        # Number of the vocabulary of each sparse feature.
        self._numbers = np.array([numbers[feature.vocabulary] for feature in schema.sparse], dtype=np.int64)
        kinds = [self._types[feature.vocabulary] for feature in schema.sparse]
        self._is_text = np.array([kind == pl.String for kind in kinds], dtype=bool)
        self._is_unsigned = [kind == pl.UInt64 for kind in kinds]
        self._keys = tuple(feature.name for feature in schema.sparse)
        self._plain_rows = PlainRowReader(schema, self._types)

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
        """Encode plain Python values without Polars, which is faster. None if a value needs conversion, or rows are too
        many.
        """
        plain = self._plain_rows.read(frame)
        if plain is None:
            return None
        numbers, values, lengths = plain
        rows = numbers.shape[1]
        counts = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
        try:
            texts = [text.encode() for part, flag in zip(values, self._is_text, strict=True) if flag for text in part]
            ids = self._find(self._numbers, self._is_text, counts, self._integer_bits(values), texts)
        except (UnicodeError, OverflowError):  # a text that cannot be encoded, or an integer beyond 64 bits
            return None
        offsets = None
        if any(each is not None for each in lengths):
            sizes = chain.from_iterable([1] * rows if each is None else each for each in lengths)
            offsets = torch.tensor([0, *accumulate(sizes)])
        sparse = KeyedJagged(keys=self._keys, values=torch.from_numpy(ids), offsets=offsets, batch_size=rows)
        return torch.from_numpy(self._standard.transform(numbers)), sparse

    def _integer_bits(self, values: Sequence[list[Any]]) -> NDArray[np.uint64]:
        """Return the bits of the integers of all features, one feature after the other."""
        flags = zip(values, self._is_text, self._is_unsigned, strict=True)
        parts = [(part, is_unsigned) for part, is_text, is_unsigned in flags if not is_text]
        if any(is_unsigned and part and min(part) < 0 for part, is_unsigned in parts):
            raise OverflowError  # NumPy 1 does not raise it
        if any(is_unsigned for _, is_unsigned in parts):
            arrays = [np.array(part, dtype=np.uint64 if is_unsigned else np.int64) for part, is_unsigned in parts]
            return np.concatenate([array.view(np.uint64) for array in arrays])
        # One array for all features, because creating an array takes about a microsecond.
        return np.array(list(chain.from_iterable(part for part, _ in parts)), dtype=np.int64).view(np.uint64)

    def _find(
        self, numbers: NDArray[np.int64], is_text: NDArray[np.bool_], counts: NDArray[np.int64],
        integers: NDArray[np.uint64], texts: Sequence[bytes],
    ) -> NDArray[np.int32]:  # fmt: skip
        """Return the ids of the values of several features, one feature after the other.

        Parameters
        ----------
        numbers, is_text, counts : ndarray
            ``[F]`` number of each feature's vocabulary, whether its values are text, and their number.
        integers : ndarray
            Bits of the values of all features that are not text.
        texts : sequence of bytes
            The values of all other features.
        """
        first_text = len(integers)
        hashes = np.concatenate([hash_integers(integers), hash_encoded(texts, len(texts))])
        ends = np.where(is_text, first_text + (counts * is_text).cumsum(), (counts * ~is_text).cumsum())
        return self._index.find(
            Query(hashes=hashes, sources=ends - counts, counts=counts, vocabularies=numbers, texts=_text_values(texts))
        )

    def encode_columns(self, columns: Mapping[str, pl.Series], origin: str) -> tuple[Tensor, KeyedJagged]:
        """Encode columns that already have the types of the schema. Error messages name `origin` as their origin."""
        schema = self._schema
        rows = len(next(iter(columns.values())))
        raw = np.empty((len(schema.dense), rows), dtype=np.float64)
        for place, feature in enumerate(schema.dense):
            raw[place] = columns[feature.name].cast(pl.Float64).to_numpy()  # a missing value becomes NaN
        dense = self._standard.transform(raw)
        bags = {
            feature.name: self._bags(columns[feature.name], feature, number, origin)
            for feature, number in zip(schema.sparse, self._numbers, strict=True)
        }
        weights = {f.name: _flat_weights(columns[weights_of(f.name)]) for f in schema.weighted}
        return torch.from_numpy(dense), KeyedJagged.from_features(with_weights(bags, weights), len(dense))

    def _bags(self, column: pl.Series, feature: SparseFeature, number: np.int64, origin: str) -> JaggedTensor:
        if feature.kind == "single":
            present = column.is_not_null().to_numpy()
            return _jagged(self._ids(column.drop_nulls(), feature, number, origin), present)
        if feature.kind == "history":  # which a frame may have at any length
            column = column.list.tail(feature.max_length)
        lengths = column.list.len().fill_null(0).to_numpy()
        flat = column.drop_nulls().explode(empty_as_null=False)
        return _jagged(self._ids(flat, feature, number, origin), lengths)

    def _ids(self, values: pl.Series, feature: SparseFeature, number: np.int64, origin: str) -> NDArray[np.int32]:
        kind = self._types[feature.vocabulary]
        if values.dtype != kind:
            try:
                values = cast_exactly(values, kind)
            except pl.exceptions.PolarsError as error:
                raise DataError(
                    f"{origin}: column {feature.name!r} is {values.dtype}, with values that are no {kind}, "
                    f"the type in the log ({' '.join(str(error).split())[:200]})"
                ) from error
        ids, is_text = np.empty(len(values), dtype=np.int32), kind == pl.String
        for first in range(0, len(values), _HASH_BATCH):
            part = values[first : first + _HASH_BATCH]
            integers = np.zeros(0, dtype=np.uint64) if is_text else part.to_numpy().view(np.uint64)
            texts = list(map(str.encode, part.to_list())) if is_text else []
            ids[first : first + len(part)] = self._find(
                np.array([number]), np.array([is_text]), np.array([len(part)]), integers, texts
            )
        return ids


def _text_values(encoded: Sequence[bytes]) -> TextValues:
    offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)).cumsum(out=offsets[1:])
    # NumPy refuses empty buffers.
    return TextValues(np.frombuffer(b"".join(encoded) or b"\0", dtype=np.uint8), offsets)


def _vocabulary_keys(vocabulary: Vocabulary) -> VocabularyKeys:
    values = vocabulary.values.drop_nulls()
    places = np.flatnonzero(vocabulary.values.is_not_null().to_numpy()).astype(np.int32)
    if values.dtype != pl.String:
        hashes = hash_integers(values.to_numpy())
        order = np.argsort(hashes)
        return VocabularyKeys(hashes[order], places[order], vocabulary.tail_buckets, None)
    hashes = np.empty(len(values), dtype=np.uint64)
    for first in range(0, len(values), _HASH_BATCH):
        texts = values[first : first + _HASH_BATCH].to_list()
        hashes[first : first + len(texts)] = hash_texts(texts)
    order = np.argsort(hashes)
    column = pa.array(values.gather(order).to_arrow(), type=pa.large_string())
    _, offsets, content = column.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64, count=len(column) + 1, offset=8 * column.offset)
    text = np.frombuffer(content, dtype=np.uint8)[ends[0] : ends[-1]] if ends[-1] > ends[0] else np.zeros(0, np.uint8)
    return VocabularyKeys(hashes[order], places[order], vocabulary.tail_buckets, TextValues(text, ends - ends[0]))


def _flat_weights(column: pl.Series) -> Tensor:
    return torch.tensor(column.drop_nulls().explode(empty_as_null=False).to_numpy(), dtype=torch.float32)


def _jagged(ids: NDArray[np.int32], lengths: NDArray[Any]) -> JaggedTensor:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return JaggedTensor(values=torch.from_numpy(ids), offsets=torch.from_numpy(offsets))
