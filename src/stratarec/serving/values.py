"""Ids of values by binary search: a join reads the whole vocabulary each time, this costs little for few values."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.vocabulary import MISSING, Vocabulary


class ValueIndex:
    """The ids of values, as `Vocabulary.encode` gives them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        order = vocabulary.values.arg_sort()
        self._vocabulary = vocabulary
        self._sorted = vocabulary.values.gather(order).set_sorted()
        self._ids = order.to_numpy().astype(np.int32)

    @property
    def type(self) -> pl.DataType:
        """Of the values."""
        return self._sorted.dtype

    def ids(self, values: pl.Series) -> NDArray[np.int32]:
        """``[N]`` ids of values of that type; null becomes `MISSING`."""
        ids = np.full(len(values), MISSING, dtype=np.int32)
        known = values.is_not_null().to_numpy()
        ids[known] = self._present(values.drop_nulls())
        return ids

    def _present(self, values: pl.Series) -> NDArray[np.int32]:
        if not len(self._sorted):
            return self._vocabulary.tail_ids(values).astype(np.int32)
        place = self._sorted.search_sorted(values, side="left").to_numpy()
        place = np.minimum(place, len(self._sorted) - 1)
        found: NDArray[np.int32] = self._ids[place]
        strange = np.flatnonzero((self._sorted.gather(place) != values).to_numpy())
        if len(strange):
            found[strange] = self._vocabulary.tail_ids(values.gather(strange))
        return found
