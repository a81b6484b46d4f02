"""The benchmark of published figures: what it reports, and that a finished run is not trained again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.init.test_public_recipes import ROWS, frame

from benchmarks import fuxictr, precision_quality_frappe, quality
from benchmarks.registry import PeerMissing
from errors import refuses
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


@pytest.fixture
def fuxi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that writes what it was asked for, and answers with two evaluations of 7 seconds."""
    told = {**evaluations(0.4, 0.3, seconds=7.0), "auc": 0.41}
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport shutil, sys\nshutil.copy(sys.argv[2], {str(tmp_path / 'asked.json')!r})\n"
        f"open(sys.argv[3], 'w').write({json.dumps(told)!r})\n"
    )
    python.chmod(0o755)
    (tmp_path / "model_zoo").mkdir()
    monkeypatch.setenv("STRATAREC_FUXICTR_PYTHON", str(python))
    monkeypatch.setenv("STRATAREC_FUXICTR", str(tmp_path))
    return tmp_path / "asked.json"


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


def test_a_codec_is_compared_with_float32_in_the_same_small_batches(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(made: Recipe, kept: Path) -> dict[str, Any]:
        batch, precision = made.train.batch_size, made.memory.precision
        auc = 0.9 - (batch == quality.SMALL_BATCH) * 0.1 - (precision == "int8") * 0.01
        assert (made.memory.cache.fraction == 0.05) == (precision == "int8")
        return {**evaluations(auc, seconds=1.0), "seconds_to_best": 1.0, "rows_behind_caches": cached}

    monkeypatch.setattr(precision_quality_frappe, "one", one)
    cached = 0.7
    metrics = precision_quality_frappe.run(quick=True, models=["dcnv2"])["metrics"]
    assert metrics == {"auc_delta_int8_dcnv2": pytest.approx(-0.01), "auc_delta_int4_dcnv2": pytest.approx(0.0)}
    cached = 0.0
    with refuses(ConfigError, "dcnv2 int8"):
        precision_quality_frappe.run(quick=True, models=["dcnv2"])


def test_fuxictr_is_asked_for_the_same_and_compared_by_its_processor_seconds(
    logs: Path, fuxi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "one", lambda made, kept: ours)
    ours = {**evaluations(0.2, 0.4, 0.5, seconds=2.0), "seconds_to_best": 6.0}
    metrics = quality.run(quick=False, models=["dcnv2"], seeds=2)["metrics"]
    asked = json.loads(fuxi.read_text())
    assert asked["params"]["embedding_regularizer"] == quality.PUBLISHED["dcnv2"].decay
    assert asked["files"]["train"] == str(logs / "frappe_x1" / "train.parquet")
    assert (metrics["auc_fuxictr_dcnv2"], metrics["processor_seconds_to_best_fuxictr_dcnv2"]) == (0.41, 7.0)
    assert metrics["ratio_fuxictr_dcnv2"] == metrics["ratio_fuxictr_seconds"] == 7.0 / 4.0
    assert metrics["ratio_fuxictr_epoch_dcnv2"] == 7.0 / 2.0
    assert metrics["reached_fuxictr_dcnv2"] == 1.0
    fuxi.unlink()
    assert quality.run(quick=False, models=["dcnv2"], seeds=2)["metrics"] == metrics
    assert not fuxi.exists()


def test_an_auc_that_is_never_reached_is_reached_at_no_speed() -> None:
    assert fuxictr.ratio(evaluations(0.1, 0.2, seconds=1.0), evaluations(0.3, seconds=1.0)) == 0.0


def test_every_model_is_one_that_a_recipe_takes(logs: Path) -> None:
    for name in quality.PUBLISHED:
        made = quality.recipe(name, 1, quality.Setting(precision="bf16", epochs=3))
        assert made.model.kind == name
        assert made.train.embedding.weight_decay == quality.PUBLISHED[name].decay


def test_what_is_not_there_is_said(logs: Path) -> None:
    with refuses(ConfigError, "dcn"):
        quality.run(quick=False, models=["dcn"])
    (logs / "frappe_x1" / "valid.parquet").unlink()
    with refuses(PeerMissing, "frappe_x1/*.parquet STRATAREC_TEST_DATA"):
        quality.run(quick=True)
