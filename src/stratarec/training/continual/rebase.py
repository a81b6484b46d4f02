"""`stratarec rebase`: renumber rows by falling `recent` count, without holes. `forget` commits by
the same code.

Rows move together with their optimizer state, and encoded rows stay encoded. If a row of an encoded
table is in the cache, as floats, it is rounded as if it left the cache, because its slot belongs to
its old number. Before the commit, the old model (with the same rows rounded) and the new model
score samples that contain every value; all scores must be identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import MANIFEST
from stratarec.data.dataset.writer import CarriedTables, write_without_samples
from stratarec.data.vocabulary import Vocabulary
from stratarec.embedding.codecs import FloatRows
from stratarec.embedding.tables.base import TableGroup
from stratarec.embedding.tables.cached import CachedTables
from stratarec.errors import CheckpointError, StorageError
from stratarec.io.atomic import file_hash
from stratarec.io.sealed import validate, write_sealed
from stratarec.models import CTRModel
from stratarec.models.base import autocast
from stratarec.planning.plan import Plan
from stratarec.training import checkpoint
from stratarec.training.build import identity, new_plan, temporary_model
from stratarec.training.checkpoint import MEMBERS, WEIGHTS
from stratarec.training.continual.chain import Chain
from stratarec.training.continual.train_period import Before
from stratarec.training.evaluate import score
from stratarec.training.run import periods
from stratarec.training.run.open_run import TrainedModel, open_run
from stratarec.training.run.periods import Period
from stratarec.training.run.run_directory import write_plan, write_recipe
from stratarec.training.steps.state import TrainingState

Ids = NDArray[np.int64]
# Number of rows that are moved at a time, and of samples that are scored at a time.
_CHUNK = 1 << 14
# Prefix of the trees of an ensemble among the network's tensors.
_TREES = "score.trees."


def rebase(run: Path) -> tuple[Period, dict[str, tuple[int, int]], int]:
    """Renumber the rows of a run by their recent counts, in a new period.

    Returns the period; for each vocabulary of kind ``count``, its number of rows before and after;
    and the number of rounded rows.

    Raises
    ------
    CheckpointError
        If scores would change, for example because encoded rows have missed steps. The run is then
        unchanged.
    StorageError
        As in `continue_run`.
    """
    sizes: dict[str, tuple[int, int]] = {}
    rounded: list[int] = []

    def change(trained: TrainedModel, before: Before, work: Path) -> Plan | None:
        if trained.model.network.trees is not None:
            raise CheckpointError(
                f"{run} has model.trees, which compare row numbers: rebase does not support them"
            )
        carried = CarriedTables.of(trained.dataset)
        ranked = {
            name: _ranked(carried.vocabularies[name], counted) for name, counted in carried.counts.items()
        }
        vocabularies = carried.vocabularies | {name: vocabulary for name, (vocabulary, _) in ranked.items()}
        sizes.update({name: (carried.vocabularies[name].rows, vocabularies[name].rows) for name in ranked})
        old = {
            name: np.arange(vocabulary.rows, dtype=np.int64)
            for name, vocabulary in carried.vocabularies.items()
        }
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
                    put_rows(
                        model, name, np.arange(len(ids)), partial(_take, group, ids + group.first_row[name])
                    )
            model.embeddings.engine.step_clock.load_position(0, before.steps, ())
            _check_scores(trained, model, old)
            position = replace(TrainingState(), finished=True)
            save_checkpoint(trained, model, dataset, {"step": 0, "training": asdict(position)}, work)
        return plan

    period, _ = commit_change(run, "rebase", change)
    return period, sizes, sum(rounded)


def commit_change(
    run: Path,
    kind: Literal["forget", "rebase"],
    change: Callable[[TrainedModel, Before, Path], Plan | None],
) -> tuple[Period, list[Path]]:
    """Commit a new period with the data and checkpoint that `change` writes into a directory.

    `change` also returns the plan of the period. This function returns the period, and the parts of
    earlier periods that could not be removed because another process reads them.
    """
    with Chain.locked(run) as chain:
        if kind == "forget" and chain.leftovers:
            raise StorageError(
                f"{chain.leftovers[0]} may hold values that are to be forgotten and cannot be removed (it "
                "has other files, or a process uses it); remove it, then run the command again"
            )
        with periods.working_directory(run) as work, open_run(run) as trained:
            trained.model.network.calibration = None
            before, parent = chain.before(trained)
            plan = change(trained, before, work)
            final = periods.of_number(run, before.number)
            recipe = replace(
                trained.recipe, data=replace(trained.recipe.data, path=str(final / periods.DATA))
            )
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
                "calibration": [logit_map.to_dict() for logit_map in trained.maps],
                "lookups": {},
                "dense": {},
                "auc": {"low": None, "high": None, "before": None},
            }
            period = validate(Period, content, kind, periods.ADVICE, CheckpointError)
            write_sealed(work / periods.PERIOD, period.to_dict())
            chain.commit(work, final)
        return period, periods.prune(run)


def save_checkpoint(
    trained: TrainedModel, model: CTRModel, dataset: Dataset, state: Mapping[str, Any], work: Path
) -> None:
    """Write a checkpoint with all rows of `model` and the network's optimizer state from the
    previous checkpoint.
    """
    loaded = checkpoint.load(trained.checkpoint)
    optimizer = {name: tensor for name, tensor in loaded.optimizer.items() if not name.startswith(MEMBERS)}
    if (trees := model.network.trees) is not None:
        # Trees are not trained, so the weights that are stored next to an average contain the same
        # trees.
        copies = {f"{WEIGHTS}{_TREES}{name}": tensor for name, tensor in trees.state_dict().items()}
        optimizer |= {name: tensor for name, tensor in copies.items() if name in optimizer}
    checkpoint.save(
        work / "checkpoints",
        model=model,
        optimizer=optimizer,
        state={**state, "identity": identity(trained.recipe, dataset)},
        previous=None,
    )


def _group(model: CTRModel, name: str) -> TableGroup:
    group = model.embeddings.engine.tables_of(name)
    assert isinstance(group, TableGroup)
    return group


def _take(group: TableGroup, ids: Ids, rows: Ids) -> FloatRows:
    return group.read_rows(ids[rows])


def _move(group: CachedTables, mine: CachedTables, name: str, ids: Ids, batch_number: int) -> int:
    """Copy the rows of a table with records from `group` to `mine`, and return how many rows were
    rounded.

    Row i of `mine` becomes row ``ids[i]`` of `group`. Rows of an encoded table that were in slots
    are rounded in both, with the noise of batch `batch_number`.
    """
    rounded = 0
    number = np.full(
        next(table.num_embeddings for table in group.configs if table.name == name), -1, dtype=np.int64
    )
    number[ids] = np.arange(len(ids))
    for first in range(0, len(number), _CHUNK):
        last = min(first + _CHUNK, len(number))
        new, old = number[first:last], np.arange(first, last)
        records, home = group.read_records(name, first, last)
        cached = np.isin(old, group.rows_in_slots(name, first, last))
        # A hot row has no record: it always stays in its slot.
        hot = (new >= 0) & np.isin(new, mine.rows_in_slots(name, 0, len(ids)))
        moved = home & (new >= 0) & ~hot
        mine.write_records(new[moved] + mine.first_row[name], records[moved])
        # Rows that were never trained are not copied if they keep their number: their initial
        # values depend on it.
        in_place = (new >= 0) & ~moved & (hot | cached | home | (new != old))
        theirs, before = new[in_place] + mine.first_row[name], old[in_place] + group.first_row[name]
        values, places = group.read_rows(before), np.arange(len(before), dtype=np.int64)
        values.clock[:] = 0
        mine.write_rows(theirs, values, places, batch_number)
        if group.codec.config.kind != "fp32":
            values, places = mine.read_rows(theirs), np.flatnonzero(~hot[in_place])
            group.write_rows(before[places], values, places, batch_number)
            rounded += int(cached[in_place & ~hot].sum())
    return rounded


def put_rows(model: CTRModel, name: str, rows: Ids, of: Callable[[Ids], FloatRows | None]) -> None:
    """Overwrite rows of a table with those that `of` returns for their numbers, or with zeros if it
    returns None.
    """
    group = _group(model, name)
    for first in range(0, len(rows), _CHUNK):
        chosen = rows[first : first + _CHUNK].astype(np.int64)
        values = of(chosen)
        if values is None:
            values = FloatRows.allocate(len(chosen), group.width, **group.codec.layout.state_shape)
        values.clock[:] = 0
        group.write_rows(chosen + group.first_row[name], values, np.arange(len(chosen), dtype=np.int64), 0)


def _ranked(vocabulary: Vocabulary, counted: pl.DataFrame) -> tuple[Vocabulary, Ids]:
    """Return a vocabulary with its values sorted by falling recent count, without holes, and the
    old id of each row, ``[rows]``.
    """
    tail = vocabulary.tail_buckets
    ranked = pl.DataFrame({"value": vocabulary.values, "id": np.arange(tail, vocabulary.rows)}).drop_nulls()
    ranked = ranked.join(counted.select("value", "recent"), on="value", how="left", maintain_order="left")
    ranked = ranked.sort([pl.col("recent").fill_null(0.0), "value"], descending=[True, False])
    old = np.concatenate([np.arange(tail), ranked["id"].to_numpy()]).astype(np.int64)
    counts = vocabulary.counts[old]
    # All values count as inherited, so later counts do not change this order.
    return replace(vocabulary, values=ranked["value"], counts=counts, inherited=len(ranked)), old


def _check_scores(trained: TrainedModel, model: CTRModel, old: Mapping[str, Ids]) -> None:
    """Raise `CheckpointError` if `model` and the model before give different scores to samples that
    use all rows.
    """
    for now, before in _samples(trained, old):
        with torch.no_grad(), autocast(trained.recipe.train.precision, model.device):
            mine, theirs = score(model.eval(), now), score(trained.model.eval(), before)
        if not np.array_equal(mine.view(np.uint32), theirs.view(np.uint32)):
            raise CheckpointError(
                "renumbering would change scores: encoded rows (memory.precision) that missed steps cannot "
                "move without being rounded; nothing was changed"
            )


def _samples(trained: TrainedModel, old: Mapping[str, Ids]) -> Iterator[tuple[Batch, Batch]]:
    """Yield pairs of batches with the same samples, first with new ids and then with old ids.

    In all batches together, each feature uses every row of its table at least once.
    """
    schema, draws = trained.dataset.schema, np.random.default_rng(0)
    rows = max((len(ids) for ids in old.values()), default=1)
    for first in range(0, rows, _CHUNK):
        size = min(_CHUNK, rows - first)
        dense = torch.from_numpy(draws.normal(size=(size, len(schema.dense))).astype(np.float32))
        chosen = {f.name: (first + np.arange(size)) % len(old[f.vocabulary]) for f in schema.sparse}
        # Permuted, so that a sample does not only combine rows with the same number.
        chosen = {name: draws.permutation(ids) for name, ids in chosen.items()}
        batches = []
        for new in (True, False):
            ids = [chosen[f.name] if new else old[f.vocabulary][chosen[f.name]] for f in schema.sparse]
            values = torch.from_numpy(
                np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, dtype=np.int32)
            )
            offsets = torch.arange(len(values) + 1)
            sparse = KeyedJagged(
                keys=tuple(f.name for f in schema.sparse),
                values=values,
                offsets=offsets,
                batch_size=size,
                weights=torch.ones(len(values)) if schema.weighted else None,
            )
            batches.append(Batch(label=torch.zeros(size), dense=dense, sparse=sparse))
        yield batches[0], batches[1]
