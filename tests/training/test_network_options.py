"""Runs of networks with dropout and batch normalization: resumed to the bit, whatever else a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import assert_same_model, last, tiny
from stratarec.data.dataset import Dataset
from stratarec.data.prepare import prepare
from stratarec.recipe import Recipe
from stratarec.tensors import read_tensors
from stratarec.training.trainer import Trainer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared data set."""
    root = tmp_path_factory.mktemp("options")
    prepare(Recipe.from_dict(tiny(root)).data)
    return root


def run(home: Path, target: Path, model: dict[str, Any], *, resume: bool = False, **train: Any) -> Trainer:
    made = tiny(home, run=str(target), **train)
    made["model"] |= model
    trainer = Trainer(Recipe.from_dict(made), Dataset.open(made["data"]["path"]))
    trainer.train(resume=resume)
    return trainer


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_dropout_and_statistics_resume_bitwise_and_heed_no_evaluation(
    home: Path, tmp_path: Path, precision: str
) -> None:
    """The masks of a step are the same however often a run stopped, evaluated or saved before."""
    model = {"dropout": 0.3, "batch_norm": True}
    run(home, tmp_path / "whole", model, precision=precision, eval_every=9)
    run(home, tmp_path / "parts", model, precision=precision, max_steps=23)
    torch.rand(100)
    run(home, tmp_path / "parts", model, precision=precision, resume=True)
    assert_same_model(last(tmp_path / "whole"), last(tmp_path / "parts"))
    network = read_tensors(last(tmp_path / "parts") / "network.safetensors")
    assert (network["score.top.1.running_mean"] != 0).any()


def test_dropout_and_statistics_change_what_is_trained(home: Path, tmp_path: Path) -> None:
    for name, model in (("plain", {}), ("dropout", {"dropout": 0.3}), ("norm", {"batch_norm": True})):
        run(home, tmp_path / name, model, max_steps=5, eval_every=0)
    weights = [read_tensors(last(tmp_path / name) / "network.safetensors")["score.out.weight"]
               for name in ("plain", "dropout", "norm")]  # fmt: skip
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_plateau_slows_all_rates_and_resumes_bitwise(home: Path, tmp_path: Path) -> None:
    """By the rule of torch, whose scheduler is told the same evaluations; at a rate that makes some of them worse."""
    options = {"plateau": {"patience": 2, "factor": 0.5, "min_factor": 0.2}, "eval_every": 4}
    options |= {"embedding": {"kind": "rowwise_adam", "learning_rate": 0.5}}
    whole = run(home, tmp_path / "whole", {}, **options)
    weight = torch.nn.Parameter(torch.zeros(1))
    rule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        torch.optim.SGD([weight], lr=1.0), mode="max", factor=0.5, patience=1, threshold=0, min_lr=0.2
    )  # fmt: skip
    for entry in whole.position.regular:
        rule.step(entry["auc"])
    assert whole.stages.rate_factor == rule.get_last_lr()[0] < 1
    assert whole.optimizer.param_groups[0]["lr"] in (1e-3, 1e-3 * 0.5, 1e-3 * 0.25, 1e-3 * 0.2)
    assert whole.model.embeddings.learning_rate == 0.5 * whole.stages.rate_factor
    run(home, tmp_path / "parts", {}, max_steps=43, **options)
    parts = run(home, tmp_path / "parts", {}, resume=True, **options)
    assert parts.stages.rate_factor == whole.stages.rate_factor
    assert_same_model(last(tmp_path / "whole"), last(tmp_path / "parts"))
