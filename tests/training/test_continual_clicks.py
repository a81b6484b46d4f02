"""Test runs that continue on a log of clicks.

The last hour of a file waits for the next file, and the labels cannot be predicted.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.clicks import ClicksConfig, ClicksSource
from stratarec.data.splits import SplitConfig
from stratarec.io.atomic import write_atomic
from stratarec.recipe import Recipe
from stratarec.training.run import periods
from stratarec.training.trainer import Trainer

HOUR, FIRST = 3_600, 1_600_000_000 // 3_600 * 3_600
HOURS = 6
"""Hours of log in a file."""


def write_logs(root: Path, files: int, clicks: int) -> list[Path]:
    """Write random clicks: users, items and times are independent. Files are not split at full
    hours.
    """
    draws, paths = np.random.default_rng(3), []
    for number in range(files):
        begin = FIRST + HOURS * HOUR * number + 900
        paths.append(root / f"clicks-{number}.parquet")
        frame = pl.DataFrame(
            {
                "user_id": draws.integers(0, 400, clicks),
                "session_id": draws.integers(0, 900, clicks),
                "item_id": draws.integers(0, 200, clicks) + 20 * number,
                "timestamp": np.sort(draws.integers(begin, begin + HOURS * HOUR, clicks)),
            }
        )
        write_atomic(paths[-1], frame.write_parquet)
    return paths


def begin(root: Path, log: Path, **changes: Any) -> Path:
    """Train a run on the first file."""
    source = {"kind": "clicks", "paths": [str(log)], "negatives": 2, "history_length": 4, "memory": "3h"}
    data = {
        "path": str(root / "data"), "source": source, "split": {"by": "fraction", "valid": 0.1, "test": 0.1},
        "vocabulary": {"min_count": 9, "tail_buckets": 4, **changes},
    }  # fmt: skip
    model = {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]}
    train = {"run": str(root / "run"), "batch_size": 256, "report": False}
    recipe = Recipe.from_dict({"name": "clicks", "data": data, "model": model, "train": train})
    Trainer(recipe, prepare(recipe.data)).train()
    return Path(recipe.run)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run on the first of three files."""
    root = tmp_path_factory.mktemp("clicks")
    begin(root, write_logs(root, 3, 1500)[0])
    return root


def logs(home: Path) -> list[Path]:
    return sorted(home.glob("clicks-*.parquet"))


def continue_run(run: Path, *files: Path, code: int = 0) -> None:
    assert main(["continue", "-q", str(run), *map(str, files)]) == code


def test_periods_in_one_command_and_in_several_are_the_same_and_omit_no_click(
    home: Path, tmp_path: Path
) -> None:
    runs = [Path(shutil.copytree(home / "run", tmp_path / name)) for name in ("whole", "each")]
    continue_run(runs[0], *logs(home)[1:])
    for file in logs(home)[1:]:
        continue_run(runs[1], file)
    period_lists = [[periods.read(path) for path in periods.paths(run)] for run in runs]
    assert [period.scores for period in period_lists[0]] == [period.scores for period in period_lists[1]]
    # The samples equal those of one log with all these clicks.
    pl.concat(map(pl.read_parquet, logs(home)[1:])).write_parquet(tmp_path / "all.parquet")
    base = Dataset.open(home / "data")
    source = ClicksSource(
        ClicksConfig(
            paths=(str(tmp_path / "all.parquet"),),
            negatives=2,
            history_length=4,
            memory="3h",
            last_window="wait",
        ),
        "error",
        SplitConfig(by="fraction", valid=0.0, test=0.0),
    )
    before = base.clicks()
    assert before is not None
    source.resume(before)
    (tmp_path / "work").mkdir()
    frame = pl.concat([chunk.frame for chunk in source.chunks(tmp_path / "work")])
    assert sum(period.scores["all"]["samples"] for period in period_lists[0]) == frame["label"].count()
    datasets = [Dataset.open(periods.of_number(run, 2) / "data") for run in runs]
    assert datasets[0].fingerprint == datasets[1].fingerprint
    kept, expected = datasets[0].clicks(), source.memory(tmp_path / "work")
    assert kept is not None
    assert kept.clicks == expected.clicks
    assert all(kept.frames[part].equals(expected.frames[part]) for part in expected.frames)
    assert len(kept.waiting)
    assert main(["check", "-q", str(runs[0])]) == 0


def test_a_forgotten_user_is_in_no_waiting_click_and_no_history(home: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    continue_run(run, logs(home)[1])
    kept = Dataset.open(periods.of_number(run, 1) / "data").clicks()
    assert kept is not None
    user, item = kept.waiting["user_id"][0], kept.waiting["item_id"][5]
    pl.DataFrame({"user_id": [user]}).write_csv(tmp_path / "users.csv")
    pl.DataFrame({"item_id": [item]}).write_csv(tmp_path / "items.csv")
    assert main(["forget", "-q", str(run), str(tmp_path / "users.csv")]) == 0
    assert main(["forget", "-q", str(run), str(tmp_path / "items.csv")]) == 0
    left = Dataset.open(periods.of_number(run, 3) / "data").clicks()
    assert left is not None
    is_forgotten = (pl.col("user_id") == user) | (pl.col("item_id") == item)
    for part in ("recent", "waiting"):
        assert left.frames[part].equals(kept.frames[part].filter(~is_forgotten))
    assert len(kept.first) - len(left.first) == 1
    continue_run(run, logs(home)[2])
