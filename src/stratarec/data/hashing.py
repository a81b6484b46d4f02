"""Hashes that stay the same across versions, platforms and runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import xxhash
from numpy.typing import NDArray

from stratarec.errors import DataError
from stratarec.io.sealed import Count, Model
from stratarec.kernels.random import mix_array
from stratarec.kernels.random.reference import mix

_SEED = 0x5DEECE66D
_MASK = (1 << 64) - 1
# Up to this number of strings, hashing all is faster than hashing distinct strings and joining.
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
    return mix_array(values.view(np.uint64) + np.uint64(_SEED))


def hash_text(value: str) -> int:
    """Return `stable_hash` of one string."""
    return xxhash.xxh3_64_intdigest(value.encode())


def hash_texts(values: Sequence[str]) -> NDArray[np.uint64]:
    """Return `stable_hash` of valid strings, without a Python function call for each."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, map(str.encode, values)), dtype=np.uint64, count=len(values))


def hash_integer(value: int) -> int:
    """Return `stable_hash` of one integer."""
    return mix((value + _SEED) & _MASK)


class HashRule(Model):
    """Description of a hash function, with which other programs can implement it."""

    function: str
    """``xxh3_64``, or ``splitmix64`` for its finaliser."""
    seed: Count
    input: str
    """Input of the function: bytes or an integer."""
    steps: str
    """Steps from the input to the hash."""

    @classmethod
    def of(cls, kind: str) -> HashRule:
        """Describe `stable_hash` for values of a Polars type: ``String``, ``Int64`` or ``UInt64``."""
        if kind == "String":
            return cls(
                function="xxh3_64",
                seed=0,
                input="the bytes of the value in UTF-8, without a length or an end",
                steps="hash = XXH3_64bits(bytes), the variant of xxHash with 64 bits and the seed 0",
            )
        return cls(
            function="splitmix64",
            seed=_SEED,
            input="the value as an integer of 64 bits, a negative one in two's complement",
            steps="x = value + seed; x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; "
            "hash = x ^ (x >> 31); all without a sign and modulo 2^64",
        )


def unit_interval(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Convert hashes to numbers in [0, 1), by their upper bits."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
