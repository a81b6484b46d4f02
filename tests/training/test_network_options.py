"""Test dropout, batch normalization, schedules and averaged weights: what they change and what is
saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from training.test_resumed import AVERAGED

from errors import refuses
from recipes import assert_same_model, last, tiny, train
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import CheckpointError
from stratarec.io.tensors import read_tensors
from stratarec.models.metrics import figures
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.evaluate import evaluate_split
from stratarec.training.run.open_run import open_run
from stratarec.training.run.run_directory import read_recipe
from stratarec.training.trainer import Trainer


def run(
    home: Path, target: Path, model: dict[str, Any], *, resume: bool = False, **options: Any
) -> Trainer:
    config = tiny(home, run=str(target), **options)
    config["model"] |= model
    return train(Recipe.from_dict(config), resume=resume)


def rows(target: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the network and every row as it is read. Stored rows may have missed
    steps.
    """
    with open_run(target) as trained:
        embeddings = trained.model.embeddings
        read = {
            table.name: embeddings.rows(table.name, 0, table.num_embeddings) for table in embeddings.tables
        }
        results = {
            f"{name}.{part}": each.clone() for name, parts in read.items() for part, each in parts.items()
        }
        return results | trained.model.network.state_dict()


def test_a_plateau_reduces_all_rates_and_resumes_bitwise(home: Path, tmp_path: Path) -> None:
    """The rule matches torch's scheduler on the same evaluations, at a rate that makes some of them
    worse.
    """
    options = {"plateau": {"patience": 2, "factor": 0.5, "min_factor": 0.2}, "eval_every": 4}
    options |= {"embedding": {"kind": "adam", "learning_rate": 0.5, "rows": "all"}}
    uninterrupted = run(home, tmp_path / "whole", {}, **options)
    weight = torch.nn.Parameter(torch.zeros(1))
    rule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        torch.optim.SGD([weight], lr=1.0), mode="min", factor=0.5, patience=1, threshold=0, min_lr=0.2
    )
    for entry in uninterrupted.state.regular:
        rule.step(entry["log_loss"])
    assert uninterrupted.parts.pipeline.rate_factor == rule.get_last_lr()[0] < 1
    rate = uninterrupted.parts.optimizer.param_groups[0]["lr"]  # a float32 number
    assert any(abs(rate - 1e-3 * factor) < 1e-9 for factor in (1, 0.5, 0.25, 0.2))
    # The rate of the best checkpoint, which is tested last and may be an earlier one.
    assert uninterrupted.parts.model.embeddings.learning_rate in (0.5, 0.5 * 0.5, 0.5 * 0.25, 0.5 * 0.2)
    run(home, tmp_path / "parts", {}, max_steps=43, **options)
    parts = run(home, tmp_path / "parts", {}, resume=True, **options)
    assert parts.parts.pipeline.rate_factor == uninterrupted.parts.pipeline.rate_factor
    one, other = (rows(tmp_path / name) for name in ("whole", "parts"))
    for name, values in one.items():
        assert torch.equal(values, other[name]), name


def test_a_schedule_relative_to_the_run_is_saved_in_steps(home: Path, tmp_path: Path) -> None:
    """A resumed run uses the saved schedule, and a run of another length is another model."""
    schedule = {"kind": "cosine", "warmup_steps": 3}
    options: dict[str, Any] = {
        "epochs": 1,
        "dense": {"schedule": schedule},
        "embedding": {"schedule": schedule},
    }
    uninterrupted = run(home, tmp_path / "whole", {}, **options)
    steps = uninterrupted.parts.cadence.total_steps
    assert uninterrupted.parts.config.dense.schedule.total_steps == steps
    assert read_recipe(tmp_path / "whole").train == uninterrupted.parts.config
    fixed = {"kind": "cosine", "warmup_steps": 3, "total_steps": steps}
    run(home, tmp_path / "fixed", {}, epochs=1, dense={"schedule": fixed}, embedding={"schedule": fixed})
    assert_same_model(last(tmp_path / "whole"), last(tmp_path / "fixed"))
    with refuses(CheckpointError, f"schedule.total_steps {steps} {2 * steps}"):
        run(home, tmp_path / "whole", {}, resume=True, **{**options, "epochs": 2})
    with open_run(tmp_path / "whole") as trained:
        assert trained.recipe.train == uninterrupted.parts.config


def test_the_average_is_evaluated_and_saved(home: Path, tmp_path: Path) -> None:
    """The average matches a loop over the weights after each step."""
    config = tiny(home, run=str(tmp_path / "run"), eval_every=7, max_steps=20, **AVERAGED)
    config["model"]["batch_norm"] = True
    trainer = Trainer(Recipe.from_dict(config), Dataset.open(config["data"]["path"]))
    weights: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}

    @contextmanager
    def stepped(step: int) -> Iterator[None]:
        yield
        weights.update(
            {name: each.double() for name, each in trainer.parts.model.network.state_dict().items()}
        )
        kept = min(0.9, step / (step + 10))
        for name, weight in weights.items():
            expected[name] = kept * expected.get(name, weight) + (1 - kept) * weight

    trainer.hooks.append(stepped)
    result = trainer.train()
    saved = read_tensors(last(tmp_path / "run") / "network.safetensors")
    beside = read_tensors(last(tmp_path / "run") / "optimizer.safetensors")
    for name, weight in expected.items():
        torch.testing.assert_close(saved[name].double(), weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(beside[f"weights/{name}"], weights[name].float())
    assert not torch.equal(saved["score.out.weight"], beside["weights/score.out.weight"])
    with open_run(tmp_path / "run") as trained:
        network = trained.model.network.state_dict()
        assert all(torch.equal(network[name], saved[name]) for name in saved)
        options: dict[str, Any] = {"precision": "float32", "progress": SilentProgress()}
        tested, _ = evaluate_split(trained.model, trained.dataset, "test", **options)
        assert figures(tested)["auc"] == result["test"]["auc"]
        # The validation at step 14 used the checkpoint of step 14.
        checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000014").load_into(trained.model)
        entry = next(each for each in trainer.state.evaluations if each["step"] == 14)
        assert (
            figures(evaluate_split(trained.model, trained.dataset, "valid", **options)[0])["auc"]
            == entry["auc"]
        )
