"""Lookups on the CPU: pool or gather rows of one group of tables.

The tables of a group follow one another in one flat array: row r is ``weights[r * D:(r + 1) * D]``.
Inner loops use unsigned indices, because Numba adds a test for negative indices to signed ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.bags import NO_LIMITS, Bags, Features, share
from stratarec.kernels.runtime.atomics import raise_to
from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY, run_team, take, team_of
from stratarec.kernels.runtime.threads import team_threads, threads_for, tile_size
from stratarec.kernels.simd.prefetch import U, ahead_of, prefetch_row
from stratarec.kernels.simd.vector import (
    LANES,
    add,
    blocks,
    broadcast,
    load,
    multiply,
    store,
    stream,
    total,
)

# Samples of a task. With fewer than 64 rows per table, prefetching restarts too often; an upper
# limit of 32 or 128 samples did not help.
_LEAST_TILE, _MOST_TILE = 64, 512
# Minimum number of rows of a task, if a batch is too small to be divided by samples alone.
_TASK_ROWS = 128
# Larger outputs bypass the caches: reading cache lines only to overwrite them took a tenth to a
# third of the time.
_STREAM_BYTES = 4 << 20


class Output(NamedTuple):
    """Flat output, number of floats of a sample, and whether stores bypass the caches."""

    out: NDArray[np.float32]
    stride: int
    streaming: bool


class Tasks(NamedTuple):
    """Counter of tasks, and number of samples and of features per task."""

    counter: NDArray[np.int64]
    samples: int
    features: int
    bad: NDArray[np.int64]
    """One number: 1 + the largest position of a bad id that a thread met, 0 if there is none."""


@njit(**BODY)
def limit_of(bags, filled, f):
    """Return the number of bags of feature f to pool.

    An empty `filled` means all bags of every feature; a full array of counts would cost 2 us a
    batch.
    """
    # The output of the other bags is never read. Setting it to zeros took 1.74 ms instead of 0.66.
    return filled[f] if len(filled) else np.int64(bags.batch)


@njit(**BODY)
def copy_rows(lanes, weights, D, values, span, table, output, target):
    """Copy the row of ``values[first + i]`` to ``out[target + i * stride:][:D]``; return a bad id's
    position, or -1.

    `span` is the first and last (exclusive) position in `values`; `table` is the table's first row
    and number of rows.
    """
    literally(lanes)
    origin, limit = table
    start, last = U(span[0]), U(span[1])
    # Prefetching reads ids up to this position. Reading one id more passed every test of compiled
    # code; it was noticed only when the kernel ran as plain Python.
    final = last - U(1)
    for i in range(start, min(start + ahead_of(D), last)):
        prefetch_row(weights, U(origin + values[i]) * D, D)
    place = U(target)
    for i in range(start, last):
        prefetch_row(weights, U(origin + values[min(i + ahead_of(D), final)]) * D, D)
        index = values[i]
        if U(index) >= U(limit):
            return np.int64(i)
        source = U(origin + index) * D
        for block in range(U(0), D, U(lanes)):
            row = load(weights, source + block, lanes)
            if output.streaming:
                stream(output.out, place + block, row)
            else:
                store(output.out, place + block, row)
        place += U(output.stride)
    return np.int64(-1)


@njit(**BODY)
def pool_singles(member, lanes, one_block, tasks, weights, width, bags, filled, features, output):
    """Copy the row of the single id of bag (f, b) to out[b * stride + column[f]:][:D], a tile of
    samples at a time.

    Only the first `limit_of` bags of feature f are pooled.
    """
    literally(lanes)
    D = U(lanes if one_block else width)
    groups = (len(features.key) + tasks.features - 1) // tasks.features
    while True:
        task = take(tasks.counter)
        first = task // groups * tasks.samples
        if first >= bags.batch:
            break
        last = min(first + tasks.samples, bags.batch)
        begin = task % groups * tasks.features
        for f in range(begin, min(begin + tasks.features, len(features.key))):
            start, stop = features.key[f] * bags.batch, min(last, limit_of(bags, filled, f))
            if stop <= first:
                continue
            bad = copy_rows(
                lanes,
                weights,
                D,
                bags.values,
                (start + first, start + stop),
                (features.base[f], features.rows[f]),
                output,
                first * output.stride + features.column[f],
            )
            if bad >= 0:
                raise_to(tasks.bad, 0, bad + 1)


@njit(**BODY)
def pool_bag(lanes, weights, D, bags, span, origin, factor, output, target):
    """Set out[target:][:D] to the sum of the bag's weighted rows, multiplied by `factor`."""
    literally(lanes)
    begin, end = span
    for block in range(U(0), D, U(lanes)):
        row = broadcast(np.float32(0.0), lanes)
        for i in range(begin, end):
            part = load(weights, U(origin + bags.values[i]) * D + block, lanes)
            if bags.weighted:
                part = multiply(broadcast(bags.weights[i], lanes), part)
            row = add(row, part)
        # Most bags are summed and need no product.
        if factor != np.float32(1.0):
            row = multiply(broadcast(factor, lanes), row)
        store(output.out, target + block, row)


@njit(**BODY)
def pool_bags(member, lanes, one_block, tasks, weights, width, bags, filled, features, output):
    """Pool bags of any length by the sum or mean of their (weighted) rows; an empty bag gives
    zeros.

    Only the first `limit_of` bags of feature f are pooled.
    """
    literally(lanes)
    D = U(lanes if one_block else width)
    count = len(features.key)
    while True:
        task = take(tasks.counter)
        # A task is a tile of one feature, so that the long bags of a feature do not all go to one
        # thread.
        f, first = task % count, task // count * tasks.samples
        if first >= bags.batch:
            break
        shift = features.key[f] * bags.batch
        limit, origin = features.rows[f], features.base[f]
        stop = bags.offsets[shift + bags.batch] - 1
        for bag in range(shift + first, shift + min(first + tasks.samples, limit_of(bags, filled, f))):
            target = U((bag - shift) * output.stride + features.column[f])
            begin, end = U(bags.offsets[bag]), U(bags.offsets[bag + 1])
            for i in range(begin, end):
                prefetch_row(weights, U(origin + bags.values[min(i + ahead_of(D), U(stop))]) * D, D)
                if U(bags.values[i]) >= U(limit):
                    raise_to(tasks.bad, 0, np.int64(i) + 1)
                    end = begin
            factor = share(end - begin, features.mean[f])
            pool_bag(lanes, weights, D, bags, (begin, end), origin, factor, output, target)


@njit(**BODY)
def gather_tiles(member, lanes, one_block, tasks, weights, width, values, table, output):
    """Copy the row of values[i] to out[i * D:][:D]."""
    literally(lanes)
    D = U(lanes if one_block else width)
    while True:
        first = take(tasks.counter) * tasks.samples
        if first >= len(values):
            break
        span = (first, min(first + tasks.samples, len(values)))
        bad = copy_rows(lanes, weights, D, values, span, table, output, first * output.stride)
        if bad >= 0:
            raise_to(tasks.bad, 0, bad + 1)


@njit(**BODY)
def weigh_tiles(member, lanes, one_block, tasks, weights, width, bags, features, gradient, out):
    """Add to out[i] the dot product of row(values[i]) and its bag's gradient; for a mean, divide by
    the bag's size.
    """
    literally(lanes)
    D = U(lanes if one_block else width)
    count = len(features.key)
    while True:
        task = take(tasks.counter)
        f, first = task % count, task // count * tasks.samples
        if first >= bags.batch:
            break
        shift = features.key[f] * bags.batch
        for bag in range(shift + first, shift + min(first + tasks.samples, bags.batch)):
            factor = share(bags.offsets[bag + 1] - bags.offsets[bag], features.mean[f])
            target = U((bag - shift) * gradient.stride + features.column[f])
            for i in range(U(bags.offsets[bag]), U(bags.offsets[bag + 1])):
                source = U(features.base[f] + bags.values[i]) * D
                product = np.float32(0.0)
                for block in range(U(0), D, U(lanes)):
                    one = load(gradient.out, target + block, lanes)
                    other = load(weights, source + block, lanes)
                    product += total(multiply(one, other))
                out[i] += factor * product


@cache
def kernels(lanes: int, one_block: bool) -> SimpleNamespace:
    """Return the lookups for blocks of `lanes` floats; each is compiled at its first call and
    cached on disk.

    The kernels take plain tuples, which are passed to compiled code in a third of the time of named
    tuples.
    """

    @njit(nogil=True, cache=True)
    def run_pool_singles(team, weights, width, bags, filled, features, output, tile):
        tasks = Tasks(stack_array(1, np.int64), tile[0], tile[1], stack_array(1, np.int64))
        args = (
            lanes,
            one_block,
            tasks,
            weights,
            width,
            Bags(*bags),
            filled,
            Features(*features),
            Output(*output),
        )
        run_team(team, pool_singles, args)
        return tasks.bad[0] - 1

    @njit(nogil=True, cache=True)
    def run_pool_bags(team, weights, width, bags, filled, features, output, tile):
        tasks = Tasks(stack_array(1, np.int64), tile[0], tile[1], stack_array(1, np.int64))
        args = (
            lanes,
            one_block,
            tasks,
            weights,
            width,
            Bags(*bags),
            filled,
            Features(*features),
            Output(*output),
        )
        run_team(team, pool_bags, args)
        return tasks.bad[0] - 1

    @njit(nogil=True, cache=True)
    def run_gather(team, weights, width, values, table, output, tile):
        tasks = Tasks(stack_array(1, np.int64), tile, 1, stack_array(1, np.int64))
        run_team(
            team, gather_tiles, (lanes, one_block, tasks, weights, width, values, table, Output(*output))
        )
        return tasks.bad[0] - 1

    @njit(nogil=True, cache=True)
    def run_weight_gradient(team, weights, width, bags, features, gradient, tile, out):
        tasks = Tasks(stack_array(1, np.int64), tile, 1, stack_array(1, np.int64))
        args = (
            lanes,
            one_block,
            tasks,
            weights,
            width,
            Bags(*bags),
            Features(*features),
            Output(*gradient),
            out,
        )
        run_team(team, weigh_tiles, args)

    return SimpleNamespace(
        pool_singles=run_pool_singles,
        pool_bags=run_pool_bags,
        gather=run_gather,
        weight_gradient=run_weight_gradient,
    )


def pool(weights, group, bags, out):
    features, array = group.pooled_features(bags), out.numpy()
    threads, stride = threads_for(len(bags.values)), array.shape[1]
    tile = _tile(bags.batch, threads)
    filled = NO_LIMITS if bags.filled is None else bags.filled[group.pooled]
    if bags.offsets is None and bags.weights is None:
        streaming = (
            array.nbytes >= _STREAM_BYTES and group.lines and not (stride % LANES or array.ctypes.data % 64)
        )
        output = array.reshape(-1), stride, streaming
        shape = _shape(tile, bags.batch, len(features[0]), threads)
        # Not only every row but every block must start at a cache line: a row of 144 is 3 blocks of
        # 48 here, 2 of 72 elsewhere.
        run = kernels(*blocks(group.width, LANES if group.lines else 1))
        return run.pool_singles(
            team_of(threads), weights, group.width, bags.compiled, filled, features, output, shape
        )
    output = array.reshape(-1), stride, False
    return kernels(*blocks(group.width)).pool_bags(
        team_of(threads),
        weights,
        group.width,
        _with_offsets(bags).compiled,
        filled,
        features,
        output,
        (tile, 1),
    )


def gather(weights, group, values, feature, out):
    threads = threads_for(len(values))
    table = (group.base[feature], group.rows[feature])
    return kernels(*blocks(group.width)).gather(
        team_of(threads),
        weights,
        group.width,
        values,
        table,
        (out.numpy().reshape(-1), group.width, False),
        _tile(len(values), threads),
    )


def weight_gradient(weights, group, bags, gradient, out):
    threads, array = team_threads(), gradient.numpy()
    kernels(*blocks(group.width)).weight_gradient(
        team_of(threads),
        weights,
        group.width,
        _with_offsets(bags).compiled,
        group.pooled_features(bags),
        (array.reshape(-1), array.shape[1], False),
        _tile(bags.batch, threads),
        out.numpy(),
    )


def _tile(count, threads):
    return tile_size(count, threads, least=_LEAST_TILE, most=_MOST_TILE)


def _shape(tile, batch, features, threads):
    """Return samples and features per task: all features, unless that gives too few tasks."""
    tiles = -(-batch // tile)
    if threads == 1 or tiles >= 4 * threads:
        return tile, features
    share = -(-features * tiles // (4 * threads))
    return tile, min(max(share, -(-_TASK_ROWS // min(tile, batch))), features)


def _with_offsets(bags):
    if bags.offsets is not None:
        return bags
    return replace(bags, offsets=np.arange(len(bags.values) + 1, dtype=np.int64))
