"""Choice of the hot rows of each table for a budget in bytes, and the file that stores the choice.

Two methods are tried (`selection`): rows with the most lookups per byte, and thresholds that make the most inputs hot.
Some inputs are drawn to choose by, and others to judge both choices; the choice with more hot inputs is kept. Counts of
rows are the vocabularies' own, so the bytes of a hot set are exact and only the share of hot inputs is estimated.

A choice is specific to one data set: on a news portal the old choice makes 15 % as many inputs hot one day later, and
0.1 % after two days. If ids are inherited (``data.vocabulary.base``) a new choice does not help: new popular values
have ids after all earlier ones, and a prefix that reaches them contains the earlier ones as well.
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
from scipy.special import stdtrit

from stratarec.config.units import readable
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
from stratarec.io.sealed import Count, Hash, Model, read_sealed, write_sealed
from stratarec.kernels.runtime.cores import cores

ADVICE = "make it anew with `stratarec profile DATASET --hot BYTES`"
Method = Literal["inputs", "accesses"]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]


class HotTable(Model):
    """The hot rows of one table, which are its first ones."""

    name: str
    rows: Count
    row_bytes: Count
    """Weights and optimizer state."""
    hot: Count
    """How many: all tail buckets, and the most frequent values."""
    accesses: Share
    """Share of the table's training lookups that go to them."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> HotTable:
        if self.hot > self.rows:
            raise ValueError(f"{self.name}: {self.hot} hot rows of {self.rows}")
        return self


class InputShare(Model):
    """Share of inputs all of whose lookups are hot, and the interval that holds it with a chance of 99 %."""

    share: Share
    low: Share
    high: Share


class Point(Model):
    """What a budget is worth."""

    budget_bytes: Count
    row_share: Share
    """Of all bytes of the model's tables."""
    accesses: Share
    """Share of training lookups that go to hot rows."""
    inputs: InputShare
    counted: InputShare
    """The same by the rows with most lookups per byte."""


class HotProfile(Model):
    """Which rows are hot."""

    format: Literal[2] = 2
    dataset: str
    fingerprint: Hash
    """Of the data set that it is of."""
    split: Literal["train"] = "train"
    method: Method
    """Chosen to make most inputs hot, or, where that was no better, to have most lookups per byte."""
    chosen: Point
    curve: tuple[Point, ...]
    """For other budgets."""
    tables: tuple[HotTable, ...]
    seconds: Annotated[float, pydantic.Field(ge=0)]
    """That calibration took."""

    def write(self, path: Path) -> None:
        """Write it as a sealed file."""
        write_sealed(path, self.to_dict())

    @classmethod
    def read(cls, path: Path, dataset: Dataset | None = None) -> HotProfile:
        """Read a file.

        Parameters
        ----------
        dataset : Dataset
            That it must be of.

        Raises
        ------
        ConfigError
            When the file is damaged, or of another data set.
        """
        found = read_sealed(path, cls, ADVICE, ConfigError)
        if dataset is not None and found.fingerprint != dataset.fingerprint:
            raise ConfigError(
                f"{path} is a hot profile of another data set ({found.dataset}, {found.fingerprint[:8]}) than "
                f"{dataset.path} ({dataset.fingerprint[:8]}): its ids mean other values; {ADVICE}"
            )
        rows = [(table.name, table.rows) for table in found.tables]
        if dataset is not None and sorted(rows) != sorted(dataset.table_rows().items()):
            raise ConfigError(f"{path} has other tables or rows than {dataset.path}, which it is of; {ADVICE}")
        return found

    @property
    def points(self) -> list[Point]:
        """The chosen budget among the others."""
        return sorted((self.chosen, *self.curve), key=lambda point: point.budget_bytes)

    @property
    def row_bytes(self) -> dict[str, int]:
        """Table -> weights and optimizer state of a row."""
        return {table.name: table.row_bytes for table in self.tables}

    def hot(self, parts: Sequence[RowRange]) -> Counts:
        """``[parts]`` hot rows of each of the data set's tables."""
        tables = {table.name: table.hot for table in self.tables}
        return np.array([tables[part.table] for part in parts], dtype=np.int64)


CONFIDENCE = 0.99
"""Of every interval: the chance that it holds the true share."""
# Inputs that follow each other in storage (and share their session) are sampled together.
_CHUNK = 1024
_ROW_GROUPS = 16
# Inputs that hot rows are chosen by: more do not change a few dozen thresholds.
_CHOOSING = 1 << 17


def estimate(shares: NDArray[np.float64]) -> InputShare:
    """The share of inputs from those of equally large samples that were drawn alike, by Student's t."""
    mean, number = float(shares.mean()), len(shares)
    if number < 2:
        return InputShare(share=mean, low=0.0, high=1.0)
    half = float(stdtrit(number - 1, (1 + CONFIDENCE) / 2) * shares.std(ddof=1) / np.sqrt(number))
    return InputShare(share=mean, low=max(mean - half, 0.0), high=min(mean + half, 1.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class InputSample:
    """Inputs of some row groups."""

    choosing: Needs
    """``[N, parts]`` of those that hot rows are chosen by."""
    judging: Needs
    """``[M, parts]`` of others."""
    chunks: NDArray[np.int64]
    """``[M]`` which of the equal samples each of these is of: row groups, or where those are few, parts of them."""

    def judge(self, hot: Counts) -> InputShare:
        """Share of inputs that are hot where the first ``hot[p]`` rows of each part are."""
        found = are_hot(self.judging, hot)
        return estimate(np.bincount(self.chunks, found) / np.bincount(self.chunks))


def draw(dataset: Dataset, parts: Sequence[RowRange], split: str, seed: int) -> InputSample:
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
    reader = NeedsReader(dataset, parts)
    with ThreadPoolExecutor(cores(), thread_name_prefix="stratarec-hot") as threads:
        found = list(threads.map(lambda place: reader.of(dataset.row_group(split, *places[place])), drawn))
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
    """What the budgets of `CURVE` are worth; `row_bytes` as of `calibrate`. None of data without tables."""
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
    """Choose hot rows.

    Parameters
    ----------
    row_bytes : mapping of str to int
        Vocabulary -> weights and optimizer state of a row; 0 for tables that are hot at no cost.
    budget : int
        Bytes of all hot rows.
    curve : sequence of float
        Other budgets to look at, as shares of all bytes.
    field : str
        Names the budget in errors.

    Raises
    ------
    ConfigError
        For a budget that holds no row, or all of them.
    """
    began = time.perf_counter()
    parts = parts_of(dataset, row_bytes)
    total = sum(part.nbytes for part in parts)
    if budget < min(part.row_bytes for part in parts if part.row_bytes):
        raise ConfigError(f"{field} is {budget:,} bytes, which hold no row; expected less than {readable(total)}")
    if budget >= total:
        raise ConfigError(
            f"{field} is {readable(budget)}, and all {len(dataset.vocabularies)} tables take {readable(total)}: "
            "every row fits, so none is hotter than others. Give less, or train without hot rows"
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
        tables=_tables(dataset, parts, hot),
        seconds=time.perf_counter() - began,
    )


def _choose(parts: Sequence[RowRange], budget: int, sample: InputSample) -> tuple[Counts, Method, Point]:
    """Hot rows of each part, how they were chosen, and what they are worth."""
    counted, complete = hottest_rows(parts, budget), most_inputs(parts, budget, sample.choosing)
    by_count, by_input = sample.judge(counted), sample.judge(complete)
    better = by_input.share > by_count.share
    hot, found = (complete, by_input) if better else (counted, by_count)
    point = Point(
        budget_bytes=budget,
        row_share=used_bytes(parts, hot) / sum(part.nbytes for part in parts),
        accesses=share_of_accesses(parts, hot),
        inputs=found,
        counted=by_count,
    )
    return hot, "inputs" if better else "accesses", point


def _tables(dataset: Dataset, parts: Sequence[RowRange], hot: Counts) -> tuple[HotTable, ...]:
    found = []
    for name, rows in dataset.table_rows().items():
        own = [(part, int(taken)) for part, taken in zip(parts, hot, strict=True) if part.table == name]
        total = sum(int(part.counts.sum()) for part, _ in own)
        accesses = sum(int(part.counts[:taken].sum()) for part, taken in own)
        found.append(
            HotTable(
                name=name,
                rows=rows,
                row_bytes=own[0][0].row_bytes,
                hot=sum(taken for _, taken in own),
                accesses=accesses / total if total else 0.0,
            )
        )
    return tuple(found)


def passed_over(dataset: Dataset) -> str:
    """What to say of ids that keep the order of an earlier data set; empty where this one's counts rank all."""
    tables = [name for name, info in dataset.vocabularies.items() if 0 < info.inherited < info.values]
    if not tables:
        return ""
    return (
        f"ids of {', '.join(tables)} go on from an earlier data set, so what became popular since lies behind its "
        "rows, which would have to be hot, too: prepare without data.vocabulary.base where that leaves few hot inputs"
    )


def without_skew(profile: HotProfile) -> str:
    """What to say of data whose hot rows are hardly more popular than others; empty where they are."""
    point = profile.chosen
    if point.accesses < 2 * point.row_share:
        return (
            f"{point.row_share:.1%} of the rows take {point.accesses:.1%} of the lookups: there is little skew to use"
        )
    if point.inputs.share < 0.01:
        return f"{point.inputs.share:.2%} of the inputs are hot: too few for batches of their own"
    return ""
