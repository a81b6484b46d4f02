"""The directory of a run while it is trained: claimed for the run, held by one process, swapped for an earlier run.

stratarec.json    says that this is a run
recipe.json       what is trained
plan.json         where its tables live, if they were placed
checkpoints/      a directory each
tensorboard/      curves
result.json       of the final test, and report.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stratarec.distributed.mesh import Mesh
from stratarec.errors import CheckpointError, ConfigError
from stratarec.io.lock import held
from stratarec.io.opening import remove_leftovers
from stratarec.io.owned_directory import Kind, claim, state
from stratarec.io.replace import aside, put_back, recover, remove, set_aside
from stratarec.training.checkpoint import checkpoint

RESULT = "result.json"
RECIPE = "recipe.json"
PLAN = "plan.json"
RUN = Kind(
    name="run",
    field="train.run",
    content=(
        RECIPE, PLAN, "checkpoints", "tensorboard", RESULT, "report.html", "predictions-*.parquet", "export",
    ),
)  # fmt: skip


@contextmanager
def opened(directory: RunDirectory, mesh: Mesh, *, resume: bool, overwrite: bool) -> Iterator[Path | None]:
    """`RunDirectory.opened` by the first rank, for all of them: they come in, and leave, together."""
    with ExitStack() as stack:

        def enter() -> str | None:
            found = stack.enter_context(directory.opened(resume=resume, overwrite=overwrite))
            return None if found is None else str(found)

        if mesh.ranks == 1:
            yield stack.enter_context(directory.opened(resume=resume, overwrite=overwrite))
            return
        found = mesh.first(enter)
        yield None if found is None else Path(found)
        # The directory is given up when nobody works in it any more.
        mesh.files.agree(None)


class RunDirectory:
    """Use `opened` once; `settle` when the run has something to go on from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._replaced = False

    @contextmanager
    def opened(self, *, resume: bool, overwrite: bool) -> Iterator[Path | None]:
        """Gives the checkpoint to go on from, None for a new run.

        An earlier run that is to be overwritten waits aside until this one has a checkpoint of its own, and comes back
        if it never has one.

        Raises
        ------
        CheckpointError
            When a run is there, and neither `resume` nor `overwrite` is set.
        StorageError
            When something else is there, or another process trains here.
        """
        if resume and overwrite:
            raise ConfigError("--resume goes on with a run and --overwrite removes it: pass one of them")
        recover(self.path, RUN, lambda path: bool(checkpoint.steps(path / "checkpoints")))
        with ExitStack() as stack:
            earlier = state(self.path, RUN) == "ours"
            if earlier:
                stack.enter_context(held(self.path))
            if earlier and overwrite:
                set_aside(self.path, RUN)
                self._replaced = True
            try:
                found = self._found(resume)
                claim(self.path, RUN)
                if self._replaced or not earlier:
                    stack.enter_context(held(self.path))
                remove_leftovers(self.path)
                yield found
            finally:
                if self._replaced:
                    put_back(self.path, RUN)

    def _found(self, resume: bool) -> Path | None:
        checkpoint.recover(self.checkpoints)
        found = checkpoint.steps(self.checkpoints)
        if found and not resume:
            raise CheckpointError(
                f"{self.path} holds a run up to {found[-1].name}: pass --resume to go on, --overwrite to start anew, "
                "or another train.run"
            )
        if not found and (self.path / RESULT).exists():
            raise CheckpointError(
                f"{self.path} holds the result of a run whose checkpoints are gone: pass --overwrite to start anew, or "
                "another train.run"
            )
        return found[-1] if found else None

    def settle(self) -> None:
        """The run can be gone on with: an earlier one that it replaces is removed."""
        if self._replaced:
            self._replaced = False
            remove(aside(self.path))
