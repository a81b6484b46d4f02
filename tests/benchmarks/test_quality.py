"""The benchmark of published figures: what it reports, and that a finished run is not trained again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafting.test_public_recipes import ROWS, frame

from benchmarks import quality
from benchmarks.registry import PeerMissing
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
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
    return tmp_path


def test_a_run_is_trained_once_and_compared_with_what_was_published(logs: Path, monkeypatch: Any) -> None:
    first = quality.run(quick=True)
    metrics, row = first["metrics"], first["samples"]["rows"][0]
    assert metrics["auc_best"] == metrics["auc_dcnv2"] == row["auc"]
    assert metrics["auc_delta_bars_min"] == row["auc"] - quality.PUBLISHED["dcnv2"].auc
    assert [each["step"] for each in row["evaluations"]] == [1, 2]
    assert 0 < row["seconds_to_best"] <= row["seconds"]
    monkeypatch.setattr(quality, "Trainer", None)
    assert quality.run(quick=True)["metrics"] == metrics


def test_every_model_is_one_that_a_recipe_takes(logs: Path) -> None:
    for name in quality.PUBLISHED:
        made = quality.recipe(name, 1, threads=1, precision="bf16", epochs=3)
        assert made.model.kind == name
        assert made.train.embedding.weight_decay == quality.PUBLISHED[name].decay


def test_what_is_not_there_is_said(logs: Path) -> None:
    with pytest.raises(ConfigError, match="no published figures of 'dcn'; there are lr, fm"):
        quality.run(quick=False, models=["dcn"])
    (logs / "frappe_x1" / "valid.parquet").unlink()
    with pytest.raises(PeerMissing, match=r"no .*/frappe_x1/\*\.parquet; set STRATAREC_TEST_DATA"):
        quality.run(quick=True)
