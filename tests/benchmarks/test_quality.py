"""The benchmark of published figures: what it reports, and that a finished run is not trained again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli.init.test_public_recipes import ROWS, frame

from benchmarks import quality
from stratarec.data.schema import Schema
from stratarec.recipe import Recipe


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of the columns of `frappe_x1`, and a place for what is made of them."""
    schema: Schema = Recipe.load(quality.ROOT / "src/stratarec/recipes/frappe_x1.yaml").data.source.schema  # type: ignore[union-attr]
    (tmp_path / "frappe_x1").mkdir()
    for split, rows in ROWS.items():
        frame(schema, rows, split != "train").write_parquet(tmp_path / "frappe_x1" / f"{split}.parquet")
    monkeypatch.setattr(quality, "LOGS", tmp_path)
    monkeypatch.setattr(quality, "WORK", tmp_path / "work")
    monkeypatch.setattr(quality, "DATA", tmp_path / "data")
    monkeypatch.delenv("STRATAREC_FUXICTR", raising=False)
    return tmp_path


def evaluations(*aucs: float, seconds: float) -> dict[str, Any]:
    return {
        "auc": max(aucs), "log_loss": 0.1,
        "evaluations": [
            {"step": place, "auc": auc, "seconds": 2 * seconds * place, "processor_seconds": seconds * place}
            for place, auc in enumerate(aucs, 1)
        ],
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_is_trained_once_and_compared_with_what_was_published(
    logs: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first = quality.run(quick=True)
    metrics, (row,) = first["metrics"], first["samples"]["rows"]
    assert capsys.readouterr().err.count("FuxiCTR left out: set STRATAREC_FUXICTR") == 1
    assert metrics["auc_best"] == metrics["auc_dcnv2"] == row["auc"]
    assert metrics["auc_delta_bars_min"] == row["auc"] - quality.PUBLISHED["dcnv2"].auc
    assert [each["step"] for each in row["evaluations"]] == [1, 2]
    assert 0 < row["seconds_to_best"] <= row["seconds"]
    assert row["rows_behind_caches"] == 0.0
    monkeypatch.setattr(quality, "Trainer", None)
    assert quality.run(quick=True)["metrics"] == metrics


def test_every_model_is_one_that_a_recipe_takes(logs: Path) -> None:
    for name in quality.PUBLISHED:
        made = quality.recipe(name, 1, quality.Setting(precision="bf16", epochs=3))
        assert made.model.kind == name
        assert made.train.embedding.weight_decay == quality.PUBLISHED[name].decay
