"""Codes between a row's own least and greatest weight: what the integer kinds share.

A weight is ``offset + code * scale``. The bounds of that are in `stratarec.embedding.codecs.RecordCodec`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.codec.kinds.base import FP32_LIMIT, F, Floats, U, W, Words, plain_fits, plain_unit
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.bits import (
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
# Rounds to nearest, ties up, by the comparison that noise decides otherwise: the largest float32 below a half.
NEAREST = F(0.49999997)


@njit(**BODY)
def extremes(values, start, D):
    """Least and greatest float of a row, and whether all are finite.

    The order of floats is that of their bits as signed integers with the magnitude of negative ones flipped. Integer
    minima vectorise, and NaN and infinities are the integers outside the finite ones.
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
    """Scale and offset as `RecordCodec` defines them, and whether their storage holds them."""
    low, high = low + F(0.0), high + F(0.0)  # zeros of either sign give the same bytes
    if wide:
        spread = high - low
        # Not subnormal: the inverse of a smaller scale would be infinite.
        scale = max(spread / levels, LEAST_NORMAL) if spread > F(0.0) else F(0.0)
        return scale, low, scale <= F(3.4028235e38)
    if not abs(low) <= F(65504.0):
        return F(0.0), low, False
    offset = to_half(low)
    # One step down: towards zero for a positive number, away from it otherwise; 0 becomes the least negative. Chosen
    # without a branch, here and for the scale: half of all rows would take it, at random.
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
    """Scale and offset of the record at `at`."""
    at += U(form.parameters_at)
    if form.wide_parameters:
        return load_f32(records, at), load_f32(records, at + U(4))
    return from_half(load_u16(records, at)), from_half(load_u16(records, at + U(2)))


@njit(**BODY)
def measure(form, values, start, levels, records, at):
    """Offset and inverse of the scale of a row, stored where they belong, and whether the codec can hold them."""
    low, high, finite = extremes(values, start, U(form.width))
    scale, offset, held = parameters(low, high, levels, form.wide_parameters)
    store_parameters(records, at + U(form.parameters_at), scale, offset, form.wide_parameters)
    # One division a row, a product a weight. A constant row has scale 0, and every code 0.
    return offset, F(1.0) / scale if scale > F(0.0) else F(0.0), finite and held


@njit(**BODY)
def code(value, offset, inverse, levels, threshold):
    """Steps above the offset, rounded up when more than `threshold` of a step is left."""
    steps = (value - offset) * inverse
    whole = np.int32(steps)
    up = np.int32(1) if steps - F(whole) > threshold else np.int32(0)
    # The product with a rounded inverse may pass the last code by a hair.
    return W(min(np.int32(whole + up), levels))


def plain_parameters(values: Floats, levels: int, wide: bool) -> tuple[np.floating, np.floating] | None:
    """(scale, offset) in their storage type: the offset rounded down and the scale up; None where they don't fit."""
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
    """Packed codes, scale and offset."""
    both = plain_parameters(values, levels, wide) if plain_fits(values, FP32_LIMIT) else None
    if both is None:
        return None
    scale, offset = np.float32(both[0]), np.float32(both[1])
    steps = (values - offset) * (np.float32(1) / scale if scale else np.float32(0))
    whole = np.floor(steps)
    up = steps - whole >= np.float32(0.5) if word is None else steps - whole > plain_unit(word)
    codes: Bytes = np.minimum(whole.astype(np.int32) + up, levels).astype(np.uint8)
    return pack(codes).tobytes() + both[0].tobytes() + both[1].tobytes()


def from_codes(codes: Bytes, stored: bytes, wide: bool) -> Floats:
    """Weights of unpacked codes; scale and offset are the end of `stored`."""
    kind = np.dtype(np.float32 if wide else np.float16)
    scale, offset = np.frombuffer(stored[-2 * kind.itemsize :], kind).astype(np.float32)
    weights: Floats = offset + codes.astype(np.float32) * scale
    return weights
