"""Test `stratarec plan` on a small data set: output, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from errors import missing
from recipes import prepared, tiny
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.models.base import build_tables
from stratarec.planning.candidates import describe_tables
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared data set and its recipe."""
    root = tmp_path_factory.mktemp("plan")
    content = tiny(root)
    content["data"]["source"]["scale"] = 0.01
    content["data"]["vocabulary"] = {"min_count": 1}
    content["train"]["batch_size"] = 16
    (root / "recipe.yaml").write_text(yaml.safe_dump(content))
    prepared(Recipe.from_dict(content).data)
    return root


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Keep measurements for all tests of this file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))


def as_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> Plan:
    assert main(["plan", *arguments, "--json"]) == 0
    return Plan.from_dict(json.loads(capfd.readouterr().out))


def test_json_has_a_plan_within_its_budgets(
    home: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = str(home / "recipe.yaml")
    unlimited = as_json(capfd, recipe)
    budget = unlimited.workspace_bytes + int(unlimited.float32_bytes * 0.8)
    content = as_json(capfd, recipe, f"memory.dram={budget}", f"memory.block.path={tmp_path / 'rows'}")
    assert content.used("dram") <= budget
    assert {each.table for each in content.tables} == {each.table for each in unlimited.tables}
    assert set(content.budgets) == {"dram", "block"}


def test_too_small_a_budget_is_one_line_and_exit_code_2(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(home / "recipe.yaml"), "memory.dram=1KiB"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("stratarec: the tables do not fit: the update of a batch alone needs ")
    assert not missing("memory.dram", error)
    assert "it is 1.0 KiB)" in error


FOLLOWS_RUN = [
    "train.dense.schedule={kind: polynomial, warmup_steps: 3}",
    "train.embedding.schedule={kind: cosine}",
    "train.class_weight=balanced",
]
"""Fields whose numbers depend on the length and labels of a run, as a drafted recipe may have."""


@pytest.mark.parametrize(
    "options",
    [
        ("memory.dram=16MiB",),
        ("--ranks", "2"),
        ("--hosts", "2x1", "--network", "1Gbit"),
        ("--hosts", "fewest", "--network", "1Gbit", "memory.dram=1GiB"),
        ("--device", "h100"),
        ("--towers", "2", "--steps", "2"),
    ],
    ids=" ".join,
)
def test_every_plan_accepts_a_recipe_without_a_number_of_steps(
    home: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert main(["plan", str(home / "recipe.yaml"), *options, *FOLLOWS_RUN]) == 0, capfd.readouterr().err


def test_lookups_and_popularity_are_those_of_the_training_split(home: Path) -> None:
    recipe = Recipe.load(home / "recipe.yaml")
    dataset = Dataset.open(recipe.data.path)
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    described = describe_tables(tables, dataset, RowOptimizerConfig(), batch_size=100)
    for spec in described:
        counts = dataset.access_counts(spec.name)
        assert spec.rows == len(counts)
        assert spec.lookups == pytest.approx(100 * counts.sum() / dataset.samples("train"))
        assert spec.popularity.used_rows == np.count_nonzero(counts)
        assert spec.distinct <= min(spec.lookups, spec.rows) + 1e-9
