"""Test extending, stopping and validating runs. A request is carried out or refused before anything
is written.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml

from errors import refuses
from recipes import assert_same_model, interrupt, last, prepared, tiny, train
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import CheckpointError, ConfigError, Interrupted, StrataError, TrainingError
from stratarec.models import CTRModel
from stratarec.recipe import Recipe
from stratarec.training import checkpoint, evaluate
from stratarec.training.run.build_run import Run
from stratarec.training.trainer import Trainer


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several batches in an evaluation."""
    monkeypatch.setattr(evaluate, "BATCH", 200)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared data set, and one without a validation split."""
    root = tmp_path_factory.mktemp("control")
    prepared(Recipe.from_dict(tiny(root)).data)
    prepared(Recipe.from_dict(without_validation(root)).data)
    return root


def without_validation(root: Path, **train: Any) -> dict[str, Any]:
    config = tiny(root, **train)
    config["data"]["path"] = str(root / "no-valid")
    config["data"]["split"]["valid"] = 0
    return config


def make_recipe(home: Path, run: Path, **train: Any) -> Recipe:
    config = tiny(
        home, run=str(run), **{"eval_every": 0, "checkpoint": {"every_steps": 7, "keep": 2}, **train}
    )
    memory = config["train"].pop("memory", {})
    return Recipe.from_dict({**config, "memory": memory})


def contents(run: Path) -> dict[str, bytes]:
    """Return the content of every file of a run except TensorBoard's."""
    files = [path for path in run.rglob("*") if path.is_file() and "tensorboard" not in path.parts]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def result(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "result.json").read_text())
    return {key: value for key, value in content.items() if key not in ("format", "hash")}


def position(run: Path) -> dict[str, Any]:
    result = dict(checkpoint.read_state(last(run))["training"])
    for name in ("train_seconds", "stage_seconds", "paces", "untimed_samples", "threads", "may_differ"):
        del result[name]
    return result


INT8 = {"precision": "int8", "lookahead": 2, "cache": {"fraction": 0.3, "ways": 8}}
LONGER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "from the middle of an epoch": ({"max_steps": 13}, {"max_steps": 45}),
    "best of its end": (
        {"epochs": 1, "eval_every": 13, "early_stopping": {"patience": 4}},
        {"epochs": 2, "eval_every": 13, "early_stopping": {"patience": 4}},
    ),
    "in tiers": ({"epochs": 1, "memory": INT8}, {"epochs": 2, "memory": INT8}),
    "under a schedule": (
        {"epochs": 1, "dense": {"schedule": {"kind": "cosine", "total_steps": 50}}},
        {"epochs": 2, "dense": {"schedule": {"kind": "cosine", "total_steps": 50}}},
    ),
}


@pytest.mark.parametrize("how", LONGER)
def test_an_extended_run_matches_a_run_of_that_length(home: Path, tmp_path: Path, how: str) -> None:
    short, long = LONGER[how]
    train(make_recipe(home, tmp_path / "whole", **long))
    train(make_recipe(home, tmp_path / "parts", **short))
    before = result(tmp_path / "parts")
    train(make_recipe(home, tmp_path / "parts", **long), resume=True)
    assert_same_model(last(tmp_path / "whole"), last(tmp_path / "parts"))
    assert position(tmp_path / "whole") == position(tmp_path / "parts")
    results = [result(tmp_path / name) for name in ("whole", "parts")]
    assert results[0]["test"] == results[1]["test"] != before["test"]
    assert results[0]["checkpoint"] == results[1]["checkpoint"]
    kept = [sorted(os.listdir(tmp_path / name / "checkpoints")) for name in ("whole", "parts")]
    assert kept[0] == kept[1]
    assert json.loads((tmp_path / "parts" / "recipe.json").read_text())["recipe"]["train"][
        "epochs"
    ] == long.get("epochs", 2)


def test_a_run_directory_is_claimed_before_the_model_is_built(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(home, tmp_path / "a", max_steps=3)
    train(recipe)

    def fail(*_: object) -> None:
        raise ConfigError("built")

    monkeypatch.setattr("stratarec.training.run.build_run.new_model", fail)
    with refuses(CheckpointError, "step-00000003 --resume --overwrite"):
        train(recipe)
    before = contents(tmp_path / "a")
    with refuses(ConfigError, "built"):
        Trainer(recipe, Dataset.open(recipe.data.path)).train(overwrite=True)
    assert contents(tmp_path / "a") == before
    # A run that cannot be built leaves no files.
    with refuses(ConfigError, "built"):
        train(make_recipe(home, tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_a_finished_run_reports_its_result_again(home: Path, tmp_path: Path, said: list[str]) -> None:
    train(make_recipe(home, tmp_path / "a", max_steps=5))
    before = contents(tmp_path / "a")
    for change in ({}, {"log_every": 3, "checkpoint": {"keep": 7}, "threads": 1}):
        said.clear()
        recipe = make_recipe(home, tmp_path / "a", max_steps=5, **change)
        assert Trainer(recipe, Dataset.open(recipe.data.path)).train(resume=True) == result(tmp_path / "a")
        assert f"{tmp_path / 'a'} is already complete" in said[-1]
    assert contents(tmp_path / "a") == before


def test_more_patience_resumes_a_run_that_was_stopped_early(home: Path, tmp_path: Path) -> None:
    options = {"epochs": 4, "eval_every": 10, "embedding": {"learning_rate": 3.0}}
    train(make_recipe(home, tmp_path / "whole", early_stopping={"patience": 4}, **options))
    stopped = train(make_recipe(home, tmp_path / "parts", early_stopping={"patience": 1}, **options))
    assert stopped.state.step < stopped.parts.cadence.total_steps
    train(make_recipe(home, tmp_path / "parts", early_stopping={"patience": 4}, **options), resume=True)
    assert_same_model(last(tmp_path / "whole"), last(tmp_path / "parts"))
    assert position(tmp_path / "whole") == position(tmp_path / "parts")
    assert result(tmp_path / "whole")["test"] == result(tmp_path / "parts")["test"]


def test_another_metric_cannot_resume_if_its_best_checkpoint_is_deleted(home: Path, tmp_path: Path) -> None:
    options = {"eval_every": 5, "embedding": {"learning_rate": 3.0}, "checkpoint": {"keep": 1}}
    trained = train(make_recipe(home, tmp_path / "a", epochs=1, **options))
    best = max(trained.state.evaluations, key=lambda entry: entry["auc"])
    assert not (tmp_path / "a" / "checkpoints" / f"step-{best['step']:08d}").exists(), "nothing to test"
    before = contents(tmp_path / "a")
    with refuses(CheckpointError, f"step {best['step']}"):
        train(
            make_recipe(home, tmp_path / "a", epochs=2, early_stopping={"metric": "auc"}, **options),
            resume=True,
        )
    assert contents(tmp_path / "a") == before


def interrupt_evaluation(trainer: Trainer, number: int) -> None:
    """Raise KeyboardInterrupt in the middle of an evaluation. Evaluations count from 1 and include
    the test.
    """
    build, begun = trainer.build, 0

    def built() -> Run:
        parts = build()
        model, begin = parts.model, parts.model.eval

        def evaluated() -> CTRModel:
            nonlocal begun
            begun += 1
            begin()
            return model

        model.eval = evaluated  # type: ignore[method-assign, assignment]
        model.register_forward_pre_hook(forward)
        return parts

    def forward(module: CTRModel, inputs: Any) -> None:
        nonlocal begun
        if begun == number and not module.training:
            begun = -10
            os.kill(os.getpid(), signal.SIGINT)

    trainer.build = built  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def uninterrupted(home: Path) -> Callable[[str, dict[str, Any]], Path]:
    """Return runs without interrupts. Each is trained once for all tests that compare with it."""
    done: dict[str, Path] = {}

    def run(name: str, options: dict[str, Any]) -> Path:
        if name not in done:
            train(make_recipe(home, home / f"uninterrupted-{name}", **options))
            done[name] = home / f"uninterrupted-{name}"
        return done[name]

    return run


@pytest.mark.parametrize(
    ("patience", "number", "memory"),
    [(0, 1, {}), (2, 2, {}), (0, 3, {}), (2, 1, INT8), (0, 2, INT8), (2, 3, INT8)],
)
def test_ctrl_c_in_a_validation_stops_there_and_changes_no_bit(
    home: Path,
    uninterrupted: Callable[[str, dict[str, Any]], Path],
    tmp_path: Path,
    patience: int,
    number: int,
    memory: dict[str, Any],
) -> None:
    options = {"epochs": 1, "eval_every": 13, "early_stopping": {"patience": patience}, "memory": memory}
    expected = uninterrupted(f"{'tiers' if memory else 'memory'}-{patience}", options)
    recipe = make_recipe(home, tmp_path / "parts", **options)
    trainer = Trainer(recipe, Dataset.open(recipe.data.path))
    interrupt_evaluation(trainer, number)
    with refuses(Interrupted, "--resume"):
        trainer.train()
    step = (13, 26, 32)[number - 1]
    assert last(tmp_path / "parts").name == f"step-{step:08d}"
    assert not any(entry["step"] == step for entry in trainer.state.evaluations)
    train(recipe, resume=True)
    assert_same_model(last(expected), last(tmp_path / "parts"))
    assert position(expected) == position(tmp_path / "parts")
    assert result(expected)["test"] == result(tmp_path / "parts")["test"]


def test_ctrl_c_in_the_final_test_stops_and_the_next_start_only_tests(home: Path, tmp_path: Path) -> None:
    recipe = make_recipe(home, tmp_path / "a", max_steps=9, report=True)
    trainer = Trainer(recipe, Dataset.open(recipe.data.path))
    interrupt_evaluation(trainer, 2)
    with refuses(Interrupted, "step-00000009 --resume"):
        trainer.train()
    before = contents(tmp_path / "a")
    assert "result.json" not in before
    resumed = Trainer(recipe, Dataset.open(recipe.data.path))
    resumed.train(resume=True)
    after = contents(tmp_path / "a")
    assert {name: content for name, content in after.items() if name in before} == before
    assert sorted(set(after) - set(before)) == ["files.json", "report.html", "result.json"]
    train(make_recipe(home, tmp_path / "b", max_steps=9))
    assert result(tmp_path / "a")["test"] == result(tmp_path / "b")["test"]


INTERRUPT = """
import os, signal
from stratarec.training import evaluate as evaluation
found = evaluation.Loader.epoch
def epoch(self, *arguments):
    for place, batch in enumerate(found(self, *arguments)):
        if self.split == "test":
            os.kill(os.getpid(), signal.NAME)
        yield batch
evaluation.Loader.epoch = epoch
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_the_final_test_is_one_line_and_has_its_own_exit_code(
    home: Path, tmp_path: Path, name: str, code: int
) -> None:
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump(make_recipe(home, tmp_path / "a", max_steps=4).to_dict())
    )
    done = forked.run(["train", "-q", str(tmp_path / "r.yaml")], before=INTERRUPT.replace("NAME", name))
    assert done.returncode == code, done.stderr
    assert "stopped in the final test" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert main(["train", "-q", "--resume", str(tmp_path / "r.yaml")]) == 0
    assert result(tmp_path / "a")["test"]


def test_a_checkpoint_interrupted_while_it_was_rewritten_is_recovered(home: Path, tmp_path: Path) -> None:
    recipe = make_recipe(home, tmp_path / "a", max_steps=20)
    train(make_recipe(home, tmp_path / "a", max_steps=14))
    newest = last(tmp_path / "a")
    newest.rename(newest.with_name(f".{newest.name}.old"))
    train(recipe, resume=True)
    train(make_recipe(home, tmp_path / "b", max_steps=20))
    assert_same_model(last(tmp_path / "a"), last(tmp_path / "b"))
    assert not list(newest.parent.glob(".step-*"))


def settings() -> tuple[Any, ...]:
    """Return torch's settings of the process."""
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
    )


def occupy(trainer: Trainer) -> None:
    trainer.run.mkdir()
    (trainer.run / "data.txt").touch()


ENDINGS: dict[str, tuple[dict[str, Any], Callable[[Trainer], None], type[BaseException] | None]] = {
    "to its end": ({"max_steps": 3}, lambda trainer: None, None),
    "no number": ({"dense": {"learning_rate": 1e30}}, lambda trainer: None, TrainingError),
    "stopped": ({}, lambda trainer: interrupt(trainer, 2), Interrupted),
    "in the test": ({"max_steps": 3}, lambda trainer: interrupt_evaluation(trainer, 2), Interrupted),
    "refused": ({}, occupy, StrataError),
}


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("strict", [False, True])
def test_a_trainer_restores_torchs_settings(home: Path, tmp_path: Path, how: str, strict: bool) -> None:
    options, prepare_end, error = ENDINGS[how]
    torch.use_deterministic_algorithms(strict, warn_only=False)
    torch.manual_seed(17)
    before = settings()
    recipe = make_recipe(home, tmp_path / "a", threads=1, **options)
    trainer = Trainer(recipe, Dataset.open(recipe.data.path))
    assert settings() == before
    prepare_end(trainer)
    if error is None:
        trainer.train()
    else:
        with pytest.raises(error):
            trainer.train()
    assert settings() == before
