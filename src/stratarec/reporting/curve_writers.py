"""Writers of training curves for experiment trackers: one small class for each library, one
registry.

A writer is opened before the first step; if that fails, the run does not start. If a library fails
later, for example because the network is down, the run continues without that library's curves.
Each library is imported when its writer is opened, and is configured by its usual environment
variables, such as MLFLOW_TRACKING_URI or WANDB_MODE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from stratarec.errors import ConfigError, StrataError

# Value of `train.curves`, which is also the name of the package that it needs -> class of the
# writer.
_WRITERS = {"tensorboard": "TensorBoardCurves", "wandb": "WandbCurves", "mlflow": "MlflowCurves"}
# Maximum length of an MLflow parameter, and number of parameters per call, that every MLflow store
# accepts.
_LONGEST, _MOST = 500, 100


@dataclass(frozen=True, kw_only=True)
class CurvesOf:
    """Description of the run whose curves are written."""

    name: str
    """Name of the recipe, which becomes the name of the project or experiment."""
    run: Path
    recipe: Mapping[str, Any]
    """Path of a field -> its value, for the fields that differ from their defaults."""
    step: int
    """First step of this process; larger than 0 if the run was resumed. Points of later steps are
    replaced, or, if the library cannot delete points, a new run begins in that library."""


class CurveWriter(Protocol):
    """Writer for one library, built from `CurvesOf`."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each named curve, such as ``train/loss``."""

    def close(self, *, failed: bool) -> None:
        """Finish the curves. `failed` is true if the run ended with an error or was stopped."""


def check_installed(kinds: Sequence[str]) -> None:
    """Raise `ConfigError` if the package of a kind is not installed."""
    for kind in kinds:
        if find_spec(kind) is None:
            raise ConfigError(
                f"train.curves names {kind}, which is not installed: pip install "
                f"'stratarec[{kind}]', or leave it out"
            )


@contextmanager
def curve_writers(kinds: Sequence[str], of: CurvesOf, say: Callable[[str], None]) -> Iterator[CurveWriters]:
    """Open a writer of each kind, and close all at the end. Raise `ConfigError` if one cannot be
    opened.
    """
    curves = CurveWriters([], say)
    failed = True
    try:
        for kind in kinds:
            try:
                writer = globals()[_WRITERS[kind]](of)
            except (StrataError, OSError):
                raise
            except Exception as error:
                raise ConfigError(f"train.curves: {kind} cannot be written: {_one_line(error)}") from error
            curves.writers.append((kind, writer))
        yield curves
        failed = False
    finally:
        curves.close(failed=failed)


class CurveWriters:
    """Forward every point to several writers, and drop a writer that fails."""

    def __init__(self, writers: list[tuple[str, CurveWriter]], say: Callable[[str], None]) -> None:
        self.writers = writers
        self._say = say

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each named curve of every writer."""
        self._call_all(lambda writer: writer.add(step, values))

    def close(self, *, failed: bool) -> None:
        """Close all writers."""
        self._call_all(lambda writer: writer.close(failed=failed))
        self.writers = []

    def _call_all(self, call: Callable[[CurveWriter], None]) -> None:
        self.writers = [writer for writer in self.writers if self._succeeds(*writer, call)]

    def _succeeds(self, kind: str, writer: CurveWriter, call: Callable[[CurveWriter], None]) -> bool:
        try:
            call(writer)
        except Exception as error:
            self._say(f"no more curves are written to {kind}: {_one_line(error)}")
            return False
        return True


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class TensorBoardCurves:
    """TensorBoard event files in the directory of the run. A resumed run deletes points of steps
    that it repeats.
    """

    def __init__(self, of: CurvesOf) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(of.run / "tensorboard"), purge_step=of.step)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._board.close()


class MlflowCurves:
    """One MLflow run per process, in the experiment with the recipe's name; fields of the recipe
    are parameters.
    """

    def __init__(self, of: CurvesOf) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        # A client instead of `mlflow.start_run`, because the global run may belong to the user.
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(of.name)
        number = self._client.create_experiment(of.name) if experiment is None else experiment.experiment_id
        self._run = self._client.create_run(number, run_name=of.run.name).info.run_id
        fields = [Param(name, str(value)[:_LONGEST]) for name, value in of.recipe.items()]
        for first in range(0, len(fields), _MOST):
            self._client.log_batch(self._run, params=fields[first : first + _MOST])

    def add(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        self._client.log_batch(
            self._run, metrics=[Metric(name, value, now, step) for name, value in values.items()]
        )

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class WandbCurves:
    """One Weights & Biases run per process, in the group with the run's name."""

    def __init__(self, of: CurvesOf) -> None:
        import wandb

        self._run = wandb.init(
            project=of.name,
            group=of.run.name,
            name=of.run.name,
            config=dict(of.recipe),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
