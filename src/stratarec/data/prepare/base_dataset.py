"""The earlier data set that a new one is based on: it keeps its ids and moments, so that a model goes on with it.

A data set and its base differ in their samples alone: features, kinds and tail buckets are the same. A base may have a
base of its own; nothing but the last one is needed. No id moves: new values follow the earlier ones. Counts cover all
logs so far, also of values without a row, and a user's history continues from the events of the base's log.
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
from stratarec.data.vocabulary import Vocabulary, VocabularyConfig, merge_counts
from stratarec.errors import ConfigError, DataError, DatasetError

_FIELD = "data.vocabulary.base"
# Names of a list that a message repeats.
_MOST_NAMES = 5


class BaseDataset:
    """An earlier data set, found to be one that data of a recipe can be based on.

    Use `BaseDataset.of`.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.fingerprint = dataset.fingerprint

    @classmethod
    def of(cls, config: PrepareConfig, schema: Schema) -> BaseDataset | None:
        """The base that a recipe names; None where it names none.

        Raises
        ------
        ConfigError
            Where it is the data set itself, or has other features, kinds of vocabularies or tail buckets: names the
            field.
        DatasetError
            Where it is missing or damaged.
        """
        if not config.vocabulary.base:
            return None
        path = Path(config.vocabulary.base)
        if path.resolve() == Path(config.path).resolve():
            raise ConfigError(f"{_FIELD} is data.path itself, {config.path!r}; name an earlier data set")
        try:
            dataset = Dataset.open(path, verify="used")
        except DatasetError as error:
            raise DatasetError(f"{_FIELD}: {error}") from error
        for fault in (*_other_features(schema, dataset), *_other_tails(config.vocabulary, dataset)):
            raise ConfigError(f"{fault}; a data set keeps the ids of one with the same features and tails alone")
        return cls(dataset)

    def locked(self) -> AbstractContextManager[None]:
        """See `Dataset.locked`."""
        return self._dataset.locked()

    def vocabulary(self, name: str, counted: pl.DataFrame, faded: float) -> tuple[Vocabulary, pl.DataFrame]:
        """A vocabulary, and the counts of this log, those of the earlier ones added where values are counted; what was
        recent then is so by the factor `faded` now.

        Raises
        ------
        DataError
            Where they are of another type than those that were `counted` in the log.
        """
        known = self._dataset.vocabulary(name)
        values, found = known.values, counted["value"].dtype
        if len(counted) and found != values.dtype:
            raise DataError(
                f"vocabulary {name!r} has values of type {found} in the log and of {values.dtype} in {_FIELD}, "
                f"{self._dataset.path}: set `type` of its features, or the type of the column"
            )
        if known.kind == "hash":
            return known, counted
        before = self._dataset.carried_counts(name).with_columns(pl.col("recent") * faded)
        return known, merge_counts([before, counted.with_columns(pl.col("value").cast(values.dtype))])

    def events(self) -> pl.DataFrame | None:
        """See `Dataset.events`."""
        return self._dataset.events()

    def clicks(self) -> ClickMemory:
        """See `Dataset.clicks`; `ConfigError` where there is nothing."""
        found = self._dataset.clicks()
        if found is None:
            raise ConfigError(
                f"{_FIELD}, {self._dataset.path}, keeps no clicks for a log of clicks to look back on: it is of "
                "another kind of source, or was prepared by an earlier version of StrataRec; prepare it anew"
            )
        return found

    @property
    def carried(self) -> Carried:
        """What it keeps of its log, and those before."""
        return self._dataset.manifest.carried

    def moments(self) -> dict[str, Moments]:
        """Of each dense feature."""
        return {name: found.moments for name, found in self._dataset.about.moments.items()}


def _other_features(schema: Schema, base: Dataset) -> Iterator[str]:
    mine, theirs = schema.inputs(), base.schema.inputs()
    for part in ("sparse", "dense"):
        names, others = ([feature["name"] for feature in each[part]] for each in (mine, theirs))
        if names != others:
            yield f"schema.{part} is {_listed(names)}, and {_listed(others)} in {_FIELD}, {base.path}"
    found = first_difference(mine, theirs)
    if found is not None:
        yield f"schema.{found.field} is {found.want!r}, and {found.have!r} in {_FIELD}, {base.path}"


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
                yield f"data.vocabulary.{field} of {name!r} is {mine!r}, and {theirs!r} in {_FIELD}, {base.path}"
