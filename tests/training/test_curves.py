"""Test the writers of curves: every library receives the points of training without a network, and
one that fails does not end the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from errors import refuses
from recipes import prepared, tiny
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import ConfigError
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.reporting import curve_writers
from stratarec.reporting.curve_writers import CurvesOf
from stratarec.training.trainer import Trainer

STEPS = [4, 8, 12, 16, 20, 24, 28, 32]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("curves")
    prepared(Recipe.from_dict(tiny(root)).data)
    return root


class RecordingProgress(SilentProgress):
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.points: list[tuple[int, dict[str, float]]] = []

    def say(self, message: str) -> None:
        self.messages.append(message)

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, dict(values)))


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Standard output is for results, so no library may print a greeting there."""
    yield
    assert capsys.readouterr().out == ""


def train_run(home: Path, run: Path, kind: str, progress: RecordingProgress) -> dict[str, Any]:
    content = tiny(home, run=str(run), epochs=1, log_every=4, curves=[kind])
    recipe = Recipe.from_dict(content)
    return Trainer(recipe, Dataset.open(recipe.data.path), progress).train()


def losses(progress: RecordingProgress) -> list[float]:
    results = [(step, values["train/loss"]) for step, values in progress.points if "train/loss" in values]
    assert [step for step, _ in results] == STEPS
    return [loss for _, loss in results]


def test_tensorboard_has_the_points_that_progress_receives(home: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    progress = RecordingProgress()
    train_run(home, tmp_path / "run", "tensorboard", progress)
    result = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    result.Reload()
    assert [each.value for each in result.Scalars("train/loss")] == pytest.approx(losses(progress))
    assert result.Scalars("valid/auc")[-1].step == 32


def test_a_missing_library_is_named_before_anything_is_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_writers, "find_spec", lambda name: None)
    with refuses(ConfigError, "train.curves stratarec[mlflow]"):
        train_run(home, tmp_path / "run", "mlflow", RecordingProgress())
    assert not (tmp_path / "run").exists()


class FailingCurves:
    """A writer whose network fails."""

    def __init__(self, of: CurvesOf) -> None:
        self.closed = 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if step > 8:
            raise ConnectionError("no route\nto host")

    def close(self, *, failed: bool) -> None:
        raise AssertionError("it is not asked again")


def test_a_library_that_fails_costs_its_curves_but_not_the_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratarec.reporting.curve_writers.TensorBoardCurves", FailingCurves)
    progress = RecordingProgress()
    assert train_run(home, tmp_path / "run", "tensorboard", progress)["steps"] == 32
    assert [line for line in progress.messages if "curves" in line] == [
        "no more curves are written to tensorboard: ConnectionError: no route to host"
    ]
