"""Whole runs: the same bits twice, and all that the command line does with one; damage is named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import forked
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import yaml

from errors import refuses
from recipes import assert_same_model, interrupt, last, tiny, train
from stratarec import Scorer
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.sources.synthetic import SyntheticSource
from stratarec.errors import CheckpointError, Interrupted
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer


def recipe(home: Path, run: Path, **train: Any) -> Recipe:
    return Recipe.from_dict(tiny(home, run=str(run), **train))


def run(home: Path, target: Path, **options: Any) -> Trainer:
    return train(recipe(home, target, **options))


def test_the_same_seed_gives_the_same_bits_and_another_does_not(home: Path, tmp_path: Path) -> None:
    run(home, tmp_path / "a")
    run(home, tmp_path / "b")
    run(home, tmp_path / "c", seed=1)
    assert_same_model(last(tmp_path / "a"), last(tmp_path / "b"))
    with pytest.raises(AssertionError):
        assert_same_model(last(tmp_path / "a"), last(tmp_path / "c"))


def test_training_learns(home: Path, tmp_path: Path) -> None:
    trainer = run(home, tmp_path / "a", epochs=4)
    first, final = trainer.state.evaluations[0], trainer.state.evaluations[-1]
    assert final["auc"] > max(first["auc"], 0.6)


def test_a_run_is_not_overwritten_by_accident(home: Path, tmp_path: Path) -> None:
    run(home, tmp_path / "a", max_steps=8)
    with refuses(CheckpointError, "--resume --overwrite"):
        run(home, tmp_path / "a", max_steps=8)


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_whole(home: Path, tmp_path: Path) -> None:
    made = recipe(home, tmp_path / "a", max_steps=30)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(made.to_dict()))
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
    made = recipe(home, tmp_path / "a")
    trainer = Trainer(made, Dataset.open(made.data.path))
    interrupt(trainer, at=11)
    with refuses(Interrupted, "--resume"):
        trainer.train()
    assert last(tmp_path / "a").name == "step-00000011"
    train(made, resume=True)
    run(home, tmp_path / "b")
    assert_same_model(last(tmp_path / "a"), last(tmp_path / "b"))


def test_the_command_line_does_the_whole_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = tiny(tmp_path, report=True)
    content["model"]["history"] = {"pooling": "mean"}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    assert main(["prepare", "-q", str(tmp_path / "r.yaml")]) == 0
    assert main(["train", "-q", str(tmp_path / "r.yaml"), "train.max_steps=20", "train.eval_every=10"]) == 0
    trained = capsys.readouterr().out
    assert main(["evaluate", "-q", str(tmp_path / "run")]) == 0
    evaluated = capsys.readouterr().out
    auc = next(line for line in evaluated.splitlines() if "AUC" in line)
    assert auc in trained.splitlines()
    assert main(["predict", "-q", str(tmp_path / "run"), "-o", str(tmp_path / "scores.parquet")]) == 0
    assert main(["export", "-q", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 0
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    source = SyntheticSource(Recipe.load(tmp_path / "r.yaml").data.source)  # type: ignore[arg-type]
    frame = pl.concat([chunk.frame for chunk in source.chunks(tmp_path)])
    rows = pq.read_table(tmp_path / "scores.parquet")["row"].to_numpy() - 1
    np.testing.assert_allclose(Scorer.open(tmp_path / "out").score(frame[rows]), scores, atol=1e-6)
    html = (tmp_path / "run" / "report.html").read_text()
    assert html.count("<svg") == 5
    assert "train valid test" in " ".join(re.findall(r"<tr[^>]*>\s*<td[^>]*>(\w+)</td>", html))
    assert "<h2>Importance</h2>" in html
    assert re.search(rf"AUC[^<]*</dt><dd>{float(auc.split()[-1]):.5f}<", html)
    assert "http://" not in html.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


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
