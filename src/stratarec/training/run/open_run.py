"""Open the final model of a run, and start a new run from the weights of an earlier one (`train
--from`).

A new run can start from an earlier run if each vocabulary of its data set begins with the
vocabulary of the same name in the earlier run's data set. This is so if both are equal, or if the
new data set was prepared with the old one as `data.vocabulary.base`, directly or through others.
Rows keep their numbers and values. Rows that the earlier run never trained have their initial
values. The new run takes the network and the optimizer state from the earlier one, but its steps,
schedules, order of samples and random numbers begin as in any new run. Adam's bias correction
continues, because its moments do. A checkpoint of step 0 is written before the first step, so the
new run can resume without the earlier run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from stratarec.data.splits import SPLITS
from stratarec.distributed.mesh import Mesh
from stratarec.embedding import RowOptimizerConfig
from stratarec.errors import CheckpointError, ConfigError, DatasetError
from stratarec.io.names import step_of
from stratarec.io.owned_directory import kind_of
from stratarec.io.scratch import temporary_directory
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
    """Raise `CheckpointError` if a checkpoint was not written by a run with this `identity` on this
    `dataset`.

    It must have the same model, optimizers and samples.
    """
    stored = checkpoint.read_state(path)["identity"]
    _check_model(path, identity, stored)
    if identity["dataset"] != stored["dataset"]:
        detail = input_difference(dataset, stored["inputs"]) or "it holds other samples"
        raise CheckpointError(
            f"{path} is of another model or data set: {dataset.path} is not its training data ({detail}); "
            "prepare the data as it was, or train again with --overwrite or another train.run"
        )


def _check_model(path: Path, identity: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the model or an optimizer in `identity` differs from that in the
    checkpoint `path`.

    `stored` is the identity in the checkpoint.
    """
    for part in ("model", "train"):
        difference = first_difference(identity[part], stored[part], part)
        if difference is not None:
            raise CheckpointError(
                f"{path} is of another model or data set: {difference.field} is {difference.have!r} there "
                f"and {difference.want!r} here"
            )


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Model with the weights of a checkpoint, its recipe and its data set. At the end of a context
    it closes itself.
    """

    recipe: Recipe
    dataset: Dataset
    model: CTRModel
    checkpoint: Path
    validated: bool
    """Whether the checkpoint was chosen by its metric on the validation split."""
    mesh: Mesh
    """Processes among which the tables are divided."""
    maps: tuple[LogitMap, ...]
    """Calibration map of each label, which scores include; empty without calibration."""
    plan: Plan | None
    """Placement of the tables; None if all tables are simply float32 in DRAM."""
    resources: ExitStack
    """Locks, memory and files that `close` releases."""
    trained_splits: tuple[str, ...]
    """Splits of the data set on which the model was trained; empty for another data set."""
    is_refitted: bool
    """Whether the model was trained on validation and test samples, too (`train.refit`)."""
    period: int = 0
    """Number of the last period of `stratarec continue`; 0 if there is none."""

    def with_fields(self, overrides: Sequence[str]) -> TrainedModel:
        """Return this model with other fields of the recipe, such as ``data.on_bad_row=skip``."""
        return replace(self, recipe=self.recipe.with_overrides(overrides)) if overrides else self

    @property
    def events(self) -> pl.DataFrame | None:
        """Events of users up to the end of the last period; None without periods or histories."""
        return self.dataset.events() if self.period else None

    @property
    def description(self) -> str:
        """Text that describes the checkpoint in messages."""
        step = step_of(self.checkpoint.name)
        if self.period:
            return f"period {self.period:,}, step {step:,} of it"
        if self.is_refitted:
            return f"step {step:,} of the refit, which trained on validation and test samples, too"
        label = METRICS[self.recipe.train.early_stopping.metric].label
        return f"step {step:,}, the {f'best by validation {label}' if self.validated else 'last one'}"

    def close(self) -> None:
        """Release the data set, and the memory and files of the tables. The model cannot be used
        afterwards.
        """
        self.resources.close()

    def __enter__(self) -> TrainedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_run(
    path: str | Path,
    data: str | Path | None = None,
    *,
    same_samples: bool = True,
    mesh: Mesh | None = None,
    device: str | None = "cpu",
    tested: bool = False,
) -> TrainedModel:
    """Open the model of a run: of its last period, or, if it was not continued, of the refit or of
    the final test.

    If the run has no result yet, the best checkpoint so far is opened, or without evaluations the
    last one.

    Parameters
    ----------
    data : path
        Another prepared data set with the same vocabularies. By default, the data set of the run is
        used.
    same_samples : bool
        Whether to refuse the data set of the run if it was prepared again with other samples.
    mesh : Mesh
        Processes that open the model together; by default only this one.
    device : str or None
        Device of the network, and of the rows if they were trained in GPU memory. None means the
        device of training.
    tested : bool
        Whether to open the model of the final test even if the run was refitted or continued.

    Raises
    ------
    CheckpointError, DatasetError
        If the run, its checkpoint or the data are missing, damaged or do not belong together.
    """
    path, mesh = Path(path), mesh or Mesh.alone()
    require_run(path)
    folder, number = (None if tested else periods.latest(path)) or path, 0
    maps: tuple[LogitMap, ...] = ()
    with ExitStack() as stack:
        if folder == path:  # no period
            chosen = lock_chosen_checkpoint(path, stack, tested=tested)
            result, folder = read_result(path), chosen.parents[1]
            recipe = read_recipe(folder)
            if result is not None and chosen in (result.tested(path), result.served(path)):
                again = result.refit_calibration
                maps = result.calibration if again is None or chosen == result.tested(path) else again
        else:
            chosen = periods.only_checkpoint(folder)
            stack.enter_context(checkpoint.locked(chosen))
            period, recipe = periods.check(folder), read_recipe(folder)
            maps, number = period.calibration, period.number
            # If the run was moved, the recipe has its old path.
            recipe = replace(recipe, data=replace(recipe.data, path=str(folder / periods.DATA)))
        mesh.check_same({"checkpoint": str(chosen.relative_to(path))})
        place = device_of(recipe.train.device if device is None else device, mesh.ranks, "--device")
        opened = _open(
            folder, recipe, chosen, data, same_samples=same_samples, mesh=mesh, maps=maps, device=place
        )
        return replace(opened, period=number)


def require_run(path: Path) -> None:
    """Raise `CheckpointError` if `path` is not a run."""
    if not (path / RECIPE).is_file():
        what = f"it is a {kind_of(path)}" if kind_of(path) not in ("", "run") else f"it has no {RECIPE}"
        raise CheckpointError(f"{path} is not a run: {what}; name the directory that `train` wrote")


# Number of tries, because a training that is still running may remove the checkpoint that is about
# to be read.
_TRIES = 10


def lock_chosen_checkpoint(path: Path, stack: ExitStack, *, tested: bool) -> Path:
    """Choose a checkpoint of a run without periods, lock it until `stack` is closed, and return it.

    If `tested` is true, it is the checkpoint that was tested, else the one that scores new samples.
    The run may still be training.
    """
    for tries in range(_TRIES):
        once_more = tries < _TRIES - 1
        try:
            chosen = _chosen_checkpoint(path, tested=tested)
            stack.enter_context(checkpoint.locked(chosen))
        except CheckpointError:
            if not once_more:
                raise
        else:
            break
    return chosen


def _open(
    path: Path,
    recipe: Recipe,
    chosen: Path,
    data: str | Path | None,
    *,
    same_samples: bool,
    mesh: Mesh,
    maps: tuple[LogitMap, ...],
    device: torch.device,
) -> TrainedModel:
    state = checkpoint.read_state(chosen)
    stored, training = state["identity"], TrainingState(**state["training"])
    is_refitted = training.phase == "refit"
    dataset = open_trained_data(
        path, recipe, chosen, stored, data, same_samples=same_samples, complete=is_refitted
    )
    with ExitStack() as stack:
        stack.enter_context(dataset.locked())
        # A run may come from another user, so nothing is written to the paths in its recipe.
        reading = stack.enter_context(_in_scratch(recipe))
        plan = read_plan(path, recipe, dataset) or new_plan(reading, dataset, device=device)
        model = stack.enter_context(temporary_model(reading, dataset, plan, mesh, device))
        checkpoint.load(chosen).load_into(model)
        if maps:
            model.network.calibration = Calibration(maps).to(device)
        resources = stack.pop_all()
    trained_splits = (
        () if dataset.fingerprint != stored["dataset"] else SPLITS if is_refitted else SPLITS[:1]
    )
    best_entry = best(training.evaluations, recipe.train.early_stopping)
    validated = best_entry is not None and best_entry["step"] == training.step
    return TrainedModel(
        recipe=recipe,
        dataset=dataset,
        model=model,
        checkpoint=chosen,
        validated=validated,
        mesh=mesh,
        maps=maps,
        plan=plan,
        resources=resources,
        trained_splits=trained_splits,
        is_refitted=is_refitted,
    )


@contextmanager
def _in_scratch(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe with temporary directories as the paths of its memories."""
    memory = recipe.memory
    if memory.block is None and memory.mapped is None:
        yield recipe
        return
    with temporary_directory() as folder:
        block = memory.block and replace(memory.block, path=str(folder / "block"))
        mapped = memory.mapped and replace(memory.mapped, path=str(folder / "mapped"))
        yield replace(recipe, memory=replace(memory, block=block, mapped=mapped))


def open_trained_data(
    path: Path,
    recipe: Recipe,
    chosen: Path,
    stored: Mapping[str, Any],
    data: str | Path | None = None,
    *,
    same_samples: bool = True,
    complete: bool,
) -> Dataset:
    """Open the data set of a run, or the data set `data`, and check that the checkpoint `chosen`
    fits it.

    `stored` is the identity in the checkpoint; `same_samples` is that of `open_run`. With
    `complete`, held-out values have rows, as for the model of a refit.
    """
    dataset = _open_data(path, recipe, data)
    dataset = dataset.complete() if complete else dataset
    _check_model(chosen, identity(recipe, dataset), stored)
    difference = input_difference(dataset, stored["inputs"])
    if difference:
        advice = "rows of the log, or pass the log itself" if complete else "training samples"
        raise DatasetError(
            f"{dataset.path} does not fit {path}: {difference}; prepare it from the same {advice}"
        )
    if data is None and same_samples and dataset.fingerprint != stored["dataset"]:
        raise DatasetError(
            f"{dataset.path} has been prepared again with other samples since {path} was trained; to use "
            f"it anyway, name it: {path} {dataset.path}"
        )
    return dataset


def _open_data(run: Path, recipe: Recipe, data: str | Path | None) -> Dataset:
    if data is None and not (Path(recipe.data.path) / MANIFEST).is_file():
        where = "" if Path(recipe.data.path).is_absolute() else f" from {Path.cwd()}"
        raise DatasetError(
            f"{run} was trained on the data set {recipe.data.path}, which does not exist{where}: name its "
            "path after the run"
        )
    return Dataset.open(recipe.data.path if data is None else data, verify="used")


def _chosen_checkpoint(path: Path, *, tested: bool) -> Path:
    """Return the checkpoint of the result; before it the best one so far, or else the last one."""
    result, recipe = read_result(path), read_recipe(path)
    if result is not None:
        return result.tested(path) if tested else result.served(path)
    checkpoints = checkpoint.list_checkpoints(path / "checkpoints")
    if not checkpoints:
        raise CheckpointError(f"{path} has no checkpoint yet")
    chosen = best(
        checkpoint.read_state(checkpoints[-1])["training"]["evaluations"], recipe.train.early_stopping
    )
    path = (
        checkpoints[-1]
        if chosen is None
        else checkpoint.step_path(checkpoints[-1].parent, int(chosen["step"]))
    )
    return path if path in checkpoints else checkpoints[-1]


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A checkpoint of an earlier run, from which a new run starts."""

    path: Path
    rows: RowOptimizerConfig
    """Row optimizer of the earlier run, with which missed steps are applied to rows."""

    def load_into(self, model: CTRModel, optimizer: torch.optim.Optimizer) -> None:
        """Load weights and optimizer state into an untrained model."""
        loaded = checkpoint.load(self.path)
        loaded.warm_start(model, self.rows)
        checkpoint.restore_optimizer(self.path, optimizer, loaded.optimizer)


@contextmanager
def open_warm_start(
    earlier: str | Path, run: Path, identity: Mapping[str, Any], dataset: Dataset, mesh: Mesh
) -> Iterator[WarmStart]:
    """Lock and check the checkpoint of the run `earlier` from which the new `run` on `dataset`
    starts.

    Raises
    ------
    CheckpointError
        If `earlier` is not a run, has no checkpoint, has another model or other features, or if its
        vocabularies are not the beginning of those of `dataset`. The message names the field.
    ConfigError
        If `earlier` is the new run itself.
    """
    earlier = Path(earlier)
    if earlier.resolve() == run.resolve():
        raise ConfigError(
            f"--from names {earlier}, which is the run to train: name another run, or another train.run"
        )
    require_run(earlier)
    with ExitStack() as stack:
        recipe = read_recipe(earlier)
        # Samples of the earlier run's test may be in the new run's test, too.
        chosen = lock_chosen_checkpoint(earlier, stack, tested=True)
        mesh.check_same({"--from": str(chosen)})
        stored, train = checkpoint.read_state(chosen)["identity"], recipe.train
        _check_same_model(earlier, identity, stored["model"], train)
        difference = feature_difference(dataset, stored["inputs"])
        if difference:
            raise CheckpointError(
                f"{dataset.path} does not extend the data set of {earlier}: {difference}; {_ADVICE}"
            )
        for name, entry in stored["inputs"]["vocabularies"].items():
            _check_begins(dataset, name, earlier, entry)
        yield WarmStart(path=chosen, rows=train.embedding)


_ADVICE = "prepare the data with the data set of that run as data.vocabulary.base"


def _check_same_model(
    earlier: Path, identity: Mapping[str, Any], model: Mapping[str, Any], train: TrainConfig
) -> None:
    """Raise `CheckpointError` if `identity` has another model or kind of optimizer than the run."""
    difference = first_difference(identity["model"], model, "model")
    for part, kind in (("dense", train.dense.kind), ("embedding", train.embedding.kind)):
        want = {"kind": identity["train"][part]["kind"]}
        difference = difference or first_difference(want, {"kind": kind}, f"train.{part}")
    if difference is not None:
        raise CheckpointError(
            f"a run cannot start from {earlier}: {difference.field} is {difference.have!r} there and "
            f"{difference.want!r} here"
        )


def _check_begins(dataset: Dataset, name: str, earlier: Path, stored: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless a vocabulary of `dataset` begins with the values of the
    earlier run's vocabulary.

    `stored` describes the earlier vocabulary.
    """
    info, values, tail = dataset.vocabularies[name], int(stored["values"]), int(stored["tail_buckets"])
    if (
        tail != info.tail_buckets
        or values > info.values
        or not _begins(dataset, name, values, stored["digest"])
    ):
        raise CheckpointError(
            f"{dataset.path} does not extend the data set of {earlier}: vocabulary {name!r} has "
            f"{info.values:,} values "
            f"and {info.tail_buckets} tail buckets, and does not begin with the {values:,} values and "
            f"{tail} tail buckets of that run; {_ADVICE}"
        )


def _begins(dataset: Dataset, name: str, values: int, digest: str) -> bool:
    if values == dataset.vocabularies[name].values:
        return dataset.vocabularies[name].digest == digest
    return dataset.vocabulary(name).digest_of(values) == digest
