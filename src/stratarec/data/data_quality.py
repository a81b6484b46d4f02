"""Two warnings about a log: features that reveal the label, and held-out samples that repeat
training samples.

*Leaks.* `init` checks the rows that it reads. `prepare` checks a sample of raw training rows,
because encoded rows do not show the order of numbers and which values were missing. The results of
`prepare` are stored in ``dataset.json`` and appear in every report of a run.

*Repeated samples.* A model can memorize them, so metrics on them say little about new samples.
Samples are compared by 64-bit hashes of their columns. For a large log only hashes that are
divisible by a number m are kept, so that all copies of a row are kept or none. Rows with few
columns can be equal by chance. But copies always have equal labels, while the labels of rows that
are equal by chance agree only as often as the columns predict them. So repeats are reported only if
labels agree much more than by chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.schema import UNKNOWN, Schema
from stratarec.data.splits import SPLITS, SplitConfig
from stratarec.data.threads import map_threads

SAMPLE_ROWS, _SAMPLE_VALUES, _FEWEST_ROWS = 50_000, 2_000_000, 2_000
"""Limits of the sample checked for leaks: most rows, most values (rows * features), fewest rows. It
takes 0.5 s.
"""
NAMED = 0.95
"""A feature is reported if its AUC alone is at least this."""
_DETERMINES = 0.995
# Minimum number of rows of the rarer class.
_LEAST = 20
# Maximum probability that a column has values in rows of one class only, by chance.
_CHANCE = 1e-6
# Minimum number of rows per value for comparing shares of positives by value.
_REPEATS = 2
# Maximum number of values of a column whose values are compared one by one with the label, and
# minimum share of rows without a positive label.
_VALUES, _LEAST_WITHOUT = 20, 0.1
# Last number in a text.
_NUMBER = r"(\d{1,18})\D*$"


@dataclass(frozen=True, kw_only=True)
class Leak:
    """A feature that seems to reveal the label, and the evidence."""

    feature: str
    text: str
    certain: bool
    """Whether the evidence is strong enough to leave the feature out instead of only reporting
    it.
    """
    is_stage: bool = False
    """Whether the feature seems to be an earlier stage of the label, as a click is of a
    purchase.
    """


def sample_rows(schema: Schema) -> int:
    """Return the number of rows to pass to `find_leaks`."""
    return max(min(SAMPLE_ROWS, _SAMPLE_VALUES // max(len(schema.names), 1)), _FEWEST_ROWS)


def looked_at(schema: Schema) -> list[str]:
    """Return the names of the columns that `find_leaks` examines, labels first."""
    derived = {feature.name for feature in schema.sparse if feature.traits.derived}
    return [*schema.label_columns, *(name for name in schema.names if name not in derived)]


def find_leaks(sample: pl.DataFrame, schema: Schema) -> list[Leak]:
    """Return the features that seem to reveal a label, those with certain evidence first.

    Parameters
    ----------
    sample : DataFrame
        Typed rows of the log, with the columns that `looked_at` lists.
    """
    leaks = []
    for label in schema.label_columns:
        has_label = (sample[label] != UNKNOWN).fill_null(False)
        positive = pl.DataFrame({"known": has_label, "label": sample[label]}).select(
            pl.when(pl.col("known")).then(pl.col("label") == 1)
        )
        columns = [sample[name] for name in looked_at(schema)[len(schema.label_columns) :]]
        find = partial(find_leak, positive=positive.to_series(), label=label)
        leaks += [leak for leak in map_threads(find, columns) if leak is not None]
    return sorted(leaks, key=lambda leak: not leak.certain)


def find_leak(column: pl.Series, positive: pl.Series, label: str) -> Leak | None:
    """Return the evidence that a feature reveals the label, or None.

    Parameters
    ----------
    positive : Series
        Booleans, null if the label is unknown.
    label : str
        Column of the label, for error messages.
    """
    if column.dtype == pl.Binary:  # has no text, and is no feature
        return None
    has_label = positive.is_not_null()
    column, positive = column.filter(has_label), positive.filter(has_label)
    positives = int(positive.sum())
    if min(positives, len(positive) - positives) < _LEAST:
        return None
    for what, there in _marks(column):
        rows, ones, rate = int(there.sum()), int((there & positive).sum()), positives / len(positive)
        only = 1 if ones == rows else 0
        # A flag may be unset in all positive rows without being a leak.
        if (
            ones in (0, rows)
            and (only or what == "filled")
            and (rate if only else 1 - rate) ** rows < _CHANCE
        ):
            return Leak(
                feature=column.name,
                text=f"{what} only where {label} is {only}: known only afterwards?",
                certain=True,
            )
    auc = alone(column, positive)
    needed = "" if auc >= _DETERMINES else _needed(column, positive)
    if needed:
        text = f"{label} is 1 only where {column.name} is {needed}: an earlier stage of the same visit?"
        return Leak(
            feature=column.name,
            text=f"{text} If so, remove it, or remove the other rows from the log",
            certain=False,
            is_stage=True,
        )
    if auc < NAMED:
        return None
    certain = auc >= _DETERMINES
    what = "determines the label" if certain else "a leak, unless it is known before the event"
    return Leak(feature=column.name, text=f"AUC {auc:.3f} against {label} alone: {what}", certain=certain)


def alone(column: pl.Series, positive: pl.Series) -> float:
    """Return the largest AUC that one feature reaches alone, at least 0.5.

    Rows are ranked by their value. If values repeat, rows are also ranked by the positive rate of
    their value, which is computed from the other half of the rows.
    """
    aucs = [0.5]
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        aucs.append(_auc(column.cast(pl.Float64).fill_nan(None).fill_null(float("-inf")), positive))
    distinct = 0 if column.dtype.base_type() == pl.List else column.n_unique()
    if 0 < distinct * _REPEATS <= len(column):
        aucs.append(_auc(_rates(column, positive), positive))
    elif (
        distinct and column.dtype == pl.String
    ):  # a row's identifier may contain a counter: order-9, order-10
        aucs += [_auc(values, positive) for values in (column, column.str.extract(_NUMBER).cast(pl.Int64))]
    return max(max(auc, 1 - auc) for auc in aucs)


def _marks(column: pl.Series) -> Iterator[tuple[str, pl.Series]]:
    """Yield groups of rows that a column separates, each with a description.

    If values are missing, the group is the rows with a value. Otherwise, if the column has two
    values, each is a group.
    """
    filled = _filled(column)
    if not filled.all():
        yield "filled", filled
    elif column.dtype.base_type() != pl.List and column.n_unique() == 2:
        yield from ((str(value), column == value) for value in column.unique().sort())


def _needed(column: pl.Series, positive: pl.Series) -> str:
    """Return the value that `column` has in every positive row, as text; an empty text if there is
    none.

    For example, a cart must be filled before there can be a purchase.
    """
    filled, is_list = _filled(column), column.dtype.base_type() == pl.List
    # Polars cannot cast a duration to text.
    is_few = not is_list and column.dtype != pl.Duration and column.n_unique() <= _VALUES
    is_number = column.dtype.is_numeric() and column.min() == 0
    value = column.cast(pl.String) if is_few else pl.Series(["other"]).new_from_index(0, len(column))
    if is_number and not is_few:
        value = value.set((column == 0).fill_null(False), "0")
    counts = (
        pl.DataFrame({"value": value.set(~filled, None), "positive": positive})
        .group_by("value")
        .agg(pl.len().alias("rows"), pl.col("positive").sum().alias("ones"))
        .sort("value")
    )
    chance = (1 - float(positive.mean())) ** pl.col("rows")  # type: ignore[arg-type]
    without = counts.filter((pl.col("ones") == 0) & (chance < _CHANCE))
    if int(without["rows"].sum()) < _LEAST_WITHOUT * len(column):
        return ""
    needed = counts.filter(pl.col("ones") > 0)["value"].drop_nulls().to_list()
    lacking = without["value"].to_list()
    if lacking == [None]:
        return "filled"
    if is_few and len(needed) <= len(lacking):
        return " or ".join(needed)
    return f"not {' or '.join('missing' if name is None else name for name in lacking)}"


def _filled(column: pl.Series) -> pl.Series:
    if column.dtype.base_type() == pl.List:
        return column.list.len().fill_null(0) > 0
    if column.dtype == pl.String:
        return (column.str.strip_chars() != "").fill_null(False)
    return column.fill_nan(None).is_not_null() if column.dtype.is_float() else column.is_not_null()


def _rates(column: pl.Series, positive: pl.Series) -> pl.Series:
    """Return for each row the positive rate of its value, computed from the other half of the
    rows.
    """
    half = (pl.int_range(len(column), eager=True).hash(0) % 2).cast(pl.Int8)
    frame = pl.DataFrame({"value": column, "positive": positive.cast(pl.Float64), "half": half})
    sums = frame.group_by("value", "half").agg(
        pl.col("positive").sum().alias("ones"), pl.len().alias("rows")
    )
    other = sums.with_columns((1 - pl.col("half")).alias("half"))
    joined = frame.join(other, on=["value", "half"], how="left", nulls_equal=True, maintain_order="left")
    base = float(positive.mean())  # type: ignore[arg-type]
    return joined.select(
        (pl.col("ones").fill_null(0) + base) / (pl.col("rows").fill_null(0) + 1)
    ).to_series()


def _auc(score: pl.Series, positive: pl.Series) -> float:
    # Rows without a score are equal, and lower than all others.
    missing, ones = score.null_count(), int(positive.sum())
    ranks = (score.rank("average") + missing).fill_null((missing + 1) / 2)
    zeros = len(positive) - ones
    return (float(ranks.filter(positive).sum()) - ones * (ones + 1) / 2) / (ones * zeros)


HeldOut = Literal["valid", "test"]

# Maximum number of rows that are compared: 20 MB of hashes, half a second.
_MOST_ROWS = 2_000_000
# Repeats are reported if they are at least this share of a split, and if the labels of equal rows
# agree with at least this Cohen's kappa.
_LEAST_SHARE, _AGREEMENT = 0.01, 0.5
# Minimum number of disagreements that are expected for random labels. If fewer are expected,
# agreement proves nothing.
_LEAST_EXPECTED = 20


def hashed_share(schema: Schema, split: SplitConfig, rows: int) -> int:
    """Return the number m such that only hashes divisible by m are kept; 0 if no two splits can
    share a sample.

    Copies have the same user and session, but may have other times. If the split keeps users or
    sessions together, copies are in one split.
    """
    together = split.by == "fraction" and not split.of and bool(schema.user or schema.session)
    features = bool(schema.dense or schema.sparse)
    return -(-rows // _MOST_ROWS) if features and not together else 0


def hash_rows(frame: pl.DataFrame, schema: Schema, split: NDArray[np.int8], share: int) -> pl.DataFrame:
    """Return hash, split and first label of the samples whose hash is divisible by `share`."""
    # A row that is written again may have another time.
    of_time = {
        schema.time,
        *(name for date in schema.dates if date.name == schema.time for name in date.features),
    }
    of_time.update(date.since_features.get(schema.time, "") for date in schema.dates)
    there = set(frame.columns) - of_time
    names = [name for name in dict.fromkeys((*schema.names, schema.user)) if name in there]
    # `select` would interpret a column with the name * as all columns.
    hashes = pl.DataFrame([frame[name] for name in names]).hash_rows()
    label = frame[schema.label_column]
    chosen = (hashes % share == 0) & pl.Series(split >= 0) & (label != UNKNOWN).fill_null(False)
    return pl.DataFrame({"hash": hashes, "split": split, "label": label.cast(pl.Int8)}).filter(chosen)


def repeated_shares(hashes: Sequence[pl.DataFrame]) -> dict[HeldOut, float]:
    """Return held-out split -> share of its samples that repeat training samples.

    Splits with few repeats are left out. The result is empty if the repeats can be explained by
    chance.
    """
    rows = pl.concat(hashes)
    training = rows.filter(pl.col("split") == 0).group_by("hash").agg(pl.col("label").mean().alias("rate"))
    held_out = rows.filter(pl.col("split") != 0)
    equal = held_out.join(training, on="hash")
    if not _agree(equal["label"].to_numpy().astype(np.float64), equal["rate"].to_numpy()):
        return {}
    repeated = equal.filter(
        pl.when(pl.col("label") == 1).then(pl.col("rate") > 0).otherwise(pl.col("rate") < 1)
    )
    names: dict[int, HeldOut] = {SPLITS.index("valid"): "valid", SPLITS.index("test"): "test"}
    shares: dict[HeldOut, float] = {}
    for number, name in names.items():
        share = int((repeated["split"] == number).sum()) / max(int((held_out["split"] == number).sum()), 1)
        if share >= _LEAST_SHARE:
            shares[name] = round(share, 4)
    return shares


def _agree(labels: NDArray[np.float64], rates: NDArray[np.float64]) -> bool:
    """Whether held-out labels agree with the labels of equal training rows much more than by
    chance.

    `rates` has, for each held-out row, the share of positives among the equal training rows.
    """
    if not len(labels):
        return False
    label, rate = labels.mean(), rates.mean()
    differ = float((labels * (1 - rates) + (1 - labels) * rates).mean())
    expected = float(label * (1 - rate) + (1 - label) * rate)
    return expected * len(labels) >= _LEAST_EXPECTED and 1 - differ / expected >= _AGREEMENT
