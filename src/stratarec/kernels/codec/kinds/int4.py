"""Weights as codes of 4 bits, two a byte: code p low and code H + p high, with H = (D + 1) // 2.

Codes p and H + p share a byte, rather than neighbours, so that the kernels read and write two contiguous runs. The last
high half of an odd width is 0.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.codec.kinds.base import F, Floats, Kind, U, W, Words, unit
from stratarec.kernels.codec.kinds.scaled import NEAREST, Bytes, code, from_codes, load_parameters, measure, plain_codes
from stratarec.kernels.runtime.team import BODY


@njit(**BODY)
def encode(form, values, start, records, at, base):
    D, levels = U(form.width), np.int32(15)
    H = (D + U(1)) // U(2)
    offset, inverse, held = measure(form, values, start, F(15.0), records, at)
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
    # The odd one stands alone: a test in the loops would keep them from vectorising.
    if D - H < H:
        p = H - U(1)
        threshold = unit(base, p) if form.stochastic else NEAREST
        records[at + p] = np.uint8(code(values[start + p], offset, inverse, levels, threshold))
    return held


@njit(**BODY)
def decode(form, values, start, records, at):
    scale, offset = load_parameters(form, records, at)
    D = U(form.width)
    H = (D + U(1)) // U(2)
    for p in range(H):
        values[start + p] = offset + F(np.int32(records[at + p] & np.uint8(15))) * scale
    for p in range(D - H):
        values[start + H + p] = offset + F(np.int32(records[at + p] >> np.uint8(4))) * scale


def pack(codes: Bytes) -> Bytes:
    """Two codes a byte."""
    half = (len(codes) + 1) // 2
    high = np.zeros(half, dtype=np.uint8)
    high[: len(codes) - half] = codes[half:]
    return codes[:half] | (high << np.uint8(4))


def plain_encode(values: Floats, word: Words | None, wide: bool) -> bytes | None:
    """Half a byte a code."""
    return plain_codes(values, word, wide, 15, pack)


def plain_decode(stored: bytes, width: int, wide: bool) -> Floats:
    """Floats of the codes."""
    packed = np.frombuffer(stored, np.uint8)[: (width + 1) // 2]
    return from_codes(np.concatenate([packed & 15, packed >> 4])[:width], stored, wide)


INT4 = Kind(
    name="int4",
    about="H = (D + 1) // 2 bytes, then scale and offset; code p < H is the lower half of byte p, and H + p the upper",
    weight_bytes=lambda width: (width + 1) // 2,
    levels=15,
    encode=encode,
    decode=decode,
    plain_encode=plain_encode,
    plain_decode=plain_decode,
    encode_rate=2e9,
    decode_rate=4e9,
    # Left for what nothing else can hold: with 4 the planner put every large table into int4 as soon as block reads
    # dominated the step, to save a fifth of it.
    penalty=50.0,
)
