"""Hashes that stay the same across versions, platforms and runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import xxhash
from numpy.typing import NDArray

from stratarec.errors import DataError
from stratarec.kernels.random import HASH_SEED, mix_array

# Maximum number of strings for which hashing every string is faster than hashing distinct strings
# and joining.
_FEW = 1000


def stable_hash(values: pl.Series) -> NDArray[np.uint64]:
    """Return ``[N]`` 64-bit hashes of integers or strings; all nulls have the same hash.

    Equal integers of different types have equal hashes.
    """
    if values.dtype.is_integer():
        signed = values.reinterpret(signed=True) if values.dtype == pl.UInt64 else values.cast(pl.Int64)
        return hash_integers(signed.fill_null(-1).to_numpy())
    if values.dtype != pl.String:
        raise DataError(f"column {values.name!r} is {values.dtype}, expected integers or text")
    if len(values) < _FEW and not values.null_count():
        return hash_texts(values.to_list())
    distinct = values.unique().drop_nulls()
    codes = pl.DataFrame({"value": distinct, "hash": hash_texts(distinct.to_list())})
    joined = values.to_frame("value").join(codes, on="value", how="left", maintain_order="left")
    return joined["hash"].fill_null(0).to_numpy()


def hash_integers(values: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `stable_hash` of 64-bit integers."""
    return mix_array(values.view(np.uint64) + np.uint64(HASH_SEED))


def hash_texts(values: Sequence[str]) -> NDArray[np.uint64]:
    """Return `stable_hash` of strings that UTF-8 can encode."""
    # Without a Python function for each string.
    hashes = map(xxhash.xxh3_64_intdigest, map(str.encode, values))
    return np.fromiter(hashes, dtype=np.uint64, count=len(values))


def unit_interval(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Convert hashes to numbers in [0, 1). Only the upper bits of a hash are used."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
