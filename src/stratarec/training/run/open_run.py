"""What a run is of, and the model that it ended with."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from stratarec.config.difference import first_difference
from stratarec.data.dataset.compatibility import input_difference
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import MANIFEST
from stratarec.data.loading.portions import batches
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.towers.tower_model import DisaggregatedModel
from stratarec.errors import CheckpointError, ConfigError, DatasetError
from stratarec.io.owned_directory import kind_of
from stratarec.io.scratch import ScratchDirectory, reading_directory
from stratarec.models import CTRModel, build_model
from stratarec.models.base import build_tables
from stratarec.models.calibration import Calibration, LogitMap
from stratarec.models.metrics import METRICS
from stratarec.planning.hot_rows import make_hot_plan
from stratarec.planning.plan import Plan, tier_config
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import TrainConfig
from stratarec.training import checkpoint
from stratarec.training.run import periods
from stratarec.training.run.device import device_of
from stratarec.training.run.run_directory import RECIPE, read_plan, read_recipe, read_result
from stratarec.training.run.shard_tables import shared_collection
from stratarec.training.steps.position import Position, best


def identity(recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    """What a checkpoint must be of: the model, its optimizers, and the data."""
    content = recipe.to_dict()
    free = (
        "run", "epochs", "max_steps", "threads", "checkpoint", "log_every", "report", "curves", "trace", "eval_every",
        "early_stopping", "calibration", "device",
    )  # fmt: skip
    train = {key: value for key, value in content["train"].items() if key not in free}
    if recipe.hot.apart:  # another order of samples
        train["hot"] = content["hot"]
    return {
        "model": content["model"],
        "train": train,
        "inputs": dataset.inputs(),
        "dataset": dataset.fingerprint,
    }


def of_data(recipe: Recipe, dataset: Dataset, steps: int = 0) -> Recipe:
    """The recipe as a run of it on this data is written down: what follows from length and classes is in numbers.

    Of a run of so many steps; by default of as many as the recipe asks for.
    """
    odds = {
        label: count.positives / (count.known - count.positives)
        for label, count in dataset.label_counts("train").items()
        if 0 < count.positives < count.known
    }
    return replace(recipe, train=recipe.train.of_run(steps or run_steps(recipe.train, dataset), odds))


def run_steps(train: TrainConfig, dataset: Dataset) -> int:
    """Steps of a whole run on this data, unless it stops early."""
    return train.steps(batches(dataset.samples("train"), train.batch_size, train.portions))


def check_identity(path: Path, identity: Mapping[str, Any], dataset: Dataset) -> None:
    """Refuse a checkpoint of another model than `identity` says, or of other samples than those of `dataset`."""
    known = checkpoint.read_state(path)["identity"]
    _check_model(path, identity, known)
    if identity["dataset"] != known["dataset"]:
        detail = input_difference(dataset, known["inputs"]) or "it holds other samples"
        raise CheckpointError(
            f"{path} is of another model or data set: {dataset.path} is not what it was trained on ({detail}); prepare "
            "the data as it was, or train anew with --overwrite or another train.run"
        )


def _check_model(path: Path, identity: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse the checkpoint `path` of the identity `known` where it is of another model or optimizer."""
    for part in ("model", "train"):
        found = first_difference(identity[part], known[part], part)
        if found is not None:
            raise CheckpointError(
                f"{path} is of another model or data set: {found.field} is {found.have!r} there and {found.want!r} here"
            )


def new_plan(recipe: Recipe, dataset: Dataset, ranks: int = 1) -> Plan | None:
    """Where a recipe's tables live on this machine; None when all are float32 in DRAM with nothing to plan.

    The budgets of the recipe are each rank's.
    """
    if not dataset.table_rows():
        return None
    copied = ranks > 1 and recipe.hot.copies is not None
    if recipe.memory.is_identity and not copied:
        if ranks == 1 and recipe.hot.budget is not None:
            raise ConfigError(
                "hot.budget is set, and every table lies whole in DRAM: set memory.dram to less than they take, or "
                "hot.budget to null"
            )
        return None
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    train = recipe.train
    return make_hot_plan(
        tables, dataset, train.embedding, recipe.memory, recipe.hot, batch_size=train.batch_size, ranks=ranks
    )


def new_model(
    recipe: Recipe, dataset: Dataset, plan: Plan | None, workspace: str, mesh: Mesh | None = None
) -> CTRModel:
    """The untrained model of a recipe; stores with files make the directory `workspace` in their memories' paths.

    With a mesh of several ranks, its tables are shared among them; `workspace` is this rank's alone.

    Raises
    ------
    ConfigError
        When `plan` is of other tables.
    """
    if plan is not None:
        _check_plan(plan, recipe, dataset)
    collection, weights = None, recipe.train.class_weights(dataset.schema.label_columns)
    if mesh is not None and mesh.ranks > 1:
        collection = partial(shared_collection, recipe, dataset, plan, workspace, mesh)
    model = build_model(
        recipe.model,
        dataset.schema,
        dataset.table_rows(),
        dataset.first_rows(),
        optimizer=recipe.train.embedding,
        seed=recipe.train.seed,
        click_rates=[
            weight * count.positives / max(count.known + (weight - 1) * count.positives, 1)
            for weight, count in zip(weights, dataset.label_counts("train").values(), strict=True)
        ],
        tiers=None if plan is None else tier_config(plan, recipe.memory, workspace),
        collection=collection,
    )
    model.network.correction = tuple(math.log(recipe.data.split.negatives) - math.log(weight) for weight in weights)
    if mesh is not None and mesh.between is not None:
        return DisaggregatedModel(model, mesh, recipe.distributed, recipe.train.seed)
    return model


def _check_plan(plan: Plan, recipe: Recipe, dataset: Dataset) -> None:
    planned = {placed.table: f"{placed.rows:,} rows of {placed.width}" for placed in plan.tables}
    actual = {name: f"{rows:,} rows of {recipe.model.table_width(name)}" for name, rows in dataset.table_rows().items()}
    for table in sorted({*planned, *actual}):
        if planned.get(table) != actual.get(table):
            raise ConfigError(
                f"the plan is of other tables: {table!r} has {planned.get(table, 'no place')} in it and "
                f"{actual.get(table, 'no place')} in this recipe's data; plan again"
            )


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with the weights of a checkpoint, and what it was trained on; a context manager that closes it."""

    recipe: Recipe
    dataset: Dataset
    model: CTRModel
    checkpoint: Path
    validated: bool
    """Whether validation chose the checkpoint."""
    mesh: Mesh
    """The processes that have it together."""
    maps: tuple[LogitMap, ...]
    """The correction of each label that the model's scores have; none by default."""
    plan: Plan | None
    """Placement of its tables, None where all are float32 in DRAM."""
    resources: ExitStack
    """What `close` gives back."""
    period: int = 0
    """Of which it is the end; 0 where the run did not go on."""

    @property
    def events(self) -> pl.DataFrame | None:
        """What users did up to the end of the last period; None where the run did not go on, or has no histories."""
        return self.dataset.events() if self.period else None

    @property
    def told(self) -> str:
        """Which checkpoint it is, in words."""
        step = int(self.checkpoint.name.removeprefix("step-"))
        if self.period:
            return f"period {self.period:,}, step {step:,} of it"
        label = METRICS[self.recipe.train.early_stopping.metric].label
        return f"step {step:,}, the {f'best by validation {label}' if self.validated else 'last one'}"

    def close(self) -> None:
        """Give back what the tables take, files too, and the data set; the model is of no use afterwards."""
        self.resources.close()

    def placed(self, name: str | None) -> TrainedModel:
        """The same with its network on that device, or, for None, where it was trained; closed where that cannot be."""
        name = self.recipe.train.device if name is None else name
        try:
            self.model.place(device_of(name, self.mesh.ranks, "--device"))
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> TrainedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_run(
    path: str | Path, data: str | Path | None = None, *, same_samples: bool = True, mesh: Mesh | None = None
) -> TrainedModel:
    """The model that a run tested; while it has not ended, that of its best checkpoint so far, else of its last.

    Parameters
    ----------
    data : path
        Another prepared data set with the same vocabularies; the run's own by default.
    same_samples : bool
        Refuse the run's own data set where it was prepared anew with other samples since.
    mesh : Mesh
        The processes that open it together; by default this one.

    Raises
    ------
    CheckpointError, DatasetError
        Where the run, its checkpoint or the data are missing, damaged or do not belong together.
    """
    path, mesh = Path(path), mesh or Mesh.alone()
    require_run(path)
    period = periods.latest(path)
    if period is not None:
        return _open_period(path, period, data, same_samples=same_samples, mesh=mesh)
    with ExitStack() as stack:
        recipe = read_recipe(path)
        found = hold_chosen(path, recipe, stack)
        mesh.check_same({"checkpoint": found.name})
        result = read_result(path)
        fitted = result is not None and result.checkpoint == found.name
        return _open(
            path, recipe, found, data, same_samples=same_samples, mesh=mesh,
            maps=result.calibration if result is not None and fitted else (),
        )  # fmt: skip


def _open_period(
    run: Path, period: Path, data: str | Path | None, *, same_samples: bool, mesh: Mesh
) -> TrainedModel:  # fmt: skip
    with ExitStack() as stack:
        found = periods.only_checkpoint(period)
        stack.enter_context(checkpoint.held(found))
        about, recipe = periods.check(period), read_recipe(period)
        mesh.check_same({"checkpoint": str(found.relative_to(run))})
        # Where the run has been moved, its recipe still says where that was.
        own = replace(recipe, data=replace(recipe.data, path=str(period / periods.DATA)))
        opened = _open(period, own, found, data, same_samples=same_samples, mesh=mesh, maps=about.calibration)
        return replace(opened, period=about.number)


def require_run(path: Path) -> None:
    """`CheckpointError` where `path` is no run."""
    if not (path / RECIPE).is_file():
        what = f"it is a {kind_of(path)}" if kind_of(path) not in ("", "run") else f"it has no {RECIPE}"
        raise CheckpointError(f"{path} is no run: {what}; name the directory that `train` wrote")


# How often a run may prune what is about to be read.
_TRIES = 10


def hold_chosen(path: Path, recipe: Recipe, stack: ExitStack) -> Path:
    """The chosen checkpoint of a run that may go on meanwhile, which stays until `stack` is closed."""
    for tries in range(_TRIES):
        once_more = tries < _TRIES - 1
        try:
            found = _chosen_checkpoint(path, recipe)
            stack.enter_context(checkpoint.held(found))
        except CheckpointError:
            if not once_more:
                raise
        else:
            break
    return found


def _open(
    path: Path, recipe: Recipe, found: Path, data: str | Path | None, *, same_samples: bool, mesh: Mesh,
    maps: tuple[LogitMap, ...],
) -> TrainedModel:  # fmt: skip
    state = checkpoint.read_state(found)
    known, position = state["identity"], Position(**state["position"])
    own = _open_data(path, recipe, data)
    _check_model(found, identity(recipe, own), known)
    difference = input_difference(own, known["inputs"])
    if difference:
        raise DatasetError(f"{own.path} does not fit {path}: {difference}; prepare it from the same training samples")
    if data is None and same_samples and own.fingerprint != known["dataset"]:
        raise DatasetError(
            f"{own.path} was prepared anew with other samples since {path} was trained on it; to use it all the same, "
            f"name it: {path} {own.path}"
        )
    with ExitStack() as stack:
        stack.enter_context(own.held())
        # A run may come from somebody else: nothing is made where it says that rows are to lie.
        reading = stack.enter_context(_in_scratch(recipe))
        plan = read_plan(path, recipe, own) or new_plan(reading, own)
        model = stack.enter_context(temporary_model(reading, own, plan, mesh))
        checkpoint.load(found).into(model)
        if maps:
            model.network.calibration = Calibration(maps)
        resources = stack.pop_all()
    chosen = best(position.evaluations, recipe.train.early_stopping)
    validated = chosen is not None and chosen["step"] == position.step
    return TrainedModel(
        recipe=recipe, dataset=own, model=model, checkpoint=found, validated=validated, mesh=mesh, maps=maps,
        plan=plan, resources=resources,
    )  # fmt: skip


@contextmanager
def _in_scratch(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with its memories that are paths in a folder that is gone afterwards."""
    memory = recipe.memory
    if memory.block is None and memory.mapped is None:
        yield recipe
        return
    with reading_directory() as folder:
        block = memory.block and replace(memory.block, path=str(folder / "block"))
        mapped = memory.mapped and replace(memory.mapped, path=str(folder / "mapped"))
        yield replace(recipe, memory=replace(memory, block=block, mapped=mapped))


@contextmanager
def temporary_model(
    recipe: Recipe, dataset: Dataset, plan: Plan | None, mesh: Mesh | None = None
) -> Iterator[CTRModel]:
    """As `new_model`; stores with files are in directories of this process alone: a run may still be training."""
    prefix, token = recipe.scratch_prefix, uuid.uuid4().hex[:12]
    with ExitStack() as stack:
        for place in _store_paths(recipe, plan):
            stack.enter_context(ScratchDirectory(place, prefix, token))
        model = new_model(recipe, dataset, plan, prefix + token, mesh)
        stack.callback(model.embeddings.close)
        yield model


def _store_paths(recipe: Recipe, plan: Plan | None) -> list[Path]:
    """Where the stores of a plan have their directories."""
    homes = {placed.tier for placed in plan.tables} if plan is not None else set()
    memories = (("mapped", recipe.memory.mapped), ("log", recipe.memory.block))
    return [Path(memory.path) for home, memory in memories if home in homes and memory is not None]


def _open_data(run: Path, recipe: Recipe, data: str | Path | None) -> Dataset:
    if data is None and not (Path(recipe.data.path) / MANIFEST).is_file():
        where = "" if Path(recipe.data.path).is_absolute() else f" from {Path.cwd()}"
        raise DatasetError(
            f"{run} was trained on the data set {recipe.data.path}, which is not there{where}: name it behind the run"
        )
    return Dataset.open(recipe.data.path if data is None else data, verify="used")


def _chosen_checkpoint(path: Path, recipe: Recipe) -> Path:
    """The checkpoint that the final test used, else the best one so far, else the last one."""
    result = read_result(path)
    if result is not None:
        return path / "checkpoints" / result.checkpoint
    found = checkpoint.steps(path / "checkpoints")
    if not found:
        raise CheckpointError(f"{path} has no checkpoint yet")
    chosen = best(checkpoint.read_state(found[-1])["position"]["evaluations"], recipe.train.early_stopping)
    path = found[-1] if chosen is None else checkpoint.of_step(found[-1].parent, int(chosen["step"]))
    return path if path in found else found[-1]
