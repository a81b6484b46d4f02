"""The periods that a run went on with after it had ended: each a directory that holds all of what follows from it.

periods/period-00001/
    period.json     what was read, how it was scored, and hashes of what lies beside it; sealed
    recipe.json     what was trained: the run's own recipe on that log; of `forget` and `rebase` that of before
    plan.json       where its tables are placed, if they are
    data/           the prepared log with vocabularies, counts of all values, and the last events of users
    checkpoints/    one, of the end of the period

A period is made beside the run and renamed into it when it is whole. It names the hash of what it went on from: the
``period.json`` before it, or ``state.json`` of the checkpoint that the run ended with. The last one and the one before
keep data and checkpoint; of earlier ones their ``period.json`` stays.
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
ADVICE = "restore it, or train the run anew"
_NAME = re.compile(r"period-\d{5,}")
_PARTS = (DATA, f"{DATA}.preparing", "checkpoints", RECIPE, PLAN, PERIOD)
# The last ones whose data and checkpoints are kept: who reads one must not lose it to the next.
_KEPT = 2


class Lookups(Model):
    """What the samples of a period look up in a vocabulary by features of one value, before any of them is admitted."""

    known: Count
    """Values with a row of their own."""
    tail: Count
    """Values without one that were counted before."""
    new: Count
    """Values that were never counted."""
    admitted: Count
    """Values that the period gave a row."""
    evicted: Count
    """Values that lost theirs."""
    rows: Count
    """Of the table, from then on."""


class DenseDrift(Model):
    """See `continual.drift.dense_drift`."""

    shift: float
    spread: Annotated[float, pydantic.Field(gt=0)]
    known: Annotated[float, pydantic.Field(ge=0, le=1)]


class AucDrift(Model):
    """See `continual.drift.auc_drift`."""

    low: float | None
    high: float | None
    before: float | None


class Period(Model):
    """All of ``period.json`` but its seal."""

    format: Literal[2] = FORMAT
    number: Annotated[int, pydantic.Field(ge=1, lt=1 << 31)]
    parent: Hash
    """Of the file that says what it went on from."""
    kind: Literal["log", "forget", "rebase"]
    """What it is of: a log that was trained on, or a change of what the run holds, which has neither log nor scores."""
    file: str
    """Name of the log, without its folder."""
    log: Hash | None
    times: tuple[int, int] | None
    """The first and the last of the log."""
    dataset: Hash
    """Of ``data/dataset.json``."""
    state: Hash
    """Of ``state.json`` in the checkpoint."""
    steps: Count
    """Of the period."""
    rate_factor: Annotated[float, pydantic.Field(gt=0, le=1)]
    """What learning rates were multiplied by beside their schedule, as by the end of the run."""
    scores: dict[str, dict[str, int | float | Bins | dict[str, Figures] | None]]
    """``all``, and the samples of ``known``, ``tail`` and ``new`` values: metrics of the scores of the model before."""
    calibration: tuple[LogitMap, ...]
    """The correction of each label that was fitted to these scores; none by default."""
    lookups: dict[str, Lookups]
    """Of each vocabulary that counts values."""
    dense: dict[str, DenseDrift]
    """Of each dense feature, against the first log."""
    auc: AucDrift
    """Against the periods before."""


def paths(run: Path) -> list[Path]:
    """The periods of a run, in order.

    Raises
    ------
    CheckpointError
        Where one is missing among them, or is elsewhere.
    """
    if (run / PERIODS).is_symlink():
        raise CheckpointError(f"{run / PERIODS} is a link, expected a directory; {ADVICE}")
    found = sorted(path for path in (run / PERIODS).glob("period-*") if _NAME.fullmatch(path.name))
    for number, path in enumerate(found, start=1):
        if path != of_number(run, number) or path.is_symlink():
            raise CheckpointError(f"{run / PERIODS} has {path.name}, expected period {number}: one before is missing")
    return found


def of_number(run: Path, number: int) -> Path:
    """Where a period lies."""
    return run / PERIODS / f"period-{number:05d}"


def read(path: Path) -> Period:
    """What the period at `path` says of itself; `CheckpointError` where it is none."""
    found = read_sealed(path / PERIOD, Period, ADVICE, CheckpointError)
    if path.name != of_number(Path(), found.number).name:
        raise CheckpointError(f"{path / PERIOD} is of period {found.number}; {ADVICE}")
    return found


def check(path: Path, parent: Path | None = None) -> Period:
    """A period whose data and checkpoint are there, found to be what it says, and to follow `parent`."""
    found = read(path)
    beside = [(path / DATA / MANIFEST, found.dataset), (only_checkpoint(path) / checkpoint.STATE, found.state)]
    for file, expected in (*beside, *([] if parent is None else [(parent, found.parent)])):
        if not file.is_file() or file_hash(file) != expected:
            raise CheckpointError(f"{path / PERIOD} does not go with {file}: its hash does not match; {ADVICE}")
    return found


def only_checkpoint(path: Path) -> Path:
    """The checkpoint of a period."""
    found = checkpoint.list_checkpoints(path / "checkpoints")
    if len(found) != 1:
        raise CheckpointError(f"{path} has {len(found)} checkpoints, expected one; {ADVICE}")
    return found[0]


def latest(run: Path) -> Path | None:
    """The last period of a run, None where there is none."""
    found = paths(run)
    return found[-1] if found else None


def prune(run: Path) -> list[Path]:
    """Remove data and checkpoints of earlier periods, and of all earlier periods if the last one forgets values.

    Returns those that remain because another process reads them; a later `prune` removes them.
    """
    every = paths(run)
    kept = 1 if every and read(every[-1]).kind == "forget" else _KEPT
    remaining = []
    for path in every[:-kept]:
        for each in checkpoint.list_checkpoints(path / "checkpoints"):
            checkpoint.remove(each)
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
