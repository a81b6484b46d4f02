"""A locked run with its periods: where the next period starts from, its commit, and removal of the
last period.

A period is written next to the run and renamed into it when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stratarec.errors import CheckpointError, DatasetError
from stratarec.io.atomic import make_directory, rename_directory
from stratarec.io.owned_directory import directory_lock
from stratarec.training import checkpoint
from stratarec.training.continual.train_period import Before
from stratarec.training.run import periods
from stratarec.training.run.open_run import TrainedModel, open_trained_data, require_run
from stratarec.training.run.periods import Period
from stratarec.training.run.run_directory import read_recipe, read_result, recover_run
from stratarec.training.steps.state import TrainingState, rate_factor


class Chain:
    """A run that this process has locked, with its periods."""

    def __init__(self, run: Path, leftovers: list[Path]) -> None:
        self.run = run
        self.leftovers = leftovers
        """Directories of unfinished periods that could not be removed."""

    @classmethod
    @contextmanager
    def locked(cls, run: Path) -> Iterator[Chain]:
        """Lock a run, and remove files that killed processes left in it and next to it."""
        recover_run(run)
        require_run(run)
        with directory_lock(run):
            leftovers = periods.remove_leftovers(run)
            periods.prune(run)
            yield cls(run, leftovers)

    def before(self, trained: TrainedModel) -> tuple[Before, Path]:
        """Return the state from which the next period starts, and the parent file: its hash
        identifies that state.
        """
        paths = periods.paths(self.run)
        state = checkpoint.read_state(trained.checkpoint)
        if paths:
            parent = paths[-2] / periods.PERIOD if len(paths) > 1 else self.ended() / checkpoint.STATE
            # The checkpoints of the run are not needed any more, and contain values that `forget`
            # removed.
            last = periods.check(paths[-1], parent if parent.parent.exists() else None)
            parent = paths[-1] / periods.PERIOD
            factor, rows = last.rate_factor, read_recipe(paths[-1]).train.embedding
        else:
            position = TrainingState(**state["training"])
            self.ended()
            parent = trained.checkpoint / checkpoint.STATE
            factor = rate_factor(position.regular, trained.recipe.train.plateau)
            rows = trained.recipe.train.embedding
        steps = state["tables"]["earlier"] + state["tables"]["step"]
        before = Before(
            number=len(paths) + 1, checkpoint=trained.checkpoint, rows=rows, steps=steps, rate_factor=factor
        )
        return before, parent

    def ended(self) -> Path:
        """Return the checkpoint that the run ended with; `CheckpointError` if the run has not
        ended.
        """
        result = read_result(self.run)
        if result is None:
            raise CheckpointError(
                f"{self.run} has not ended: finish it first, with `stratarec train --resume`"
            )
        return result.served(self.run)

    def commit(self, work: Path, final: Path) -> None:
        """Rename `work`, which contains a complete period, to `final`; `StorageError` if that
        fails.
        """
        make_directory(final.parent)
        rename_directory(work, final)


def revert(run: Path) -> Period:
    """Remove the last period of a run, and return that period. The run is then as it was before the
    period.

    Raises
    ------
    CheckpointError
        If the run has no period, if the last period forgets values, or if the data or the
        checkpoint before it was removed or changed.
    StorageError
        If another process writes in the run, or reads its last period.
    """
    with Chain.locked(run) as chain:
        every = periods.paths(run)
        if not every:
            raise CheckpointError(f"{run} has no period to remove")
        last = periods.read(every[-1])
        if last.kind == "forget":
            raise CheckpointError(
                f"period {last.number} of {run} forgets values; no command can restore them"
            )
        try:
            _check_earlier(chain, every)
        except (CheckpointError, DatasetError) as error:
            raise CheckpointError(f"period {last.number} of {run} cannot be removed: {error}") from error
        with directory_lock(every[-1] / periods.DATA):
            periods.remove(every[-1])
    return last


def _check_earlier(chain: Chain, every: list[Path]) -> None:
    """Raise an error unless the model before the last period can be opened."""
    is_first = len(every) == 1
    data = Path(read_recipe(chain.run).data.path) if is_first else every[-2] / periods.DATA
    if not data.exists():
        raise CheckpointError(f"{data}, the data before it, does not exist")
    if is_first:
        chosen = chain.ended()
        state = checkpoint.load(chosen).state
        is_refitted = state["training"].get("phase") == "refit"
        recipe = read_recipe(chosen.parents[1])  # a refit has its own learning rates
        open_trained_data(chain.run, recipe, chosen, state["identity"], complete=is_refitted)
    else:
        periods.check(every[-2])
