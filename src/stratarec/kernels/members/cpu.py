"""Numba kernels of an ensemble's network between its matrix products: inputs of members, ReLU with
dropout, logits.

Shapes: B samples, K members, N numbers, F vectors of sparse features, D width of a member's vector,
Q bins of a number, H width of a hidden layer.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.vector import add, broadcast, load, multiply, multiply_add, passed, store, total

U = np.uint64
# Number of samples that a thread processes at a time.
TILE = 32
# Limit of numbers in first-order terms, because a single extreme number would otherwise decide the
# score.
MOST_DEVIATIONS = 8.0
_MOST = np.float32(MOST_DEVIATIONS)


class Fields(NamedTuple):
    """Flat inputs of the members, and results of the forward pass that the backward pass uses."""

    samples: int
    members: int
    numbers: int
    features: int
    width: int
    bins: int
    vectors: NDArray[np.float32]
    """``[B, F, K, D + 1]`` vectors and first-order weights."""
    dense: NDArray[np.float32]
    """``[B, N]``."""
    edges: NDArray[np.float32]
    """``[N, Q + 1]`` ascending edges of bins."""
    weight: NDArray[np.float32]
    """``[N, Q, K, D]``."""
    bias: NDArray[np.float32]
    """``[N, K, D]``."""
    first: NDArray[np.float32]
    """``[N, K]`` first-order weights."""
    below: NDArray[np.float32]
    """``[N, Q + 1, K, D]``: sums of the weights of all bins below each edge."""
    bin: NDArray[np.int64]
    """``[B, N]`` bin of each number, Q above the last edge."""
    share: NDArray[np.float32]
    """``[B, N]`` share of that bin that is below the number."""
    mask: NDArray[np.int64]
    """``[K]`` which mask drops the fields of a member, -1 for none."""
    bits: NDArray[np.int16]
    """``[masks, B, N + F]``: a field is dropped if its bits are below `limit`."""
    limit: int
    scale: float


@njit(**BODY)
def first_bits(fields, k, b):
    """Return the place of the bits of sample b's first field for member k, or -1 if the member
    drops no fields.
    """
    mask = fields.mask[k]
    return -1 if mask < 0 else (mask * fields.samples + b) * (fields.numbers + fields.features)


@njit(**BODY)
def factor(fields, bits, place):
    """Return the factor of field `place`: 0 if it is dropped. `bits` is from `first_bits`."""
    if bits < 0:
        return np.float32(1.0)
    return fields.scale if fields.bits[bits + place] >= fields.limit else np.float32(0.0)


@njit(**BODY)
def sum_bins(fields):
    """Fill `below`. A bin without width carries no information, so its weight is not added."""
    count, Q = fields.members * fields.width, fields.bins
    for n in range(fields.numbers):
        start = n * (Q + 1) * count
        for c in range(count):
            fields.below[start + c] = np.float32(0.0)
        for q in range(Q):
            edge = n * (Q + 1) + q
            is_wide = fields.edges[edge + 1] > fields.edges[edge]
            for c in range(count):
                weight = fields.weight[(n * Q + q) * count + c] if is_wide else np.float32(0.0)
                fields.below[start + (q + 1) * count + c] = fields.below[start + q * count + c] + weight


@njit(**BODY)
def find_bin(fields, b, n):
    """Set `bin` and `share` of number n of sample b."""
    Q, value, edge = fields.bins, fields.dense[b * fields.numbers + n], n * (fields.bins + 1)
    low, high = 0, Q
    while low < high:  # the number of bins whose upper edge is at most the value
        middle = (low + high) // 2
        if fields.edges[edge + middle + 1] <= value:
            low = middle + 1
        else:
            high = middle
    share = np.float32(0.0) if value == value else value  # NaN stays NaN
    # The difference of edges may be infinite: then the share is 0.
    if low < Q and value > fields.edges[edge + low]:
        begin = fields.edges[edge + low]
        share = (value - begin) / (fields.edges[edge + low + 1] - begin)
    fields.bin[b * fields.numbers + n], fields.share[b * fields.numbers + n] = low, share


@njit(**BODY)
def fill(member, lanes, counter, fields, out, logits):
    """Write each member's inputs, ``[K, B, N + F, D]``, and first-order terms, ``[B, K]``."""
    literally(lanes)
    B = fields.samples
    K = fields.members
    N = fields.numbers
    F = fields.features
    D = fields.width
    Q = fields.bins
    while True:
        begin = take(counter) * TILE
        if begin >= B:
            break
        for b in range(begin, min(begin + TILE, B)):
            for n in range(N):
                find_bin(fields, b, n)
            for k in range(K):
                bits, place, logit = first_bits(fields, k, b), U((k * B + b) * (N + F) * D), np.float32(0.0)
                column = U(k * D)  # of the member's weights of a number
                for n in range(N):
                    logit += min(max(fields.dense[b * N + n], -_MOST), _MOST) * fields.first[n * K + k]
                    bin = fields.bin[b * N + n]
                    scale = broadcast(factor(fields, bits, n), lanes)
                    share = broadcast(fields.share[b * N + n], lanes)
                    bias, below = column + U(n * K * D), column + U((n * (Q + 1) + bin) * K * D)
                    weight = column + U((n * Q + min(bin, Q - 1)) * K * D)
                    for d in range(U(0), U(D), U(lanes)):
                        vector = add(
                            load(fields.bias, bias + d, lanes), load(fields.below, below + d, lanes)
                        )
                        vector = multiply_add(share, load(fields.weight, weight + d, lanes), vector)
                        store(out, place + d, multiply(passed(vector, vector), scale))
                    place += U(D)
                row = U((b * F * K + k) * (D + 1))
                for f in range(F):
                    scale = factor(fields, bits, N + f)
                    logit += fields.vectors[row + U(D)] * scale
                    for d in range(U(0), U(D), U(lanes)):
                        store(
                            out,
                            place + d,
                            multiply(load(fields.vectors, row + d, lanes), broadcast(scale, lanes)),
                        )
                    place += U(D)
                    row += U(K * (D + 1))
                logits[b * K + k] = logit


class FieldGradients(NamedTuple):
    """Gradients of `Fields.vectors`, `weight`, `bias` and `first`, flat."""

    vectors: NDArray[np.float32]
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    first: NDArray[np.float32]


@njit(**BODY)
def spread_number(lanes, fields, n, inputs, gradient, logits, out):
    """Set the gradients of the weights of number n. Samples are added in their order."""
    literally(lanes)
    B = fields.samples
    K = fields.members
    N = fields.numbers
    F = fields.features
    D = fields.width
    Q = fields.bins
    # First the gradient of `below`, from the bin that it is for downwards: that of bin q is in
    # place q - 1.
    for c in range(Q * K * D):
        out.weight[n * Q * K * D + c] = np.float32(0.0)
    for c in range(K * D):
        out.bias[n * K * D + c] = np.float32(0.0)
    for k in range(K):
        bias, first = U((n * K + k) * D), np.float32(0.0)
        for b in range(B):
            first += min(max(fields.dense[b * N + n], -_MOST), _MOST) * logits[b * K + k]
            bin, share = fields.bin[b * N + n], broadcast(fields.share[b * N + n], lanes)
            scale = broadcast(factor(fields, first_bits(fields, k, b), n), lanes)
            place = U(((k * B + b) * (N + F) + n) * D)
            weights = U(((n * Q + min(bin, Q - 1)) * K + k) * D)
            below = U(((n * (Q + 1) + bin) * K + k) * D)
            for d in range(U(0), U(D), U(lanes)):
                part = passed(
                    multiply(load(gradient, place + d, lanes), scale), load(inputs, place + d, lanes)
                )
                store(out.bias, bias + d, add(load(out.bias, bias + d, lanes), part))
                # The share of a number above the last edge is 0.
                store(
                    out.weight, weights + d, multiply_add(share, part, load(out.weight, weights + d, lanes))
                )
                store(fields.below, below + d, add(load(fields.below, below + d, lanes), part))
        out.first[n * K + k] = first


@njit(**BODY)
def add_bins_above(fields, n, out):
    """Add to the gradient of each bin's weight the gradients of all samples in bins above it."""
    count, Q = fields.members * fields.width, fields.bins
    for q in range(Q - 1, -1, -1):
        edge, above = n * (Q + 1) + q, (n * (Q + 1) + q + 1) * count
        is_wide = fields.edges[edge + 1] > fields.edges[edge]
        for c in range(count):
            if is_wide:
                out.weight[(n * Q + q) * count + c] += fields.below[above + c]
            fields.below[above - count + c] += fields.below[above + c]


@njit(**BODY)
def spread(member, lanes, counter, fields, inputs, gradient, logits, out):
    """Compute the gradients of `fill`: a task is a number, or a tile of samples.

    `inputs` and `gradient` are ``[K, B, N + F, D]``, and `logits` is the gradient of the logits,
    ``[B, K]``.
    """
    literally(lanes)
    B = fields.samples
    K = fields.members
    N = fields.numbers
    F = fields.features
    D = fields.width
    while True:
        task = take(counter)
        begin = (task - N) * TILE
        if begin >= B:
            break
        if task < N:
            spread_number(lanes, fields, task, inputs, gradient, logits, out)
            add_bins_above(fields, task, out)
            continue
        for b in range(begin, min(begin + TILE, B)):
            for k in range(K):
                bits, place = first_bits(fields, k, b), U(((k * B + b) * (N + F) + N) * D)
                row, of_logit = U((b * F * K + k) * (D + 1)), logits[b * K + k]
                for f in range(F):
                    scale = factor(fields, bits, N + f)
                    out.vectors[row + U(D)] = of_logit * scale
                    for d in range(U(0), U(D), U(lanes)):
                        part = multiply(load(gradient, place + d, lanes), broadcast(scale, lanes))
                        store(out.vectors, row + d, part)
                    place += U(D)
                    row += U(K * (D + 1))


class Hidden(NamedTuple):
    """A hidden layer: its sizes, where its values are, and its dropout. The values of a member are
    ``[B, widths[k]]`` and begin at ``starts[k] * B``.
    """

    samples: int
    width: int
    """Columns of bits, biases and weights; a member uses the first ones."""
    members: int
    widths: NDArray[np.int64]
    starts: NDArray[np.int64]
    bits: NDArray[np.int16]
    """``[B, width]``: an output is dropped if its bits are below the member's limit. Empty without
    dropout.
    """
    limit: NDArray[np.int16]
    scale: NDArray[np.float32]
    """``[K]`` limits and factors."""


@njit(**BODY)
def activate(member, lanes, counter, layer, values, bias, weight, logits):
    """Add the bias ``[K, width]`` to the values, which are products, then apply dropout and ReLU in
    place.

    If `weight` ``[K, width]`` is not empty, the products of the result with it are added to the
    logits, ``[B, K]``.
    """
    literally(lanes)
    B, W, has_bits = layer.samples, layer.width, len(layer.bits) > 0
    while True:
        begin = take(counter) * TILE
        if begin >= B:
            break
        for k in range(layer.members):
            limit = layer.limit[k]
            scale = layer.scale[k]
            H = layer.widths[k]
            first = U(k * W)
            for b in range(begin, min(begin + TILE, B)):
                start, bits = U(layer.starts[k] * B + b * H), U(b * W)
                if has_bits and limit > -32768:
                    for h in range(U(H)):
                        value = values[start + h] + bias[first + h]
                        is_zero = value <= np.float32(0.0) or layer.bits[bits + h] < limit
                        values[start + h] = np.float32(0.0) if is_zero else value * scale
                else:
                    for h in range(U(H)):
                        value = values[start + h] + bias[first + h]
                        values[start + h] = np.float32(0.0) if value <= np.float32(0.0) else value
                if len(weight):
                    sums = broadcast(np.float32(0.0), lanes)
                    for h in range(U(0), U(H), U(lanes)):
                        sums = multiply_add(
                            load(values, start + h, lanes), load(weight, first + h, lanes), sums
                        )
                    logits[b * layer.members + k] += total(sums)


@njit(**BODY)
def differentiate(member, counter, layer, values, weight, logits, gradient, bias, weight_gradient):
    """Turn the gradient of `values`, the result of `activate`, into the gradient of its products,
    in place.

    `bias` ``[K, width]``, which is zeros, gets the sum over samples. If `weight` is not empty, the
    gradient is computed from that of the logits, ``[B, K]``, and `weight_gradient`, which is zeros,
    gets its sum, too. A task is a member; samples are added in their order.
    """
    B, W = layer.samples, layer.width
    while True:
        k = take(counter)
        if k >= layer.members:
            break
        scale, H, first = layer.scale[k], layer.widths[k], U(k * W)
        for b in range(B):
            start = U(layer.starts[k] * B + b * H)
            if len(weight):
                of_logit = logits[b * layer.members + k]
                for h in range(U(H)):
                    weight_gradient[first + h] += of_logit * values[start + h]
                    gradient[start + h] = of_logit * weight[first + h]
            for h in range(U(H)):
                part = (
                    gradient[start + h] * scale if values[start + h] > np.float32(0.0) else np.float32(0.0)
                )
                gradient[start + h] = part
                bias[first + h] += part


@njit(nogil=True, cache=True)
def run_differentiate(team, layer, values, weight, logits, gradient, bias, weight_gradient):
    args = (
        stack_array(1, np.int64),
        Hidden(*layer),
        values,
        weight,
        logits,
        gradient,
        bias,
        weight_gradient,
    )
    run_team(team, differentiate, args)


@cache
def kernels(lanes: int) -> SimpleNamespace:
    """Return kernels for blocks of `lanes` floats, a divisor of the width, cached on disk."""

    @njit(nogil=True, cache=True)
    def run_fill(team, fields, out, logits):
        fields = Fields(*fields)
        sum_bins(fields)
        run_team(team, fill, (lanes, stack_array(1, np.int64), fields, out, logits))

    @njit(nogil=True, cache=True)
    def run_spread(team, fields, inputs, gradient, logits, out):
        fields = Fields(*fields)
        fields.below[:] = np.float32(0.0)
        args = (lanes, stack_array(1, np.int64), fields, inputs, gradient, logits, FieldGradients(*out))
        run_team(team, spread, args)

    @njit(nogil=True, cache=True)
    def run_activate(team, layer, values, bias, weight, logits):
        args = (lanes, stack_array(1, np.int64), Hidden(*layer), values, bias, weight, logits)
        run_team(team, activate, args)

    return SimpleNamespace(fill=run_fill, spread=run_spread, activate=run_activate)
