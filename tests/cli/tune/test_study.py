"""Test `stratarec tune`: trials are compared by validation alone and resume after a stop."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
import yaml

from errors import refuses
from recipes import KILLS, prepared, tiny
from stratarec.cli.tune.space import Space
from stratarec.cli.tune.study import Trial
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import ConfigError, DatasetError, StorageError
from stratarec.io.owned_directory import claim, directory_lock
from stratarec.io.sealed import write_sealed
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.run.run_directory import RUN
from stratarec.training.trainer import Trainer

if TYPE_CHECKING:
    from stratarec.cli.tune.study import Best

SPACE = ("train.dense.learning_rate=log(1e-4,1e-1)", "train.batch_size=choice(64,128)")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set without the files of the test split, so that reading them is an error."""
    root = tmp_path_factory.mktemp("home")
    dataset = prepared(Recipe.from_dict(content(root)).data)
    for entry in dataset.manifest.files("test"):
        (dataset.path / entry.path).unlink()
    return root


def content(root: Path, **train: Any) -> dict[str, Any]:
    config = tiny(root, **{"eval_every": 5, "max_steps": 15, "checkpoint": {"every_steps": 5}, **train})
    config["data"]["source"]["samples"] = 2500
    return config


def tune_study(root: Path, folder: Path, trials: int, items: tuple[str, ...] = SPACE, **train: Any) -> Best:
    from stratarec.cli.tune.study import tune

    config = content(root, **train)
    return tune(config, Space.read(items, config, "r.yaml"), folder, trials, SilentProgress(), "r.yaml")


def history(folder: Path) -> list[tuple[Any, ...]]:
    """Return values, end and validation metrics of the finished trials."""
    trials = json.loads((folder / "study" / "study.json").read_text())["trials"]
    return [
        (each["params"], each["state"], each["evaluations"])
        for each in trials
        if each["state"] != "running"
    ]


@pytest.fixture(scope="module")
def complete_study(home: Path) -> tuple[Path, Best]:
    """Run a study of four trials."""
    return home / "whole", tune_study(home, home / "whole", 4)


def test_tuning_does_not_read_the_test_split(home: Path, complete_study: tuple[Path, Best]) -> None:
    folder, best = complete_study
    with pytest.raises(DatasetError, match="test"):
        Dataset.open(home / "data")
    untested = Dataset.open(home / "data", verify="used", untouched=("test",))
    with refuses(DatasetError, "test"):
        untested.reader("test")
    assert not list(folder.rglob("result.json"))
    # The recipe's own values are the first trial.
    first = history(folder)[0][0]
    assert first == {"train.dense.learning_rate": 0.001, "train.batch_size": "128"}
    assert best.value == min(min(trial) for _, state, trial in history(folder) if state == "complete")
    trials = pl.read_csv(folder / "trials.csv")
    assert trials["log loss"].min() == best.value
    assert trials["trial"].to_list() == [f"trial-000{number}" for number in range(4)]
    assert "train.dense.learning_rate" in trials.columns


def test_the_best_recipe_trains_to_the_metrics_of_its_trial(
    home: Path, complete_study: tuple[Path, Best], tmp_path: Path
) -> None:
    folder, best = complete_study
    assert [path.parent for path in folder.glob("trial-*/checkpoints")] == [best.run]
    result = yaml.safe_load(best.recipe.read_text())
    assert result["train"]["batch_size"] == best.values["train.batch_size"]
    assert result["train"]["eval_every"] == 5 * 128 // result["train"]["batch_size"]
    result["train"]["run"] = str(tmp_path / "run")
    dataset = Dataset.open(home / "data", verify="used", untouched=("test",))
    position = Trainer(Recipe.from_dict(result), dataset).fit(lambda evaluations: None)
    assert min(entry["log_loss"] for entry in position.evaluations) == best.value


def test_the_same_call_resumes_and_then_has_nothing_to_do(
    home: Path, complete_study: tuple[Path, Best], tmp_path: Path
) -> None:
    folder, best = complete_study
    shutil.copytree(folder, tmp_path / "copy")
    before = history(folder)
    assert tune_study(home, folder, 3).value == best.value
    assert history(folder) == before
    tune_study(home, tmp_path / "copy", 5)
    assert history(tmp_path / "copy")[:4] == before
    assert len(history(tmp_path / "copy")) == 5


@pytest.mark.slow
def test_a_killed_study_matches_an_uninterrupted_one(
    home: Path, complete_study: tuple[Path, Best], tmp_path: Path
) -> None:
    folder, best = complete_study
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content(home)))
    command = [sys.executable, "-m", "stratarec", "tune", "-q", str(tmp_path / "r.yaml"), "--space", *SPACE]
    command += ["--trials", "4", "-o", str(tmp_path / "out")]
    draws = random.Random(7)
    for _ in range(KILLS + 1):
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            # Do not kill before the first trial, because a start takes longer than a trial.
            until = time.monotonic() + 60
            before = _written(tmp_path / "out")
            while (
                _written(tmp_path / "out") == before and process.poll() is None and time.monotonic() < until
            ):
                time.sleep(0.01)
            time.sleep(draws.uniform(0, 1.5))
            process.kill()
    result = tune_study(home, tmp_path / "out", 4)
    assert history(tmp_path / "out") == history(folder)
    assert (result.values, result.value) == (best.values, best.value)
    assert [path.parent for path in (tmp_path / "out").glob("trial-*/checkpoints")] == [result.run]


def _written(folder: Path) -> int:
    return sum(path.stat().st_mtime_ns for path in folder.glob("study/study.json"))


def change_trials(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Change the trials of a study and seal the file again."""
    study = json.loads((folder / "study" / "study.json").read_text())
    study.pop("hash")
    write_sealed(folder / "study" / "study.json", {**study, "trials": change(study["trials"])})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params": {"train.batch_size": "64"}}, "0 --space"),
        ({"params": {"train.batch_size": "96", "train.dense.learning_rate": 0.001}}, "train.batch_size 96"),
        ({"params": {"train.batch_size": "64", "train.dense.learning_rate": 9.0}}, "learning_rate 9.0"),
        ({"state": "running", "value": None}, "running"),
        ({"state": "pruned"}, "trials.0 pruned 0"),
        ({"run": "/home"}, "trials.0.run"),
        ({"evaluations": ["a"]}, "trials.0.evaluations.0"),
    ],
)
def test_a_study_with_impossible_content_is_refused(
    home: Path, complete_study: tuple[Path, Best], tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    shutil.copytree(complete_study[0], tmp_path / "out", ignore=shutil.ignore_patterns("trial-*"))
    change_trials(tmp_path / "out", lambda trials: [trials[0] | changed, *trials[1:]])
    with refuses(ConfigError, f"study.json {message} --output"):
        tune_study(home, tmp_path / "out", 5)


def test_bad_trials_end_early(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_at: list[int] = []

    def train(self: Trial, dataset: Dataset, watch: Callable[[int, float], None]) -> float:
        stopped_at.append(0)
        value = 0.5 + 0.01 * len(stopped_at)
        for step in (1, 2, 3):
            watch(step, value)
            stopped_at[-1] = step
        return value

    monkeypatch.setattr(Trial, "train", train)
    assert tune_study(home, tmp_path, 8).value == pytest.approx(0.51)
    assert [state for _, state, _ in history(tmp_path)] == ["complete"] * 5 + ["pruned"] * 3
    assert stopped_at == [3] * 5 + [0] * 3


def test_a_directory_has_one_study_and_a_study_one_process(
    home: Path, complete_study: tuple[Path, Best]
) -> None:
    folder, _ = complete_study
    with refuses(ConfigError, "recipe.train.max_steps 15 16"):
        tune_study(home, folder, 9, max_steps=16)
    with refuses(ConfigError, "space.train.batch_size"):
        tune_study(home, folder, 9, SPACE[:1])
    with directory_lock(folder / "study"), pytest.raises(StorageError, match="in use"):
        tune_study(home, folder, 9)
    claim(home / "odd" / "study", RUN)
    with refuses(StorageError, "run study"):
        tune_study(home, home / "odd", 1)
