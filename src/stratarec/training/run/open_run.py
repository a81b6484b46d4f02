"""Open the model that a run ended with, and start a new run from the weights of an earlier one (`train --from`).

A new run may start from an earlier run if each vocabulary of the earlier run is the beginning of the same vocabulary in
the new run's data set: both are equal, or the new data set was prepared with the old one as `data.vocabulary.base`,
directly or through others. Rows keep their numbers and values; rows that the earlier run never trained have their
initial values. Network and optimizer state are taken over; steps, schedules, the order of samples and random numbers
are those of a new run. The bias correction of Adam continues, because its moments do. A checkpoint of step 0 is written
before the first step, so the new run resumes without the earlier run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch

from stratarec.config.validate import first_difference
from stratarec.data.dataset.compatibility import feature_difference, input_difference
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import MANIFEST
from stratarec.distributed.mesh import Mesh
from stratarec.embedding import RowOptimizerConfig
from stratarec.errors import CheckpointError, ConfigError, DatasetError
from stratarec.io.owned_directory import kind_of
from stratarec.io.scratch import reading_directory
from stratarec.models import CTRModel
from stratarec.models.calibration import Calibration, LogitMap
from stratarec.models.metrics import METRICS
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import TrainConfig
from stratarec.training import checkpoint
from stratarec.training.build import identity, new_plan, temporary_model
from stratarec.training.run import periods
from stratarec.training.run.run_directory import RECIPE, read_plan, read_recipe, read_result
from stratarec.training.steps.state import TrainingState, best
from stratarec.training.torch_setup import device_of


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
    def description(self) -> str:
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
        found = lock_chosen_checkpoint(path, recipe, stack)
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
        stack.enter_context(checkpoint.locked(found))
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


def lock_chosen_checkpoint(path: Path, recipe: Recipe, stack: ExitStack) -> Path:
    """The chosen checkpoint of a run that may go on meanwhile, which stays until `stack` is closed."""
    for tries in range(_TRIES):
        once_more = tries < _TRIES - 1
        try:
            found = _chosen_checkpoint(path, recipe)
            stack.enter_context(checkpoint.locked(found))
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
    known, position = state["identity"], TrainingState(**state["training"])
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
        stack.enter_context(own.locked())
        # A run may come from somebody else: nothing is made where it says that rows are to lie.
        reading = stack.enter_context(_in_scratch(recipe))
        plan = read_plan(path, recipe, own) or new_plan(reading, own)
        model = stack.enter_context(temporary_model(reading, own, plan, mesh))
        checkpoint.load(found).load_into(model)
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
    found = checkpoint.list_checkpoints(path / "checkpoints")
    if not found:
        raise CheckpointError(f"{path} has no checkpoint yet")
    chosen = best(checkpoint.read_state(found[-1])["training"]["evaluations"], recipe.train.early_stopping)
    path = found[-1] if chosen is None else checkpoint.step_path(found[-1].parent, int(chosen["step"]))
    return path if path in found else found[-1]


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The checkpoint of an earlier run, from which a new run can start."""

    path: Path
    rows: RowOptimizerConfig
    """Of the earlier run: how its rows take the steps that they missed."""

    def load_into(self, model: CTRModel, optimizer: torch.optim.Optimizer) -> None:
        """Give weights and optimizer state to a model that was not trained."""
        loaded = checkpoint.load(self.path)
        loaded.warm_start(model, self.rows)
        checkpoint.restore_optimizer(self.path, optimizer, loaded.optimizer)


@contextmanager
def open_warm_start(
    earlier: str | Path, run: Path, identity: Mapping[str, Any], dataset: Dataset, mesh: Mesh
) -> Iterator[WarmStart]:  # fmt: skip
    """What the new `run` of that identity, on `dataset`, begins with; held while it is read.

    Raises
    ------
    CheckpointError
        Where `earlier` is no run, has no checkpoint, or is of another model, other features or a data set that is no
        base of `dataset`: names the field.
    """
    earlier = Path(earlier)
    if earlier.resolve() == run.resolve():
        raise ConfigError(f"--from names {earlier}, the very run that is to begin: name another train.run")
    require_run(earlier)
    with ExitStack() as stack:
        recipe = read_recipe(earlier)
        found = lock_chosen_checkpoint(earlier, recipe, stack)
        mesh.check_same({"--from": str(found)})
        known, train = checkpoint.read_state(found)["identity"], recipe.train
        _check_same_model(earlier, identity, known["model"], train)
        difference = feature_difference(dataset, known["inputs"])
        if difference:
            raise CheckpointError(f"{dataset.path} does not go on from {earlier}: {difference}; {_ADVICE}")
        for name, entry in known["inputs"]["vocabularies"].items():
            _check_begins(dataset, name, earlier, entry)
        yield WarmStart(path=found, rows=train.embedding)


_ADVICE = "prepare the data with the data set of that run as data.vocabulary.base"


def _check_same_model(earlier: Path, identity: Mapping[str, Any], model: Mapping[str, Any], train: TrainConfig) -> None:
    """Refuse weights that the new model has not, and optimizer state of another kind."""
    found = first_difference(identity["model"], model, "model")
    for part, kind in (("dense", train.dense.kind), ("embedding", train.embedding.kind)):
        want = {"kind": identity["train"][part]["kind"]}
        found = found or first_difference(want, {"kind": kind}, f"train.{part}")
    if found is not None:
        raise CheckpointError(
            f"a run cannot begin with {earlier}: {found.field} is {found.have!r} there and {found.want!r} here"
        )


def _check_begins(dataset: Dataset, name: str, earlier: Path, known: Mapping[str, Any]) -> None:
    """Refuse a `dataset` whose vocabulary does not begin with the values of the one that was `known`."""
    info, values, tail = dataset.vocabularies[name], int(known["values"]), int(known["tail_buckets"])
    if tail != info.tail_buckets or values > info.values or not _begins(dataset, name, values, known["digest"]):
        raise CheckpointError(
            f"{dataset.path} does not go on from {earlier}: vocabulary {name!r} has {info.values:,} values and "
            f"{info.tail_buckets} tail buckets, and does not begin with the {values:,} values and {tail} tail "
            f"buckets of that run; {_ADVICE}"
        )


def _begins(dataset: Dataset, name: str, values: int, digest: str) -> bool:
    if values == dataset.vocabularies[name].values:
        return dataset.vocabularies[name].digest == digest
    return dataset.vocabulary(name).digest_of(values) == digest
