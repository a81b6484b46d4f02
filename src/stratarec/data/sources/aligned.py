"""Lists that belong together place by place: columns of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa


def complete(lists: Sequence[pl.Series]) -> list[pl.Series]:
    """Lists that are as long as each other in every row, without the places at which one of them holds nothing."""
    flat = [column.drop_nulls().explode(empty_as_null=False) for column in lists]
    known = np.logical_and.reduce([column.is_not_null().to_numpy() for column in flat])
    if known.all():
        return list(lists)
    lengths = lists[0].list.len().fill_null(0).to_numpy()
    rows = np.repeat(np.arange(len(lengths)), lengths)[known]
    offsets = np.concatenate([[0], np.bincount(rows, minlength=len(lengths)).cumsum()]).astype(np.int64)
    return [
        pl.Series(column.name, pa.LargeListArray.from_arrays(offsets, values.filter(pl.Series(known)).to_arrow()))
        for column, values in zip(lists, flat, strict=True)
    ]
