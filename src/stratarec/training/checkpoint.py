"""Checkpoints of a run. Each is a directory for one step that is complete or absent, with a hash of
every file.

step-00001000/
    network.safetensors    weights of the network, or their average
    optimizer.safetensors  state of the dense optimizer, torch's random state, and the current
                           weights if the model's files contain others (an average, or the best
                           members of an ensemble)
    tables/                rows of the tables with optimizer state; unchanged files are linked from
                           the last checkpoint
    state.json             training state, identity of model and data, and the hashes of all files

A checkpoint is written under a temporary name, synced and renamed. It records the model,
optimizers, inputs and data set; a run with others cannot resume from it. Each rank writes its
groups of tables with the row numbers of the whole table, so a checkpoint can be loaded with a
different number of ranks, other tiers or other codecs.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import torch
from torch import Tensor

from stratarec.distributed.mesh import Mesh
from stratarec.distributed.towers import gather_towers
from stratarec.embedding.checkpoint import TablesManifest
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.stores.row_files import verify_file
from stratarec.errors import CheckpointError
from stratarec.io.atomic import (
    file_hash,
    open_regular,
    remove_tree,
    replace_directory,
    storage_errors,
    temporary_name,
    working_directory,
)
from stratarec.io.names import STEP_NAME, step_name
from stratarec.io.owned_directory import try_lock
from stratarec.io.sealed import Count, Hash, Model, read_sealed, write_sealed
from stratarec.io.tensors import read_tensors, write_tensors
from stratarec.models import CTRModel
from stratarec.models.metrics import watched
from stratarec.models.zoo.trees import TreeSizes
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.steps.members import BestMembers
from stratarec.training.steps.state import Phase, TrainingState
from stratarec.training.steps.step import WeightAverage

FORMAT: Literal[10] = 10
NETWORK, OPTIMIZER = "network.safetensors", "optimizer.safetensors"
_TREES = "score.trees."

Json = dict[str, pydantic.JsonValue]
Seconds = Annotated[float, pydantic.Field(ge=0)]


class ReliabilityBin(Model):
    samples: Count
    share: float
    predicted: float
    observed: float
    low: float
    high: float


Bins = tuple[ReliabilityBin, ...]
Figures = dict[str, int | float | Bins | None]


class MemberScore(Model):
    """Best version of one member of an ensemble: its step, its validation log loss, and its weight
    in the mean.
    """

    step: Count
    log_loss: float
    weight: Annotated[float, pydantic.Field(ge=0)]


Evaluation = dict[str, bool | int | float | Bins | tuple[MemberScore, ...] | dict[str, Figures] | None]


class VocabularyInput(Model):
    """Numbers and hash that identify a vocabulary."""

    values: Count
    tail_buckets: Count
    first_rows: Count
    digest: Hash


class Inputs(Model):
    """Features of a data set, as `Dataset.inputs` returns them."""

    sparse: tuple[Json, ...]
    dense: tuple[Json, ...]
    vocabularies: dict[str, VocabularyInput]
    labels: tuple[str, ...] = ()
    """Names of the labels, if there are several."""

    @pydantic.field_validator("dense")
    @classmethod
    def _check_dense(cls, value: tuple[Json, ...]) -> tuple[Json, ...]:
        for feature in value:
            for name in ("mean", "deviation"):
                if not isinstance(feature.get(name, 0.0), int | float):
                    raise ValueError(f"{name} is {feature[name]!r}, expected a number")
        return value


class Identity(Model):
    """Model and data of a checkpoint, as `build.identity` returns them."""

    model: Json
    train: Json
    inputs: Inputs
    dataset: Hash


class TrainingStateModel(Model):
    """Fields of `state.TrainingState`."""

    phase: Phase = "train"
    base: str = ""
    step: Count
    epoch: Count
    batch: Count
    smoothed_loss: float
    finished: bool
    losses: tuple[tuple[Count, float], ...]
    evaluations: tuple[Evaluation, ...]
    train_seconds: Seconds
    stage_seconds: dict[str, Seconds]
    paces: tuple[tuple[Count, Seconds, Count], ...]
    trained_samples: Count
    untimed_samples: Count
    threads: Count = 0
    may_differ: tuple[tuple[Count, str], ...] = ()

    @pydantic.field_validator("evaluations")
    @classmethod
    def _check_evaluations(cls, value: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
        for entry in value:
            step = entry.get("step")
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"an evaluation is of step {step!r}, expected a number of steps")
            labels = entry.get("labels", {})
            by_label: tuple[Mapping[str, object], ...] = (
                tuple(labels.values()) if isinstance(labels, dict) else ({},)
            )
            for figures in (entry, *by_label):
                lost = [
                    name for name in watched() if isinstance(figures.get(name, True), bool | dict | tuple)
                ]
                if lost:
                    raise ValueError(f"the evaluation of step {step} lacks {lost[0]}")
        return value


class CheckpointState(Model):
    """Content of ``state.json`` without its seal."""

    format: Literal[10]
    step: Count
    hashes: dict[str, Hash]
    tables: TablesManifest
    training: TrainingStateModel
    identity: Identity

    @pydantic.model_validator(mode="after")
    def _check(self) -> CheckpointState:
        if set(self.hashes) != {NETWORK, OPTIMIZER}:
            raise ValueError(f"hashes of {sorted(self.hashes)}, expected of {NETWORK} and {OPTIMIZER}")
        state, step = self.training, self.step
        for what, actual in (("a training state", state.step), ("tables", self.tables.step)):
            if actual != step:
                raise ValueError(f"{what} of step {actual} in a checkpoint of step {step}")
        steps: list[Any] = [entry["step"] for entry in state.evaluations]
        curves = (state.losses, state.paces, state.may_differ, self.tables.changes)
        steps += [first for curve in curves for first, *_ in curve]
        latest = max((*steps, state.epoch, state.batch), default=0)
        if latest > step:
            raise ValueError(
                f"losses, evaluations, epochs or batches up to {latest} in a checkpoint of step {step}"
            )
        if not max(state.untimed_samples, step) <= state.trained_samples:
            raise ValueError(
                f"{state.trained_samples} samples in {step} steps, {state.untimed_samples} untimed"
            )
        return self


WEIGHTS = "weights/"
"""Prefix of the network's current weights in the optimizer's file, if the network's file contains
their average.
"""
MEMBERS = "members/"
"""Prefix of the current weights of network and tables in the optimizer's file, if their own files
contain the best members."""
STATE = "state.json"
_FILES = (NETWORK, OPTIMIZER)
_ADVICE = "use another checkpoint"


def save(
    folder: Path,
    *,
    model: CTRModel,
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    previous: Path | None,
    mesh: Mesh | None = None,
) -> Path:
    """Write a checkpoint of step ``state["step"]`` into `folder`, and return its path.

    Every rank of a mesh writes its rows; then the first rank writes the other files and renames the
    directory.

    Parameters
    ----------
    folder : Path
        Directory of the run's checkpoints.
    model : CTRModel
        Model whose network and tables are written.
    optimizer : mapping of str to Tensor
        Content of the optimizer's file: `optimizer_tensors`, `average_tensors` and
        `member_tensors`.
    state : mapping
        ``step``, ``training`` and ``identity`` of `CheckpointState`.
    previous : Path or None
        Last checkpoint of this model object. Files whose rows have not changed are linked from it;
        None to write all.
    mesh : Mesh, optional
        Processes that save together; by default only this one.
    """
    mesh, final = mesh or Mesh.alone(), step_path(folder, state["step"])

    @storage_errors(final)
    def commit() -> None:
        for name, tensors in zip(_FILES, (model.network.state_dict(), optimizer), strict=True):
            write_tensors(temporary / name, tensors)
        hashes = {name: file_hash(temporary / name) for name in _FILES}
        write_sealed(temporary / STATE, {"format": FORMAT, "hashes": hashes, "tables": tables, **state})
        replace_directory(temporary, final)

    with ExitStack() as stack:
        temporary = Path(mesh.first(lambda: str(stack.enter_context(_new_directory(folder, final)))))
        with storage_errors(final):
            tables = model.embeddings.save(
                temporary / "tables", None if previous is None else previous / "tables"
            )
        mesh.first(commit)
    return final


@contextmanager
def _new_directory(folder: Path, final: Path) -> Iterator[Path]:
    # Directories of killed processes contain links that keep old files on the disk.
    for leftover in folder.glob(".step-*.tmp"):
        remove_tree(leftover)
    with working_directory(final, ()) as temporary:
        yield temporary


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Content of a checkpoint, with hashes that were checked."""

    path: Path
    """Directory of the checkpoint."""
    state: dict[str, Any]
    """Content of ``state.json``, as `CheckpointState` describes it."""
    network: dict[str, Tensor]
    """Weights of the network, by name."""
    optimizer: dict[str, Tensor]
    """Tensors of the optimizer's file, by name."""

    def load_into(self, model: CTRModel) -> str:
        """Load network and tables into `model`.

        Returns a reason if training from here may give other bits than the run that wrote the
        checkpoint; otherwise an empty string.
        """
        self._load_network(model)
        return model.embeddings.load(self.path / "tables", self.state["tables"])

    def warm_start(self, model: CTRModel, rows: RowOptimizerConfig) -> None:
        """Load network and tables into the `model` of a new run, which continues data or settings
        of an earlier one.

        Parameters
        ----------
        model : CTRModel
            Untrained model.
        rows : RowOptimizerConfig
            Row optimizer of the earlier run, with which missed steps are applied to rows.
        """
        self._load_network(model)
        model.embeddings.engine.initialize_from(self.path / "tables", self.state["tables"], rows)

    def _load_network(self, model: CTRModel) -> None:
        if (trees := model.network.trees) is not None:
            trees.resize(
                TreeSizes.of({name.removeprefix(_TREES): tensor for name, tensor in self.network.items()})
            )
        check_tensors(self.path / NETWORK, self.network, model.network.state_dict())
        model.network.load_state_dict(self.network)
        if fault := model.network.fault():
            raise CheckpointError(f"{self.path / NETWORK}: {fault}; {_ADVICE}")


def continue_from(
    path: Path,
    model: CTRModel,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage,
    rows: RowOptimizerConfig,
) -> None:
    """Continue from the checkpoint in `path`: load weights, rows, optimizer state and average into
    an untrained model.

    Unlike a resumed run, training then counts its steps from 0.

    Parameters
    ----------
    path : Path
        Directory of the checkpoint.
    model : CTRModel
        Untrained model.
    optimizer : torch.optim.Optimizer
        Optimizer of the model's network.
    average : WeightAverage
        Average of the network's weights.
    rows : RowOptimizerConfig
        Row optimizer of the checkpoint's run, with which missed steps are applied to rows.
    """
    loaded = load(path)
    loaded.warm_start(model, rows)
    restore_optimizer(path, optimizer, loaded.optimizer)
    if loaded.state["step"] or any(name.startswith(WEIGHTS) for name in loaded.optimizer):
        restore_average(path, average, loaded.optimizer)


def load(path: Path) -> Checkpoint:
    """Read the checkpoint in the directory `path` and check its hashes.

    Raises
    ------
    CheckpointError
        If the checkpoint is missing or damaged. The message names the file.
    """
    state = read_state(path)
    for name in _FILES:
        verify_file(path / name, state["hashes"][name])
    return Checkpoint(
        path=path,
        state=state,
        network=read_tensors(path / _FILES[0]),
        optimizer=read_tensors(path / _FILES[1]),
    )


def read_state(path: Path) -> dict[str, Any]:
    """Return the content of ``state.json`` of the checkpoint in `path`, after checking it with
    `CheckpointState`.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, expected a checkpoint; {_ADVICE}")
    state = read_sealed(path / STATE, CheckpointState, _ADVICE, CheckpointError)
    if step_path(path.parent, state.step) != path:
        raise CheckpointError(f"{path} has the state of step {state.step}; {_ADVICE}")
    return state.model_dump(mode="json", exclude_unset=True)


def check_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` unless `tensors` have the names, shapes and dtypes of `expected`, and
    are finite.

    `path` is their file, for the message.
    """
    for name in sorted({*tensors, *expected}):
        what, want = ("none" if name not in group else _shape(group[name]) for group in (tensors, expected))
        if what != want:
            raise CheckpointError(f"{path} has {what} for {name}, expected {want}; {_ADVICE}")
        if not torch.isfinite(tensors[name]).all():
            raise CheckpointError(f"{path} has a number that is not finite in {name}; {_ADVICE}")


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def step_path(folder: Path, step: int) -> Path:
    """Return the path that the checkpoint of a step has in `folder`."""
    return folder / step_name(step)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    return sorted(
        path
        for path in folder.glob("*")
        if re.fullmatch(STEP_NAME, path.name) and not path.is_symlink() and (path / STATE).is_file()
    )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager that locks the checkpoint in `path`, so that it is not removed.

    Raises
    ------
    CheckpointError
        If the checkpoint does not exist, or is being removed.
    """
    try:
        file = open_regular(path / STATE)
    except OSError as error:
        raise CheckpointError(f"{path} does not exist: {error.strerror}; {_ADVICE}") from error
    with file:
        if not try_lock(file, shared=True) or not (path / STATE).is_file():
            raise CheckpointError(f"{path} is being removed; {_ADVICE}")
        yield


def recover(folder: Path) -> None:
    """Complete or undo replacements of checkpoints in `folder` that were interrupted because the
    process ended.
    """
    for old in folder.glob(".step-*.old"):
        final = folder / old.name[1 : -len(".old")]
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, final)


def prune(folder: Path, keep: int, protected: set[Path]) -> None:
    """Remove checkpoints in `folder` that are no longer needed.

    Parameters
    ----------
    folder : Path
        Directory of the checkpoints.
    keep : int
        Number of latest checkpoints to keep, at least 1.
    protected : set of Path
        Other checkpoints to keep. Checkpoints that a process is reading are kept, too.
    """
    for path in sorted(set(list_checkpoints(folder)[:-keep]) - protected):
        remove(path)


def remove(path: Path) -> None:
    """Remove the checkpoint in `path`, unless a process is reading it."""
    with suppress(OSError), open_regular(path / STATE) as file:
        if try_lock(file):
            # Renamed first, because a partly removed directory would still look like a checkpoint.
            leaving = temporary_name(path)
            os.rename(path, leaving)
            remove_tree(leaving)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of a dense optimizer and torch's random state as tensors.

    Tensors of the optimizer are named ``<parameter>.<name>``, with the index of the parameter; the
    other is named ``random``.
    """
    tensors = {"random": torch.get_rng_state()}
    for place, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            tensors[f"{place}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return tensors


def average_tensors(average: WeightAverage) -> dict[str, Tensor]:
    """Return the current weights of a network, while the network itself has the average.

    The tensors have the names that they have in the optimizer's file.
    """
    return {WEIGHTS + name: weight for name, weight in average.hidden.items()}


def restore_average(path: Path, average: WeightAverage, tensors: Mapping[str, Tensor]) -> None:
    """Restore the average and the current weights from the checkpoint in `path`.

    The network of that checkpoint must be loaded already; it has the average. `tensors` are from
    the optimizer's file.

    Raises
    ------
    CheckpointError
        If the weights in `tensors` do not fit the network.
    """
    if average.enabled:
        weights = {
            name.removeprefix(WEIGHTS): tensor
            for name, tensor in tensors.items()
            if name.startswith(WEIGHTS)
        }
        check_tensors(path / OPTIMIZER, weights, average.weights)
        average.restore(weights)


def member_tensors(members: BestMembers | None) -> dict[str, Tensor]:
    """Return the current weights of an ensemble, while the model itself has the best members.

    The tensors have the names that they have in the optimizer's file.
    """
    stored = {} if members is None else members.stored
    return {MEMBERS + name: tensor for name, tensor in stored.items()}


def restore_members(path: Path, members: BestMembers | None, tensors: Mapping[str, Tensor]) -> None:
    """Restore the best members and the current weights of an ensemble from the checkpoint in
    `path`.

    The model of that checkpoint must be loaded already; it has the best members. `tensors` are from
    the optimizer's file.

    Raises
    ------
    CheckpointError
        If the weights in `tensors` do not fit the model.
    """
    weights = {
        name.removeprefix(MEMBERS): tensor for name, tensor in tensors.items() if name.startswith(MEMBERS)
    }
    if members is not None and weights:
        check_tensors(path / OPTIMIZER, weights, members.current)
        members.restore(weights)


def restore_random(tensors: Mapping[str, Tensor]) -> None:
    """Restore torch's random state from the tensors of `optimizer_tensors`, which
    `restore_optimizer` has checked.
    """
    torch.set_rng_state(tensors["random"])


def restore_optimizer(path: Path, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load `tensors`, the content of the optimizer's file of the checkpoint in `path`, into a dense
    optimizer.

    The random state is checked but not restored.

    Raises
    ------
    CheckpointError
        If the tensors do not fit this optimizer. The optimizer is then unchanged.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    try:
        random = tensors["random"]
        for key, value in tensors.items():
            if key != "random" and not key.startswith((WEIGHTS, MEMBERS)):
                place, name = key.split(".", 1)
                _check_moment(key, value, weights[int(place)])
                state.setdefault(int(place), {})[name] = value
        names = {frozenset(entries) for entries in state.values()}
        if len(names) > 1 or len(state) not in (0, len(weights)):
            raise ValueError("it lacks the state of some weights")
        torch.Generator().set_state(random)
        _check_random(random)
    except (LookupError, ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path / OPTIMIZER} is not a state of this optimizer ({reason}); {_ADVICE}"
        ) from error
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _check_random(state: Tensor) -> None:
    """Check that the remaining random numbers of a state are inside their table, which torch does
    not check.
    """
    words = state.cpu().numpy()
    remaining, place = int(words[8:12].view(np.int32)[0]), int(words[16:24].view(np.uint64)[0])
    # With one number left, the first draw fills a new table of 624 numbers.
    if remaining + place > 625:
        raise ValueError(f"the random state has {remaining} numbers from {place}, outside its table")


def _check_moment(key: str, value: Tensor, weight: Tensor) -> None:
    """Raise `ValueError` unless a state tensor has the shape of its weight, or no dimensions as a
    step count has.
    """
    fits = value.shape in (weight.shape, torch.Size([])) and value.dtype == torch.float32
    if not fits or not torch.isfinite(value).all():
        raise ValueError(f"{key} is {_shape(value)} for a weight of {_shape(weight)}, or not finite")


SETTLED = "settled"
"""Note that a run leaves in the rendezvous store when it has written a checkpoint. If torchrun
restarts the processes, they see the note, resume from that checkpoint, and do not overwrite the run
again."""


@dataclass(kw_only=True)
class CheckpointManager:
    """Writes, restores and removes the checkpoints of one run. Every rank has a manager."""

    folder: Path
    """Directory of the checkpoints."""
    model: CTRModel
    optimizer: torch.optim.Optimizer
    """Optimizer of the model's network."""
    average: WeightAverage
    """Average of the network's weights."""
    members: BestMembers | None
    """Best members, if the model is an ensemble."""
    config: TrainConfig
    identity: dict[str, Any]
    """Identity of the run's model and data, as `build.identity` returns it."""
    mesh: Mesh
    saved: Callable[[], None]
    """Function that the first rank calls after each checkpoint."""
    tested: str = ""
    """Name of the checkpoint in an earlier result of this run. It is kept until there is a new
    result.
    """
    _last: Path | None = None

    def save(self, state: TrainingState) -> Path:
        """Write a checkpoint of step ``state.step``, and remove checkpoints that are no longer
        needed.
        """
        gather_towers(self.model, self.optimizer, self.mesh)
        with self.average.shown(), self.members.shown() if self.members else nullcontext():
            path = save(
                self.folder,
                model=self.model,
                optimizer={
                    **optimizer_tensors(self.optimizer),
                    **average_tensors(self.average),
                    **member_tensors(self.members),
                },
                state={"step": state.step, "training": asdict(state), "identity": self.identity},
                previous=self._last,
                mesh=self.mesh,
            )
        self._last = path
        if self.mesh.is_first:
            self.saved()
            self.mesh.record(SETTLED)
        self.prune(state)
        return path

    def restore(self, path: Path) -> str:
        """Restore everything except the training state from the checkpoint in `path`.

        Returns a reason if training from here may give other bits than the run that wrote the
        checkpoint; otherwise an empty string.
        """
        loaded = load(path)
        difference = loaded.load_into(self.model)
        restore_optimizer(path, self.optimizer, loaded.optimizer)
        restore_random(loaded.optimizer)
        restore_members(path, self.members, loaded.optimizer)
        if loaded.state["step"]:
            restore_average(path, self.average, loaded.optimizer)
        self._last = path
        return difference

    def continue_from(self, path: Path, rows: RowOptimizerConfig) -> None:
        """Load the checkpoint `path` of an earlier phase by the function `continue_from`.

        `rows` is the row optimizer of that phase.
        """
        continue_from(path, self.model, self.optimizer, self.average, rows)
        self._last = path

    def load_best(self, step: int, *, current: int) -> Path:
        """Load the checkpoint of a step into the model, and return its path.

        Parameters
        ----------
        step : int
            Step of the checkpoint.
        current : int
            Step up to which the model has been trained. If it equals `step`, no file is read:
            averaged weights or best members are put into the model.
        """
        path = step_path(self.folder, step)
        if step == current:
            self.average.swap()
            if self.members is not None:
                self.members.swap()
        else:
            load(path).load_into(self.model)
        return path

    def prune(self, state: TrainingState) -> None:
        """Remove the checkpoints that neither a run in this `state` nor its result needs, on the
        first rank only.
        """
        if not self.mesh.is_first:
            return
        needed = {step_path(self.folder, step) for step in state.needed_steps(self.config.early_stopping)}
        if self.tested:
            needed.add(self.folder / self.tested)
        prune(self.folder, self.config.checkpoint.keep, needed)
