"""Which samples of a log are of values that a model knows, and which of values that share rows or were never seen."""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset

KINDS = ("known", "tail", "new")
"""A sample is of the last of these that one of its values is: with a row of its own, counted before, neither."""


class Novelty:
    """Looks at the values of features of one value; lists nearly always have a rare one.

    Parameters
    ----------
    dataset : Dataset
        Whose vocabularies the model has.
    """

    def __init__(self, dataset: Dataset) -> None:
        counted = {name: info for name, info in dataset.vocabularies.items() if info.kind == "count"}
        self._features = {
            feature.name: feature.vocabulary
            for feature in dataset.schema.sparse
            if feature.kind == "single" and feature.vocabulary in counted
        }
        self._kinds = {name: _kinds(dataset, name) for name in set(self._features.values())}
        self.lookups: dict[str, Counter[str]] = {name: Counter() for name in counted}
        """Vocabulary -> how many lookups there were of each kind."""

    def of(self, frame: pl.DataFrame) -> NDArray[np.int8]:
        """``[N, F]`` the place of the kind of each value in `KINDS`; see `kinds_of`."""
        found = np.zeros((len(frame), len(self._features)), dtype=np.int8)
        for place, (feature, name) in enumerate(self._features.items()):
            known, column = self._kinds[name], frame[feature]
            values = column.cast(known["value"].dtype, strict=False).to_frame("value")
            kind = values.join(known, on="value", how="left", maintain_order="left")["kind"].fill_null(len(KINDS) - 1)
            there = column.is_not_null().to_numpy()
            kinds = kind.to_numpy()[there]
            self.lookups[name].update(dict(zip(KINDS, np.bincount(kinds, minlength=len(KINDS)).tolist(), strict=True)))
            found[there, place] = kinds
        return found


def kinds_of(values: NDArray[np.int8]) -> NDArray[np.int8]:
    """``[N]`` kinds of samples, of those of their values ``[N, F]``.

    A feature of one kind in all samples, as the day of the week is on a first Monday, tells none from another.
    """
    apart = (values != values[:1]).any(axis=0)
    kinds: NDArray[np.int8] = (values[:, apart] if apart.any() else values).max(axis=1, initial=0)
    return kinds


def _kinds(dataset: Dataset, name: str) -> pl.DataFrame:
    """Columns `value` and `kind` of all values that are known of."""
    parts = [dataset.vocabulary(name).values.drop_nulls(), dataset.carried_counts(name)["value"]]
    every = [
        pl.DataFrame({"value": part, "kind": np.full(len(part), kind, np.int8)}) for kind, part in enumerate(parts)
    ]
    return pl.concat(every).unique("value", keep="first")
