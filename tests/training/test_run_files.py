"""Test the files of a run: equal runs write equal files, and the JSON files are valid JSON."""

from __future__ import annotations

import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from errors import missing
from recipes import last, tiny
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.io.sealed import write_sealed
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.run.run_directory import MIRROR
from stratarec.training.trainer import Trainer


def strict(path: Path) -> Any:
    """Parse a file as strict JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path} holds {word}, which is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def log(root: Path) -> dict[str, Any]:
    """Return a recipe for a log without users, whose validation days contain only clicks."""
    rows = np.arange(3000)
    label = np.where((rows >= 2000) & (rows < 2500), 1, rows % 2)
    frame = pl.DataFrame({"label": label, "day": rows // 500 * 86400, "item": rows % 7, "city": rows % 5})
    frame.write_parquet(root / "log.parquet")
    schema = {"time": "day", "sparse": [{"name": "item"}, {"name": "city"}]}
    return {
        "name": "days",
        "data": {
            "path": str(root / "data"),
            "source": {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": schema},
            "split": {"by": "time", "valid": "1d", "test": "1d"},
        },
        "model": {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"run": str(root / "run"), "batch_size": 100, "epochs": 3},
    }


def run(home: Path, target: Path, *, resume: bool = False, **train: Any) -> None:
    recipe = Recipe.from_dict(tiny(home, run=str(target), **train))
    Trainer(recipe, Dataset.open(recipe.data.path)).train(resume=resume)


def tensor_files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*.safetensors"))}


def test_equal_runs_write_equal_files_and_another_seed_writes_others(home: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(home, tmp_path / name, max_steps=8, embedding={"kind": "rowwise_adam"}, seed=seed)
    tensors = tensor_files(last(tmp_path / "a"))
    assert len(tensors) > 2
    assert tensors == tensor_files(last(tmp_path / "b"))
    assert not set(tensors.values()) & set(tensor_files(last(tmp_path / "c")).values())


def test_a_resumed_run_writes_the_files_of_an_uninterrupted_run(home: Path, tmp_path: Path) -> None:
    run(home, tmp_path / "whole", max_steps=14)
    run(home, tmp_path / "parts", max_steps=14)
    shutil.rmtree(last(tmp_path / "parts"))
    assert checkpoint.list_checkpoints(tmp_path / "parts" / "checkpoints")
    run(home, tmp_path / "parts", max_steps=14, resume=True)
    uninterrupted, parts = (tensor_files(last(tmp_path / name)) for name in ("whole", "parts"))
    for name in ("network.safetensors", "optimizer.safetensors"):
        assert uninterrupted[name] == parts[name]


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train a run for which AUC is undefined on the validation split and grouped AUC everywhere.

    Return it with its output.
    """
    root = tmp_path_factory.mktemp("days")
    (root / "recipe.yaml").write_text(yaml.safe_dump(log(root)))
    assert main(["prepare", "-q", str(root / "recipe.yaml")]) == 0
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main(["train", str(root / "recipe.yaml")]) == 0
    return root, out.getvalue() + err.getvalue()


def test_every_json_file_of_a_run_is_strict(days: tuple[Path, str]) -> None:
    root, _ = days
    files = [*(root / "run").rglob("*.json"), *(root / "data").rglob("*.json")]
    assert {"result.json", "state.json", "recipe.json", "dataset.json"} <= {file.name for file in files}
    for file in files:
        strict(file)
    assert strict(root / "run" / "result.json")["test"]["grouped_auc"] is None
    position = strict(last(root / "run") / "state.json")["training"]
    assert position["evaluations"][0]["auc"] is None


def test_check_knows_all_files_that_commands_write_into_a_run(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(home, tmp_path / "run", max_steps=3, epochs=1, report=True)
    place = str(tmp_path / "run")
    write_sealed(tmp_path / "run" / MIRROR, {"format": 1, "run": "0" * 32})
    for command in (
        ["explain", place, "--samples", "50"],
        ["predict", place],
        ["export", place],
        ["evaluate", place],
    ):
        assert main([*command, "-q"]) == 0
    capsys.readouterr()
    assert main(["check", place]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "outputs, which have no hash: explanation.html, predictions-test.parquet" in lines
    assert not [line for line in lines if line.startswith("unknown files")]
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "predictions-link.parquet").symlink_to("notes.txt")
    assert main(["check", place]) == 0
    assert "unknown files, not read: notes.txt, predictions-link.parquet" in capsys.readouterr().out
    (tmp_path / "run" / MIRROR).write_text("{}")
    assert main(["check", place]) == 2
    assert not missing(MIRROR, capsys.readouterr().err)
