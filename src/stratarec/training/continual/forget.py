"""`stratarec forget`: remove values from vocabularies, counts, user events and clicks, and set
their rows and click rates to zero.

No value has the id of such a row any more. All other rows keep their numbers and bits. Data and
checkpoints of earlier periods are deleted at once. The data set of the run, logs and exports are
not deleted; the user must do that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from stratarec.data.click_memory import ITEM, ClickMemory, item_keys
from stratarec.data.columns.converter import BadRows, Converter
from stratarec.data.columns.text_values import integers_from_text
from stratarec.data.dataset.writer import CarriedTables, write_without_samples
from stratarec.data.schema import Schema
from stratarec.data.vocabulary import Vocabulary, buckets_of
from stratarec.errors import DataError
from stratarec.io.atomic import open_regular
from stratarec.planning.plan import Plan
from stratarec.training import checkpoint
from stratarec.training.continual.rebase import Ids, commit_change, put_rows, save_checkpoint
from stratarec.training.continual.train_period import Before
from stratarec.training.run import periods
from stratarec.training.run.open_run import TrainedModel
from stratarec.training.run.periods import Period


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """Result of `forget`."""

    period: Period
    known: dict[str, int]
    """Column -> number of values in the file that the run knew."""
    unknown: dict[str, pl.Series]
    """Column -> values in the file that the run did not know."""
    remaining: list[Path]
    """Parts of earlier periods that could not be deleted because another process reads them."""


def forget(run: Path, file: str) -> Forgotten:
    """Remove the values in `file` from a run, by a new period.

    Raises
    ------
    DataError
        If the file has columns that the run does not have, values of another type, or no value that
        the run knows.
    CheckpointError, StorageError
        As in `continue_run`.
    """
    counts: dict[str, int] = {}
    unknown: dict[str, pl.Series] = {}

    def change(trained: TrainedModel, before: Before, work: Path) -> Plan | None:
        carried = CarriedTables.of(trained.dataset)
        named = _read_values(file, trained.dataset.schema, carried)
        tables, rows, strange = _without(carried, named, trained.dataset.schema)
        unknown.update(strange)
        counts.update({name: len(values) - len(strange[name]) for name, values in named.items()})
        if not any(counts.values()):
            raise DataError(
                f"{file}: the run has none of these values, so there is nothing to forget. After an "
                "interrupted `forget` of the same file, this means that it had already finished"
            )
        dataset = write_without_samples(trained.dataset, work / periods.DATA, tables)
        for name, ids in rows.items():
            put_rows(trained.model, name, ids, lambda rows: None)
        if (trees := trained.model.network.trees) is not None:
            for place, feature in enumerate(trained.dataset.schema.sparse):
                codes = rows.get(feature.vocabulary, np.zeros(0, dtype=np.int64)) + 1
                trees.rates[place, codes[codes < trees.rates.shape[1]]] = 0
                trees.remove_pairs(place, codes)
        loaded = checkpoint.load(trained.checkpoint)
        state = {name: loaded.state[name] for name in ("step", "training")}
        save_checkpoint(trained, trained.model, dataset, state, work)
        # The same plan, because rows in slots keep their bits only in a cache of the same size.
        return trained.plan

    period, remaining = commit_change(run, "forget", change)
    return Forgotten(period=period, known=counts, unknown=unknown, remaining=remaining)


def _read_values(file: str, schema: Schema, carried: CarriedTables) -> dict[str, pl.Series]:
    """Return the distinct values of each column of a file, in the type in which the run stores
    them.

    Values are read as `prepare` reads them from a log. A column has the name of a vocabulary, of a
    feature that uses a vocabulary, or of the users' column.
    """
    path = Path(file)
    try:
        with open_regular(path) as source:
            frame = (
                pl.read_parquet(source)
                if path.suffix.lower() == ".parquet"
                else pl.read_csv(source, infer_schema=False)
            )
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise DataError(f"{file} cannot be read: {reason}") from error
    of_feature = {feature.name: feature.vocabulary for feature in schema.sparse}
    bad = BadRows(None)
    header = 0 if path.suffix.lower() == ".parquet" else 1  # the first line of a CSV file
    converter = Converter(file, np.arange(1, len(frame) + 1) + header, bad)
    values: dict[str, pl.Series] = {}
    for name in frame.columns:
        vocabulary = of_feature.get(name, name)
        if vocabulary not in carried.counts and name != schema.user:
            raise DataError(
                f"{file}: column {name!r} is not a vocabulary with one row per value; expected "
                f"{', '.join(dict.fromkeys([*carried.counts, *([schema.user] if schema.user else [])]))}"
            )
        stored = next(
            (earlier.dtype for earlier in _stored_values(name, vocabulary, carried, schema)), pl.String()
        )
        raw = frame[name]
        if stored == pl.UInt64 and raw.dtype == pl.String:
            converted = raw.cast(stored, strict=False).fill_null(
                integers_from_text(raw).cast(stored, strict=False)
            )
            converter.require(raw, raw.is_null() | converted.is_not_null(), "a whole number or nothing")
        else:
            read = converter.category(raw, "text" if stored == pl.String else "integer")
            converted = read.cast(stored, strict=False)
            converter.require(raw, read.is_null() | converted.is_not_null(), f"a value that {stored} holds")
        values[name] = converted.drop_nulls().unique(maintain_order=True)
    bad.raise_first()
    if not sum(map(len, values.values())):
        raise DataError(
            f"{file} contains no value; expected a column with the name of each vocabulary, and its values"
        )
    return values


def _stored_values(
    column: str, vocabulary: str, carried: CarriedTables, schema: Schema
) -> Iterator[pl.Series]:
    """Yield all values of a column that a run stores: values with a row, values without one, values
    in events and in clicks.
    """
    if vocabulary in carried.counts:
        yield carried.vocabularies[vocabulary].values
        yield carried.counts[vocabulary]["value"]
    if carried.events is not None:
        of_feature = {feature.name: feature.vocabulary for feature in schema.sparse}
        items = (feature.of for feature in schema.histories if of_feature[feature.of] == vocabulary)
        for name in (*([column] if column == schema.user else []), *items):
            yield carried.events[name]
    if carried.clicks is not None:
        name = column if column == schema.user else vocabulary
        for part in ("recent", "waiting"):
            if name in carried.clicks.frames[part].columns:
                yield carried.clicks.frames[part][name]


def _without(
    carried: CarriedTables, named: Mapping[str, pl.Series], schema: Schema
) -> tuple[CarriedTables, dict[str, Ids], dict[str, pl.Series]]:
    """Remove values from all tables that one data set carries over to the next.

    Returns the remaining tables, the ids of the removed values by vocabulary, and the unknown
    values by column.
    """
    vocabularies, counts, events = dict(carried.vocabularies), dict(carried.counts), carried.events
    clicks = carried.clicks
    of_feature = {feature.name: feature.vocabulary for feature in schema.sparse}
    rows: dict[str, Ids] = {}
    unknown: dict[str, pl.Series] = {}
    for column, values in named.items():
        name = of_feature.get(column, column)
        unknown[column] = values
        for earlier in _stored_values(column, name, carried, schema):
            unknown[column] = unknown[column].filter(
                ~unknown[column].is_in(_cast(earlier, values.dtype).implode())
            )
        if name in counts:
            vocabularies[name], counts[name], ids = _remove_values(vocabularies[name], counts[name], values)
            rows[name] = np.union1d(rows.get(name, np.zeros(0, dtype=np.int64)), ids)
        if events is not None and column == schema.user:
            events = events.filter(~events[column].is_in(_cast(values, events[column].dtype).implode()))
        if events is not None:
            items = [f.of for f in schema.histories if of_feature[f.of] == name]
            events = _events_without(events, items, values, schema)
        if clicks is not None:
            clicks = _clicks_without(clicks, column if column == schema.user else name, values, schema)
    return (
        CarriedTables(vocabularies=vocabularies, counts=counts, events=events, clicks=clicks),
        rows,
        unknown,
    )


def _clicks_without(clicks: ClickMemory, name: str, values: pl.Series, schema: Schema) -> ClickMemory:
    """Return the clicks without values of the column `name`.

    If the values are users or items, their clicks are removed. If they are contexts, the clicks
    stay, with null as the context.
    """
    if name not in clicks.recent.columns:
        return clicks
    targets, item = _cast(values, clicks.recent[name].dtype), name == schema.sparse[0].name
    theirs = pl.col(name).is_in(targets.implode())
    if item or name == schema.user:
        parts = {part: clicks.frames[part].filter(~theirs) for part in ("recent", "waiting")}
    else:
        cleared = pl.when(theirs).then(None).otherwise(pl.col(name)).alias(name)
        parts = {part: clicks.frames[part].with_columns(cleared) for part in ("recent", "waiting")}
    first = (
        clicks.first.filter(~clicks.first[ITEM].is_in(item_keys(targets).implode()))
        if item
        else clicks.first
    )
    return replace(clicks, recent=parts["recent"], waiting=parts["waiting"], first=first)


def _events_without(
    events: pl.DataFrame, items: Sequence[str], values: pl.Series, schema: Schema
) -> pl.DataFrame:
    for name in items:
        theirs = events[name].is_in(_cast(values, events[name].dtype).implode())
        events = events.with_columns(
            pl.when(theirs).then(None).otherwise(pl.Series(events[name])).alias(name)
        )
    return events.filter(
        pl.any_horizontal(events[feature.of].is_not_null() for feature in schema.histories)
    )


def _remove_values(
    vocabulary: Vocabulary, counted: pl.DataFrame, values: pl.Series
) -> tuple[Vocabulary, pl.DataFrame, Ids]:
    """Return a vocabulary and its counts without `values`, and the ids that the values had."""
    targets = _cast(values, vocabulary.values.dtype).implode()
    places = np.flatnonzero(vocabulary.values.is_in(targets).fill_null(False).to_numpy())
    theirs = counted["value"].is_in(targets)
    removed_values = vocabulary.values.gather(places)
    rare = counted.filter(theirs & ~counted["value"].is_in(removed_values.implode()))
    counts = vocabulary.counts.copy()
    np.subtract.at(counts, buckets_of(rare["value"], vocabulary.tail_buckets), rare["count"].to_numpy())
    # Counts that a limit on memory dropped are not in `counts`, so the difference may be negative.
    np.maximum(counts, 0, out=counts)
    ids = places + vocabulary.tail_buckets
    counts[ids] = 0
    without = vocabulary.values_without(ids)
    remaining_vocabulary = replace(vocabulary, values=without, counts=counts, inherited=len(without))
    return remaining_vocabulary, counted.filter(~theirs), ids


def _cast(values: pl.Series, kind: pl.DataType) -> pl.Series:
    return values.cast(kind, strict=False).drop_nulls()
