"""Triton kernels of pooling.

Constants: D columns of a row, DP the next power of two, K bags or lookups of a program, U lookups
unrolled, BY a common divisor of all column positions, from which the compiler knows how wide loads
and stores can be.
"""

import triton
import triton.language as tl

from stratarec.kernels.simd.gpu import total


@triton.jit(do_not_specialize=["bags"])
def pool(
    weights,
    rows,
    offsets,
    share,
    column,
    mean,
    out,
    bags,
    batch,
    stride,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    U: tl.constexpr,
    SINGLE: tl.constexpr,
    BY: tl.constexpr,
):
    """Set out[b * stride + column[f]:][:D] to bag f * batch + b, pooled in ascending order."""
    bag = tl.program_id(0) * K + tl.arange(0, K)
    valid = bag < bags
    feature = bag // batch
    place = tl.multiple_of((bag % batch).to(tl.int64) * stride + tl.load(column + feature, valid, 0), BY)
    d = tl.arange(0, DP)
    inside = d < D
    if SINGLE:
        row = tl.load(rows + bag, valid, 0).to(tl.int64)
        pooled = tl.load(weights + (row * D)[:, None] + d[None, :], valid[:, None] & inside[None, :])
    else:
        begin = tl.load(offsets + bag, valid, 0)
        count = tl.load(offsets + bag + 1, valid, 0) - begin
        pooled = tl.zeros((K, DP), tl.float32)
        for i in range(0, tl.max(count, axis=0), U):
            for u in tl.static_range(U):
                more = valid & (i + u < count)
                row = tl.load(rows + begin + i + u, more, 0).to(tl.int64)
                part = tl.load(
                    weights + (row * D)[:, None] + d[None, :], more[:, None] & inside[None, :], 0.0
                )
                if share is not None:
                    part = tl.load(share + begin + i + u, more, 0.0)[:, None] * part
                pooled = pooled + part
        averaged = (tl.load(mean + feature, valid, 0) != 0) & (count > 1)
        pooled = (
            pooled
            * tl.div_rn(1.0 + tl.zeros((K,), tl.float32), tl.where(averaged, count, 1).to(tl.float32))[
                :, None
            ]
        )
    tl.store(out + place[:, None] + d[None, :], pooled, valid[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["lookups"])
def weight_gradient(
    weights,
    rows,
    bag_of,
    offsets,
    column,
    mean,
    pooled,
    out,
    lookups,
    batch,
    stride,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
):
    """Set out[i] to the gradient of lookup i's weight, from that of the pooled output."""
    i = tl.program_id(0) * K + tl.arange(0, K)
    valid = i < lookups
    bag = tl.load(bag_of + i, valid, 0)
    feature = bag // batch
    source = (bag % batch).to(tl.int64) * stride + tl.load(column + feature, valid, 0)
    row = tl.load(rows + i, valid, 0).to(tl.int64)
    d = tl.arange(0, DP)
    mask = valid[:, None] & (d < D)[None, :]
    gradient = tl.load(pooled + source[:, None] + d[None, :], mask, 0.0)
    product = total(
        gradient * tl.load(weights + (row * D)[:, None] + d[None, :], mask, 0.0), K, DP, D, LANES
    )
    count = tl.load(offsets + bag + 1, valid, 0) - tl.load(offsets + bag, valid, 0)
    averaged = (tl.load(mean + feature, valid, 0) != 0) & (count > 1)
    factor = tl.div_rn(1.0 + tl.zeros((K,), tl.float32), tl.where(averaged, count, 1).to(tl.float32))
    tl.store(out + i, factor * product, valid)
