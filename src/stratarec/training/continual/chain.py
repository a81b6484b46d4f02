"""Where a run stands among its periods, and how one more is made: beside the run, renamed into it when it is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stratarec.errors import CheckpointError, StorageError
from stratarec.io.atomic import make_directory, storage_error, sync, sync_tree, working_directory
from stratarec.training import checkpoint
from stratarec.training.continual.train_period import Before
from stratarec.training.run import periods
from stratarec.training.run.open_run import TrainedModel
from stratarec.training.run.run_directory import RECIPE, read_recipe, read_result
from stratarec.training.steps.position import Position, rate_factor

_PARTS = {"data", "data.preparing", "checkpoints", RECIPE, periods.PERIOD}


class Chain:
    """A run and its periods, while nobody else writes in it."""

    def __init__(self, run: Path) -> None:
        self.run = run

    @contextmanager
    def work(self) -> Iterator[Path]:
        """A directory beside the run, which is gone afterwards unless it was renamed."""
        place = self.run.resolve()
        place = place.with_name(f"{place.name}.continuing")
        with working_directory(place, _PARTS) as work:
            yield work

    def before(self, trained: TrainedModel) -> tuple[Before, Path]:
        """What is gone on from, and the file that says what that is."""
        found = periods.paths(self.run)
        state = checkpoint.read_state(trained.checkpoint)
        if found:
            parent = found[-2] / periods.PERIOD if len(found) > 1 else self._ended() / checkpoint.STATE
            last, parent = periods.check(found[-1], parent), found[-1] / periods.PERIOD
            factor, rows = last.rate_factor, read_recipe(found[-1]).train.embedding
        else:
            position = Position(**state["position"])
            self._ended()
            parent = trained.checkpoint / checkpoint.STATE
            factor = rate_factor(position.regular, trained.recipe.train.plateau)
            rows = trained.recipe.train.embedding
        steps = state["tables"]["earlier"] + state["tables"]["step"]
        before = Before(
            number=len(found) + 1, checkpoint=trained.checkpoint, rows=rows, steps=steps, rate_factor=factor
        )
        return before, parent

    def _ended(self) -> Path:
        """The checkpoint that the run ended with."""
        result = read_result(self.run)
        if result is None:
            raise CheckpointError(f"{self.run} has not ended: finish it first, with `stratarec train --resume`")
        return self.run / "checkpoints" / result.checkpoint

    def commit(self, work: Path, final: Path) -> None:
        """Make what lies in `work` the next period; `StorageError` where that cannot be written."""
        try:
            make_directory(final.parent)
            sync_tree(work)
            os.rename(work, final)
            sync(final.parent)
        except StorageError:
            raise
        except OSError as error:
            raise storage_error(final, error) from error
