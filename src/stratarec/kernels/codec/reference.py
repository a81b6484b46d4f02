"""One record at a time in plain NumPy; the kernels produce the same bytes and the same floats.

Where rounding is exact in real arithmetic it is done in float64 here and by bit patterns in the kernels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.codec import layout as form
from stratarec.kernels.codec.layout import Layout
from stratarec.kernels.random.reference import mix

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def noise(key: int, write: int, columns: range) -> NDArray[np.uint32]:
    """32 random bits for each column, a function of (key, write, column)."""
    base = mix(key ^ mix((write * _GOLDEN + 1) & _MASK))
    low, high = base & 0xFFFFFFFF, base >> 32
    words = np.array([((low + column * form.STEP) & 0xFFFFFFFF) ^ high for column in columns], dtype=np.uint32)
    words = (words ^ (words >> np.uint32(16))) * np.uint32(form.MIX_1)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(form.MIX_2)
    return words ^ (words >> np.uint32(16))


def unit(words: NDArray[np.uint32]) -> Floats:
    """24 of the bits as a float32 in [0, 1)."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def fits(values: Floats, limit: int) -> bool:
    """Whether every magnitude is a number of at most `limit`, given as float32 bits."""
    return bool(((values.view(np.uint32) & np.uint32(0x7FFFFFFF)) <= limit).all())


def to_bf16(values: Floats, words: NDArray[np.uint32] | None) -> NDArray[np.uint16]:
    """Upper halves, rounded by 16 random bits each, or to nearest even without them."""
    bits = values.view(np.uint32)
    added = (words >> np.uint32(16)) if words is not None else np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & 1)
    # A magnitude of at most the largest bfloat16 never carries into infinity.
    return ((bits + added) >> np.uint32(16)).astype(np.uint16)


def to_fp16(values: Floats, words: NDArray[np.uint32] | None) -> NDArray[np.uint16]:
    """Half floats; with noise, the two neighbours by their distance, subnormals too."""
    if words is None:
        return values.astype(np.float16).view(np.uint16)
    exact = np.abs(values).astype(np.float64)
    step = 2.0 ** np.maximum(np.frexp(exact)[1] - 11, -24)
    whole, fraction = np.divmod(exact / step, 1)
    rounded = (whole + (fraction > unit(words))) * step
    signed: NDArray[np.float64] = np.copysign(rounded, values)
    return signed.astype(np.float16).view(np.uint16)


def parameters(values: Floats, layout: Layout) -> tuple[np.floating, np.floating] | None:
    """(scale, offset) in their storage type: the offset rounded down and the scale up; None where they don't fit."""
    least, most = np.float32(values.min()) + np.float32(0), np.float32(values.max()) + np.float32(0)
    with np.errstate(over="ignore"):
        if layout.wide_parameters:
            spread = most - least
            scale = np.maximum(spread / np.float32(layout.levels), np.float32(2.0**-126)) if spread else spread
            return (scale, least) if np.isfinite(scale) else None
        if abs(least) > 65504:
            return None
        offset = np.float16(least)
        if offset > least:
            offset = np.nextafter(offset, np.float16(-np.inf))
        step = (most - np.float32(offset)) / np.float32(layout.levels)
        half = np.float16(step)
        if half < step:
            half = np.nextafter(half, np.float16(np.inf))
        return (half, offset) if np.isfinite(half) else None


def to_codes(
    values: Floats, scale: np.float32, offset: np.float32, levels: int, words: NDArray[np.uint32] | None
) -> Bytes:
    """Steps of `scale` above `offset`, rounded, at most `levels`."""
    steps = (values - offset) * (np.float32(1) / scale if scale else np.float32(0))
    whole = np.floor(steps)
    up = steps - whole >= np.float32(0.5) if words is None else steps - whole > unit(words)
    codes: Bytes = np.minimum(whole.astype(np.int32) + up, levels).astype(np.uint8)
    return codes


def pack(codes: Bytes) -> Bytes:
    """Two codes of 4 bits a byte."""
    half = (len(codes) + 1) // 2
    high = np.zeros(half, dtype=np.uint8)
    high[: len(codes) - half] = codes[half:]
    return codes[:half] | (high << np.uint8(4))


def encode_weights(values: Floats, words: NDArray[np.uint32], layout: Layout) -> bytes | None:
    """Encoded weights with their scale and offset."""
    if not fits(values, {form.FP16: form.FP16_LIMIT, form.BF16: form.BF16_LIMIT}.get(layout.kind, form.FP32_LIMIT)):
        return None
    chosen = words if layout.stochastic else None
    if layout.kind == form.FP32:
        return values.tobytes()
    if layout.kind in (form.FP16, form.BF16):
        return (to_fp16 if layout.kind == form.FP16 else to_bf16)(values, chosen).tobytes()
    both = parameters(values, layout)
    if both is None:
        return None
    scale, offset = both
    codes = to_codes(values, np.float32(scale), np.float32(offset), layout.levels, chosen)
    return (codes if layout.kind == form.INT8 else pack(codes)).tobytes() + scale.tobytes() + offset.tobytes()


def encode(
    weights: Floats,
    row_state: np.float32,
    full_state: Floats,
    key: int,
    write: int,
    layout: Layout,
    clock: int = 0,
) -> bytes | None:
    """The record of one row, or None when it holds a number that the codec cannot hold."""
    width, full = layout.width, layout.full_state * layout.width
    parts = [encode_weights(weights, noise(key, write, range(width)), layout)]
    states = []
    if layout.row_state:
        states.append(
            (np.array([row_state], dtype=np.float32), range(width + max(width, full), width + max(width, full) + 1))
        )
    if layout.full_state:
        states.append((full_state, range(width, width + full)))
    for values, columns in states:
        if not fits(values, form.FP32_LIMIT if layout.wide_state else form.BF16_LIMIT):
            return None
        parts.append(values.tobytes() if layout.wide_state else to_bf16(values, noise(key, write, columns)).tobytes())
    parts.append(clock.to_bytes(4, "little") if layout.clock else b"")
    return b"".join(part for part in parts if part is not None) if parts[0] is not None else None


def from_bf16(record: bytes) -> Floats:
    """Floats of stored upper halves."""
    return (np.frombuffer(record, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def decode(record: bytes, layout: Layout) -> tuple[Floats, Floats, Floats]:
    """``(weights [D], row state [0 or 1], full state [0, D or 2 D])`` of one record, without its clock."""
    encoded = record[: layout.parameters_at]
    if layout.kind == form.FP32:
        weights = np.frombuffer(encoded, np.float32)
    elif layout.kind == form.FP16:
        weights = np.frombuffer(encoded, np.float16).astype(np.float32)
    elif layout.kind == form.BF16:
        weights = from_bf16(encoded)
    else:
        stored = np.frombuffer(encoded, np.uint8)
        codes = stored if layout.kind == form.INT8 else np.concatenate([stored & 15, stored >> 4])[: layout.width]
        kind = np.float32 if layout.wide_parameters else np.float16
        scale, offset = np.frombuffer(record[layout.parameters_at : layout.row_state_at], kind).astype(np.float32)
        weights = offset + codes.astype(np.float32) * scale
    state = (lambda part: np.frombuffer(part, np.float32)) if layout.wide_state else from_bf16
    return (
        weights,
        state(record[layout.row_state_at : layout.full_state_at]),
        state(record[layout.full_state_at : layout.clock_at]),
    )
