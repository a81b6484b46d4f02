"""Ids of values by binary search: a join reads the whole vocabulary each time, this costs little for few values.

Integers are searched themselves, text by its hash, which the tail needs as well; a text that is found is compared.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.hashing import hash_integer, hash_integers, hash_text, hash_texts
from stratarec.data.vocabulary import MISSING, Vocabulary

# Texts whose hashes are made at once.
_PIECE = 1 << 16


class ValueIndex:
    """The ids of values, as `Vocabulary.encode` gives them.

    Notes
    -----
    Takes 12 bytes a value beside the vocabulary's own values.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._values = vocabulary, vocabulary.values
        self.is_text = self._values.dtype == pl.String
        there = self._values.drop_nulls()
        keys = _hashes(there) if self.is_text else there.to_numpy()
        order = np.argsort(keys, kind="stable")
        places = np.flatnonzero(self._values.is_not_null().to_numpy())
        self._keys, self._places = keys[order], places[order].astype(np.int32)
        # For one value at a time: an item of a memory view costs a tenth of an array's.
        self._key_view, self._place_view = self._keys.data, self._places.data
        again = np.flatnonzero(self._keys[1:] == self._keys[:-1]) + 1
        self._same_hash = {self._values[int(place)]: int(place) for place in self._places[again]}

    @property
    def type(self) -> pl.DataType:
        """Of the values."""
        return self._values.dtype

    def ids(self, values: pl.Series) -> NDArray[np.int32]:
        """``[N]`` ids of values of that type; null becomes `MISSING`."""
        if not values.null_count():
            return self._present(values)
        ids = np.full(len(values), MISSING, dtype=np.int32)
        ids[values.is_not_null().to_numpy()] = self._present(values.drop_nulls())
        return ids

    def id_of(self, value: int | str) -> int:
        """The id of one value that the type of the vocabulary can hold."""
        key = hash_text(value) if isinstance(value, str) else value
        place = bisect_left(self._key_view, key)
        if place < len(self._key_view) and self._key_view[place] == key:
            found, buckets = self._place_view[place], self._vocabulary.tail_buckets
            if not isinstance(value, str) or self._values[found] == value:
                return buckets + found
            if value in self._same_hash:
                return buckets + self._same_hash[value]
        hashed = key if isinstance(value, str) else hash_integer(value)
        return hashed % self._vocabulary.tail_buckets

    def _present(self, values: pl.Series) -> NDArray[np.int32]:
        keys = _hashes(values) if self.is_text else values.to_numpy()
        if not len(self._keys):
            return self._tail(keys)
        nearest = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        place: NDArray[np.int32] = self._places[nearest]
        wrong = (self._values[place] != values).to_numpy() if self.is_text else self._keys[nearest] != keys
        found: NDArray[np.int32] = place + np.int32(self._vocabulary.tail_buckets)
        strange = np.flatnonzero(wrong)
        found[strange] = self._tail(keys[strange])
        if self._same_hash:
            for at in strange.tolist():
                if values[at] in self._same_hash:
                    found[at] = self._vocabulary.tail_buckets + self._same_hash[values[at]]
        return found

    def _tail(self, keys: NDArray[Any]) -> NDArray[np.int32]:
        hashes = keys if self.is_text else hash_integers(keys)
        buckets = np.uint64(self._vocabulary.tail_buckets)
        return (hashes % buckets).astype(np.int32)


def _hashes(texts: pl.Series) -> NDArray[np.uint64]:
    """``[N]`` the hash of each text."""
    found = np.empty(len(texts), dtype=np.uint64)
    for first in range(0, len(texts), _PIECE):
        part = texts[first : first + _PIECE].to_list()
        found[first : first + len(part)] = hash_texts(part)
    return found
