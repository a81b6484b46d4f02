"""Test `stratarec compare`: runs next to each other on the terminal and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import prepared, tiny
from stratarec.cli import main
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two runs on one data set, a run on another with the same name, and folders that are
    not runs.
    """
    root = tmp_path_factory.mktemp("runs")
    for name, content in (
        ("one", tiny(root)),
        ("two", tiny(root, dense={"learning_rate": 0.003}, early_stopping={"patience": 5})),
        ("other", tiny(root)),
    ):
        content["train"] |= {"run": str(root / name), "max_steps": 40}
        content["name"] = name
        if name == "other":
            content["data"] |= {
                "path": str(root / "else"),
                "source": {**content["data"]["source"], "seed": 4},
            }
        recipe = Recipe.from_dict(content)
        Trainer(recipe, prepared(recipe.data)).train()
    (root / "r.yaml").write_text(yaml.safe_dump(tiny(root)))
    return root


def content(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["compare", "--json", *map(str, paths)]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_figures_are_those_of_the_runs_and_only_differing_fields_are_listed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = content(capsys, runs / "one", runs / "two")
    assert config["differences"] == {
        "train.dense.learning_rate": [0.001, 0.003],
        "train.early_stopping.patience": [0, 5],
    }
    for entry, name in zip(config["runs"], ("one", "two"), strict=True):
        result = json.loads((runs / name / "result.json").read_text())
        assert entry["result"]["test"] == result["test"]
        assert entry["checkpoint"] == int(result["checkpoint"][5:]) == entry["validation"]["step"]
        assert entry["steps"] == 40
        assert entry["samples_per_second"] == pytest.approx(result["samples_per_second"], rel=1e-9)
        assert not entry["other_data"]


def test_tables_that_stay_float32_are_named_next_to_the_precision_of_the_recipe(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe.from_dict(
        {**tiny(runs, run=str(tmp_path / "int8"), max_steps=5), "memory": {"precision": "int8"}}
    )
    Trainer(recipe, prepared(recipe.data)).train()
    assert any(
        "float32" in note for note in content(capsys, runs / "one", tmp_path / "int8")["runs"][1]["notes"]
    )
    assert main(["compare", str(runs / "one"), str(tmp_path / "int8")]) == 0
    assert "int8: float32" in " ".join(capsys.readouterr().out.split())


def test_a_continued_run_has_no_test_split(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    going = tmp_path / "going"
    recipe = Recipe.from_dict(tiny(runs, run=str(going), max_steps=25))
    trainer = Trainer(recipe, prepared(recipe.data))
    trainer.train()
    (going / "result.json").unlink()
    config = content(capsys, runs / "one", going)
    assert config["runs"][1]["result"] is None
    assert config["runs"][1]["validation"]["step"] == config["runs"][1]["checkpoint"] == 25
    assert main(["compare", str(going), str(runs / "one")]) == 0
    assert "not finished, so without a test: going" in capsys.readouterr().out
