"""What some inputs of a data set need, some to choose hot rows by and others to judge the choice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from stratarec.data.dataset import Dataset
from stratarec.hot.needs import Needs, NeedsReader, are_hot
from stratarec.hot.parts import Counts, Part

CONFIDENCE = 0.99
"""Of every interval."""
# Inputs that follow each other in storage (and share their session) are sampled together.
_CHUNK = 1024
_ROW_GROUPS = 16
# Inputs that hot rows are chosen by: more do not change a few dozen thresholds.
_CHOOSING = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A share, and the interval that holds the true one with a chance of 99 %."""

    share: float
    low: float
    high: float

    @classmethod
    def of(cls, shares: NDArray[np.float64]) -> Estimate:
        """From the shares of equally large samples that were drawn alike, by Student's t."""
        mean, number = float(shares.mean()), len(shares)
        if number < 2:
            return cls(share=mean, low=0.0, high=1.0)
        half = float(stdtrit(number - 1, (1 + CONFIDENCE) / 2) * shares.std(ddof=1) / np.sqrt(number))
        return cls(share=mean, low=max(mean - half, 0.0), high=min(mean + half, 1.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Inputs of some row groups."""

    choosing: Needs
    """``[N, parts]`` of those that hot rows are chosen by."""
    judging: Needs
    """``[M, parts]`` of others."""
    chunks: NDArray[np.int64]
    """``[M]`` which of the equal samples each of these is of: row groups, or where those are few, parts of them."""

    def judge(self, hot: Counts) -> Estimate:
        """Share of inputs that are hot where the first ``hot[p]`` rows of each part are."""
        found = are_hot(self.judging, hot)
        return Estimate.of(np.bincount(self.chunks, found) / np.bincount(self.chunks))


def draw(dataset: Dataset, parts: Sequence[Part], split: str, seed: int) -> Sample:
    """What the inputs of up to 16 row groups need, drawn at random; half of them are for judging.

    Notes
    -----
    Row groups are read by as many threads as there are cores.
    """
    places = [
        (number, group) for number, shard in enumerate(dataset.shards(split)) for group in range(len(shard.row_groups))
    ]
    draws = np.random.default_rng([seed, 5])
    drawn = sorted(draws.permutation(len(places))[:_ROW_GROUPS].tolist())
    found = needs_of(dataset, parts, split, [places[place] for place in drawn])
    chunk = max(min(_CHUNK, min(map(len, found)) // 4), 1)
    numbers = [np.arange(len(needs)) // chunk for needs in found]
    few = len(found) < _ROW_GROUPS
    judged, chunks, first = [], [], 0
    for place, number in enumerate(numbers):
        odd = number % 2 == 1
        judged.append(odd)
        chunks.append(number[odd] // 2 + first if few else np.full(int(odd.sum()), place))
        first += int(number[-1]) // 2 + 1 if few else 0
    choosing = np.concatenate([needs[~odd] for needs, odd in zip(found, judged, strict=True)])
    if len(choosing) > _CHOOSING:
        choosing = choosing[draws.permutation(len(choosing))[:_CHOOSING]]
    judging = np.concatenate([needs[odd] for needs, odd in zip(found, judged, strict=True)])
    return Sample(
        choosing=choosing,
        judging=judging if len(judging) else choosing,
        chunks=np.unique(np.concatenate(chunks), return_inverse=True)[1]
        if len(judging)
        else np.zeros(len(choosing), dtype=np.int64),
    )


def needs_of(dataset: Dataset, parts: Sequence[Part], split: str, places: Sequence[tuple[int, int]]) -> list[Needs]:
    """``[samples, parts]`` of each of the row groups ``(shard, row group)``."""
    reader = NeedsReader(dataset, parts)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="stratarec-hot") as threads:
        return list(threads.map(lambda place: reader.of(dataset.row_group(split, *place)), places))
