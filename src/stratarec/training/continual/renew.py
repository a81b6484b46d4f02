"""What a run holds, changed between two logs: values are forgotten, or rows are numbered anew. Each is a period without
a log, made and committed as the others are, all or nothing.

*Forget*: values leave vocabularies, counts and the events of users; their rows become zeros that no id leads to. All
else keeps its number and its bits. Earlier periods are removed at once; what the run itself was trained on, and logs
and exports, are the user's to remove.

*Rebase*: values by falling `recent` count, without holes. Rows come along with their optimizer state, encoded ones as
they are encoded; those that a cache had as floats above encoded homes are rounded, as they are when they leave it: no
slot is theirs under another number. That scores are the same, to the bit, is shown of samples that have every value
once before anything is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.click_memory import ITEM, ClickMemory, item_keys
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import MANIFEST
from stratarec.data.dataset.renewed import Carrying, write_without_samples
from stratarec.data.schema import Schema
from stratarec.data.vocabulary import Vocabulary, buckets_of
from stratarec.embedding.tables.base import TableGroup
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tables.row_arrays import FloatRows
from stratarec.errors import CheckpointError, DataError, StorageError
from stratarec.io.atomic import file_hash
from stratarec.io.sealed import validated, write_sealed
from stratarec.models import CTRModel
from stratarec.models.base import autocast
from stratarec.planning.plan import Plan
from stratarec.training import checkpoint
from stratarec.training.continual.chain import Chain
from stratarec.training.continual.train_period import Before
from stratarec.training.evaluation.evaluate import score
from stratarec.training.run import periods
from stratarec.training.run.open_run import TrainedModel, identity, new_plan, open_run, temporary_model
from stratarec.training.run.periods import Period
from stratarec.training.run.run_directory import write_plan, write_recipe
from stratarec.training.steps.position import Position

Ids = NDArray[np.int64]
# Rows that move, and samples that are scored, at a time.
_PIECE = 1 << 14


def forget(run: Path, file: str) -> tuple[Period, dict[str, int], list[Path]]:
    """Forget the values in `file`.

    Returns the period, the number of known values of each column, and what remains of earlier periods because another
    process reads it.

    Raises
    ------
    DataError
        Where the file is none of columns of values, or the run knows none of them.
    CheckpointError, StorageError
        As `continue_run`.
    """
    known: dict[str, int] = {}

    def change(trained: TrainedModel, before: Before, work: Path) -> Plan | None:
        carried = Carrying.of(trained.dataset)
        named = _read_values(file, trained.dataset.schema, carried)
        left, gone = _without(carried, named, trained.dataset.schema, known)
        if not any(known.values()):
            raise DataError(f"{file}: the run knows none of its values, so there is nothing to forget")
        dataset = write_without_samples(trained.dataset, work / periods.DATA, left)
        for name, ids in gone.items():
            _put(trained.model, name, ids, lambda rows: None)
        loaded = checkpoint.load(trained.checkpoint)
        state = {name: loaded.state[name] for name in ("step", "position")}
        _save(trained, trained.model, dataset, state, work)
        # Rows in slots keep their bits only in a cache of the same shape.
        return trained.plan

    period, remaining = _renewed(run, "forget", change)
    return period, known, remaining


def rebase(run: Path) -> tuple[Period, dict[str, tuple[int, int]], int]:
    """Number rows anew; gives the period, of each vocabulary by count its rows before and after, and how many rows were
    rounded.

    Raises
    ------
    CheckpointError
        Where scores would not be the same, as where encoded rows missed steps. The run is then as it was.
    StorageError
        As `continue_run`.
    """
    sizes: dict[str, tuple[int, int]] = {}
    rounded: list[int] = []

    def change(trained: TrainedModel, before: Before, work: Path) -> Plan | None:
        carried = Carrying.of(trained.dataset)
        ranked = {name: _ranked(carried.vocabularies[name], found) for name, found in carried.counts.items()}
        vocabularies = carried.vocabularies | {name: vocabulary for name, (vocabulary, _) in ranked.items()}
        sizes.update({name: (carried.vocabularies[name].rows, vocabularies[name].rows) for name in ranked})
        old = {name: np.arange(each.rows, dtype=np.int64) for name, each in carried.vocabularies.items()}
        old |= {name: ids for name, (_, ids) in ranked.items()}
        dataset = write_without_samples(
            trained.dataset, work / periods.DATA, replace(carried, vocabularies=vocabularies)
        )
        plan = new_plan(trained.recipe, dataset)
        with temporary_model(trained.recipe, dataset, plan) as model:
            loaded = checkpoint.load(trained.checkpoint)
            model.network.load_state_dict(loaded.network)
            for name, ids in old.items():
                mine, group = _group(model, name), _group(trained.model, name)
                if (
                    isinstance(mine, CachedTables)
                    and isinstance(group, CachedTables)
                    and mine.codec.identity == group.codec.identity
                ):
                    rounded.append(_move(group, mine, name, ids, before.steps))
                else:
                    _put(model, name, np.arange(len(ids)), partial(_take, group, ids + group.first_row[name]))
            model.embeddings.engine.course.go_on(0, before.steps, ())
            _check_scores(trained, model, old)
            _save(trained, model, dataset, {"step": 0, "position": asdict(replace(Position(), finished=True))}, work)
        return plan

    period, _ = _renewed(run, "rebase", change)
    return period, sizes, sum(rounded)


def _renewed(
    run: Path, kind: Literal["forget", "rebase"], change: Callable[[TrainedModel, Before, Path], Plan | None]
) -> tuple[Period, list[Path]]:
    """Commit a period of the data and checkpoint that `change` writes into a directory, under the plan it returns.

    Returns the period, and what remains of earlier ones because another process reads it.
    """
    with Chain.locked(run) as chain:
        if kind == "forget" and chain.leftovers:
            raise StorageError(
                f"{chain.leftovers[0]} may hold values that are to be forgotten and cannot be removed (it has other "
                "files, or a process uses it); remove it, then run the command again"
            )
        with periods.working_directory(run) as work, open_run(run) as trained:
            trained.model.network.calibration = None
            before, parent = chain.before(trained)
            plan = change(trained, before, work)
            final = periods.of_number(run, before.number)
            recipe = replace(trained.recipe, data=replace(trained.recipe.data, path=str(final / periods.DATA)))
            write_recipe(work, recipe)
            write_plan(work, recipe, plan)
            content = {
                "format": periods.FORMAT,
                "number": before.number,
                "parent": file_hash(parent),
                "kind": kind,
                "file": "",
                "log": None,
                "times": trained.dataset.manifest.carried.times,
                "dataset": file_hash(work / periods.DATA / MANIFEST),
                "state": file_hash(periods.only_checkpoint(work) / checkpoint.STATE),
                "steps": 0,
                "rate_factor": before.rate_factor,
                "scores": {},
                "calibration": [each.to_dict() for each in trained.maps],
                "lookups": {},
                "dense": {},
                "auc": {"low": None, "high": None, "before": None},
            }
            found = validated(Period, content, kind, periods.ADVICE, CheckpointError)
            write_sealed(work / periods.PERIOD, found.to_dict())
            chain.commit(work, final)
        return found, periods.prune(run)


def _save(trained: TrainedModel, model: CTRModel, dataset: Dataset, state: Mapping[str, Any], work: Path) -> None:
    """A checkpoint of `model` with the optimizer's state of the one before, all rows of it written anew."""
    loaded = checkpoint.load(trained.checkpoint)
    checkpoint.save(
        work / "checkpoints",
        model=model,
        optimizer=loaded.optimizer,
        state={**state, "identity": identity(trained.recipe, dataset)},
        previous=None,
    )


def _group(model: CTRModel, name: str) -> TableGroup:
    group = model.embeddings.engine.tables_of(name)
    assert isinstance(group, TableGroup)
    return group


def _take(group: TableGroup, ids: Ids, rows: Ids) -> FloatRows:
    return group.take(ids[rows])


def _move(group: CachedTables, mine: CachedTables, name: str, ids: Ids, write: int) -> int:
    """Give each row of a table that has records the record of the row ``ids[row]`` of `group`; gives how many of these
    were in slots, and are now rounded in both."""
    rounded = 0
    number = np.full(next(table.num_embeddings for table in group.configs if table.name == name), -1, dtype=np.int64)
    number[ids] = np.arange(len(ids))
    for first in range(0, len(number), _PIECE):
        last = min(first + _PIECE, len(number))
        new, old = number[first:last], np.arange(first, last)
        records, home = group.at_home(name, first, last)
        cached = np.isin(old, group.in_slots(name, first, last))
        # Hot rows are in slots of their own.
        hot = (new >= 0) & np.isin(new, mine.in_slots(name, 0, len(ids)))
        moved = home & (new >= 0) & ~hot
        mine.put_records(new[moved] + mine.first_row[name], records[moved])
        # Tail buckets that nothing trained begin as they did: their numbers are what they were.
        rest = (new >= 0) & ~moved & (hot | cached | home | (new != old))
        theirs, before = new[rest] + mine.first_row[name], old[rest] + group.first_row[name]
        found, places = group.take(before), np.arange(len(before), dtype=np.int64)
        found.clock[:] = 0
        mine.put(theirs, found, places, write)
        if group.codec.config.kind != "fp32":
            found, places = mine.take(theirs), np.flatnonzero(~hot[rest])
            group.put(before[places], found, places, write)
            rounded += int(cached[rest & ~hot].sum())
    return rounded


def _put(model: CTRModel, name: str, rows: Ids, of: Callable[[Ids], FloatRows | None]) -> None:
    """Give rows of a table what `of` gives for them, zeros for None."""
    group = _group(model, name)
    for first in range(0, len(rows), _PIECE):
        chosen = rows[first : first + _PIECE].astype(np.int64)
        found = of(chosen)
        if found is None:
            found = FloatRows.allocate(len(chosen), group.width, **group.codec.layout.kept)
        found.clock[:] = 0
        group.put(chosen + group.first_row[name], found, np.arange(len(chosen), dtype=np.int64), 0)


def _ranked(vocabulary: Vocabulary, counted: pl.DataFrame) -> tuple[Vocabulary, Ids]:
    """A vocabulary by falling recent count without holes, and ``[rows]`` the id that each of its rows had."""
    tail = vocabulary.tail_buckets
    known = pl.DataFrame({"value": vocabulary.values, "id": np.arange(tail, vocabulary.rows)}).drop_nulls()
    known = known.join(counted.select("value", "recent"), on="value", how="left", maintain_order="left")
    known = known.sort([pl.col("recent").fill_null(0.0), "value"], descending=[True, False])
    old = np.concatenate([np.arange(tail), known["id"].to_numpy()]).astype(np.int64)
    counts = vocabulary.counts[old]
    # All of them are kept as they are from here on, so that none has to fall behind another by its count.
    return replace(vocabulary, values=known["value"], counts=counts, inherited=len(known)), old


def _check_scores(trained: TrainedModel, model: CTRModel, old: Mapping[str, Ids]) -> None:
    """Refuse a `model` whose scores are not those of the one before, to the bit, of samples that have every row."""
    for now, before in _samples(trained, old):
        with torch.no_grad(), autocast(trained.recipe.train.precision, model.device):
            mine, theirs = score(model.eval(), now), score(trained.model.eval(), before)
        if not np.array_equal(mine.view(np.uint32), theirs.view(np.uint32)):
            raise CheckpointError(
                "scores would not be the same, to the bit, with rows numbered anew: rows that rest encoded "
                "(memory.precision) and missed steps cannot move without being rounded; nothing was changed"
            )


def _samples(trained: TrainedModel, old: Mapping[str, Ids]) -> Iterator[tuple[Batch, Batch]]:
    """Batches that have every row of every table once in each feature, by new ids and by those before."""
    schema, draws = trained.dataset.schema, np.random.default_rng(0)
    rows = max((len(ids) for ids in old.values()), default=1)
    for first in range(0, rows, _PIECE):
        size = min(_PIECE, rows - first)
        dense = torch.from_numpy(draws.normal(size=(size, len(schema.dense))).astype(np.float32))
        chosen = {f.name: (first + np.arange(size)) % len(old[f.vocabulary]) for f in schema.sparse}
        # Other features meet each other in other pairs than by rank.
        chosen = {name: draws.permutation(ids) for name, ids in chosen.items()}
        batches = []
        for new in (True, False):
            ids = [chosen[f.name] if new else old[f.vocabulary][chosen[f.name]] for f in schema.sparse]
            values = torch.from_numpy(np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, dtype=np.int32))
            offsets = torch.arange(len(values) + 1)
            sparse = KeyedJagged(
                keys=tuple(f.name for f in schema.sparse), values=values, offsets=offsets, batch_size=size,
                weights=torch.ones(len(values)) if schema.weighted else None,
            )  # fmt: skip
            batches.append(Batch(label=torch.zeros(size), dense=dense, sparse=sparse))
        yield batches[0], batches[1]


def _read_values(file: str, schema: Schema, carried: Carrying) -> dict[str, pl.Series]:
    """Column -> its values, by the name of a vocabulary, of a feature that has it, or of the users' column."""
    path = Path(file)
    try:
        frame = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path, infer_schema=False)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}") from error
    of_feature = {feature.name: feature.vocabulary for feature in schema.sparse}
    found: dict[str, pl.Series] = {}
    for name in frame.columns:
        vocabulary = of_feature.get(name, name)
        if vocabulary not in carried.counts and name != schema.user:
            raise DataError(
                f"{file}: column {name!r} is no vocabulary whose values have rows of their own; there are "
                f"{', '.join(dict.fromkeys([*carried.counts, *([schema.user] if schema.user else [])]))}"
            )
        found[name] = frame[name].drop_nulls()
    if not sum(map(len, found.values())):
        raise DataError(f"{file} names no value: expected a column for each vocabulary, named for it, and its values")
    return found


def _without(
    carried: Carrying, named: Mapping[str, pl.Series], schema: Schema, known: dict[str, int]
) -> tuple[Carrying, dict[str, Ids]]:
    """What is left, and of each table the rows that are nobody's now; `known` gets how many values each column had."""
    vocabularies, counts, events = dict(carried.vocabularies), dict(carried.counts), carried.events
    clicks = carried.clicks
    of_feature = {feature.name: feature.vocabulary for feature in schema.sparse}
    gone: dict[str, Ids] = {}
    for column, values in named.items():
        name, known[column] = of_feature.get(column, column), 0
        if name in counts:
            vocabularies[name], counts[name], ids, seen = _taken(vocabularies[name], counts[name], values)
            gone[name] = np.union1d(gone.get(name, np.zeros(0, dtype=np.int64)), ids)
            known[column] = seen
        if events is not None and column == schema.user:
            theirs = events[column].is_in(_cast(values, events[column].dtype).implode())
            known[column] = max(known[column], events.filter(theirs)[column].n_unique())
            events = events.filter(~theirs)
        if events is not None:
            items = [f.of for f in schema.histories if of_feature[f.of] == name]
            events = _events_without(events, items, values, schema)
        if clicks is not None:
            clicks = _clicks_without(clicks, column if column == schema.user else name, values, schema)
    return Carrying(vocabularies=vocabularies, counts=counts, events=events, clicks=clicks), gone


def _clicks_without(clicks: ClickMemory, name: str, values: pl.Series, schema: Schema) -> ClickMemory:
    """Without the clicks of users or of items; where values are contexts, clicks are without these."""
    if name not in clicks.recent.columns:
        return clicks
    wanted, item = _cast(values, clicks.recent[name].dtype), name == schema.sparse[0].name
    theirs = pl.col(name).is_in(wanted.implode())
    if item or name == schema.user:
        parts = {part: clicks.frames[part].filter(~theirs) for part in ("recent", "waiting")}
    else:
        gone = pl.when(theirs).then(None).otherwise(pl.col(name)).alias(name)
        parts = {part: clicks.frames[part].with_columns(gone) for part in ("recent", "waiting")}
    first = clicks.first.filter(~clicks.first[ITEM].is_in(item_keys(wanted).implode())) if item else clicks.first
    return replace(clicks, recent=parts["recent"], waiting=parts["waiting"], first=first)


def _events_without(
    events: pl.DataFrame, items: Sequence[str], values: pl.Series, schema: Schema
) -> pl.DataFrame:  # fmt: skip
    for name in items:
        theirs = events[name].is_in(_cast(values, events[name].dtype).implode())
        events = events.with_columns(pl.when(theirs).then(None).otherwise(pl.Series(events[name])).alias(name))
    return events.filter(pl.any_horizontal(events[feature.of].is_not_null() for feature in schema.histories))


def _taken(
    vocabulary: Vocabulary, counted: pl.DataFrame, values: pl.Series
) -> tuple[Vocabulary, pl.DataFrame, Ids, int]:
    """A vocabulary and counts without some values; their ids, and how many were counted."""
    wanted = _cast(values, vocabulary.values.dtype).implode()
    places = np.flatnonzero(vocabulary.values.is_in(wanted).fill_null(False).to_numpy())
    theirs = counted["value"].is_in(wanted)
    own = vocabulary.values.gather(places)
    rare = counted.filter(theirs & ~counted["value"].is_in(own.implode()))
    counts = vocabulary.counts.copy()
    np.subtract.at(counts, buckets_of(rare["value"], vocabulary.tail_buckets), rare["count"].to_numpy())
    np.maximum(counts, 0, out=counts)  # what a limit on memory forgot was taken from nowhere
    ids = places + vocabulary.tail_buckets
    counts[ids] = 0
    without = vocabulary.values_without(ids)
    kept = replace(vocabulary, values=without, counts=counts, inherited=len(without))
    return kept, counted.filter(~theirs), ids, int(theirs.sum())


def _cast(values: pl.Series, kind: pl.DataType) -> pl.Series:
    return values.cast(kind, strict=False).drop_nulls()
