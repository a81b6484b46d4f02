"""Common parts of codecs: description, layout of records, noise for stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.random.reference import mix
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.bits import add32, float_bits, fold32, multiply32

U, W, F = np.uint64, np.uint32, np.float32
Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

MAGNITUDE = W(0x7FFFFFFF)
# Float32 bits of the largest finite magnitude of each float format; larger numbers, infinity and
# NaN are invalid.
FP32_LIMIT = 0x7F7FFFFF
FP16_LIMIT = 0x477FE000
BF16_LIMIT = 0x7F7F0000

# Column d of a record's noise is murmur3's finalizer applied to (low + d * STEP) ^ high, a Weyl
# sequence of 32 bits; low and high are the halves of the record's key.
STEP = 0x9E3779B9
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35


class Form(NamedTuple):
    """`RecordLayout` for kernels: position of the kind in `KINDS`, and first byte of each part of a
    record.
    """

    kind: int
    stochastic: bool
    wide_parameters: bool
    wide_state: bool
    width: int
    row_state: bool
    full_state: int
    parameters_at: int
    row_state_at: int
    full_state_at: int
    clock_at: int
    record_bytes: int


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Storage format of weights.

    Parameters
    ----------
    name : str
        Name in recipes, plans, checkpoints and exports.
    about : str
        Layout of the encoded weights, for the README of an export; empty if the name says enough.
    weight_bytes : callable
        Returns the number of bytes of D encoded weights.
    levels : int
        Greatest code, for kinds that store codes with a scale and an offset; otherwise 0.
    encode, decode : callable
        Compiled ``encode(form, values, start, records, at, base)``, which returns whether the kind
        can represent every number, and ``decode(form, values, start, records, at)``. `form` is a
        `Form`, the row is D floats of flat `values` from `start` on, the record starts at byte `at`
        of flat `records`, `base` is the key of its noise.
    plain_encode : callable
        `encode` in NumPy. Takes weights ``[D]``, random bits ``[D]`` (None rounds to nearest), and
        whether scale and offset are float32. Returns None if the kind cannot represent the weights.
    plain_decode : callable
        `decode` in NumPy. Takes encoded bytes, D, and whether scale and offset are float32.
    encode_rate, decode_rate : float
        Float32 bytes per second on one core, for the planner; infinite for a copy, which costs only
        memory traffic.
    penalty : float
        Cost of the loss of precision, for ``precision: auto``: the planner adds this multiple of a
        table's compute seconds to the cost of the kind. With 0.5 for int8, a table is stored as
        float32 in a slower tier instead of as int8 in DRAM, if the slower tier adds less than half
        the table's compute time. With 50 for int4, that codec is used only if nothing else fits.
        The figures are a judgement, not a measurement: int8 under a cache trains to the accuracy of
        float32 (arXiv 2010.11305), int4 not always.
    automatic : bool
        Whether ``precision: auto`` may choose the kind.
    on_gpu : bool
        Whether `kernels.codec.gpu` has the kind too, for rows that are trained in GPU memory.
    """

    name: str
    about: str
    weight_bytes: Callable[[int], int]
    levels: int = 0
    encode: Callable[..., Any]
    decode: Callable[..., Any]
    plain_encode: Callable[[Floats, Words | None, bool], bytes | None]
    plain_decode: Callable[[bytes, int, bool], Floats]
    encode_rate: float
    decode_rate: float
    penalty: float
    automatic: bool = True
    on_gpu: bool = False


# Results are cast to 32 bits after every operation: Numba widens 32-bit words to 64 bits, and LLVM
# narrows them again where it sees the cast. It does not narrow the mixing of the noise, so products
# and shifts there are 32-bit intrinsics; otherwise half as many lanes would be used.
@njit(**BODY)
def finish(weyl, base):
    """Return 32 random bits: murmur3's finalizer applied to `weyl` xor the high half of `base`."""
    word = W(weyl ^ W(base >> U(32)))
    word = multiply32(fold32(word, W(16)), W(MIX_1))
    word = multiply32(fold32(word, W(13)), W(MIX_2))
    return fold32(word, W(16))


@njit(**BODY)
def words(base, column):
    """Return 32 random bits, a function of the record's key `base` and a column."""
    return finish(add32(W(base), multiply32(W(column), W(STEP))), base)


@njit(**BODY)
def fraction(word):
    """Return 24 bits of `word` as a float in [0, 1)."""
    # Through int32: processors convert signed integers to float in one instruction, but most have
    # none for unsigned ones.
    return F(np.int32(word >> W(8))) * F(2.0**-24)


@njit(**BODY)
def unit(base, column):
    """Return a random 24-bit float in [0, 1), a function of a record's key and a column."""
    return fraction(words(base, column))


@njit(**BODY)
def fits(values, start, D, limit):
    """Whether every magnitude in the row is at most `limit`, which is given as float32 bits."""
    # A running maximum instead of an early return: a loop without an exit is vectorized.
    most = W(0)
    for d in range(D):
        most = max(most, W(float_bits(values[start + d]) & MAGNITUDE))
    return most <= W(limit)


def noise(key: int, batch_number: int, columns: range) -> Words:
    """Return 32 random bits for each column, a function of it, `key` and `batch_number`."""
    base = mix(key ^ mix((batch_number * 0x9E3779B97F4A7C15 + 1) & ((1 << 64) - 1)))
    low, high = base & 0xFFFFFFFF, base >> 32
    word = np.array([((low + column * STEP) & 0xFFFFFFFF) ^ high for column in columns], dtype=np.uint32)
    word = (word ^ (word >> np.uint32(16))) * np.uint32(MIX_1)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(MIX_2)
    return word ^ (word >> np.uint32(16))


def plain_unit(word: Words) -> Floats:
    """Return 24 bits of each word as a float32 in [0, 1)."""
    return (word >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def plain_fits(values: Floats, limit: int) -> bool:
    """Whether every magnitude is at most `limit`, which is given as float32 bits."""
    return bool(((values.view(np.uint32) & MAGNITUDE) <= limit).all())
