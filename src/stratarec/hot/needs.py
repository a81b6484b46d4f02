"""Which rows of each part a sample needs: it is hot when no part has fewer hot rows than that.

``needs[i, p]`` is the number of first rows of part p among which all lookups of sample i lie: 0 where it looks up none,
all of a part that is hot as a whole or not at all. A bag that several samples share is looked at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.dataset import Dataset
from stratarec.data.names import events
from stratarec.data.row_group import RowGroup
from stratarec.hot.parts import Counts, Part

Needs = NDArray[np.int32]


class NeedsReader:
    """Reads what the samples of a data set need.

    Parameters
    ----------
    dataset : Dataset
    parts : sequence of Part
        Of its tables.
    """

    def __init__(self, dataset: Dataset, parts: Sequence[Part]) -> None:
        self._parts, self._windows = parts, dataset.windows
        self._tables = {feature.name: feature.vocabulary for feature in dataset.schema.sparse}
        self._groups = {name: group for group, names in dataset.groups.items() for name in names}

    def of(self, row_group: RowGroup) -> Needs:
        """``[samples, parts]`` of a row group, in the order of storage."""
        found = np.zeros((row_group.samples.num_rows, len(self._parts)), dtype=np.int32)
        for feature, table in self._tables.items():
            for place, needed in self._feature(row_group, feature, table):
                np.maximum(found[:, place], needed, out=found[:, place])
        return found

    def _feature(self, row_group: RowGroup, feature: str, table: str) -> Iterator[tuple[int, Needs]]:
        """What the samples need of each part of a feature's table."""
        holder = feature if feature in self._windows else self._groups.get(feature)
        values, start, length = _bags(row_group, feature, holder)
        pointers = None if holder is None else row_group.pointers(holder)
        for place, part in enumerate(self._parts):
            if part.table == table:
                needed = bag_needs(values, start, length, part)
                yield place, needed if pointers is None else needed[pointers]


def bag_needs(
    values: NDArray[np.int32], start: NDArray[np.int64] | None, length: NDArray[np.int64] | None, part: Part
) -> Needs:
    """What each bag ``values[start[i]:start[i] + length[i]]`` needs of a part; bags may overlap.

    Parameters
    ----------
    start, length : ndarray or None
        None where every value is a bag of its own, and none if it is negative.
    """
    inside = (values >= part.first) & (values - np.int32(part.first) < part.rows)
    rows = np.int32(part.rows) if part.whole else values - np.int32(part.first) + np.int32(1)
    each: Needs = np.where(inside, rows, np.int32(0))
    if start is None or length is None:
        return each
    # Every other piece is the one from the end of a bag to the next: it is left out again. The zero is for bags that
    # end where the values do.
    bounds = np.stack([start, start + length], axis=1).ravel()
    found = np.maximum.reduceat(np.append(each, np.int32(0)), bounds)[::2] if len(bounds) else each[:0]
    return np.where(length > 0, found, np.int32(0))


def are_hot(needs: Needs, hot: Counts) -> NDArray[np.bool_]:
    """``[N]`` which samples need none but the first ``hot[p]`` rows of each part."""
    found: NDArray[np.bool_] = np.all(needs <= hot.astype(np.int32), axis=1)
    return found


def _bags(
    row_group: RowGroup, feature: str, holder: str | None
) -> tuple[NDArray[np.int32], NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Values, starts and lengths of a feature's distinct bags; of a feature of one id the values alone."""
    if holder == feature and feature in row_group.tables:
        windows, values = row_group.tables[feature], row_group.tables[events(feature)]["id"].to_numpy()
        return values, *(windows[name].to_numpy().astype(np.int64) for name in ("start", "length"))
    column = (row_group.samples if holder is None else row_group.tables[holder])[feature]
    if not pa.types.is_list(column.type):
        return column.to_numpy(), None, None
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # an empty column stays chunked
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], column.type)
    offsets = whole.offsets.to_numpy().astype(np.int64)
    return whole.values.to_numpy(), offsets[:-1], np.diff(offsets)
