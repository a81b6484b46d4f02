"""Find the column of a log that names the split of each row, as data sets and AutoML tools write it."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from stratarec.cli.init.words import SPLIT_VALUES, SPLIT_WORDS, tokens

# Share of the training rows that are for validation if the column names none.
VALID = 0.1


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

    @property
    def reason(self) -> str:
        """Reason for the draft."""
        parts = [f"validation {', '.join(self.valid)}"] if isinstance(self.valid, tuple) else []
        parts += [f"test {', '.join(self.test)}"] if self.test else []
        return f"names the split of each row: {'; '.join(parts)}"


def find_split(frame: pl.DataFrame, names: list[str], positive: pl.Series) -> SplitColumn | None:
    """Return the column whose name and values say to which split a row belongs; None if there is none.

    A split whose rows do not have both classes, such as a test without labels, is left out.

    Parameters
    ----------
    frame : DataFrame
    names : list of str
        Columns that may be it.
    positive : Series
        Booleans of the label, null where it is missing.
    """
    for name in names:
        if not tokens(name) & SPLIT_WORDS:
            continue
        text = frame[name].cast(pl.String, strict=False).str.strip_chars().str.to_lowercase()
        splits = {value: SPLIT_VALUES.get(value, "") for value in text.unique(maintain_order=True).drop_nulls()}
        if tokens(name) & {"is"} and splits.keys() <= {"0", "1", "true", "false"}:
            named = min(tokens(name) & {"train", "valid", "test"}, default="")
            other = "test" if named == "train" else "train"
            splits = {value: named if value in ("1", "true") else other for value in splits}
        if "" in splits.values():
            continue
        rows = text.replace_strict(splits, return_dtype=pl.String)
        usable = [
            part for part in ("train", "valid", "test") if positive.filter(rows == part).drop_nulls().n_unique() > 1
        ]
        if "train" not in usable or len(usable) < 2:
            continue
        values = {part: tuple(value for value in splits if splits[value] == part) for part in usable}
        valid, test = values.get("valid", VALID), values.get("test", ())
        return SplitColumn(name=name, valid=valid, test=test, missing=text.null_count(), held_out=rows != "train")
    return None
