"""Where curves go: every library has the points that training has, without a network; one that fails costs no run."""

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


class Told(SilentProgress):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.points: list[tuple[int, dict[str, float]]] = []

    def say(self, message: str) -> None:
        self.said.append(message)

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, dict(values)))


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Standard output is for results: no library greets there."""
    yield
    assert capsys.readouterr().out == ""


def trained(home: Path, run: Path, kind: str, told: Told) -> dict[str, Any]:
    content = tiny(home, run=str(run), epochs=1, log_every=4, curves=[kind])
    recipe = Recipe.from_dict(content)
    return Trainer(recipe, Dataset.open(recipe.data.path), told).train()


def losses(told: Told) -> list[float]:
    results = [(step, values["train/loss"]) for step, values in told.points if "train/loss" in values]
    assert [step for step, _ in results] == STEPS
    return [loss for _, loss in results]


def test_tensorboard_has_what_progress_receives(home: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = Told()
    trained(home, tmp_path / "run", "tensorboard", told)
    result = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    result.Reload()
    assert [each.value for each in result.Scalars("train/loss")] == pytest.approx(losses(told))
    assert result.Scalars("valid/auc")[-1].step == 32


def test_what_is_not_installed_is_named_before_anything_is_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_writers, "find_spec", lambda name: None)
    with refuses(ConfigError, "train.curves stratarec[mlflow]"):
        trained(home, tmp_path / "run", "mlflow", Told())
    assert not (tmp_path / "run").exists()


class Failing:
    """A library whose network goes away."""

    def __init__(self, of: CurvesOf) -> None:
        self.closed = 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if step > 8:
            raise ConnectionError("no route\nto host")

    def close(self, *, failed: bool) -> None:
        raise AssertionError("it is not asked again")


def test_a_library_that_fails_costs_its_curves_and_not_the_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratarec.reporting.curve_writers.TensorBoardCurves", Failing)
    told = Told()
    assert trained(home, tmp_path / "run", "tensorboard", told)["steps"] == 32
    assert [line for line in told.said if "curves" in line] == [
        "no more curves are written to tensorboard: ConnectionError: no route to host"
    ]
