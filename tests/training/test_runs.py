"""Test full runs: they learn, stop, and name damage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml

from errors import refuses
from recipes import assert_same_model, interrupt, last, tiny, train
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import Interrupted
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer


def make_recipe(home: Path, run: Path, **train: Any) -> Recipe:
    return Recipe.from_dict(tiny(home, run=str(run), **train))


def run(home: Path, target: Path, **options: Any) -> Trainer:
    return train(make_recipe(home, target, **options))


def test_training_learns(home: Path, tmp_path: Path) -> None:
    trainer = run(home, tmp_path / "a", epochs=4)
    first, final = trainer.state.evaluations[0], trainer.state.evaluations[-1]
    assert final["auc"] > max(first["auc"], 0.6)


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_checkpoint_intact(home: Path, tmp_path: Path) -> None:
    recipe = make_recipe(home, tmp_path / "a", max_steps=30)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))"
    )
    done = forked.run(["train", "-q", str(tmp_path / "r.yaml")], before=limit)
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "a" / "checkpoints").glob("*")), "a half-written checkpoint was left"


def test_ctrl_c_writes_a_checkpoint_to_resume_from(home: Path, tmp_path: Path) -> None:
    recipe = make_recipe(home, tmp_path / "a")
    trainer = Trainer(recipe, Dataset.open(recipe.data.path))
    interrupt(trainer, at=11)
    with refuses(Interrupted, "--resume"):
        trainer.train()
    assert last(tmp_path / "a").name == "step-00000011"
    train(recipe, resume=True)
    run(home, tmp_path / "b")
    assert_same_model(last(tmp_path / "a"), last(tmp_path / "b"))


def test_a_damaged_data_set_is_refused_before_training(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(home / "data", tmp_path / "data")
    shard = next((tmp_path / "data" / "train").glob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tiny(tmp_path)))
    assert main(["train", "-q", str(tmp_path / "r.yaml")]) == 2
    assert str(shard) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
