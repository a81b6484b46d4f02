"""Test histories in drafted recipes: they are added if there is enough data and validation does not
get worse.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from stratarec.cli.init import history
from stratarec.cli.init.draft import content_of, draft
from stratarec.errors import ConfigError, Interrupted


def log(path: Path, *, users: int = 300, items: int = 60, each: int = 40, taste: float = 0.0) -> tuple[str]:
    """Write a log whose users come on different days and like items by two hidden numbers."""
    draws, rows = np.random.default_rng(0), users * each
    likes, kinds = draws.normal(size=(users, 2)), draws.normal(size=(items, 2))
    user, item = np.repeat(np.arange(users), each), draws.integers(0, items, rows)
    logit = taste * (likes[user] * kinds[item]).sum(1) - 0.5
    day = np.sort(draws.integers(0, 100, users))[user]
    frame = pl.DataFrame(
        {
            "user_id": user,
            "item_id": item,
            "ts": 1_600_000_000 + day * 86_400 + draws.integers(0, 86_400, rows),
            "device": draws.integers(0, 4, rows),
            "click": (draws.random(rows) < 1 / (1 + np.exp(-logit))).astype(int),
        }
    )
    frame.sort("ts").write_csv(path)
    return (str(path),)


def names(content: Mapping[str, Any]) -> list[str]:
    return [feature["name"] for feature in content["data"]["source"]["schema"]["sparse"]]


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Replace the short trainings by given mean losses with and without a history, and record what
    was trained.
    """
    means, draws = {"True": 0.6, "False": 0.6}, np.random.default_rng(0)

    def trained(content: Mapping[str, Any], folder: Path) -> pl.DataFrame:
        has_history = str("item_id_history" in names(content))
        row = np.arange(1000)
        if means[has_history] < 0:
            raise ConfigError("data.source: broken")
        return pl.DataFrame(
            {"row": row, "user": row // 10, "loss": means[has_history] + draws.normal(0, 0.1, 1000)}
        )

    monkeypatch.setattr(history, "_losses", trained)
    return means


def test_users_or_values_with_few_rows_have_no_history(tmp_path: Path, losses: dict[str, float]) -> None:
    losses["True"] = 0.1
    for name, sizes in (("users", {"users": 4000, "each": 3}), ("values", {"items": 6000})):
        paths = log(tmp_path / f"{name}.csv", **sizes)  # type: ignore[arg-type]
        path, _, guesses = draft(paths, tmp_path / f"{name}.yaml")
        assert guesses.history is not None
        assert not guesses.history.drafted
        assert "item_id_history" not in names(yaml.safe_load(path.read_text()))
        assert f"#   item_id_history: a history of the user; {guesses.history.reason}" in path.read_text()


@pytest.mark.parametrize(("having", "kept"), [(0.55, True), (0.65, False), (0.6, False)])
def test_validation_decides_about_a_history(
    having: float, kept: bool, tmp_path: Path, losses: dict[str, float]
) -> None:
    losses["True"] = having
    messages: list[str] = []
    path, _, guesses = draft(log(tmp_path / "log.csv"), tmp_path / "log.yaml", say=messages.append)
    assert len(messages) == 1
    assert guesses.history is not None
    assert ("item_id_history" in names(yaml.safe_load(path.read_text()))) is kept
    assert guesses.history.reason in path.read_text()


def test_a_log_that_cannot_be_trained_keeps_the_choice_of_the_rule(
    tmp_path: Path, losses: dict[str, float]
) -> None:
    losses["False"] = -1.0
    path, _, guesses = draft(log(tmp_path / "log.csv"), tmp_path / "log.yaml")
    assert guesses.history is not None
    assert guesses.history.drafted
    assert "data.source: broken" in path.read_text()


def test_a_stopped_training_says_to_run_init_again_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(content: Mapping[str, Any], folder: Path) -> pl.DataFrame:
        folder.mkdir()
        assert not (temporary / "stratarec-temporary-killed").exists()
        raise Interrupted(f"stopped; the checkpoint is {folder}; resume with the same command and --resume")

    temporary = tmp_path / "tmp"
    (temporary / "stratarec-temporary-killed" / "with").mkdir(parents=True)  # of a process that was killed
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(history, "_losses", stopped)
    with pytest.raises(Interrupted, match=r"^stopped; nothing was written; run the same command again$"):
        draft(log(tmp_path / "log.csv"), tmp_path / "log.yaml")
    assert not list(temporary.iterdir())
    assert not (tmp_path / "log.yaml").exists()


def test_a_large_log_is_not_trained(
    tmp_path: Path, losses: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses["True"] = -1.0
    monkeypatch.setattr(history, "_MOST_ROWS", 1000)
    assert "item_id_history" in names(content_of(log(tmp_path / "log.csv")))


@pytest.mark.slow
def test_short_trainings_keep_a_history_only_if_users_differ(tmp_path: Path) -> None:
    for name, options, is_kept in (("taste", {"users": 600, "taste": 2.0}, True), ("none", {}, False)):
        recipe, _, _ = draft(log(tmp_path / f"{name}.csv", **options), tmp_path / f"{name}.yaml")
        assert ("item_id_history" in names(yaml.safe_load(recipe.read_text()))) == is_kept
