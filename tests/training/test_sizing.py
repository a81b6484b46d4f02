"""What a recipe leaves out is chosen by the number of training samples, told, and written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import prepared, tiny
from stratarec.cli import main
from stratarec.recipe import Recipe
from stratarec.training.auto_config import chosen, sized
from stratarec.training.run.run_directory import read_recipe


@pytest.mark.parametrize(
    ("samples", "batch", "epochs"),
    [(0, 128, 2), (8_000, 128, 2), (80_000, 256, 1), (800_000, 512, 1), (8_000_000, 1024, 1), (10**10, 4096, 1)],
)
def test_batches_grow_with_the_data_and_few_samples_are_seen_again(samples: int, batch: int, epochs: int) -> None:
    found = chosen(samples, validated=True)
    assert (found["train.batch_size"], found["train.epochs"]) == (batch, epochs)
    # Where there is one pass it is validated four times.
    evaluations = samples // batch // found["train.eval_every"] if found["train.eval_every"] else epochs
    assert evaluations == (4 if epochs == 1 else 2)
    assert found["train.early_stopping.patience"] == 2


@pytest.mark.parametrize(("samples", "decay"), [(100, 0.0), (80_000, 0.9904), (800_000, 0.9981), (10**10, 0.9999)])
def test_the_average_is_over_the_last_third_of_the_steps(samples: int, decay: float) -> None:
    assert chosen(samples, validated=False)["train.average.decay"] == decay


def test_without_validation_there_is_one_pass() -> None:
    found = chosen(8_000, validated=False)
    assert (found["train.epochs"], found["train.early_stopping.patience"]) == (1, 0)


def without(content: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {**content, "train": {name: value for name, value in content["train"].items() if name not in fields}}


def test_what_a_recipe_names_is_never_changed(tmp_path: Path) -> None:
    content = tiny(tmp_path)
    dataset = prepared(Recipe.from_dict(content).data)
    assert sized(content, dataset) == (content, "")
    found, said = sized(without(content, "batch_size"), dataset)
    assert (found["train"]["batch_size"], said.count("=")) == (128, 1)
    # One who says how long it trains has evaluations in mind, too.
    assert {name: found["train"].get(name) for name in ("epochs", "early_stopping")} == {
        "epochs": 2,
        "early_stopping": None,
    }
    left = without(content, "epochs", "early_stopping")
    found, said = sized(left, dataset)
    assert found["train"] == {**left["train"], "epochs": 2, "early_stopping": {"patience": 2}}
    assert f"{dataset.samples('train'):,} training samples" in said
    assert Recipe.from_dict(found).train.eval_every == content["train"]["eval_every"]


def test_a_run_says_what_was_chosen_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = without(tiny(tmp_path), "batch_size", "epochs", "eval_every")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    prepared(Recipe.from_dict(content).data)
    assert main(["train", str(tmp_path / "r.yaml")]) == 0
    error = capsys.readouterr().err
    assert "training samples, as the recipe does not say: train.batch_size=128 train.epochs=2" in error
    train = read_recipe(tmp_path / "run").train
    assert 0.9 < train.average.decay < 1
    assert (train.batch_size, train.epochs, train.early_stopping.patience) == (128, 2, 2)
    # The same call finds the same values, and so its run.
    assert main(["train", str(tmp_path / "r.yaml"), "--resume"]) == 0
