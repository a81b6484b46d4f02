"""Test search spaces of `stratarec tune`: allowed forms, and errors before any training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes import tiny
from stratarec.cli.tune.space import Choice, Range, Space
from stratarec.cli.tune.study import Trial


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    return tiny(tmp_path)


def test_forms_give_floats_integers_and_values(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(
        "train.batch_size: log(64, 1024)\nmodel.top_mlp: choice([16], [32, 16])\n"
    )
    space = Space.read(
        [
            str(tmp_path / "space.yaml"),
            "train.dense.learning_rate=log(1e-4,1e-2)",
            "model.dropout = uniform(0, 0.5)",
        ],
        content,
        "r.yaml",
    )
    assert space.dimensions == {
        "train.batch_size": Range(low=64, high=1024, log=True, is_integer=True),
        "model.top_mlp": Choice(values=("[16]", "[32, 16]")),
        "train.dense.learning_rate": Range(low=1e-4, high=1e-2, log=True, is_integer=False),
        "model.dropout": Range(low=0, high=0.5, log=False, is_integer=False),
    }
    # The recipe's own values are tried first if they are in the space.
    assert space.recipe_values(content) == {
        "train.batch_size": 128,
        "model.top_mlp": "[16]",
        "train.dense.learning_rate": 0.001,
        "model.dropout": 0.0,
    }
    assert space.values(space.recipe_values(content))["model.top_mlp"] == [16]
    narrow = Space.read(
        ["train.batch_size=choice(256,512)", "model.dropout=uniform(0,0.1)"], content, "r.yaml"
    )
    assert narrow.recipe_values(content) == {"model.dropout": 0.0}


def test_evaluations_come_after_as_many_samples_for_any_batch_size(
    content: dict[str, Any], tmp_path: Path
) -> None:
    def steps(**values: int) -> Any:
        fields = {f"train.{name}": value for name, value in values.items()}
        return Trial(content=content, values=fields, run=tmp_path).overrides.get("train.eval_every")

    assert (content["train"]["batch_size"], content["train"]["eval_every"]) == (128, 20)
    assert steps(batch_size=64) == 40
    assert steps(batch_size=5000) == 1
    assert steps(batch_size=64, eval_every=7) == 7
    assert steps(epochs=3) is None
