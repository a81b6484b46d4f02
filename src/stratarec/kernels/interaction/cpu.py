"""Numba bodies of the pairwise dot interaction: one sample at a time, its vectors side by side in the first cache."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

U = np.uint64


@njit(nogil=True, cache=True, inline="always")
def load(dense, pooled, first, sample, vectors, width, scratch):
    """Copy a sample's vectors, the dense one first, to `scratch` ``[vectors * D]``."""
    if first:
        source = U(sample) * width
        for d in range(width):
            scratch[d] = dense[source + d]
    target, count = U(first) * width, U(vectors - first) * width
    source = U(sample) * count
    for d in range(count):
        scratch[target + d] = pooled[source + d]


@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz", "contract"})
def dot(scratch, one, other, width):
    total = np.float32(0.0)
    for d in range(width):
        total += scratch[one + d] * scratch[other + d]
    return total


@njit(parallel=True, nogil=True, cache=True)
def forward(dense, pooled, first, batch, vectors, width, out, columns, chunks):
    """out[b] = dense[b], then x_i . x_j for i = 1 .. V - 1 and j < i."""
    D = U(width)
    for chunk in prange(chunks):
        scratch = np.empty(vectors * width, np.float32)
        for b in range(batch * chunk // chunks, batch * (chunk + 1) // chunks):
            load(dense, pooled, first, b, vectors, D, scratch)
            place = U(b) * U(columns)
            if first:
                for d in range(D):
                    out[place + d] = scratch[d]
                place += D
            for i in range(U(1), U(vectors)):
                for j in range(U(0), i):
                    out[place] = dot(scratch, i * D, j * D, D)
                    place += U(1)


@njit(nogil=True, cache=True, fastmath={"contract"})
def add_scaled(target, start, factor, scratch, source, width):
    for d in range(width):
        target[start + d] += factor * scratch[source + d]


@njit(parallel=True, nogil=True, cache=True)
def backward(dense, pooled, first, batch, vectors, width, gradient, columns, dense_out, pooled_out, chunks):
    """Gradients of `forward`'s inputs from the gradient of its output."""
    D = U(width)
    for chunk in prange(chunks):
        scratch = np.empty(vectors * width, np.float32)
        total = np.empty(vectors * width, np.float32)
        for b in range(batch * chunk // chunks, batch * (chunk + 1) // chunks):
            load(dense, pooled, first, b, vectors, D, scratch)
            total[:] = 0
            place = U(b) * U(columns)
            if first:
                for d in range(D):
                    total[d] = gradient[place + d]
                place += D
            for i in range(U(1), U(vectors)):
                for j in range(U(0), i):
                    factor = gradient[place]
                    add_scaled(total, i * D, factor, scratch, j * D, D)
                    add_scaled(total, j * D, factor, scratch, i * D, D)
                    place += U(1)
            if first:
                target = U(b) * D
                for d in range(D):
                    dense_out[target + d] = total[d]
            count = U(vectors - first) * D
            target = U(b) * count
            for d in range(count):
                pooled_out[target + d] = total[U(first) * D + d]
