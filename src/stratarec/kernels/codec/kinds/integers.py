"""Codecs that store weights as integer codes of 8 or 4 bits, between a row's least and greatest
weight.

A weight is ``offset + code * scale``. The error bounds are in
`stratarec.embedding.codecs.RecordCodec`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.codec.kinds.base import (
    FP32_LIMIT,
    STEP,
    F,
    Floats,
    Kind,
    U,
    W,
    Words,
    finish,
    fraction,
    plain_fits,
    plain_unit,
    unit,
)
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.bits import (
    add32,
    bits_float,
    float_bits,
    from_half,
    load_f32,
    load_u16,
    select32,
    store_f32,
    store_u16,
    to_half,
)

Bytes = NDArray[np.uint8]
LEAST_NORMAL = F(2.0**-126)
# The largest float32 below a half. With this threshold, `code` rounds to nearest, ties up.
NEAREST = F(0.49999997)


@njit(**BODY)
def extremes(values, start, D):
    """Return the least and greatest float of a row, and whether all are finite.

    Floats have the order of their bits as signed integers, if the magnitude bits of negative
    numbers are flipped. Minima of integers vectorize, and NaN and infinities are outside the range
    of the finite numbers.
    """
    least, most = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for d in range(D):
        bits = np.int32(float_bits(values[start + d]))
        order = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        least, most = min(least, order), max(most, order)
    finite = least >= np.int32(~FP32_LIMIT) and most <= np.int32(FP32_LIMIT)
    low = bits_float(W(np.int32(least ^ np.int32(W(np.int32(least >> np.int32(31))) >> W(1)))))
    high = bits_float(W(np.int32(most ^ np.int32(W(np.int32(most >> np.int32(31))) >> W(1)))))
    return low, high, finite


@njit(**BODY)
def parameters(low, high, levels, wide):
    """Return scale and offset as in `RecordCodec`, and whether their storage can hold them."""
    low, high = low + F(0.0), high + F(0.0)  # zeros of either sign give the same bytes
    if wide:
        spread = high - low
        # The scale must not be subnormal: its inverse would be infinite.
        scale = max(spread / levels, LEAST_NORMAL) if spread > F(0.0) else F(0.0)
        return scale, low, scale <= F(3.4028235e38)
    if not abs(low) <= F(65504.0):
        return F(0.0), low, False
    offset = to_half(low)
    # One step down, which is towards zero for a positive number and away from zero for a negative
    # one; 0 becomes the least negative number. Without a branch, here and for the scale, because
    # half of all rows would take the branch at random.
    down = W(0x8001) if offset == 0 else W(offset + W(0xFFFF) if offset < 0x8000 else offset + W(1))
    offset = np.uint16(select32(from_half(offset) > low, down, W(offset)))
    step = (high - from_half(offset)) / levels
    scale = to_half(step)
    scale = np.uint16(scale + select32(from_half(scale) < step, W(1), W(0)))
    return from_half(scale), from_half(offset), scale < 0x7C00


@njit(**BODY)
def store_parameters(records, at, scale, offset, wide):
    if wide:
        store_f32(records, at, scale)
        store_f32(records, at + U(4), offset)
    else:
        store_u16(records, at, to_half(scale))
        store_u16(records, at + U(2), to_half(offset))


@njit(**BODY)
def load_parameters(form, records, at):
    """Return scale and offset of the record at `at`."""
    at += U(form.parameters_at)
    if form.wide_parameters:
        return load_f32(records, at), load_f32(records, at + U(4))
    return from_half(load_u16(records, at)), from_half(load_u16(records, at + U(2)))


@njit(**BODY)
def measure(form, values, start, levels, records, at):
    """Store scale and offset of a row; return offset, inverse of the scale, and whether the codec
    can hold the row.
    """
    low, high, finite = extremes(values, start, U(form.width))
    scale, offset, valid = parameters(low, high, levels, form.wide_parameters)
    store_parameters(records, at + U(form.parameters_at), scale, offset, form.wide_parameters)
    # One division per row, one product per weight. A constant row has scale 0, and all its codes
    # are 0.
    return offset, F(1.0) / scale if scale > F(0.0) else F(0.0), finite and valid


@njit(**BODY)
def code(value, offset, inverse, levels, threshold):
    """Return the steps above the offset, rounded up if more than `threshold` of a step remains."""
    steps = (value - offset) * inverse
    floor = np.int32(steps)
    up = np.int32(1) if steps - F(floor) > threshold else np.int32(0)
    # The product with a rounded inverse may slightly exceed the last code.
    return W(min(np.int32(floor + up), levels))


def plain_parameters(values: Floats, levels: int, wide: bool) -> tuple[np.floating, np.floating] | None:
    """Return (scale, offset) in their storage type, or None if the type cannot hold them.

    The offset is rounded down and the scale up, so codes reach every weight.
    """
    least, most = np.float32(values.min()) + np.float32(0), np.float32(values.max()) + np.float32(0)
    with np.errstate(over="ignore"):
        if wide:
            spread = most - least
            scale = np.maximum(spread / np.float32(levels), np.float32(2.0**-126)) if spread else spread
            return (scale, least) if np.isfinite(scale) else None
        if abs(least) > 65504:
            return None
        offset = np.float16(least)
        if offset > least:
            offset = np.nextafter(offset, np.float16(-np.inf))
        step = (most - np.float32(offset)) / np.float32(levels)
        half = np.float16(step)
        if half < step:
            half = np.nextafter(half, np.float16(np.inf))
        return (half, offset) if np.isfinite(half) else None


def plain_codes(
    values: Floats, word: Words | None, wide: bool, levels: int, pack: Callable[[Bytes], Bytes]
) -> bytes | None:
    """Encode codes (packed by `pack`), scale and offset in NumPy."""
    stored = plain_parameters(values, levels, wide) if plain_fits(values, FP32_LIMIT) else None
    if stored is None:
        return None
    scale, offset = np.float32(stored[0]), np.float32(stored[1])
    steps = (values - offset) * (np.float32(1) / scale if scale else np.float32(0))
    floor = np.floor(steps)
    up = steps - floor >= np.float32(0.5) if word is None else steps - floor > plain_unit(word)
    codes: Bytes = np.minimum(floor.astype(np.int32) + up, levels).astype(np.uint8)
    return pack(codes).tobytes() + stored[0].tobytes() + stored[1].tobytes()


def from_codes(codes: Bytes, stored: bytes, wide: bool) -> Floats:
    """Return the weights of unpacked `codes`; the last bytes of `stored` are scale and offset."""
    kind = np.dtype(np.float32 if wide else np.float16)
    scale, offset = np.frombuffer(stored[-2 * kind.itemsize :], kind).astype(np.float32)
    weights: Floats = offset + codes.astype(np.float32) * scale
    return weights


@njit(**BODY)
def encode_int8(form, values, start, records, at, base):
    D, levels = U(form.width), np.int32(255)
    offset, inverse, valid = measure(form, values, start, F(255.0), records, at)
    if form.stochastic:
        # The Weyl sequence advances by additions: from `column`, LLVM would compute it in 64 bits.
        weyl = W(base)
        for d in range(D):
            threshold = fraction(finish(weyl, base))
            records[at + d] = np.uint8(code(values[start + d], offset, inverse, levels, threshold))
            weyl = add32(weyl, W(STEP))
    else:
        for d in range(D):
            records[at + d] = np.uint8(code(values[start + d], offset, inverse, levels, NEAREST))
    return valid


@njit(**BODY)
def decode_int8(form, values, start, records, at):
    scale, offset = load_parameters(form, records, at)
    for d in range(U(form.width)):
        values[start + d] = offset + F(np.int32(records[at + d])) * scale


def plain_int8(values: Floats, word: Words | None, wide: bool) -> bytes | None:
    """Encode one code per byte."""
    return plain_codes(values, word, wide, 255, lambda codes: codes)


def from_int8(stored: bytes, width: int, wide: bool) -> Floats:
    """Decode one code per byte."""
    return from_codes(np.frombuffer(stored, np.uint8)[:width], stored, wide)


INT8 = Kind(
    name="int8",
    about="D codes of a byte, then scale and offset",
    weight_bytes=lambda width: width,
    levels=255,
    encode=encode_int8,
    decode=decode_int8,
    plain_encode=plain_int8,
    plain_decode=from_int8,
    encode_rate=2e9,
    decode_rate=4e9,
    penalty=0.5,
    on_gpu=True,
)


@njit(**BODY)
def encode_int4(form, values, start, records, at, base):
    """Store codes p and H + p in the low and high half of byte p, with H = (D + 1) // 2.

    Codes of neighbours are not paired, so that two contiguous parts of the row are read. The last
    high half of an odd width is 0.
    """
    D, levels = U(form.width), np.int32(15)
    H = (D + U(1)) // U(2)
    offset, inverse, valid = measure(form, values, start, F(15.0), records, at)
    if form.stochastic:
        for p in range(D - H):
            first = code(values[start + p], offset, inverse, levels, unit(base, p))
            second = code(values[start + H + p], offset, inverse, levels, unit(base, H + p))
            records[at + p] = np.uint8(W(first | W(second << W(4))))
    else:
        for p in range(D - H):
            first = code(values[start + p], offset, inverse, levels, NEAREST)
            second = code(values[start + H + p], offset, inverse, levels, NEAREST)
            records[at + p] = np.uint8(W(first | W(second << W(4))))
    # The odd code is stored separately: a test in the loops would keep them from being vectorized.
    if D - H < H:
        p = H - U(1)
        threshold = unit(base, p) if form.stochastic else NEAREST
        records[at + p] = np.uint8(code(values[start + p], offset, inverse, levels, threshold))
    return valid


@njit(**BODY)
def decode_int4(form, values, start, records, at):
    scale, offset = load_parameters(form, records, at)
    D = U(form.width)
    H = (D + U(1)) // U(2)
    for p in range(H):
        values[start + p] = offset + F(np.int32(records[at + p] & np.uint8(15))) * scale
    for p in range(D - H):
        values[start + H + p] = offset + F(np.int32(records[at + p] >> np.uint8(4))) * scale


def pack(codes: Bytes) -> Bytes:
    """Pack two codes per byte."""
    half = (len(codes) + 1) // 2
    high = np.zeros(half, dtype=np.uint8)
    high[: len(codes) - half] = codes[half:]
    return codes[:half] | (high << np.uint8(4))


def plain_int4(values: Floats, word: Words | None, wide: bool) -> bytes | None:
    """Encode two codes per byte."""
    return plain_codes(values, word, wide, 15, pack)


def from_int4(stored: bytes, width: int, wide: bool) -> Floats:
    """Decode two codes per byte."""
    packed = np.frombuffer(stored, np.uint8)[: (width + 1) // 2]
    return from_codes(np.concatenate([packed & 15, packed >> 4])[:width], stored, wide)


INT4 = Kind(
    name="int4",
    about="H = (D + 1) // 2 bytes, then scale and offset; code p < H is the lower half of "
    "byte p, and H + p the upper",
    weight_bytes=lambda width: (width + 1) // 2,
    levels=15,
    encode=encode_int4,
    decode=decode_int4,
    plain_encode=plain_int4,
    plain_decode=from_int4,
    encode_rate=2e9,
    decode_rate=4e9,
    # Only for tables that fit nowhere otherwise: with a penalty of 4 the planner put every large
    # table into int4 when block reads dominated the step, to save a fifth of it.
    penalty=50.0,
    on_gpu=True,
)
