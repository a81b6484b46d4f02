"""Choose the hot rows of each table for a budget in bytes, and store the choice in a file.

Two methods are tried (`selection`): rows with the most lookups per byte, and thresholds that make the most inputs hot.
The second method chooses by a random sample of inputs. Other inputs judge both choices, and the choice with more hot
inputs is kept. Row counts come from the vocabularies, so the bytes of a hot set are exact; only the share of hot inputs
is estimated.

A choice is specific to one data set: on a news portal, an old choice made only 15 % as many inputs hot one day later,
and 0.1 % after two days. If ids are inherited (``data.vocabulary.base``), a new choice does not help: new popular
values have ids after all earlier ids, so a prefix that contains them contains all earlier values as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
from numpy.typing import NDArray

from stratarec.config.units import format_bytes
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import ConfigError
from stratarec.hot.hot_loader import NeedsReader, are_hot
from stratarec.hot.selection import (
    Counts,
    Needs,
    RowRange,
    hottest_rows,
    most_inputs,
    parts_of,
    share_of_accesses,
    used_bytes,
)
from stratarec.io.sealed import Count, Hash, Model, write_sealed
from stratarec.kernels.runtime.cores import cores

Method = Literal["inputs", "accesses"]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]


class HotTable(Model):
    """The hot rows of one table, which are the first rows."""

    name: str
    rows: Count
    row_bytes: Count
    """Bytes of weights and optimizer state of a row."""
    hot: Count
    """Number of hot rows: all tail buckets and the most frequent values."""
    accesses: Share
    """Share of the table's training lookups that use hot rows."""


class InputShare(Model):
    """Share of inputs whose lookups are all hot, with its 99 % confidence interval."""

    share: Share
    low: Share
    high: Share


class Point(Model):
    """Result for one budget: shares of hot rows, hot lookups and hot inputs."""

    budget_bytes: Count
    row_share: Share
    """Bytes of the hot rows as a share of the bytes of all tables."""
    accesses: Share
    """Share of training lookups that use hot rows."""
    inputs: InputShare
    counted: InputShare
    """Share of hot inputs if the rows with the most lookups per byte were hot."""


class HotProfile(Model):
    """The hot rows of a data set, as they are stored in a file."""

    format: Literal[2] = 2
    dataset: str
    fingerprint: Hash
    """Fingerprint of the data set."""
    split: Literal["train"] = "train"
    method: Method
    """``inputs`` if the hot rows make the most inputs hot, ``accesses`` if they have the most lookups per byte."""
    chosen: Point
    curve: tuple[Point, ...]
    """Results for other budgets."""
    tables: tuple[HotTable, ...]
    seconds: Annotated[float, pydantic.Field(ge=0)]
    """Duration of the calibration in seconds."""

    def write(self, path: Path) -> None:
        """Write the profile to a sealed file."""
        write_sealed(path, self.to_dict())

    @property
    def points(self) -> list[Point]:
        """Results for all budgets, including the chosen budget, in ascending order."""
        return sorted((self.chosen, *self.curve), key=lambda point: point.budget_bytes)

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of weights and optimizer state of a row, by table."""
        return {table.name: table.row_bytes for table in self.tables}

    def hot(self, parts: Sequence[RowRange]) -> Counts:
        """Return the number of hot rows of each part, ``[parts]``."""
        tables = {table.name: table.hot for table in self.tables}
        return np.array([tables[part.table] for part in parts], dtype=np.int64)


CONFIDENCE = 0.99
"""Confidence level of every interval."""
# Maximum number of neighbouring inputs, which may share a session, that are used together: to choose or to judge.
_CHUNK = 1024
_ROW_GROUPS = 16
# Number of inputs for choosing hot rows; more would not change a few dozen thresholds.
_CHOOSING = 1 << 17


def estimate(shares: NDArray[np.float64]) -> InputShare:
    """Estimate the share of hot inputs, with Student's t interval, from the shares in random subsets of equal size."""
    from scipy.special import stdtrit  # importing it takes a tenth of a second

    mean, number = float(shares.mean()), len(shares)
    if number < 2:
        return InputShare(share=mean, low=0.0, high=1.0)
    half = float(stdtrit(number - 1, (1 + CONFIDENCE) / 2) * shares.std(ddof=1) / np.sqrt(number))
    return InputShare(share=mean, low=max(mean - half, 0.0), high=min(mean + half, 1.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class InputSample:
    """Needs of inputs from randomly chosen row groups: how many first rows of each part each input uses."""

    choosing: Needs
    """``[N, parts]`` needs of the inputs by which hot rows are chosen."""
    judging: Needs
    """``[M, parts]`` needs of the other inputs, which judge the choice."""
    chunks: NDArray[np.int64]
    """``[M]`` subsample that each input of `judging` is in: its row group, or a part of it if row groups are few."""

    def judge(self, hot: Counts) -> InputShare:
        """Estimate the share of inputs that are hot if the first ``hot[p]`` rows of each part p are hot."""
        return estimate(np.bincount(self.chunks, are_hot(self.judging, hot)) / np.bincount(self.chunks))


def draw(dataset: Dataset, parts: Sequence[RowRange], split: str, seed: int) -> InputSample:
    """Draw up to 16 row groups at random, and compute the needs of their inputs; half of the inputs are for judging.

    Notes
    -----
    Row groups are read by as many threads as there are cores.
    """
    places = [
        (number, group) for number, shard in enumerate(dataset.shards(split)) for group in range(len(shard.row_groups))
    ]
    draws = np.random.default_rng([seed, 5])
    drawn = sorted(draws.permutation(len(places))[:_ROW_GROUPS].tolist())
    reader = NeedsReader(dataset, parts)
    with ThreadPoolExecutor(cores(), thread_name_prefix="stratarec-hot") as threads:
        needs_by_group = list(threads.map(lambda place: reader.of(dataset.row_group(split, *places[place])), drawn))
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
"""Budgets of the curve, as shares of all bytes."""


def budgets(dataset: Dataset, row_bytes: Mapping[str, int], *, seed: int = 0) -> tuple[Point, ...]:
    """Compute the results for the budgets of `CURVE`; empty without tables. `row_bytes` is as in `calibrate`."""
    parts = parts_of(dataset, row_bytes)
    if not parts:
        return ()
    sample, total = draw(dataset, parts, "train", seed), sum(part.nbytes for part in parts)
    return tuple(_choose(parts, int(share * total), sample)[2] for share in CURVE)


def calibrate(
    dataset: Dataset,
    row_bytes: Mapping[str, int],
    budget: int,
    *,
    curve: Sequence[float] = CURVE,
    seed: int = 0,
    field: str = "--hot",
) -> HotProfile:
    """Choose the hot rows of a data set.

    Parameters
    ----------
    row_bytes : mapping of str to int
        Bytes of weights and optimizer state of a row, by vocabulary; 0 for tables whose rows are hot at no cost.
    budget : int
        Bytes for all hot rows.
    curve : sequence of float
        Other budgets for which to compute results, as shares of all bytes.
    field : str
        Name of the budget in error messages.

    Raises
    ------
    ConfigError
        If the budget holds not even one row, or all rows.
    """
    start = time.perf_counter()
    parts = parts_of(dataset, row_bytes)
    total = sum(part.nbytes for part in parts)
    if budget < min(part.row_bytes for part in parts if part.row_bytes):
        raise ConfigError(
            f"{field} is {budget:,} bytes, too few for one row; expected more, and less than {format_bytes(total)}"
        )
    if budget >= total:
        raise ConfigError(
            f"{field} is {format_bytes(budget)}, but all {len(dataset.vocabularies)} tables take only "
            f"{format_bytes(total)}, so every row would be hot: set less, or train without hot rows"
        )
    sample = draw(dataset, parts, "train", seed)
    hot, method, point = _choose(parts, budget, sample)
    others = [_choose(parts, int(share * total), sample)[2] for share in curve]
    return HotProfile(
        dataset=dataset.name,
        fingerprint=dataset.fingerprint,
        method=method,
        chosen=point,
        curve=tuple(others),
        tables=_tables(parts, hot),
        seconds=time.perf_counter() - start,
    )


def _choose(parts: Sequence[RowRange], budget: int, sample: InputSample) -> tuple[Counts, Method, Point]:
    """Return the number of hot rows of each part, the method that chose them, and the result for this choice."""
    counted, complete = hottest_rows(parts, budget), most_inputs(parts, budget, sample.choosing)
    by_count, by_input = sample.judge(counted), sample.judge(complete)
    better = by_input.share > by_count.share
    hot, share = (complete, by_input) if better else (counted, by_count)
    point = Point(
        budget_bytes=budget,
        row_share=used_bytes(parts, hot) / sum(part.nbytes for part in parts),
        accesses=share_of_accesses(parts, hot),
        inputs=share,
        counted=by_count,
    )
    return hot, "inputs" if better else "accesses", point


def _tables(parts: Sequence[RowRange], hot: Counts) -> tuple[HotTable, ...]:
    return tuple(
        HotTable(
            name=part.table,
            rows=part.rows,
            row_bytes=part.row_bytes,
            hot=int(count),
            accesses=share_of_accesses([part], np.array([count])),
        )
        for part, count in zip(parts, hot, strict=True)
    )


def warn_inherited_ids(dataset: Dataset) -> str:
    """Return a warning if ids follow those of an earlier data set, so that they are not ranked by count; else ""."""
    tables = [name for name, info in dataset.vocabularies.items() if 0 < info.inherited < info.values]
    if not tables:
        return ""
    return (
        f"ids of {', '.join(tables)} continue those of an earlier data set, so newly popular values come after its "
        "rows, which would have to be hot, too: if few inputs are hot, prepare without data.vocabulary.base"
    )


def warn_little_skew(profile: HotProfile) -> str:
    """Return a warning if hot rows are hardly more popular than other rows, else ""."""
    point = profile.chosen
    if point.accesses < 2 * point.row_share:
        return f"{point.row_share:.1%} of the rows receive {point.accesses:.1%} of the lookups: hot rows save little"
    if point.inputs.share < 0.01:
        return f"{point.inputs.share:.2%} of the inputs are hot: too few for separate batches"
    return ""
