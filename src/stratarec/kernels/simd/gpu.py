"""Sums of rows for Triton kernels, with the bits of `vector.total`."""

import triton
import triton.language as tl


@triton.jit
def halve(x, K: tl.constexpr, W: tl.constexpr):
    """Return the sums ``[K]`` of x ``[K, W]``. The two halves of each row are added until one
    number remains.

    Each addition has only two operands, so the compiler cannot choose another order.
    """
    if W == 1:
        return tl.reshape(x, (K,))
    else:
        return halve(tl.sum(tl.reshape(x, (K, 2, W // 2)), 1), K, W // 2)


@triton.jit
def total(x, K: tl.constexpr, DP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr):
    """Return the sums ``[K]`` of x ``[K, DP]``, which is 0 from column D on, in the order of
    `vector.total`.
    """
    blocks = tl.reshape(x, (K, DP // LANES, LANES))
    number = tl.arange(0, DP // LANES)[None, :, None]
    # A block is selected by adding zeros to it, which is exact in any order.
    lanes = tl.sum(tl.where(number == 0, blocks, 0.0), 1)
    for block in tl.static_range(1, (D + LANES - 1) // LANES):
        lanes = lanes + tl.sum(tl.where(number == block, blocks, 0.0), 1)
    return halve(lanes, K, LANES)
