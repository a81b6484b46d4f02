"""Test defaults that depend on the number of training samples: they are chosen, reported and
saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from errors import missing
from recipes import last, prepared, sized, tiny
from stratarec.cli import main
from stratarec.recipe import Recipe, with_values
from stratarec.training.checkpoint import read_state
from stratarec.training.resolve import defaults_by_size
from stratarec.training.run.run_directory import read_result


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("dcnv2", {}),
        ("deepfm", {"embedding.kind": "adagrad"}),
        ("fm", {"embedding.kind": "adagrad", "dense.learning_rate": 0.01}),
        ("lr", {"embedding.learning_rate": 0.1, "dense.learning_rate": 0.02}),
    ],
)
def test_a_kind_has_its_default_overrides(kind: str, fields: dict[str, Any]) -> None:
    result = defaults_by_size(80_000, validated=True, kind=kind)
    assert {field: result[f"train.{field}"] for field in fields} == fields
    others = defaults_by_size(80_000, validated=True).keys() | {f"train.{field}" for field in fields}
    assert result.keys() == others
    assert result["train.epochs"] == (5 if kind in ("fm", "lr") else 1)


def without(content: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {
        **content,
        "train": {name: value for name, value in content["train"].items() if name not in fields},
    }


@pytest.mark.parametrize(
    ("samples", "validated", "epochs"),
    [(19_999, True, 100), (20_000, True, 10), (50_000, True, 5), (20_000, False, 5)],
)
def test_an_ensemble_has_more_epochs_with_few_samples(samples: int, validated: bool, epochs: int) -> None:
    assert defaults_by_size(samples, validated=validated, kind="ensemble")["train.epochs"] == epochs


def test_a_run_that_starts_from_another_has_its_model_and_optimizers(tmp_path: Path) -> None:
    """A later log may have fewer samples, for which other members and optimizers would be
    chosen.
    """
    content = tiny(tmp_path)
    content["model"], content["train"] = {"kind": "ensemble"}, {}
    dataset = prepared(Recipe.from_dict(content).data)
    few, _ = sized(content, dataset)
    earlier = {
        "model.members": 3,
        "train.dense.kind": "sgd",
        "train.embedding.kind": "sgd",
        "train.batch_size": 7,
    }
    recipe, _ = sized(content, dataset, Recipe.from_dict(with_values(few, earlier)))
    assert recipe["model"]["members"] == 3 != few["model"]["members"]
    assert [recipe["train"][part]["kind"] for part in ("dense", "embedding")] == ["sgd", "sgd"]
    assert recipe["train"]["batch_size"] == few["train"]["batch_size"] != 7
    named, _ = sized(with_values(content, {"model.members": 5}), dataset, Recipe.from_dict(few))
    assert named["model"]["members"] == 5


def test_long_runs_stop_after_the_best_validation_and_the_best_model_is_tested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = without(
        tiny(tmp_path, embedding={"learning_rate": 1.0}), "batch_size", "epochs", "eval_every"
    )
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    prepared(Recipe.from_dict(content).data)
    assert main(["train", str(tmp_path / "r.yaml"), "train.epochs=20"]) == 0
    out = capsys.readouterr().out
    evaluations = read_state(last(tmp_path / "run"))["training"]["evaluations"]
    best = min(evaluations, key=lambda entry: entry["log_loss"])
    assert evaluations.index(best) == len(evaluations) - 3
    result = read_result(tmp_path / "run")
    assert result is not None
    assert (result.checkpoint, result.steps) == (f"step-{best['step']:08d}", evaluations[-1]["step"])
    assert not missing(f"step {best['step']} {result.steps} loss {best['log_loss']:.4f}", out)
    for command in ("predict", "evaluate", "export"):
        assert main([command, "-q", str(tmp_path / "run")]) == 0
        assert not missing(f"step {best['step']}", capsys.readouterr().out)
