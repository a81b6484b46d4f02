"""The benchmark of a click log's last day: that its contenders are scored on it, and how they are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from benchmarks import globo, sessions

CONTEXTS = (
    "click_environment", "click_deviceGroup", "click_os", "click_country", "click_region", "click_referrer_type",
)  # fmt: skip
DAY_MS, CLICKS = 86_400_000, 600


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five days of clicks on thirty articles in the columns of the published log."""
    draws = np.random.default_rng(1)
    user = draws.integers(0, 60, CLICKS)
    time = np.sort(draws.integers(0, 5 * DAY_MS, CLICKS))
    columns = {"user_id": user, "session_id": user * 10 + time // DAY_MS, "click_timestamp": time}
    columns |= {"click_article_id": (30 * draws.random(CLICKS) ** 2).astype(np.int64)}
    columns |= {name: draws.integers(0, 3, CLICKS) for name in CONTEXTS}
    pl.DataFrame(columns).write_parquet(tmp_path / "globo_clicks.parquet")
    monkeypatch.setattr(sessions, "LOGS", tmp_path)
    monkeypatch.setattr(globo, "FOLDER", tmp_path / "found")
    plain = sessions.recipe
    monkeypatch.setattr(sessions, "recipe", lambda *given: plain(*given, f"data.path={tmp_path}/data"))
    monkeypatch.setattr(globo, "recipe", lambda *given: plain(*given, f"data.path={tmp_path}/data"))
    return tmp_path


@pytest.mark.slow
def test_contenders_are_scored_on_the_last_day_once(log: Path, monkeypatch: Any) -> None:
    first = globo.run(quick=True, models=["recipe", "logistic", "popularity"])
    rows = {row["model"]: row for row in first["samples"]["found"]}
    assert set(rows) == {"recipe", "logistic", "popularity"}
    for name in ("recipe", "logistic"):
        assert 0 < rows[name]["auc"] < 1
        # A line or a rising curve of logits orders samples as they were, up to ties.
        assert rows[name]["auc_platt"] == pytest.approx(rows[name]["auc"], abs=0.01)
        assert rows[name]["auc_isotonic"] == pytest.approx(rows[name]["auc"], abs=0.01)
    assert "log_loss" not in rows["popularity"]
    monkeypatch.setattr(globo, "Trainer", None)
    assert globo.run(quick=True, models=["recipe", "popularity"])["samples"]["found"] == [
        rows["recipe"],
        rows["popularity"],
    ]


def row(model: str, auc: float) -> dict[str, Any]:
    fitted = {f"{figure}_{kind}": 1.0 for kind in globo.CORRECTIONS for figure in ("calibration", "log_loss")}
    return {"model": model, "auc": auc, "log_loss": 0.4, "calibration": 1.1, **fitted}


def test_the_best_is_compared_with_the_best_peer_and_low_precision_with_its_own_float32() -> None:
    rows = [row("best", 0.80), row("best", 0.82), row("torchrec", 0.79), row("lightgbm", 0.80), row("adam", 0.7)]
    found = globo.compared([*rows, row("int8", 0.695)])
    assert found["auc_best"] == pytest.approx(0.81)
    assert found["auc_delta_peers"] == pytest.approx(0.01)
    assert found["auc_delta_int8_globo"] == pytest.approx(-0.005)
    assert "auc_delta_int4_globo" not in found
