"""Choose the hot rows of each table for a budget in bytes.

Two methods are tried (`selection`): rows with the most lookups per byte, and thresholds that make
the most inputs hot. The second method chooses by a random sample of inputs. Other inputs judge both
choices, and the choice with more hot inputs is kept. Row counts come from the vocabularies, so the
bytes of a hot set are exact; only the share of hot inputs is estimated.

A choice is specific to one data set: on a news portal, an old choice made only 15 % as many inputs
hot one day later, and 0.1 % after two days. If ids are inherited (``data.vocabulary.base``), a new
choice does not help: new popular values have ids after all earlier ids, so a prefix that contains
them contains all earlier values as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stratarec.config.units import format_bytes
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import ConfigError
from stratarec.hot.hot_loader import NeedsReader, are_hot
from stratarec.hot.selection import (
    Counts,
    Needs,
    RowRange,
    choose_by_inputs,
    choose_by_lookups,
    parts_of,
    share_of_accesses,
    used_bytes,
)
from stratarec.kernels.runtime.cores import cores


@dataclass(frozen=True)
class InputShare:
    """Share of inputs whose lookups are all hot, with its 99 % confidence interval."""

    share: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """Result for one budget: shares of hot rows, hot lookups and hot inputs."""

    budget_bytes: int
    row_share: float
    """Bytes of the hot rows as a share of the bytes of all tables."""
    accesses: float
    """Share of training lookups that use hot rows."""
    inputs: InputShare
    counted: InputShare
    """Share of hot inputs if the rows with the most lookups per byte were hot."""


@dataclass(frozen=True, kw_only=True)
class HotProfile:
    """The hot rows of a data set for one budget."""

    method: Literal["inputs", "accesses"]
    """``inputs`` if the hot rows make most inputs hot; ``accesses`` if chosen by lookups per byte.
    """
    chosen: Point
    rows: Mapping[str, int]
    """Number of hot rows of each table: all tail buckets and the most frequent values."""

    def hot(self, parts: Sequence[RowRange]) -> Counts:
        """Return the number of hot rows of each part, ``[parts]`` int64.

        Parameters
        ----------
        parts : sequence of RowRange
            Rows of the data set's tables, as `parts_of` returns them.
        """
        return np.array([self.rows[part.table] for part in parts], dtype=np.int64)


CONFIDENCE = 0.99
"""Confidence level of every interval."""
# Maximum number of neighbouring inputs, which may share a session, that are used together: to
# choose or to judge.
_CHUNK = 1024
_ROW_GROUPS = 16
# Number of inputs for choosing hot rows; more would not change a few dozen thresholds.
_CHOOSING = 1 << 17


def estimate(shares: NDArray[np.float64]) -> InputShare:
    """Estimate the share of hot inputs, with Student's t interval.

    Parameters
    ----------
    shares : ndarray
        ``[subsets]`` float64 shares, from 0 to 1, of hot inputs in random subsets of about equal
        size.
    """
    from scipy.special import stdtrit  # importing it takes a tenth of a second

    mean, number = float(shares.mean()), len(shares)
    if number < 2:
        return InputShare(share=mean, low=0.0, high=1.0)
    half = float(stdtrit(number - 1, (1 + CONFIDENCE) / 2) * shares.std(ddof=1) / np.sqrt(number))
    return InputShare(share=mean, low=max(mean - half, 0.0), high=min(mean + half, 1.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class InputSample:
    """Needs of inputs from randomly chosen row groups.

    An input needs the first n rows of a part if they contain all its lookups in the part.
    """

    choosing: Needs
    """``[N, parts]`` needs of the inputs by which hot rows are chosen."""
    judging: Needs
    """``[M, parts]`` needs of the other inputs, which judge the choice."""
    chunks: NDArray[np.int64]
    """``[M]`` subsample that each input of `judging` is in: its row group, or a part of it if row
    groups are few.
    """

    def judge(self, hot: Counts) -> InputShare:
        """Estimate the share of hot inputs.

        Parameters
        ----------
        hot : ndarray
            ``[parts]`` int64 number of hot rows of each part, which are its first rows.
        """
        return estimate(np.bincount(self.chunks, are_hot(self.judging, hot)) / np.bincount(self.chunks))


def draw(dataset: Dataset, parts: Sequence[RowRange], split: str, seed: int) -> InputSample:
    """Draw up to 16 row groups at random, and compute the needs of their inputs; half of the inputs
    are for judging.

    Parameters
    ----------
    dataset : Dataset
        Data set to read.
    parts : sequence of RowRange
        Rows of its tables.
    split : str
        ``train``, ``valid`` or ``test``.
    seed : int
        Seed of the choice of row groups.

    Notes
    -----
    Row groups are read by as many threads as there are cores.
    """
    places = [
        (number, group)
        for number, shard in enumerate(dataset.shards(split))
        for group in range(len(shard.row_groups))
    ]
    draws = np.random.default_rng([seed, 5])
    drawn = sorted(draws.permutation(len(places))[:_ROW_GROUPS].tolist())
    reader = NeedsReader(dataset, parts)
    with ThreadPoolExecutor(cores(), thread_name_prefix="stratarec-hot") as threads:
        needs_by_group = list(
            threads.map(lambda place: reader.of(dataset.row_group(split, *places[place])), drawn)
        )
    chunk = max(min(_CHUNK, min(map(len, needs_by_group)) // 4), 1)
    numbers = [np.arange(len(needs)) // chunk for needs in needs_by_group]
    few = len(needs_by_group) < _ROW_GROUPS
    judged, chunks, first = [], [], 0
    for place, number in enumerate(numbers):
        odd = number % 2 == 1
        judged.append(odd)
        chunks.append(number[odd] // 2 + first if few else np.full(int(odd.sum()), place))
        first += int(number[-1]) // 2 + 1 if few else 0
    choosing = np.concatenate([needs[~odd] for needs, odd in zip(needs_by_group, judged, strict=True)])
    if len(choosing) > _CHOOSING:
        choosing = choosing[draws.permutation(len(choosing))[:_CHOOSING]]
    judging = np.concatenate([needs[odd] for needs, odd in zip(needs_by_group, judged, strict=True)])
    return InputSample(
        choosing=choosing,
        judging=judging if len(judging) else choosing,
        chunks=np.unique(np.concatenate(chunks), return_inverse=True)[1]
        if len(judging)
        else np.zeros(len(choosing), dtype=np.int64),
    )


CURVE = (0.02, 0.068, 0.124, 0.25, 0.5)
"""Budgets that `budgets` examines, as shares of all bytes."""


def budgets(dataset: Dataset) -> tuple[Point, ...]:
    """Choose hot rows for each budget of `CURVE`, and return the results; empty without tables.

    Parameters
    ----------
    dataset : Dataset
        Data set whose rows are chosen. Each row counts as one byte, whatever its width.
    """
    parts = parts_of(dataset, dict.fromkeys(dataset.vocabularies, 1))
    if not parts:
        return ()
    sample, total = draw(dataset, parts, "train", seed=0), sum(part.nbytes for part in parts)
    return tuple(_choose(parts, int(share * total), sample).chosen for share in CURVE)


def calibrate(
    dataset: Dataset, row_bytes: Mapping[str, int], budget_bytes: int, *, seed: int = 0
) -> HotProfile:
    """Choose the hot rows of a data set.

    Parameters
    ----------
    dataset : Dataset
        Its training split is sampled.
    row_bytes : mapping of str to int
        Bytes of weights and optimizer state of a row, by vocabulary; 0 for tables whose rows are
        hot at no cost.
    budget_bytes : int
        Maximum bytes of all hot rows together.
    seed : int
        Seed of the sample of inputs.

    Raises
    ------
    ConfigError
        If the budget holds not even one row, or all rows.
    """
    parts = parts_of(dataset, row_bytes)
    total = sum(part.nbytes for part in parts)
    if budget_bytes < min(part.row_bytes for part in parts if part.row_bytes):
        raise ConfigError(
            f"hot.budget is {budget_bytes:,} bytes, too few for one row; expected more, and less than "
            f"{format_bytes(total)}"
        )
    if budget_bytes >= total:
        raise ConfigError(
            f"hot.budget is {format_bytes(budget_bytes)}, but all {len(dataset.vocabularies)} tables take "
            f"only {format_bytes(total)}, so every row would be hot: set less, or train without hot rows"
        )
    return _choose(parts, budget_bytes, draw(dataset, parts, "train", seed))


def _choose(parts: Sequence[RowRange], budget_bytes: int, sample: InputSample) -> HotProfile:
    """Choose the hot rows by both methods, and return the better choice."""
    counted = choose_by_lookups(parts, budget_bytes)
    complete = choose_by_inputs(parts, budget_bytes, sample.choosing)
    by_count, by_input = sample.judge(counted), sample.judge(complete)
    better = by_input.share > by_count.share
    hot, share = (complete, by_input) if better else (counted, by_count)
    point = Point(
        budget_bytes=budget_bytes,
        row_share=used_bytes(parts, hot) / sum(part.nbytes for part in parts),
        accesses=share_of_accesses(parts, hot),
        inputs=share,
        counted=by_count,
    )
    rows = {part.table: int(count) for part, count in zip(parts, hot, strict=True)}
    return HotProfile(method="inputs" if better else "accesses", chosen=point, rows=rows)


def warn_inherited_ids(dataset: Dataset) -> str:
    """Return a warning if ids continue those of a base and are not ranked by count, else empty."""
    tables = [name for name, info in dataset.vocabularies.items() if 0 < info.inherited < info.values]
    if not tables:
        return ""
    return (
        f"ids of {', '.join(tables)} continue those of an earlier data set, so newly popular values come "
        "after its rows, which would have to be hot, too: if few inputs are hot, prepare "
        "without data.vocabulary.base"
    )


def warn_little_skew(profile: HotProfile) -> str:
    """Return a warning if hot rows are hardly more popular than other rows, or hardly any input is
    hot; else "".
    """
    point = profile.chosen
    if point.accesses < 2 * point.row_share:
        return f"{point.row_share:.1%} of the rows receive {point.accesses:.1%} of the lookups: hot rows save little"
    if point.inputs.share < 0.01:
        return f"{point.inputs.share:.2%} of the inputs are hot: too few for separate batches"
    return ""
