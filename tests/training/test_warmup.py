"""Kernels are compiled before the clock starts, without a trace in what a run computes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml

from recipes import last, tiny
from stratarec.data.dataset import Dataset
from stratarec.data.prepare import prepare
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training import trainer as module
from stratarec.training.trainer import Trainer
from stratarec.training.warmup import warm_up

INT8 = {"precision": "int8", "cache": {"fraction": 0.1, "ways": 8}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data sets: a synthetic log with and without groups, and clicks with histories."""
    root = tmp_path_factory.mktemp("warm")
    draws = np.random.default_rng(5)
    pl.DataFrame(
        {
            "user_id": draws.integers(0, 60, 4000),
            "session_id": draws.integers(0, 400, 4000),
            "item_id": (200 * draws.random(4000) ** 2).astype(np.int64),
            "timestamp": 1_600_000_000 + np.sort(draws.integers(0, 86400 * 5, 4000)),
        }
    ).write_parquet(root / "clicks.parquet")
    for groups in ("auto", "none"):
        prepare(Recipe.from_dict(synthetic(root, groups)).data)
    prepare(Recipe.from_dict(clicks(root)).data)
    return root


def synthetic(root: Path, groups: str, **changes: Any) -> dict[str, Any]:
    found = tiny(root, run=str(root / "run"), batch_size=64, epochs=1, eval_every=30, checkpoint={"every_steps": 20})
    found["data"] |= {"path": str(root / groups), "groups": groups, "vocabulary": {"min_count": 1, "tail_buckets": 4}}
    found["data"]["source"]["scale"] = 0.05
    found["model"]["embedding_dim"] = 16
    return found | changes


def clicks(root: Path, **model: Any) -> dict[str, Any]:
    return {
        "name": "clicks",
        "data": {
            "path": str(root / "clicks"),
            "source": {"kind": "clicks", "paths": [str(root / "clicks.parquet")], "negatives": 2},
            "split": {"by": "time", "valid": "1d", "test": "1d"},
            "vocabulary": {"min_count": 1},
        },
        "model": {"kind": "dlrm", "embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [16], **model},
        "train": {"run": str(root / "run"), "batch_size": 128},
    }


def test_warming_up_changes_no_bit(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, times in (("never", 0), ("often", 3)):
        content = synthetic(root, "auto", memory={"dram": None, **INT8})
        recipe = Recipe.from_dict({**content, "train": {**content["train"], "run": str(tmp_path / name)}})
        trainer = Trainer(recipe, Dataset.open(recipe.data.path))
        state = torch.get_rng_state()
        with monkeypatch.context() as patch:
            patch.setattr(module, "warm_up", lambda *given, times=times: [warm_up(*given) for _ in range(times)])
            trainer.train()
        assert torch.equal(torch.get_rng_state(), state)
    files = [
        {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.safetensors")}
        for path in (last(tmp_path / name) for name in ("never", "often"))
    ]
    assert len(files[0]) > 3
    assert files[0] == files[1]


def test_warming_up_leaves_nothing_behind(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    memory = {**INT8, "block": {"path": str(tmp_path / "rows")}, "mapped": {"path": str(tmp_path / "mapped")}}
    recipe = Recipe.from_dict(synthetic(root, "auto", memory=memory))
    trainer = Trainer(recipe, Dataset.open(recipe.data.path))
    own = sorted(tmp_path.rglob("*"))
    warm_up(recipe, trainer.loader, trainer.plan, SilentProgress())
    assert sorted(tmp_path.rglob("*")) == own
    trainer.model.embeddings.close()


def test_a_memory_that_cannot_be_written_is_left_for_the_run_to_name(root: Path, tmp_path: Path) -> None:
    recipe = Recipe.from_dict(synthetic(root, "auto", memory=INT8))
    trainer = Trainer(recipe, Dataset.open(recipe.data.path))
    assert trainer.plan is not None
    (tmp_path / "file").touch()
    blocked = Recipe.from_dict(
        synthetic(root, "auto", memory={**INT8, "block": {"path": str(tmp_path / "file" / "x")}})
    )
    warm_up(blocked, trainer.loader, trainer.plan, SilentProgress())


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "plain dcnv2 in bf16": ({"groups": "none", "model": {"kind": "dcnv2", "embedding_dim": 16, "deep_mlp": [16]}}, ""),
    "grouped, int8 in dram": ({"groups": "auto", "memory": INT8}, "dram"),
    "int4 in a log": ({"groups": "none", "memory": {**INT8, "precision": "int4", "block": {"path": "rows"}}}, "log"),
    "attention": ({"history": {"pooling": "target_attention"}}, ""),
    "transformer": ({"history": {"pooling": "transformer"}}, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_finds_every_kernel_ready(root: Path, tmp_path: Path, case: str) -> None:
    changes, home = CASES[case]
    if "history" in changes:
        content = clicks(root, **changes)
    else:
        content = synthetic(root, **changes)
        content["train"]["precision"] = "bf16" if "bf16" in case else "float32"
    content["train"]["run"] = str(tmp_path / "run")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    script = Path(__file__).with_name("compiled.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "r.yaml"), home],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.slow
def test_the_first_run_on_a_machine_reports_a_sane_speed(root: Path, tmp_path: Path) -> None:
    content = synthetic(root, "auto")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    speeds, said = [], []
    for name in ("first", "second"):
        done = subprocess.run(
            [sys.executable, "-m", "stratarec", "train", str(tmp_path / "r.yaml"), f"train.run={tmp_path / name}"],
            capture_output=True, text=True, check=False, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = re.search(r"^speed +([\d,]+) samples/s$", done.stdout, re.MULTILINE)
        assert found is not None
        speeds.append(int(found[1].replace(",", "")))
        said.append(done.stderr.count("compiling kernels for this machine, once"))
        left = re.findall(r"ETA (\d+) s", done.stderr)
        assert all(int(seconds) < 120 for seconds in left)
    assert said == [1, 0]
    assert speeds[1] / 3 < speeds[0] < speeds[1] * 3
