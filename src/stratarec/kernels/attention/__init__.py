"""What attention over histories needs: every sample meets the rows of its own history, without padding or copies.

A *pair* is a sample and one row of its history; a sample's pairs follow one another. Rows are those of distinct
events: samples of one history, and histories that overlap, read the same ones.

Shapes: B samples, E events, N pairs, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stratarec.errors import ConfigError
from stratarec.kernels.attention import cpu, reference
from stratarec.kernels.runtime.accelerator import beside
from stratarec.kernels.runtime.memory import RECYCLER
from stratarec.kernels.runtime.team import team_of
from stratarec.kernels.runtime.threads import team_threads, tile_size
from stratarec.kernels.simd.vector import blocks


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Sample b's pairs ``offsets[b]:offsets[b + 1]`` are with the events from ``first[b]`` on.

    Parameters
    ----------
    first : Tensor
        ``[B]`` int64.
    offsets : Tensor
        ``[B + 1]`` int64, rising, from 0 to N.
    """

    first: Tensor
    offsets: Tensor

    @property
    def samples(self) -> int:
        return self.first.numel()

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """``[N]`` sample and ``[N]`` event of every pair."""
        return reference.places(self.first, self.offsets)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def check(self, samples: Tensor | None, events: Tensor) -> None:
        """`ConfigError` unless the shapes fit and every pair's event exists."""
        ends = self.first + self.offsets.diff()
        last = int(ends.max()) if self.samples else 0
        if (samples is not None and samples.shape != (self.samples, events.shape[1])) or last > len(events):
            got = None if samples is None else tuple(samples.shape)
            raise ConfigError(
                f"pairs of {self.samples} samples with events up to {last} got samples {got} and events "
                f"{tuple(events.shape)}"
            )


def pair_sums(samples: Tensor, events: Tensor, pairs: Pairs) -> Tensor:
    """``[N, D]`` float32: ``samples[b] + events[e]`` of every pair."""
    pairs.check(samples, events)
    if events.device.type != "cpu":
        return reference.pair_sums(samples.float(), events.float(), *_places(pairs, events))
    out: Tensor = _Combine.apply(samples.float(), events.float(), pairs, False)  # type: ignore[no-untyped-call]
    return out


def pair_products(samples: Tensor, events: Tensor, pairs: Pairs) -> Tensor:
    """``[N, D]`` float32: ``samples[b] * events[e]`` of every pair."""
    pairs.check(samples, events)
    if events.device.type != "cpu":
        return reference.pair_products(samples.float(), events.float(), *_places(pairs, events))
    out: Tensor = _Combine.apply(samples.float(), events.float(), pairs, True)  # type: ignore[no-untyped-call]
    return out


def pair_pool(weights: Tensor, events: Tensor, pairs: Pairs) -> Tensor:
    """``[B, D]`` float32: the sum of ``weights[p] * events[e]`` over a sample's pairs; zeros where it has none."""
    pairs.check(None, events)
    if weights.shape != (len(pairs),):
        raise ConfigError(f"{len(pairs)} pairs got weights {tuple(weights.shape)}")
    if events.device.type != "cpu":
        return reference.pair_pool(weights.float(), events.float(), *_places(pairs, events), pairs.samples)
    out: Tensor = _Pool.apply(weights.float(), events.float(), pairs)  # type: ignore[no-untyped-call]
    return out


def _places(pairs: Pairs, events: Tensor) -> tuple[Tensor, Tensor]:
    sample, event = pairs.places
    return beside(sample, events), beside(event, events)


def _flat(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(-1).numpy()


def _rows(pairs: Pairs, width: int, split: int, threads: int) -> tuple[Any, ...]:
    """`cpu.PairRows` for work over `split` samples or events."""
    return pairs.first.numpy(), pairs.offsets.numpy(), width, tile_size(split, threads, least=64)


# Target attention gained nothing by deduplication as long as keys and rows were copied to every sample and padded (655
# ms a step with it and 650 without, one thread): so pairs point at rows.
def _combine(samples: Tensor, events: Tensor, pairs: Pairs, times: bool) -> Tensor:
    width, threads = events.shape[1], team_threads()
    out = RECYCLER.empty(len(pairs), width)
    rows = _rows(pairs, width, pairs.samples, threads)
    cpu.kernels(*blocks(width)).combine(team_of(threads), rows, times, _flat(samples), _flat(events), _flat(out))
    return out


def _sum_to_samples(term: int, left: Tensor, events: Tensor, pairs: Pairs) -> Tensor:
    width, threads = events.shape[1], team_threads()
    out = RECYCLER.empty(pairs.samples, width)
    rows = _rows(pairs, width, pairs.samples, threads)
    cpu.kernels(*blocks(width)).sum_to_samples(team_of(threads), rows, term, _flat(left), _flat(events), _flat(out))
    return out


def _sum_to_events(term: int, left: Tensor, samples: Tensor, pairs: Pairs, events: int) -> Tensor:
    width, threads = samples.shape[1], team_threads()
    out = RECYCLER.empty(events, width)
    rows = _rows(pairs, width, events, threads)
    cpu.kernels(*blocks(width)).sum_to_events(team_of(threads), rows, term, _flat(left), _flat(samples), _flat(out))
    return out


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, samples: Tensor, events: Tensor, pairs: Pairs, times: bool) -> Tensor:
        ctx.pairs, ctx.times = pairs, times
        # A sum's gradient needs the shapes alone.
        ctx.save_for_backward(*((samples, events) if times else (samples[:0], events[:0])))
        ctx.events = len(events)
        return _combine(samples, events, pairs, times)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        samples, events = ctx.saved_tensors
        term = cpu.PRODUCT if ctx.times else cpu.PLAIN
        to_samples = _sum_to_samples(term, gradient, events, ctx.pairs)
        return to_samples, _sum_to_events(term, gradient, samples, ctx.pairs, ctx.events), None, None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, events: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        ctx.save_for_backward(weights, events)
        return _sum_to_samples(cpu.SCALED, weights, events, pairs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, events = ctx.saved_tensors
        pairs: Pairs = ctx.pairs
        width, threads = events.shape[1], team_threads()
        dots = torch.empty(len(pairs))
        rows = _rows(pairs, width, pairs.samples, threads)
        cpu.kernels(*blocks(width)).dots(team_of(threads), rows, _flat(gradient), _flat(events), dots.numpy())
        return dots, _sum_to_events(cpu.SCALED, weights, gradient, pairs, len(events)), None
