"""Attention over histories without padding or copies, computed on pairs of a sample and an event.

The pairs of a sample are contiguous. Each distinct event has one row: samples with the same
history, and histories that overlap, read the same rows. One thread computes each output row and
adds its pairs in ascending order, so the bits of the result do not depend on the number of threads.

Shapes: B samples, E events, N pairs, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import literally, njit
from numpy.typing import NDArray
from torch import Tensor

from stratarec.errors import ConfigError
from stratarec.kernels.row_index import RowIndex, add_up
from stratarec.kernels.row_index import take as take_rows
from stratarec.kernels.runtime.memory import RECYCLER, flat
from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY, run_team, take, team_of
from stratarec.kernels.runtime.threads import team_threads, tile_size
from stratarec.kernels.simd.vector import add, blocks, broadcast, load, multiply, store, total


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs of samples and events.

    Pairs ``offsets[b]:offsets[b + 1]`` join sample b with consecutive events, beginning with event
    ``first[b]``.

    Parameters
    ----------
    first : Tensor
        ``[B]`` int64 first event of each sample.
    offsets : Tensor
        ``[B + 1]`` int64, rising, from 0 to N.
    """

    first: Tensor
    offsets: Tensor

    @property
    def samples(self) -> int:
        """Number of samples, B."""
        return self.first.numel()

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Sample and event of every pair, both ``[N]``."""
        return reference_places(self.first, self.offsets)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def check(self, samples: Tensor | None, events: Tensor) -> None:
        """Raise `ConfigError` unless the shapes fit and the event of every pair exists.

        Parameters
        ----------
        samples : Tensor or None
            ``[B, D]`` vectors of samples; None to check only the events.
        events : Tensor
            ``[E, D]`` vectors of events.
        """
        ends = self.first + self.offsets.diff()
        last = int(ends.max()) if self.samples else 0
        if (samples is not None and samples.shape != (self.samples, events.shape[1])) or last > len(events):
            got = None if samples is None else tuple(samples.shape)
            raise ConfigError(
                f"pairs of {self.samples} samples with events up to {last} got samples {got} and events "
                f"{tuple(events.shape)}"
            )


class DevicePairs(NamedTuple):
    """Pairs on a device. There may be more pairs, which are in no list."""

    samples: RowIndex
    """Sample of every pair, and the pairs of every sample."""
    events: RowIndex
    """Event of every pair, and the pairs of every event."""


def pair_sums(samples: Tensor, events: Tensor, pairs: Pairs | DevicePairs) -> Tensor:
    """Return ``samples[b] + events[e]`` of every pair of a sample b and an event e, ``[N, D]``
    float32.

    Parameters
    ----------
    samples, events : Tensor
        ``[B, D]`` and ``[E, D]`` vectors.
    pairs : Pairs or DevicePairs
        The pairs, on the device of the vectors.
    """
    if isinstance(pairs, DevicePairs):
        return take_rows(samples.float(), pairs.samples) + take_rows(events.float(), pairs.events)
    pairs.check(samples, events)
    out: Tensor = _Combine.apply(samples.float(), events.float(), pairs, False)
    return out


def pair_products(samples: Tensor, events: Tensor, pairs: Pairs | DevicePairs) -> Tensor:
    """Return ``samples[b] * events[e]`` of every pair, ``[N, D]`` float32; see `pair_sums`."""
    if isinstance(pairs, DevicePairs):
        return take_rows(samples.float(), pairs.samples) * take_rows(events.float(), pairs.events)
    pairs.check(samples, events)
    out: Tensor = _Combine.apply(samples.float(), events.float(), pairs, True)
    return out


def pair_pool(weights: Tensor, events: Tensor, pairs: Pairs | DevicePairs) -> Tensor:
    """Return for each sample the sum of ``weights[p] * events[e]`` over its pairs, ``[B, D]``
    float32.

    The sum of a sample without pairs is zero. `weights` is ``[N]``; the other arguments are those
    of `pair_sums`.
    """
    if isinstance(pairs, DevicePairs):
        return add_up(weights.float().unsqueeze(1) * take_rows(events.float(), pairs.events), pairs.samples)
    pairs.check(None, events)
    if weights.shape != (len(pairs),):
        raise ConfigError(
            f"{len(pairs)} pairs got weights {tuple(weights.shape)}, expected one for each pair"
        )
    out: Tensor = _Pool.apply(weights.float(), events.float(), pairs)
    return out


# Every pair refers to the row of its event. When keys and rows were copied to every sample and
# padded, deduplication gained nothing: 655 ms a step with it and 650 without, on one thread.
def _run(name: str, pairs: Pairs, split: int, width: int, out: Tensor, *inputs: Any) -> Tensor:
    """Run the kernel `name`, whose threads share `split` samples or events; return `out`."""
    threads = team_threads()
    rows = pairs.first.numpy(), pairs.offsets.numpy(), width, tile_size(split, threads, least=64)
    arrays = [flat(part) if isinstance(part, Tensor) else part for part in (*inputs, out)]
    getattr(kernels(*blocks(width)), name)(team_of(threads), rows, *arrays)
    return out


def _sum_to_samples(term: int, terms: Tensor, events: Tensor, pairs: Pairs) -> Tensor:
    width = events.shape[1]
    out = RECYCLER.empty(pairs.samples, width)
    return _run("sum_to_samples", pairs, pairs.samples, width, out, term, terms, events)


def _sum_to_events(term: int, terms: Tensor, samples: Tensor, pairs: Pairs, events: int) -> Tensor:
    width = samples.shape[1]
    return _run("sum_to_events", pairs, events, width, RECYCLER.empty(events, width), term, terms, samples)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, samples: Tensor, events: Tensor, pairs: Pairs, times: bool) -> Tensor:
        ctx.pairs = pairs
        ctx.times = times
        # The gradient of a sum needs only the shapes.
        ctx.save_for_backward(*((samples, events) if times else (samples[:0], events[:0])))
        ctx.events = len(events)
        out = RECYCLER.empty(len(pairs), events.shape[1])
        return _run("combine", pairs, pairs.samples, events.shape[1], out, times, samples, events)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        samples, events = ctx.saved_tensors
        term = PRODUCT if ctx.times else PLAIN
        to_samples = _sum_to_samples(term, gradient, events, ctx.pairs)
        return to_samples, _sum_to_events(term, gradient, samples, ctx.pairs, ctx.events), None, None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, events: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        ctx.save_for_backward(weights, events)
        return _sum_to_samples(SCALED, weights, events, pairs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, events = ctx.saved_tensors
        pairs: Pairs = ctx.pairs
        dots = _run(
            "dots", pairs, pairs.samples, events.shape[1], torch.empty(len(pairs)), gradient, events
        )
        return dots, _sum_to_events(SCALED, weights, gradient, pairs, len(events)), None


U = np.uint64
# Term of a pair in a sum: the pair's row in `terms` (PLAIN), this row times a row of the sample or
# event (PRODUCT), or the pair's number in `terms` times a row of the sample or event (SCALED).
PLAIN, PRODUCT, SCALED = 0, 1, 2


class PairRows(NamedTuple):
    """Arrays of `Pairs`, floats of a row, and samples (or events) that a thread takes at a time."""

    first: NDArray[np.int64]
    offsets: NDArray[np.int64]
    width: int
    tile: int


@njit(**BODY)
def combine(member, lanes, one_block, counter, pairs, times, samples, events, out):
    """Set out[p] to samples[b] + events[e], or to their product if `times`, for every pair p."""
    literally(lanes)
    D = U(lanes if one_block else pairs.width)
    first = pairs.first
    offsets = pairs.offsets
    tile = pairs.tile
    while True:
        begin = take(counter) * tile
        if begin >= len(first):
            break
        for b in range(begin, min(begin + tile, len(first))):
            source = U(first[b]) * D
            for target in range(U(offsets[b]) * D, U(offsets[b + 1]) * D, D):
                for block in range(U(0), D, U(lanes)):
                    one, other = load(samples, U(b) * D + block, lanes), load(events, source + block, lanes)
                    store(out, target + block, multiply(one, other) if times else add(one, other))
                source += D


@njit(**BODY)
def term_of(lanes, term, terms, p, right, place, D):
    """Return one block of a pair's term: it begins at `p` in `terms` and at `place` in `right`."""
    literally(lanes)
    if term == PLAIN:
        return load(terms, p, lanes)
    row = load(right, place, lanes)
    if term == PRODUCT:
        return multiply(load(terms, p, lanes), row)
    return multiply(broadcast(terms[p // D], lanes), row)


@njit(**BODY)
def sum_to_samples(member, lanes, one_block, counter, pairs, term, terms, events, out):
    """Set out[b] to the sum of the terms of sample b's pairs."""
    literally(lanes)
    D = U(lanes if one_block else pairs.width)
    first = pairs.first
    offsets = pairs.offsets
    tile = pairs.tile
    while True:
        begin = take(counter) * tile
        if begin >= len(first):
            break
        for b in range(begin, min(begin + tile, len(first))):
            # The outer loop is over blocks, the inner loop over pairs, so a block of the sum stays
            # in one register.
            for block in range(U(0), D, U(lanes)):
                row_sum = broadcast(np.float32(0.0), lanes)
                source = U(first[b]) * D + block
                for p in range(U(offsets[b]) * D + block, U(offsets[b + 1]) * D + block, D):
                    row_sum = add(row_sum, term_of(lanes, term, terms, p, events, source, D))
                    source += D
                store(out, U(b) * D + block, row_sum)


@njit(**BODY)
def sum_to_events(member, lanes, one_block, counter, pairs, term, terms, samples, out):
    """Set out[e] to the sum of the terms of event e's pairs; threads add tiles of events."""
    literally(lanes)
    D = U(lanes if one_block else pairs.width)
    first = pairs.first
    offsets = pairs.offsets
    tile = pairs.tile
    events = len(out) // pairs.width
    while True:
        low = take(counter) * tile
        if low >= events:
            break
        high = min(low + tile, events)
        for place in range(U(low) * D, U(high) * D, U(lanes)):
            store(out, place, broadcast(np.float32(0.0), lanes))
        # Every tile visits all samples, because windows overlap and any sample may have events in
        # the tile. The ascending order of samples fixes the bits.
        for b in range(len(first)):
            begin, end = max(first[b], low), min(first[b] + offsets[b + 1] - offsets[b], high)
            if begin >= end:
                continue
            p = U(offsets[b] + begin - first[b]) * D
            for target in range(U(begin) * D, U(end) * D, D):
                for block in range(U(0), D, U(lanes)):
                    part = term_of(lanes, term, terms, p + block, samples, U(b) * D + block, D)
                    store(out, target + block, add(load(out, target + block, lanes), part))
                p += D


@njit(**BODY)
def dots(member, lanes, one_block, counter, pairs, samples, events, out):
    """Set out[p] to the dot product of samples[b] and events[e] for every pair p."""
    literally(lanes)
    D = U(lanes if one_block else pairs.width)
    first = pairs.first
    offsets = pairs.offsets
    tile = pairs.tile
    while True:
        begin = take(counter) * tile
        if begin >= len(first):
            break
        for b in range(begin, min(begin + tile, len(first))):
            source = U(first[b]) * D
            for p in range(U(offsets[b]), U(offsets[b + 1])):
                product = np.float32(0.0)
                for block in range(U(0), D, U(lanes)):
                    one, other = load(samples, U(b) * D + block, lanes), load(events, source + block, lanes)
                    product += total(multiply(one, other))
                out[p] = product
                source += D


@cache
def kernels(lanes: int, one_block: bool) -> SimpleNamespace:
    """Return the kernels for blocks of `lanes` floats, compiled when called, cached on disk."""

    @njit(nogil=True, cache=True)
    def run_combine(team, pairs, times, samples, events, out):
        args = (lanes, one_block, stack_array(1, np.int64), PairRows(*pairs), times, samples, events, out)
        run_team(team, combine, args)

    @njit(nogil=True, cache=True)
    def run_sum_to_samples(team, pairs, term, terms, events, out):
        args = (lanes, one_block, stack_array(1, np.int64), PairRows(*pairs), term, terms, events, out)
        run_team(team, sum_to_samples, args)

    @njit(nogil=True, cache=True)
    def run_sum_to_events(team, pairs, term, terms, samples, out):
        args = (lanes, one_block, stack_array(1, np.int64), PairRows(*pairs), term, terms, samples, out)
        run_team(team, sum_to_events, args)

    @njit(nogil=True, cache=True)
    def run_dots(team, pairs, samples, events, out):
        run_team(
            team, dots, (lanes, one_block, stack_array(1, np.int64), PairRows(*pairs), samples, events, out)
        )

    return SimpleNamespace(
        combine=run_combine,
        sum_to_samples=run_sum_to_samples,
        sum_to_events=run_sum_to_events,
        dots=run_dots,
    )


def reference_places(first: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return sample and event of every pair, both ``[N]``."""
    samples = torch.repeat_interleave(torch.arange(len(first)), offsets.diff())
    return samples, torch.arange(len(samples)) - offsets[samples] + first[samples]


def reference_pair_sums(samples: Tensor, events: Tensor, sample: Tensor, event: Tensor) -> Tensor:
    """Return ``samples[b] + events[e]`` of every pair, ``[N, D]``."""
    return samples[sample] + events[event]


def reference_pair_products(samples: Tensor, events: Tensor, sample: Tensor, event: Tensor) -> Tensor:
    """Return ``samples[b] * events[e]`` of every pair, ``[N, D]``."""
    return samples[sample] * events[event]


def reference_pair_pool(
    weights: Tensor, events: Tensor, sample: Tensor, event: Tensor, samples: int
) -> Tensor:
    """Return the sums of ``weights[p] * events[e]`` over the pairs of each sample, ``[B, D]``."""
    return weights.new_zeros(samples, events.shape[1]).index_add(
        0, sample, weights.unsqueeze(1) * events[event]
    )
