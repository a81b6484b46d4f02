"""Triton kernels of the codecs. They write the same bytes as the CPU kernels.

Records are consecutive in the device's memory. If all parts of a record begin at multiples of 4
bytes, they are read and written by words, otherwise byte by byte. Constants: D columns of a row, DP
the next power of two, K rows of a program, KIND the position of the codec in the registry, STATE 0
for float32 state and 2 for bfloat16 state.
"""

import triton
import triton.language as tl

from stratarec.kernels.codec.kinds import KINDS, base, integers
from stratarec.kernels.random.gpu import mix

FP32, FP16, BF16, INT8, INT4 = (
    tl.constexpr(list(KINDS).index(name)) for name in ("fp32", "fp16", "bf16", "int8", "int4")
)
FP32_LIMIT, FP16_LIMIT, BF16_LIMIT = (
    tl.constexpr(limit) for limit in (base.FP32_LIMIT, base.FP16_LIMIT, base.BF16_LIMIT)
)
STEP = tl.constexpr(base.STEP)
NEAREST = tl.constexpr(float(integers.NEAREST))


@triton.jit
def noise_words(key, column):
    """Return 32 random bits for each column, the bits of `kinds.base.words`.

    `key` is the 64-bit key of a record's noise.
    """
    word = (key.to(tl.uint32) + column.to(tl.uint32) * STEP) ^ (key >> 32).to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def unit(key, column):
    """Return for each column a random float in [0, 1) with 24 bits."""
    return (noise_words(key, column) >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24))


@triton.jit
def put(records, at, word, mask, BYTES: tl.constexpr, WORDS: tl.constexpr):
    """Store the lowest `BYTES` bytes of each word."""
    if WORDS and BYTES == 4:
        tl.store((records + at).to(tl.pointer_type(tl.uint32)), word, mask)
    elif WORDS and BYTES == 2:
        tl.store((records + at).to(tl.pointer_type(tl.uint16)), word.to(tl.uint16), mask)
    else:
        for byte in tl.static_range(BYTES):
            tl.store(records + at + byte, (word >> (8 * byte)).to(tl.uint8), mask)


@triton.jit
def get(records, at, mask, BYTES: tl.constexpr, WORDS: tl.constexpr):
    """Load `BYTES` bytes of each record as a word."""
    if WORDS and BYTES == 4:
        return tl.load((records + at).to(tl.pointer_type(tl.uint32)), mask, 0)
    elif WORDS and BYTES == 2:
        return tl.load((records + at).to(tl.pointer_type(tl.uint16)), mask, 0).to(tl.uint32)
    else:
        word = tl.load(records + at, mask, 0).to(tl.uint32)
        for byte in tl.static_range(1, BYTES):
            word = word | (tl.load(records + at + byte, mask, 0).to(tl.uint32) << (8 * byte))
        return word


@triton.jit
def to_half(x):
    """Return the bits of the nearest float16."""
    return x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def from_half(word):
    """Return the float32 of float16 bits."""
    return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def ordered(x, mask, OTHER: tl.constexpr):
    """Return floats as integers with the same order, and `OTHER` where not `mask`."""
    word = x.to(tl.int32, bitcast=True)
    return tl.where(mask, word ^ ((word >> 31) & 0x7FFFFFFF), OTHER)


@triton.jit
def unordered(order):
    """Return the floats of integers from `ordered`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def parameters(low, high, LEVELS: tl.constexpr, WIDE: tl.constexpr):
    """Return scale, offset and whether they can be stored, as `kinds.integers.parameters` does."""
    low, high = low + 0.0, high + 0.0
    levels = tl.zeros_like(low) + LEVELS
    if WIDE:
        spread = high - low
        scale = tl.where(spread > 0.0, tl.maximum(tl.div_rn(spread, levels), 1.1754943508222875e-38), 0.0)
        return scale, low, scale <= 3.4028234663852886e38
    else:
        fits = tl.abs(low) <= 65504.0
        offset = to_half(low)
        down = tl.where(offset == 0, 0x8001, tl.where(offset < 0x8000, offset - 1, offset + 1))
        offset = tl.where(from_half(offset) > low, down, offset)
        least = tl.div_rn(high - from_half(offset), levels)
        scale = to_half(least)
        scale = tl.where(from_half(scale) < least, scale + 1, scale)
        fits = fits & (scale < 0x7C00)
        return tl.where(fits, from_half(scale), 0.0), tl.where(fits, from_half(offset), low), fits


@triton.jit
def code(value, offset, inverse, threshold, LEVELS: tl.constexpr):
    """Return the number of steps of each value above the offset, rounded up if more than
    `threshold` of a step remains.

    The result is at most `LEVELS`.
    """
    steps = (value - offset) * inverse
    floor = steps.to(tl.int32)
    up = tl.where(steps - floor.to(tl.float32) > threshold, 1, 0)
    return tl.minimum(floor + up, LEVELS).to(tl.uint32)


@triton.jit
def put_floats(
    records, at, value, key, column, mask, KIND: tl.constexpr, STOCHASTIC: tl.constexpr, WORDS: tl.constexpr
):
    """Store numbers as fp32, fp16 or bf16; return for each whether the format represents it."""
    word = value.to(tl.uint32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    if KIND == FP32:
        put(records, at, word, mask, 4, WORDS)
        return magnitude <= FP32_LIMIT
    elif KIND == FP16:
        if STOCHASTIC:
            exponent = tl.maximum(word & 0x7F800000, 113 << 23)
            apart = (exponent - (10 << 23)).to(tl.float32, bitcast=True)
            steps = magnitude.to(tl.float32, bitcast=True) * ((264 << 23) - exponent).to(
                tl.float32, bitcast=True
            )
            floor = steps.to(tl.int32).to(tl.float32)
            up = tl.where(steps - floor > unit(key, column), 1.0, 0.0)
            half = to_half((floor + up) * apart) | ((word >> 16) & 0x8000)
        else:
            half = to_half(value)
        put(records, at, half, mask, 2, WORDS)
        return magnitude <= FP16_LIMIT
    else:
        more = (noise_words(key, column) >> 16) if STOCHASTIC else 0x7FFF + ((word >> 16) & 1)
        put(records, at, (word + more) >> 16, mask, 2, WORDS)
        return magnitude <= BF16_LIMIT


@triton.jit
def get_floats(records, at, mask, KIND: tl.constexpr, WORDS: tl.constexpr):
    """Load numbers that `put_floats` stored."""
    if KIND == FP32:
        return get(records, at, mask, 4, WORDS).to(tl.float32, bitcast=True)
    elif KIND == FP16:
        return from_half(get(records, at, mask, 2, WORDS))
    else:
        return (get(records, at, mask, 2, WORDS) << 16).to(tl.float32, bitcast=True)


@triton.jit
def all_of(fits, mask):
    """Return for each row whether `fits` is true for all its numbers in `mask`."""
    return tl.min(tl.where(mask, fits, True).to(tl.int32), 1) > 0


@triton.jit(do_not_specialize=["count"])
def encode(
    slots,
    places,
    keys,
    record_of,
    records,
    fits,
    count,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WIDE: tl.constexpr,
    STATE: tl.constexpr,
    ROW_STATE: tl.constexpr,
    FULL: tl.constexpr,
    CLOCKED: tl.constexpr,
    PARAMETERS_AT: tl.constexpr,
    ROW_STATE_AT: tl.constexpr,
    FULL_STATE_AT: tl.constexpr,
    CLOCK_AT: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Encode the slot places[i] into record record_of[i]; set fits[i] to 1 if the codec can
    represent its numbers.

    Without `record_of` it is record i. Records are `BYTES` apart. The rounding noise is a function
    of keys[i] and the column.
    """
    i = tl.program_id(0) * K + tl.arange(0, K)
    valid = i < count
    slot = tl.load(places + i, valid, 0)
    key = mix(tl.load(keys + i, valid, 0).to(tl.uint64, bitcast=True))[:, None]
    record = tl.load(record_of + i, valid, 0) if record_of is not None else i.to(tl.int64)
    at = (record * BYTES)[:, None]
    d = tl.arange(0, DP)[None, :]
    mask = valid[:, None] & (d < D)
    WORDS: tl.constexpr = (
        PARAMETERS_AT | ROW_STATE_AT | (FULL_STATE_AT if FULL else 0) | (CLOCK_AT if CLOCKED else 0) | BYTES
    ) % 4 == 0
    at = tl.multiple_of(at, [4, 4]) if WORDS else at
    weight = tl.load(slots[0] + (slot * D)[:, None] + d, mask, 0.0)
    if KIND < INT8:
        size = 4 if KIND == FP32 else 2
        good = all_of(
            put_floats(records, at + size * d, weight, key, d, mask, KIND, STOCHASTIC, WORDS), mask
        )
    else:
        LEVELS: tl.constexpr = 255 if KIND == INT8 else 15
        least = tl.min(ordered(weight, mask, 0x7FFFFFFF), 1)
        most = tl.max(ordered(weight, mask, -0x80000000), 1)
        scale, offset, good = parameters(unordered(least), unordered(most), LEVELS, WIDE)
        good = good & (least >= -0x7F800000) & (most <= 0x7F7FFFFF)
        if WIDE:
            put(
                records,
                at + PARAMETERS_AT,
                scale.to(tl.uint32, bitcast=True)[:, None],
                valid[:, None],
                4,
                WORDS,
            )
            put(
                records,
                at + PARAMETERS_AT + 4,
                offset.to(tl.uint32, bitcast=True)[:, None],
                valid[:, None],
                4,
                WORDS,
            )
        else:
            put(records, at + PARAMETERS_AT, to_half(scale)[:, None], valid[:, None], 2, WORDS)
            put(records, at + PARAMETERS_AT + 2, to_half(offset)[:, None], valid[:, None], 2, WORDS)
        inverse = tl.where(
            scale > 0.0, tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale > 0.0, scale, 1.0)), 0.0
        )
        offset, inverse = offset[:, None], inverse[:, None]
        threshold = unit(key, d) if STOCHASTIC else NEAREST
        low = code(weight, offset, inverse, threshold, LEVELS)
        if KIND == INT8:
            put(records, at + d, low, mask, 1, WORDS)
        else:
            HALF: tl.constexpr = (D + 1) // 2
            above = valid[:, None] & (d < D - HALF)
            other = tl.load(slots[0] + (slot * D)[:, None] + HALF + d, above, 0.0)
            threshold = unit(key, HALF + d) if STOCHASTIC else NEAREST
            high = tl.where(above, code(other, offset, inverse, threshold, LEVELS), 0)
            put(records, at + d, low | (high << 4), valid[:, None] & (d < HALF), 1, WORDS)
    SIZE: tl.constexpr = 4 if STATE == FP32 else 2
    if ROW_STATE:
        state = tl.load(slots[1] + slot, valid, 0.0)[:, None]
        column = tl.zeros((K, 1), tl.int32) + (D + (FULL * D if FULL > 1 else D))
        stored = put_floats(
            records, at + ROW_STATE_AT, state, key, column, valid[:, None], STATE, True, WORDS
        )
        good = good & all_of(stored, valid[:, None])
    for full in tl.static_range(FULL):
        state = tl.load(slots[2] + ((slot * FULL + full) * D)[:, None] + d, mask, 0.0)
        place = at + FULL_STATE_AT + SIZE * (full * D + d)
        stored = put_floats(records, place, state, key, D + full * D + d, mask, STATE, True, WORDS)
        good = good & all_of(stored, mask)
    if CLOCKED:
        clock = tl.load(slots[3] + slot, valid, 0).to(tl.uint32, bitcast=True)
        put(records, at + CLOCK_AT, clock[:, None], valid[:, None], 4, WORDS)
    tl.store(fits + i, good.to(tl.uint8), valid)


@triton.jit(do_not_specialize=["count"])
def decode(
    slots,
    places,
    record_of,
    records,
    count,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    STATE: tl.constexpr,
    ROW_STATE: tl.constexpr,
    FULL: tl.constexpr,
    CLOCKED: tl.constexpr,
    PARAMETERS_AT: tl.constexpr,
    ROW_STATE_AT: tl.constexpr,
    FULL_STATE_AT: tl.constexpr,
    CLOCK_AT: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Decode record record_of[i] into the slot places[i]; without `record_of` it is record i."""
    i = tl.program_id(0) * K + tl.arange(0, K)
    valid = i < count
    slot = tl.load(places + i, valid, 0)
    record = tl.load(record_of + i, valid, 0) if record_of is not None else i.to(tl.int64)
    at = (record * BYTES)[:, None]
    d = tl.arange(0, DP)[None, :]
    mask = valid[:, None] & (d < D)
    WORDS: tl.constexpr = (
        PARAMETERS_AT | ROW_STATE_AT | (FULL_STATE_AT if FULL else 0) | (CLOCK_AT if CLOCKED else 0) | BYTES
    ) % 4 == 0
    at = tl.multiple_of(at, [4, 4]) if WORDS else at
    if KIND < INT8:
        size = 4 if KIND == FP32 else 2
        weight = get_floats(records, at + size * d, mask, KIND, WORDS)
    else:
        FLOAT: tl.constexpr = FP32 if WIDE else FP16
        scale = get_floats(records, at + PARAMETERS_AT, valid[:, None], FLOAT, WORDS)
        offset = get_floats(records, at + PARAMETERS_AT + (4 if WIDE else 2), valid[:, None], FLOAT, WORDS)
        if KIND == INT8:
            codes = get(records, at + d, mask, 1, WORDS)
        else:
            HALF: tl.constexpr = (D + 1) // 2
            codes = get(records, at + tl.where(d < HALF, d, d - HALF), mask, 1, WORDS)
            codes = tl.where(d < HALF, codes & 15, codes >> 4)
        weight = offset + codes.to(tl.int32).to(tl.float32) * scale
    tl.store(slots[0] + (slot * D)[:, None] + d, weight, mask)
    SIZE: tl.constexpr = 4 if STATE == FP32 else 2
    if ROW_STATE:
        state = get_floats(records, at + ROW_STATE_AT, valid[:, None], STATE, WORDS)
        tl.store(slots[1] + slot[:, None], state, valid[:, None])
    for full in tl.static_range(FULL):
        state = get_floats(records, at + FULL_STATE_AT + SIZE * (full * D + d), mask, STATE, WORDS)
        tl.store(slots[2] + ((slot * FULL + full) * D)[:, None] + d, state, mask)
    if CLOCKED:
        clock = get(records, at + CLOCK_AT, valid[:, None], 4, WORDS).to(tl.int32, bitcast=True)
        tl.store(slots[3] + slot[:, None], clock, valid[:, None])
