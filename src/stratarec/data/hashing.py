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


def stable_hash(values: pl.Series) -> NDArray[np.uint64]:
    """``[N]`` 64-bit hash of integers or strings; nulls hash as their row in a fixed way: all alike.

    Equal integers have equal hashes whatever their type.
    """
    if values.dtype.is_integer():
        signed = values.reinterpret(signed=True) if values.dtype == pl.UInt64 else values.cast(pl.Int64)
        return hash_integers(signed.fill_null(-1).to_numpy())
    if values.dtype != pl.String:
        raise DataError(f"column {values.name!r} is {values.dtype}, expected integers or text")
    distinct = values.unique()
    hashes = [hash_text(value) if value is not None else 0 for value in distinct]
    codes = pl.DataFrame({"value": distinct, "hash": pl.Series(hashes, dtype=pl.UInt64)})
    joined = values.to_frame("value").join(codes, on="value", how="left", maintain_order="left", nulls_equal=True)
    return joined["hash"].to_numpy()


def hash_integers(values: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`stable_hash` of integers of 64 bits."""
    return mix_array(values.view(np.uint64) + np.uint64(_SEED))


def hash_text(value: str) -> int:
    """`stable_hash` of one text."""
    return xxhash.xxh3_64_intdigest(value.encode())


def hash_texts(values: Sequence[str]) -> NDArray[np.uint64]:
    """`stable_hash` of texts that are valid; without a call of Python for each."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, map(str.encode, values)), dtype=np.uint64, count=len(values))


def hash_integer(value: int) -> int:
    """`stable_hash` of one integer."""
    return mix((value + _SEED) & _MASK)


class HashRule(Model):
    """A hash in words and numbers, by which others than StrataRec can compute it."""

    function: str
    """``xxh3_64``, or ``splitmix64`` for its finaliser."""
    seed: Count
    input: str
    """What is hashed."""
    steps: str
    """How the hash follows from the input."""

    @classmethod
    def of(cls, kind: str) -> HashRule:
        """What `stable_hash` does with values of a Polars type: ``String``, ``Int64`` or ``UInt64``."""
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
    """The hash as a number in [0, 1), by its upper bits."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
