"""Periods of a continued run. Each period is a directory with all files that were written for it.

periods/period-00001/
    period.json     description of the log, scores, and hashes of the other files; sealed
    recipe.json     recipe of the run for this log; for `forget` and `rebase`, the recipe of the
                    previous period
    plan.json       placement of the tables, if there is one
    data/           prepared log with vocabularies, counts of all values, and the last events of
                    users
    checkpoints/    the checkpoint at the end of the period

A period is written next to the run and renamed into it when it is complete. It contains the hash of
its parent, which is the ``period.json`` of the previous period, or ``state.json`` of the run's last
checkpoint. Only the last two periods keep their data and checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from stratarec.data.dataset.manifest import MANIFEST
from stratarec.errors import CheckpointError, StorageError
from stratarec.io import atomic
from stratarec.io.atomic import file_hash
from stratarec.io.owned_directory import directory_lock
from stratarec.io.scratch import remove_abandoned
from stratarec.io.sealed import Count, Hash, Model, read_sealed
from stratarec.models.calibration import LogitMap
from stratarec.training import checkpoint
from stratarec.training.checkpoint import Bins, Figures
from stratarec.training.run.run_directory import PLAN, RECIPE, read_recipe

PERIODS, PERIOD, DATA = "periods", "period.json", "data"
FORMAT: Literal[2] = 2
ADVICE = "restore it, or train the run again"
_NAME = re.compile(r"period-\d{5,}")
_PARTS = (DATA, f"{DATA}.preparing", "checkpoints", RECIPE, PLAN, PERIOD)
# Number of last periods that keep data and checkpoints: a process that reads a period can finish
# while the next one is committed.
_KEPT = 2


class Lookups(Model):
    """Counts of a period's lookups in one vocabulary, by features of kind ``single``, before new
    values are admitted.
    """

    known: Count
    """Number of lookups of values with a row."""
    tail: Count
    """Number of lookups of values without a row that occurred before."""
    new: Count
    """Number of lookups of values that never occurred before."""
    admitted: Count
    """Number of values that got a row in this period."""
    evicted: Count
    """Number of values that lost their row in this period."""
    rows: Count
    """Number of rows of the table after the period."""


class DenseDrift(Model):
    """Drift of one dense feature, computed by `continual.period_checks.dense_drift`."""

    shift: float
    spread: Annotated[float, pydantic.Field(gt=0)]
    known: Annotated[float, pydantic.Field(ge=0, le=1)]


class AucDrift(Model):
    """Drift of the AUC; `continual.period_checks.auc_drift` computes and describes it."""

    low: float | None
    high: float | None
    before: float | None


class Period(Model):
    """Content of ``period.json`` without its seal."""

    format: Literal[2] = FORMAT
    number: Annotated[int, pydantic.Field(ge=1, lt=1 << 31)]
    parent: Hash
    """Hash of the parent (see the module docstring)."""
    kind: Literal["log", "forget", "rebase"]
    """``log`` if the period trained on a log. ``forget`` and ``rebase`` only change tables and have
    no log or scores.
    """
    file: str
    """Name of the log, without its folder."""
    log: Hash | None
    times: tuple[int, int] | None
    """First and last time in the log."""
    dataset: Hash
    """Hash of ``data/dataset.json``."""
    state: Hash
    """Hash of ``state.json`` in the checkpoint."""
    steps: Count
    """Number of training steps in the period."""
    rate_factor: Annotated[float, pydantic.Field(gt=0, le=1)]
    """Factor on learning rates that `train.plateau` had reached at the end of the run."""
    scores: dict[str, dict[str, int | float | Bins | dict[str, Figures] | None]]
    """Metrics of the previous model on ``all`` samples, and on samples of each kind: ``known``,
    ``tail``, ``new``.
    """
    calibration: tuple[LogitMap, ...]
    """Calibration map of each label, fitted on the samples of this period."""
    lookups: dict[str, Lookups]
    """Vocabulary of kind ``count`` -> its lookups."""
    dense: dict[str, DenseDrift]
    """Drift of each dense feature relative to the first log."""
    auc: AucDrift
    """Drift of the AUC relative to earlier periods."""


def paths(run: Path) -> list[Path]:
    """Return the directories of the periods of a run, in order.

    Raises
    ------
    CheckpointError
        If a period is missing or is a symbolic link.
    """
    if (run / PERIODS).is_symlink():
        raise CheckpointError(f"{run / PERIODS} is a link, expected a directory; {ADVICE}")
    periods = sorted(path for path in (run / PERIODS).glob("period-*") if _NAME.fullmatch(path.name))
    for number, path in enumerate(periods, start=1):
        if path != of_number(run, number) or path.is_symlink():
            raise CheckpointError(
                f"{run / PERIODS} has {path.name}, expected period {number}: one before is missing"
            )
    return periods


def of_number(run: Path, number: int) -> Path:
    """Return the directory of the period with this number."""
    return run / PERIODS / f"period-{number:05d}"


def read(path: Path) -> Period:
    """Read ``period.json``; `CheckpointError` if `path` is not a period."""
    period = read_sealed(path / PERIOD, Period, ADVICE, CheckpointError)
    if path.name != of_number(Path(), period.number).name:
        raise CheckpointError(f"{path / PERIOD} is that of period {period.number}; {ADVICE}")
    return period


def check(path: Path, parent: Path | None = None) -> Period:
    """Read a period and check the hashes of its data, its checkpoint and its `parent`."""
    period = read(path)
    hashes = [
        (path / DATA / MANIFEST, period.dataset),
        (only_checkpoint(path) / checkpoint.STATE, period.state),
    ]
    for file, expected in (*hashes, *([] if parent is None else [(parent, period.parent)])):
        if not file.is_file() or file_hash(file) != expected:
            raise CheckpointError(
                f"{path / PERIOD} does not match {file}, which is missing or was changed; {ADVICE}"
            )
    return period


def only_checkpoint(path: Path) -> Path:
    """Return the path of a period's checkpoint."""
    checkpoints = checkpoint.list_checkpoints(path / "checkpoints")
    if len(checkpoints) != 1:
        raise CheckpointError(f"{path} has {len(checkpoints)} checkpoints, expected one; {ADVICE}")
    return checkpoints[0]


def latest(run: Path) -> Path | None:
    """Return the directory of the last period of a run; None if it has no period."""
    periods = paths(run)
    return periods[-1] if periods else None


def prune(run: Path) -> list[Path]:
    """Remove the data and checkpoints of all periods except the last two, or, if the last one
    forgets values, except the last one.

    Returns the paths that remain because another process reads them. A later call of `prune`
    removes these.
    """
    every = paths(run)
    count = 1 if every and read(every[-1]).kind == "forget" else _KEPT
    remaining = []
    for path in every[:-count]:
        for old in checkpoint.list_checkpoints(path / "checkpoints"):
            checkpoint.remove(old)
        remaining += checkpoint.list_checkpoints(path / "checkpoints")
        if (path / DATA).is_dir():
            with suppress(StorageError, OSError), directory_lock(path / DATA):
                remove(path / DATA)
            remaining += [path / DATA] if (path / DATA).exists() else []
    return remaining


def remove(folder: Path) -> None:
    """Remove a period or its data. If the process is killed, no partly removed period remains."""
    # Renamed first: if the process is killed, the new name is one that `remove_leftovers` removes.
    leaving = atomic.temporary_name(folder)
    os.rename(folder, leaving)
    atomic.sync(folder.parent)
    atomic.remove_tree(leaving)


@contextmanager
def working_directory(run: Path) -> Iterator[Path]:
    """Yield a new directory next to a run for its next period, and remove it afterwards."""
    with atomic.working_directory(_workplace(run), _PARTS) as work:
        yield work


def remove_leftovers(run: Path) -> list[Path]:
    """Remove files that killed processes left in a run and next to it, and return working
    directories that remain.

    The caller must have locked the run.
    """
    atomic.remove_leftovers(run)
    recipe = read_recipe(run)
    remove_abandoned()
    for memory in (recipe.memory.block, recipe.memory.mapped):
        if memory is not None:
            remove_abandoned(Path(memory.path), recipe.scratch_prefix)
    return atomic.remove_working_directories(_workplace(run), _PARTS)


def _workplace(run: Path) -> Path:
    place = run.resolve()
    return place.with_name(f"{place.name}.continuing")
