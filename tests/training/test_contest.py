"""`stratarec compare`: runs side by side, on the terminal, as JSON and as a page."""

from __future__ import annotations

import json
import shutil
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
    """Two runs on one data set, one on another with a run's name of its own, and things that are no runs."""
    root = tmp_path_factory.mktemp("runs")
    for name, content in (
        ("one", tiny(root)),
        ("two", tiny(root, dense={"learning_rate": 0.003}, early_stopping={"patience": 5})),
        ("other", tiny(root)),
    ):
        content["train"] |= {"run": str(root / name), "max_steps": 40}
        content["name"] = name
        if name == "other":
            content["data"] |= {"path": str(root / "else"), "source": {**content["data"]["source"], "seed": 4}}
        recipe = Recipe.from_dict(content)
        Trainer(recipe, prepared(recipe.data)).train()
    (root / "r.yaml").write_text(yaml.safe_dump(tiny(root)))
    return root


def content(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["compare", "--json", *map(str, paths)]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_figures_are_those_of_the_runs_and_fields_those_that_differ(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = content(capsys, runs / "one", runs / "two")
    assert found["differences"] == {
        "train.dense.learning_rate": [0.001, 0.003],
        "train.early_stopping.patience": [0, 5],
    }
    for entry, name in zip(found["runs"], ("one", "two"), strict=True):
        result = json.loads((runs / name / "result.json").read_text())
        assert entry["result"]["test"] == result["test"]
        assert entry["checkpoint"] == int(result["checkpoint"][5:]) == entry["validation"]["step"]
        assert entry["steps"] == 40
        assert entry["samples_per_second"] == pytest.approx(result["samples_per_second"], rel=1e-9)
        assert not entry["other_data"]


def test_a_table_fits_80_columns(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    capsys.readouterr()
    assert main(["compare", *(str(runs / name) for name in ("one", "two", "other"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    auc = json.loads((runs / "two" / "result.json").read_text())["test"]["auc"]
    row = next(line for line in lines if line.startswith("test: AUC"))
    assert row.split()[-2] == f"{auc:.5f}"
    # As many tables of the recipes' fields as the width asks for.
    found = [cell for line in lines if line.startswith("train.dense.learning_rate") for cell in line.split()[1:]]
    assert found == ["0.001", "0.003", "0.001"]
    # What was measured on other samples is marked, and why.
    assert lines[0].split() == ["one", "two", "other*"]
    assert "* trained and tested on other data than one: compare its metrics with care" in lines


def test_a_run_that_goes_on_has_no_test(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    going = tmp_path / "going"
    recipe = Recipe.from_dict(tiny(runs, run=str(going), max_steps=25))
    trainer = Trainer(recipe, prepared(recipe.data))
    trainer.train()
    (going / "result.json").unlink()
    found = content(capsys, runs / "one", going)
    assert found["runs"][1]["result"] is None
    assert found["runs"][1]["validation"]["step"] == found["runs"][1]["checkpoint"] == 25
    assert main(["compare", str(going), str(runs / "one")]) == 0
    assert "not ended, so without a test: going" in capsys.readouterr().out


def test_a_page_has_the_curves_of_all_and_loads_nothing(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["compare", str(runs / "one"), str(runs / "two"), "-o", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 3
    words = ("Training loss", "Validation AUC", "Validation log loss", "train.dense.learning_rate", "0.003")
    assert all(word in text for word in words)
    assert "best AUC on the test split: two" in text
    assert text.count("<script") == 1  # of its charts
    shutil.copytree(runs / "two", tmp_path / "twin")
    assert main(["compare", str(runs / "two"), str(tmp_path / "twin"), "-o", str(page)]) == 0
    assert "the same AUC on the test split: two and twin" in page.read_text()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["one", "r.yaml"], "is no run: it has no recipe.json"),
        (["data"], "is no run: it is a data set"),
        (["one", "one"], "is named twice"),
        (["one", "gone"], "is no run"),
    ],
)
def test_what_is_no_run_is_one_line(
    runs: Path, names: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *(str(runs / name) for name in names)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
