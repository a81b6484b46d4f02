"""The base of a data set: an earlier data set. The new one inherits its ids and moments, so that a
model trained on the base can continue on the new data set.

A data set and its base have the same features, kinds of vocabularies and tail buckets. Ids never
change: the ids of new values follow the earlier ids. Counts cover all logs so far, including values
without a row, and histories continue from the events of the base's log. A base may have a base
itself, which is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import polars as pl

from stratarec.config.validate import first_difference
from stratarec.data.click_memory import ClickMemory
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import Carried
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.schema import Schema
from stratarec.data.transforms import Moments
from stratarec.data.vocabulary import Vocabulary, VocabularyConfig, add_counts
from stratarec.errors import ConfigError, DataError, DatasetError

_FIELD = "data.vocabulary.base"
# Maximum number of names that an error message shows.
_MOST_NAMES = 5


class BaseDataset:
    """The data set that a recipe names as ``data.vocabulary.base``. Open it with
    `BaseDataset.of`.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.fingerprint = dataset.fingerprint

    @classmethod
    def of(cls, config: PrepareConfig, schema: Schema, *, complete: bool) -> BaseDataset | None:
        """Open the base of a recipe; None without a base. `complete` chooses the view
        `Dataset.complete`.

        Raises
        ------
        ConfigError
            If the base is the data set itself, or has other features, kinds of vocabularies or tail
            buckets. The message names the field.
        DatasetError
            If the base is missing or damaged.
        """
        if not config.vocabulary.base:
            return None
        path = Path(config.vocabulary.base)
        if path.resolve() == Path(config.path).resolve():
            raise ConfigError(f"{_FIELD} is data.path itself, {config.path!r}; name an earlier data set")
        try:
            dataset = Dataset.open(path, verify="used")
            dataset = dataset.complete() if complete else dataset
        except DatasetError as error:
            raise DatasetError(f"{_FIELD}: {error}") from error
        for fault in (*_other_features(schema, dataset), *_other_tails(config.vocabulary, dataset)):
            raise ConfigError(f"{fault}; a base must have the same features and tail buckets")
        return cls(dataset)

    def locked(self) -> AbstractContextManager[None]:
        """Context manager that prevents other processes from replacing the base while it is
        read.
        """
        return self._dataset.locked()

    def vocabulary(
        self, name: str, counted: pl.DataFrame, kind: pl.DataType, decay: float
    ) -> tuple[Vocabulary, pl.DataFrame]:
        """Return the base's vocabulary, and `counted`. For kind ``count``, the counts of earlier
        logs are added to it.

        Parameters
        ----------
        name : str
            Name of the vocabulary.
        counted : DataFrame
            Counts of this log.
        kind : DataType
            Type of the values in this log.
        decay : float
            Factor that multiplies the earlier `recent` counts.

        Raises
        ------
        DataError
            If the values of the base have another type.
        """
        vocabulary = self._dataset.vocabulary(name)
        if len(counted) and kind != vocabulary.values.dtype:
            raise DataError(
                f"vocabulary {name!r} has values of type {kind} in the log and {vocabulary.values.dtype} "
                "in the base "
                f"{self._dataset.path} ({_FIELD}): set `type` of its features, or the "
                "type of the log's column"
            )
        if vocabulary.kind == "hash":
            return vocabulary, counted
        before = self._dataset.carried_counts(name).with_columns(pl.col("recent") * decay)
        return vocabulary, add_counts(before, counted.cast({"value": vocabulary.values.dtype}))

    def held_out_values(self, name: str) -> pl.Series | None:
        """Read the held-out values of a vocabulary; None if there are none that are not
        inherited.
        """
        present = self._dataset.manifest.vocabularies[name].held_out and not self._dataset.is_complete
        return self._dataset.held_out_values(name) if present else None

    def events(self) -> pl.DataFrame | None:
        """Read the last positive events of users; None if there are no histories."""
        return self._dataset.events()

    def clicks(self) -> ClickMemory:
        """Read the clicks of the base. Raises `ConfigError` if it has none."""
        clicks = self._dataset.clicks()
        if clicks is None:
            raise ConfigError(
                f"{_FIELD}, {self._dataset.path}, stores no earlier clicks: it has another kind of source, "
                "or was prepared by an earlier version of StrataRec; prepare it again"
            )
        return clicks

    @property
    def carried(self) -> Carried:
        """State of all logs up to the base."""
        return self._dataset.manifest.carried

    def moments(self) -> dict[str, Moments]:
        """Return the moments of each dense feature."""
        return {name: info.moments for name, info in self._dataset.about.moments.items()}


def _other_features(schema: Schema, base: Dataset) -> Iterator[str]:
    mine, theirs = schema.inputs(), base.schema.inputs()
    for part in ("sparse", "dense"):
        names, others = ([feature["name"] for feature in inputs[part]] for inputs in (mine, theirs))
        if names != others:
            yield f"schema.{part} is {_listed(names)}, but {_listed(others)} in {_FIELD}, {base.path}"
    difference = first_difference(mine, theirs)
    if difference is not None:
        yield f"schema.{difference.field} is {difference.want!r}, but {difference.have!r} in {_FIELD}, {base.path}"


def _listed(names: list[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > _MOST_NAMES else ""
    return f"[{', '.join(names[:_MOST_NAMES])}{more}]"


def _other_tails(config: VocabularyConfig, base: Dataset) -> Iterator[str]:
    for name, info in base.vocabularies.items():
        limits = config.limits(name)
        tail = "buckets" if limits.kind == "hash" else "tail_buckets"
        for field, mine, theirs in (
            ("kind", limits.kind, info.kind),
            (tail, getattr(limits, tail), info.tail_buckets),
        ):
            if mine != theirs:
                yield f"data.vocabulary.{field} of {name!r} is {mine!r}, but {theirs!r} in {_FIELD}, {base.path}"
