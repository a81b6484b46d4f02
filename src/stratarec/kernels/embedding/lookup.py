"""Numba bodies of lookups: pool or gather rows of one width group.

A group's tables lie one after another in one flat array: row r is ``weights[r * D:(r + 1) * D]``. Features are given
as parallel arrays: `key` (place in the batch's keys), `base` (first row of its table), `rows` (rows of its table),
`column` (first output column), `mean` (1 for mean pooling).

Inner loops index flat arrays with unsigned integers. With signed ones Numba adds a test for negative indices.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
from numba import literally, njit

from stratarec.kernels.embedding.rows import U, ahead_of, prefetch_row
from stratarec.kernels.team import BODY, run_team, take
from stratarec.kernels.vector import add, broadcast, load, multiply, store, stream, total


@njit(**BODY)
def share(length, mean):
    """What a lookup of a bag of `length` counts for."""
    return np.float32(1.0) / np.float32(length) if mean and length > 1 else np.float32(1.0)


@njit(**BODY)
def copy_rows(lanes, weights, D, values, first, last, origin, limit, out, target, stride, streaming):
    """``out[target + i * stride:][:D]`` = row of values[first + i]. Returns the place of a bad id, or -1."""
    literally(lanes)
    start, final = U(first), U(last) - U(1)
    for i in range(start, min(start + ahead_of(D), U(last))):
        prefetch_row(weights, U(origin + values[i]) * D, D)
    place = U(target)
    for i in range(start, U(last)):
        prefetch_row(weights, U(origin + values[min(i + ahead_of(D), final)]) * D, D)
        index = values[i]
        if U(index) >= U(limit):
            return np.int64(i)
        source = U(origin + index) * D
        for block in range(U(0), D, U(lanes)):
            row = load(weights, source + block, lanes)
            if streaming:
                stream(out, place + block, row)
            else:
                store(out, place + block, row)
        place += U(stride)
    return np.int64(-1)


@njit(**BODY)
def pool_singles(
    member,
    lanes,
    whole,
    counter,
    weights,
    width,
    values,
    batch,
    key,
    base,
    rows,
    column,
    out,
    stride,
    tile,
    streaming,
    bad,
):
    """out[b * stride + column[f]:][:D] = row of the one id of bag (f, b), `tile` samples at a time."""
    literally(lanes)
    D = U(lanes if whole else width)
    while True:
        first = take(counter) * tile
        if first >= batch:
            break
        last = min(first + tile, batch)
        for f in range(len(key)):
            start, target = key[f] * batch, first * stride + column[f]
            found = copy_rows(
                lanes, weights, D, values, start + first, start + last, base[f], rows[f], out, target, stride,
                streaming,
            )  # fmt: skip
            bad[member] = max(bad[member], found)


@njit(**BODY)
def pool_bags(
    member, lanes, whole, counter, weights, width, values, offsets, sample_weights, weighted, batch, filled, key, base,
    rows, column, mean, out, stride, tile, bad,
):  # fmt: skip
    """As `pool_singles` for bags of any length: sum or mean of (weighted) rows; an empty bag gives zeros.

    Of feature f only the first ``filled[f]`` bags are pooled.
    """
    literally(lanes)
    D = U(lanes if whole else width)
    while True:
        task = take(counter)
        # A feature's long bags must not all fall to one member: a task is a tile of one feature.
        f, first = task % len(key), (task // len(key)) * tile
        if first >= batch:
            break
        shift = key[f] * batch
        limit, origin = rows[f], base[f]
        stop = offsets[shift + batch] - 1
        for bag in range(shift + first, shift + min(first + tile, filled[f])):
            target = U((bag - shift) * stride + column[f])
            begin, end = U(offsets[bag]), U(offsets[bag + 1])
            for i in range(begin, end):
                prefetch_row(weights, U(origin + values[min(i + ahead_of(D), U(stop))]) * D, D)
                if U(values[i]) >= U(limit):
                    bad[member] = i
                    end = begin
            for block in range(U(0), D, U(lanes)):
                row = broadcast(np.float32(0.0), lanes)
                for i in range(begin, end):
                    part = load(weights, U(origin + values[i]) * D + block, lanes)
                    if weighted:
                        part = multiply(broadcast(sample_weights[i], lanes), part)
                    row = add(row, part)
                if mean[f] and end > begin + U(1):
                    row = multiply(broadcast(share(end - begin, mean[f]), lanes), row)
                store(out, target + block, row)


@njit(**BODY)
def gather(member, lanes, whole, counter, weights, width, values, base, rows, out, tile, bad):
    """out[i * D:][:D] = row of values[i]: an unpooled lookup in one table."""
    literally(lanes)
    D = U(lanes if whole else width)
    while True:
        first = take(counter) * tile
        if first >= len(values):
            break
        last = min(first + tile, len(values))
        found = copy_rows(
            lanes, weights, D, values, first, last, base, rows, out, first * width, width, False
        )  # fmt: skip
        bad[member] = max(bad[member], found)


@njit(**BODY)
def weight_gradient(
    member,
    lanes,
    whole,
    counter,
    weights,
    width,
    values,
    offsets,
    batch,
    key,
    base,
    column,
    mean,
    gradient,
    stride,
    out,
):
    """out[i] += gradient of bag(i) . row(values[i]) (divided by the bag's length for mean pooling)."""
    literally(lanes)
    while True:
        f = take(counter)
        if f >= len(key):
            break
        shift = key[f] * batch
        for bag in range(shift, shift + batch):
            factor = share(offsets[bag + 1] - offsets[bag], mean[f])
            target = U((bag - shift) * stride + column[f])
            for i in range(U(offsets[bag]), U(offsets[bag + 1])):
                source = U((base[f] + values[i]) * width)
                product = np.float32(0.0)
                for block in range(U(0), U(width), U(lanes)):
                    one, other = load(gradient, target + block, lanes), load(weights, source + block, lanes)
                    product += total(multiply(one, other))
                out[i] += factor * product


@cache
def kernels(lanes: int, whole: bool) -> SimpleNamespace:
    """The lookups for rows in blocks of `lanes`; each is compiled at its first call and kept on disk."""

    @njit(nogil=True, cache=True)
    def run_pool_singles(team, weights, width, values, batch, key, base, rows, column, out, stride, tile, streaming):
        counter, bad = np.zeros(1, np.int64), np.full(team.threads, -1)
        given = (
            lanes, whole, counter, weights, width, values, batch, key, base, rows, column, out, stride, tile,
            streaming, bad,
        )  # fmt: skip
        run_team(team, pool_singles, given)
        return bad.max()

    @njit(nogil=True, cache=True)
    def run_pool_bags(
        team, weights, width, values, offsets, sample_weights, weighted, batch, filled, key, base, rows,
        column, mean, out, stride, tile,
    ):  # fmt: skip
        counter, bad = np.zeros(1, np.int64), np.full(team.threads, -1)
        given = (
            lanes, whole, counter, weights, width, values, offsets, sample_weights, weighted, batch, filled, key, base,
            rows, column, mean, out, stride, tile, bad,
        )  # fmt: skip
        run_team(team, pool_bags, given)
        return bad.max()

    @njit(nogil=True, cache=True)
    def run_gather(team, weights, width, values, base, rows, out, tile):
        counter, bad = np.zeros(1, np.int64), np.full(team.threads, -1)
        run_team(team, gather, (lanes, whole, counter, weights, width, values, base, rows, out, tile, bad))
        return bad.max()

    @njit(nogil=True, cache=True)
    def run_weight_gradient(
        team, weights, width, values, offsets, batch, key, base, column, mean, gradient, stride, out
    ):
        counter = np.zeros(1, np.int64)
        given = (
            lanes, whole, counter, weights, width, values, offsets, batch, key, base, column, mean, gradient, stride,
            out,
        )  # fmt: skip
        run_team(team, weight_gradient, given)

    return SimpleNamespace(
        pool_singles=run_pool_singles,
        pool_bags=run_pool_bags,
        gather=run_gather,
        weight_gradient=run_weight_gradient,
    )
