"""The benchmark of logs by size: what it reports, and that a finished log is not trained on again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import sizes
from errors import refuses
from stratarec.errors import ConfigError


def test_both_sides_are_scored_on_the_same_log_once(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("lightgbm")
    monkeypatch.setattr(sizes, "FOLDER", tmp_path)
    found = sizes.run(quick=True)
    metrics, (ours, trees) = found["metrics"], found["samples"]["rows"]
    assert (ours["model"], trees["model"]) == ("stratarec", "lightgbm")
    assert metrics["auc_delta_lightgbm_4000"] == ours["auc"] - trees["auc"]
    assert "train.batch_size" in found["samples"]["settings"][0]
    monkeypatch.setattr(sizes, "both", None)
    assert sizes.run(quick=True)["metrics"] == metrics


def test_a_log_has_enough_to_test_on(tmp_path: Path) -> None:
    small, large = sizes.log(tmp_path, 10_000, 1, 10), sizes.log(tmp_path, 2_000_000, 1, 10)
    assert small.source.samples == 9_000 + sizes.LEAST_TEST  # type: ignore[union-attr]
    assert small.split.valid * small.source.samples == pytest.approx(1_000)  # type: ignore[union-attr]
    assert large.source.samples == 2_000_000  # type: ignore[union-attr]


def test_sizes_too_small_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(sizes, "import_peer", lambda name: None)
    with refuses(ConfigError, "--samples 10 1000"):
        sizes.run(quick=False, samples=[100_000, 10])
