"""Periods of `stratarec continue`: each is a directory with everything that was written for it.

periods/period-00001/
    period.json     log, scores, and hashes of the other files; sealed
    recipe.json     recipe of the run on that log; for `forget` and `rebase` the recipe before
    plan.json       placement of the tables, if there is one
    data/           prepared log with vocabularies, counts of all values, and the last events of users
    checkpoints/    one checkpoint, of the end of the period

A period is written next to the run and renamed into it when it is complete. It contains the hash of its parent: the
``period.json`` before it, or ``state.json`` of the last checkpoint of the run. The last two periods keep data and
checkpoint; earlier ones only keep ``period.json``.
"""

from __future__ import annotations

import os
import re
import tempfile
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
from stratarec.io.scratch import READING_PREFIX, remove_abandoned
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
# Number of last periods that keep data and checkpoints, so that a reader of one does not lose it to the next.
_KEPT = 2


class Lookups(Model):
    """Lookups of single-value features in a vocabulary by the samples of a period, before new values are admitted."""

    known: Count
    """Lookups of values that have a row."""
    tail: Count
    """Lookups of values without a row that were counted before."""
    new: Count
    """Lookups of values that were never counted."""
    admitted: Count
    """Values that got a row in this period."""
    evicted: Count
    """Values that lost their row."""
    rows: Count
    """Rows of the table after the period."""


class DenseDrift(Model):
    """Result of `continual.drift.dense_drift`."""

    shift: float
    spread: Annotated[float, pydantic.Field(gt=0)]
    known: Annotated[float, pydantic.Field(ge=0, le=1)]


class AucDrift(Model):
    """Result of `continual.drift.auc_drift`."""

    low: float | None
    high: float | None
    before: float | None


class Period(Model):
    """Content of ``period.json`` without its seal."""

    format: Literal[2] = FORMAT
    number: Annotated[int, pydantic.Field(ge=1, lt=1 << 31)]
    parent: Hash
    """Hash of the file of the parent."""
    kind: Literal["log", "forget", "rebase"]
    """A log that was trained on, or a change of the tables, which has neither log nor scores."""
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
    """Training steps of the period."""
    rate_factor: Annotated[float, pydantic.Field(gt=0, le=1)]
    """Factor of `train.plateau` on learning rates, as at the end of the run."""
    scores: dict[str, dict[str, int | float | Bins | dict[str, Figures] | None]]
    """Metrics of the previous model on ``all`` samples, and on those of ``known``, ``tail`` and ``new`` values."""
    calibration: tuple[LogitMap, ...]
    """Calibration of each label fitted to these scores."""
    lookups: dict[str, Lookups]
    """Lookups in each vocabulary that counts values."""
    dense: dict[str, DenseDrift]
    """Drift of each dense feature relative to the first log."""
    auc: AucDrift
    """Drift of the AUC relative to earlier periods."""


def paths(run: Path) -> list[Path]:
    """Return the periods of a run, in order.

    Raises
    ------
    CheckpointError
        If one is missing, or is a link.
    """
    if (run / PERIODS).is_symlink():
        raise CheckpointError(f"{run / PERIODS} is a link, expected a directory; {ADVICE}")
    periods = sorted(path for path in (run / PERIODS).glob("period-*") if _NAME.fullmatch(path.name))
    for number, path in enumerate(periods, start=1):
        if path != of_number(run, number) or path.is_symlink():
            raise CheckpointError(f"{run / PERIODS} has {path.name}, expected period {number}: one before is missing")
    return periods


def of_number(run: Path, number: int) -> Path:
    """Return the path of a period."""
    return run / PERIODS / f"period-{number:05d}"


def read(path: Path) -> Period:
    """Read ``period.json``; `CheckpointError` if `path` is not a period."""
    period = read_sealed(path / PERIOD, Period, ADVICE, CheckpointError)
    if path.name != of_number(Path(), period.number).name:
        raise CheckpointError(f"{path / PERIOD} is of period {period.number}; {ADVICE}")
    return period


def check(path: Path, parent: Path | None = None) -> Period:
    """Read a period and check the hashes of its data, its checkpoint and its `parent`."""
    period = read(path)
    hashes = [(path / DATA / MANIFEST, period.dataset), (only_checkpoint(path) / checkpoint.STATE, period.state)]
    for file, expected in (*hashes, *([] if parent is None else [(parent, period.parent)])):
        if not file.is_file() or file_hash(file) != expected:
            raise CheckpointError(f"{path / PERIOD} does not go with {file}: its hash does not match; {ADVICE}")
    return period


def only_checkpoint(path: Path) -> Path:
    """Return the checkpoint of a period."""
    checkpoints = checkpoint.list_checkpoints(path / "checkpoints")
    if len(checkpoints) != 1:
        raise CheckpointError(f"{path} has {len(checkpoints)} checkpoints, expected one; {ADVICE}")
    return checkpoints[0]


def latest(run: Path) -> Path | None:
    """Return the last period of a run; None if there is none."""
    periods = paths(run)
    return periods[-1] if periods else None


def prune(run: Path) -> list[Path]:
    """Remove data and checkpoints of old periods, and of all earlier periods if the last one forgets values.

    Returns those that remain because another process reads them; a later `prune` removes them.
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
    """Remove a period or its data at once."""
    # Renamed first: a process that is killed here leaves a name that `remove_leftovers` knows.
    leaving = atomic.temporary_name(folder)
    os.rename(folder, leaving)
    atomic.sync(folder.parent)
    atomic.remove_tree(leaving)


@contextmanager
def working_directory(run: Path) -> Iterator[Path]:
    """Make a directory next to a run in which its next period is written."""
    with atomic.working_directory(_workplace(run), _PARTS) as work:
        yield work


def remove_leftovers(run: Path) -> list[Path]:
    """Delete what killed processes left in a run and next to it; return the working directories that remain.

    The caller has locked the run.
    """
    atomic.remove_leftovers(run)
    recipe = read_recipe(run)
    remove_abandoned(Path(tempfile.gettempdir()), READING_PREFIX)
    for memory in (recipe.memory.block, recipe.memory.mapped):
        if memory is not None:
            remove_abandoned(Path(memory.path), recipe.scratch_prefix)
    return atomic.remove_working_directories(_workplace(run), _PARTS)


def _workplace(run: Path) -> Path:
    place = run.resolve()
    return place.with_name(f"{place.name}.continuing")
