"""Weights as codes of 8 bits, one a byte."""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.codec.kinds.base import STEP, F, Floats, Kind, U, W, Words, finish, fraction
from stratarec.kernels.codec.kinds.scaled import NEAREST, code, from_codes, load_parameters, measure, plain_codes
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.bits import add32


@njit(**BODY)
def encode(form, values, start, records, at, base):
    D, levels = U(form.width), np.int32(255)
    offset, inverse, held = measure(form, values, start, F(255.0), records, at)
    if form.stochastic:
        # The sequence is carried along: from `column` LLVM would compute it in 64 bits.
        weyl = W(base)
        for d in range(D):
            threshold = fraction(finish(weyl, base))
            records[at + d] = np.uint8(code(values[start + d], offset, inverse, levels, threshold))
            weyl = add32(weyl, W(STEP))
    else:
        for d in range(D):
            records[at + d] = np.uint8(code(values[start + d], offset, inverse, levels, NEAREST))
    return held


@njit(**BODY)
def decode(form, values, start, records, at):
    scale, offset = load_parameters(form, records, at)
    for d in range(U(form.width)):
        values[start + d] = offset + F(np.int32(records[at + d])) * scale


def plain_encode(values: Floats, word: Words | None, wide: bool) -> bytes | None:
    """A byte a code."""
    return plain_codes(values, word, wide, 255, lambda codes: codes)


def plain_decode(stored: bytes, width: int, wide: bool) -> Floats:
    """Floats of the first `width` bytes."""
    return from_codes(np.frombuffer(stored, np.uint8)[:width], stored, wide)


INT8 = Kind(
    name="int8",
    about="D codes of a byte, then scale and offset",
    weight_bytes=lambda width: width,
    levels=255,
    encode=encode,
    decode=decode,
    plain_encode=plain_encode,
    plain_decode=plain_decode,
    encode_rate=2e9,
    decode_rate=4e9,
    penalty=0.5,
)
