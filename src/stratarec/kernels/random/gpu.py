"""Triton kernels of counter-based noise."""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def mix(word):
    """Apply the finalizer of splitmix64 to uint64 words."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit(do_not_specialize=["count"])
def initialize(
    slots,
    places,
    keys,
    bounds,
    count,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    ROW_STATE: tl.constexpr,
    FULL: tl.constexpr,
    CLOCKED: tl.constexpr,
):
    """Set the weights of the slot places[i] to noise that is uniform in [-bounds[i], bounds[i]],
    and its state to 0.

    Each weight is a function of keys[i] and the column.
    """
    i = tl.program_id(0) * K + tl.arange(0, K)
    valid = i < count
    slot, key = tl.load(places + i, valid, 0), tl.load(keys + i, valid, 0).to(tl.uint64, bitcast=True)
    bound = tl.load(bounds + i, valid, 0.0)[:, None]
    d = tl.arange(0, DP)
    mask = valid[:, None] & (d < D)[None, :]
    noise = mix(key[:, None] + d[None, :].to(tl.uint64) * GOLDEN) >> 40
    unit = noise.to(tl.float32) * (1.0 / (1 << 24))
    tl.store(slots[0] + (slot * D)[:, None] + d[None, :], -bound + (bound + bound) * unit, mask)
    if ROW_STATE:
        tl.store(slots[1] + slot, tl.zeros_like(slot).to(tl.float32), valid)
    for full in tl.static_range(FULL):
        tl.store(
            slots[2] + ((slot * FULL + full) * D)[:, None] + d[None, :], tl.zeros((K, DP), tl.float32), mask
        )
    if CLOCKED:
        tl.store(slots[3] + slot, tl.zeros_like(slot).to(tl.int32), valid)
