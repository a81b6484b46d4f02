"""Find the columns of a log that name the split of each row, as data sets and AutoML tools write
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from stratarec.cli.init.times import Times
from stratarec.cli.init.words import SPLIT_VALUES, SPLIT_WORDS, tokens
from stratarec.data.columns.text_values import TEXT_TYPES

# Share of the training rows that are for validation if the column names none.
VALID = 0.1
# Maximum share of rows that a flag holds out. A flag that is set in more rows, such as is_valid,
# has another meaning.
_MOST_HELD_OUT = 0.4
# Minimum share of training rows after the middle of the test for a split that contradicts the time.
_LATER = 0.9
# Largest number of folds of a cross-validation, and maximum ratio of the sizes of two of them.
_FOLDS, _UNEVEN = 20, 1.5


@dataclass(frozen=True, kw_only=True)
class SplitColumn:
    """Column with the split of each row, and its values for the recipe."""

    name: str
    valid: tuple[str, ...] | float
    test: tuple[str, ...]
    missing: int
    """Number of sampled rows without a value."""
    held_out: pl.Series
    """Whether each sampled row is for validation or the test."""
    reason: str
    """Reason for the draft."""


def find_splits(
    frame: pl.DataFrame, names: Sequence[str], positive: pl.Series, times: Times | None
) -> list[SplitColumn]:
    """Return the columns whose names and values say to which split a row belongs, those with the
    most splits first.

    A split whose rows have no labels, such as a test that others evaluate, is left out.

    Parameters
    ----------
    frame : DataFrame
        Sample rows of the log.
    names : sequence of str
        Columns that may be it.
    positive : Series
        Booleans of the label, null where it is missing.
    times : Times, optional
        Times of the rows.
    """
    found = []
    for name in names:
        dtype = frame[name].dtype
        if not tokens(name) & SPLIT_WORDS or not (dtype.is_numeric() or dtype in (*TEXT_TYPES, pl.Boolean)):
            continue
        text = frame[name].cast(pl.String, strict=False).str.strip_chars().str.to_lowercase()
        splits = {
            value: SPLIT_VALUES.get(value, "") for value in text.unique(maintain_order=True).drop_nulls()
        }
        is_flag = "is" in tokens(name) and {value.removesuffix(".0") for value in splits} <= {
            "0",
            "1",
            "true",
            "false",
        }
        if is_flag:
            named = min(tokens(name) & {"train", "valid", "test"}, default="")
            other = "test" if named == "train" else "train"
            splits = {
                value: named if value.removesuffix(".0") in ("1", "true") else other for value in splits
            }
        if "" in splits.values():
            continue
        rows = text.replace_strict(splits, return_dtype=pl.String)
        labels = {
            part: positive.filter(rows == part).drop_nulls().n_unique()
            for part in ("train", "valid", "test")
        }
        known = [part for part in labels if labels[part]]
        if labels["train"] < 2 or len(known) < 2 or (is_flag and (rows != "train").mean() > _MOST_HELD_OUT):  # type: ignore[operator]
            continue
        values = {part: tuple(value for value in splits if splits[value] == part) for part in known}
        parts = [
            f"{'validation' if part == 'valid' else part} {', '.join(map(repr, values[part]))} "
            f"({float((rows == part).mean() or 0):.1%} of rows)"  # type: ignore[arg-type]
            for part in known
        ]
        reason = f"names the split of each row: {', '.join(parts)}{_doubts(rows, labels, times)}"
        found.append(
            SplitColumn(
                name=name,
                valid=values.get("valid", VALID),
                test=values.get("test", ()),
                missing=text.null_count(),
                held_out=rows != "train",
                reason=reason,
            )
        )
    return sorted(
        found, key=lambda column: (column.missing > 0, isinstance(column.valid, float), not column.test)
    )


def _doubts(rows: pl.Series, labels: dict[str, int], times: Times | None) -> str:
    """Return what is odd about a split, for the end of a reason; empty if nothing is."""
    doubts = [
        f"; all rows of the {part} split have the same label: if it was made up, remove them from the log"
        for part in ("valid", "test")
        if labels[part] == 1
    ]
    if times is not None and labels["test"]:
        middle = times.seconds.filter(rows == "test").median()
        if float((times.seconds.filter(rows == "train") > middle).mean() or 0) > _LATER:  # type: ignore[arg-type]
            doubts.append("; training rows are later than the test, unlike in production")
    return "".join(doubts)


def find_folds(frame: pl.DataFrame, names: Sequence[str]) -> dict[str, str]:
    """Return the columns that number the folds of a cross-validation, each with the reason to leave
    it out.
    """
    folds = {}
    for name in names:
        column = frame[name]
        if not tokens(name) & {"fold", "kfold"} or not column.dtype.is_integer() or column.null_count():
            continue
        counts = column.value_counts().sort(name)
        numbers, rows = counts[name].to_list(), counts["count"]
        is_range = 2 < len(numbers) <= _FOLDS and numbers == list(
            range(numbers[0], numbers[0] + len(numbers))
        )
        if is_range and numbers[0] in (0, 1) and int(rows.max()) <= _UNEVEN * int(rows.min()):  # type: ignore[arg-type]
            first, second = numbers[:2]
            folds[name] = (
                "numbers the folds of a cross-validation; to hold out two of them: "
                f"data.split: {{by: column, column: {name!r}, valid: ['{first}'], test: ['{second}']}}"
            )
    return folds
