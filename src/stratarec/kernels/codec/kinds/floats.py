"""Codecs of floats: IEEE binary32, IEEE binary16 and bfloat16, the upper half of a binary32."""

from __future__ import annotations

from math import inf

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.codec.kinds.base import (
    BF16_LIMIT,
    FP16_LIMIT,
    FP32_LIMIT,
    MAGNITUDE,
    F,
    Floats,
    Kind,
    U,
    W,
    Words,
    fits,
    plain_fits,
    plain_unit,
    unit,
    words,
)
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.bits import (
    bits_float,
    float_bits,
    from_half,
    load_f32,
    load_u16,
    store_f32,
    store_u16,
    to_half,
)


@njit(**BODY)
def put_fp32(values, start, D, records, at):
    for d in range(D):
        store_f32(records, at + U(4) * d, values[start + d])
    # Checked after the copy, while the row is in the L1 cache. Bytes of invalid rows, which are
    # rare, are not used.
    return fits(values, start, D, FP32_LIMIT)


@njit(**BODY)
def get_fp32(values, start, D, records, at):
    for d in range(D):
        values[start + d] = load_f32(records, at + U(4) * d)


@njit(**BODY)
def put_bf16_nearest(values, start, D, records, at):
    for d in range(D):
        bits = float_bits(values[start + d])
        # Half of the last kept bit, minus one if that bit is 0, so that a tie rounds to the even
        # neighbour.
        even = W(W(0x7FFF) + W(W(bits >> W(16)) & W(1)))
        store_u16(records, at + U(2) * d, np.uint16(W(W(bits + even) >> W(16))))
    return fits(values, start, D, BF16_LIMIT)


@njit(**BODY)
def put_bf16(values, start, D, records, at, base, column):
    """Encode bfloat16, rounded stochastically.

    16 random bits are added below the upper half, so the probability of a carry is proportional to
    the dropped part.
    """
    for d in range(D):
        random = W(words(base, column + d) >> W(16))
        store_u16(records, at + U(2) * d, np.uint16(W(W(float_bits(values[start + d]) + random) >> W(16))))
    return fits(values, start, D, BF16_LIMIT)


@njit(**BODY)
def get_bf16(values, start, D, records, at):
    for d in range(D):
        values[start + d] = bits_float(W(W(load_u16(records, at + U(2) * d)) << W(16)))


@njit(**BODY)
def put_fp16(values, start, D, records, at, base):
    """Encode float16, rounded stochastically.

    The neighbours of |w| are 2^max(e - 10, -24) apart, where e is the exponent of w. Dividing by
    this power is exact.
    """
    for d in range(D):
        bits = float_bits(values[start + d])
        # Below 2^-14 half floats are subnormal, and the distance of neighbours no longer shrinks.
        exponent = max(W(bits & W(0x7F800000)), W(113 << 23))
        step = bits_float(W(exponent - W(10 << 23)))
        steps = bits_float(W(bits & MAGNITUDE)) * bits_float(W(W(264 << 23) - exponent))
        floor = np.int32(steps)
        up = F(1.0) if steps - F(floor) > unit(base, d) else F(0.0)
        # Exact, because an integer number of steps is a half float.
        rounded = to_half((F(floor) + up) * step)
        store_u16(records, at + U(2) * d, np.uint16(rounded | np.uint16(W(W(bits >> W(16)) & W(0x8000)))))
    return fits(values, start, D, FP16_LIMIT)


@njit(**BODY)
def encode_fp32(form, values, start, records, at, base):
    return put_fp32(values, start, U(form.width), records, at)


@njit(**BODY)
def decode_fp32(form, values, start, records, at):
    get_fp32(values, start, U(form.width), records, at)


@njit(**BODY)
def encode_fp16(form, values, start, records, at, base):
    D = U(form.width)
    if form.stochastic:
        return put_fp16(values, start, D, records, at, base)
    for d in range(D):
        store_u16(records, at + U(2) * d, to_half(values[start + d]))
    return fits(values, start, D, FP16_LIMIT)


@njit(**BODY)
def decode_fp16(form, values, start, records, at):
    for d in range(U(form.width)):
        values[start + d] = from_half(load_u16(records, at + U(2) * d))


@njit(**BODY)
def encode_bf16(form, values, start, records, at, base):
    if form.stochastic:
        return put_bf16(values, start, U(form.width), records, at, base, U(0))
    return put_bf16_nearest(values, start, U(form.width), records, at)


@njit(**BODY)
def decode_bf16(form, values, start, records, at):
    get_bf16(values, start, U(form.width), records, at)


def plain_fp32(values: Floats, word: Words | None, wide: bool) -> bytes | None:
    """Encode weights as float32."""
    return values.tobytes() if plain_fits(values, FP32_LIMIT) else None


def from_fp32(stored: bytes, width: int = 0, wide: bool = False) -> Floats:
    """Decode float32."""
    return np.frombuffer(stored, np.float32)


def plain_fp16(values: Floats, word: Words | None, wide: bool) -> bytes | None:
    """Encode float16, also subnormal. Round to nearest, or to either neighbour by the random bits
    `word`, if given.
    """
    if not plain_fits(values, FP16_LIMIT):
        return None
    if word is None:
        return values.astype(np.float16).tobytes()
    exact = np.abs(values).astype(np.float64)
    step = 2.0 ** np.maximum(np.frexp(exact)[1] - 11, -24)
    steps, fraction = np.divmod(exact / step, 1)
    rounded = (steps + (fraction > plain_unit(word))) * step
    signed: NDArray[np.float64] = np.copysign(rounded, values)
    return signed.astype(np.float16).tobytes()


def from_fp16(stored: bytes, width: int = 0, wide: bool = False) -> Floats:
    """Decode float16."""
    return np.frombuffer(stored, np.float16).astype(np.float32)


def plain_bf16(values: Floats, word: Words | None, wide: bool = False) -> bytes | None:
    """Encode bfloat16, rounded by random bits `word`; without them to nearest, ties to even."""
    if not plain_fits(values, BF16_LIMIT):
        return None
    bits = values.view(np.uint32)
    added = (
        (word >> np.uint32(16)) if word is not None else np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & 1)
    )
    # Numbers up to the largest bfloat16 never round to infinity.
    return ((bits + added) >> np.uint32(16)).astype(np.uint16).tobytes()


def from_bf16(stored: bytes, width: int = 0, wide: bool = False) -> Floats:
    """Decode bfloat16."""
    return (np.frombuffer(stored, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


FP32 = Kind(
    name="fp32",
    about="",
    weight_bytes=lambda width: 4 * width,
    encode=encode_fp32,
    decode=decode_fp32,
    plain_encode=plain_fp32,
    plain_decode=from_fp32,
    encode_rate=inf,
    decode_rate=inf,
    penalty=0.0,
    on_gpu=True,
)
FP16 = Kind(
    name="fp16",
    about="D numbers of 2 bytes",
    weight_bytes=lambda width: 2 * width,
    encode=encode_fp16,
    decode=decode_fp16,
    plain_encode=plain_fp16,
    plain_decode=from_fp16,
    encode_rate=4e9,
    decode_rate=8e9,
    penalty=0.2,
    on_gpu=True,
)
BF16 = Kind(
    name="bf16",
    about="D numbers of 2 bytes, each the upper half of a float32",
    weight_bytes=lambda width: 2 * width,
    encode=encode_bf16,
    decode=decode_bf16,
    plain_encode=plain_bf16,
    plain_decode=from_bf16,
    encode_rate=4e9,
    decode_rate=8e9,
    penalty=0.25,
    on_gpu=True,
    # Never chosen automatically: bf16 takes as many bytes as fp16 and has fewer bits of precision.
    automatic=False,
)
