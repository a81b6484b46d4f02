"""Test how drafts split a log, and which values get a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from stratarec.cli.init.draft import content_of
from stratarec.cli.init.draft import draft as write_draft
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.data.splits import SplitConfig
from stratarec.errors import ConfigError
from stratarec.recipe import Recipe

ROWS = 3000
FIRST = 1_600_000_000
DAY = 86_400


def draft(folder: Path, columns: dict[str, Any]) -> dict[str, Any]:
    """Write a log with random labels, and return the content of the draft for it."""
    label = np.random.default_rng(1).integers(0, 2, len(next(iter(columns.values()))))
    pl.DataFrame({**columns, "click": label}).write_csv(folder / "log.csv")
    content = content_of((str(folder / "log.csv"),))
    content["data"]["path"] = str(folder / "data")
    return content


def prepared(content: dict[str, Any]) -> Dataset:
    return prepare(Recipe.from_dict(content).data)


@pytest.mark.parametrize("power", [0.2, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("days", [2, 40, 3000])
def test_validation_and_test_have_about_a_tenth_of_the_rows_of_a_log_that_grows_or_shrinks(
    power: float, days: int, tmp_path: Path
) -> None:
    draws = np.random.default_rng(0)
    times = FIRST + (days * DAY * draws.random(ROWS) ** power).astype(np.int64)
    content = draft(tmp_path, {"time": times, "item": draws.integers(0, 9, ROWS)})
    assert content["data"]["split"]["by"] == "time"
    dataset = prepared(content)
    shares = [dataset.samples(split) / ROWS for split in ("valid", "test")]
    # Periods are whole hours or days, and together at most half of the time.
    assert min(shares) > (0.02 if days == 2 or power == 2 else 0.08)
    assert max(shares) < (0.25 if days == 2 or power == 0.2 else 0.13)
    assert dataset.samples("train") >= ROWS / 2


END = 300 * DAY
SHAPES: dict[str, Callable[[np.random.Generator], Any]] = {
    "two days": lambda draws: draws.integers(0, 2, ROWS) * 100 * DAY + draws.integers(0, DAY, ROWS),
    "three dates": lambda draws: np.array([0, 93, 304])[draws.integers(0, 3, ROWS)] * DAY,
    "busy last second": lambda draws: np.where(draws.random(ROWS) < 0.5, draws.integers(0, END, ROWS), END),
    "busy last hour": lambda draws: END - np.where(draws.random(ROWS) < 0.9, 1, 8000) * draws.integers(0, 3000, ROWS),
    "busy last day": lambda draws: END - np.where(draws.random(ROWS) < 0.9, 1, 290) * draws.integers(0, DAY, ROWS),
    "doubles each day": lambda draws: (14 - np.minimum(draws.exponential(1 / np.log(2), ROWS), 14)) * DAY,
    "halves each day": lambda draws: np.minimum(draws.exponential(1 / np.log(2), ROWS), 14) * DAY,
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_all_splits_have_rows_and_training_has_at_least_half(shape: str, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    times = FIRST + np.asarray(SHAPES[shape](draws)).astype(np.int64)
    dataset = prepared(draft(tmp_path, {"time": times, "item": draws.integers(0, 9, ROWS)}))
    counts = {split: dataset.samples(split) for split in dataset.splits}
    assert min(counts.values()) > 0
    assert counts["train"] >= ROWS / 2


@pytest.mark.parametrize(("once", "least"), [(0.02, 1), (0.3, 2)])
def test_values_that_occur_once_have_rows_unless_many_future_values_will_be_new(
    once: float, least: int, tmp_path: Path
) -> None:
    place = np.arange(ROWS)
    items = np.where(place < once * ROWS, 100_000 + place, place % 97)
    content = draft(tmp_path, {"item_id": np.random.default_rng(0).permutation(items)})
    assert content["data"]["vocabulary"] == {"min_count": least, "tail_buckets": 1}


@pytest.mark.parametrize("is_sorted", [False, True])
def test_users_without_times_are_features_if_they_return(is_sorted: bool, tmp_path: Path) -> None:
    users = np.random.default_rng(0).integers(0, 100, ROWS)
    content = draft(
        tmp_path, {"user_id": np.sort(users) if is_sorted else users, "item": np.arange(ROWS) % 7}
    )
    schema, split = content["data"]["source"]["schema"], content["data"]["split"]
    assert schema["user"] == "user_id"
    assert ("user_id" in [feature["name"] for feature in schema["sparse"]]) == (not is_sorted)
    assert split == {"by": "fraction", "valid": 0.1, "test": 0.1} | ({} if is_sorted else {"of": "rows"})
    dataset = prepared(content)
    if not is_sorted:
        assert sum(dataset.samples(name) for name in ("valid", "test")) == pytest.approx(
            0.2 * ROWS, rel=0.2
        )
        assert dataset.table_rows()["user_id"] == 101  # so all users are in the training split


def test_only_random_splits_of_rows_can_divide_users(tmp_path: Path) -> None:
    source = {"kind": "clicks", "paths": [str(tmp_path / "clicks.parquet")]}
    columns = {"user_id": [1, 2], "session_id": [1, 2], "item_id": [1, 2], "timestamp": [FIRST, FIRST + 1]}
    pl.DataFrame(columns).write_parquet(tmp_path / "clicks.parquet")
    data = {"path": str(tmp_path / "data"), "source": source, "split": {"by": "fraction", "of": "rows"}}
    with pytest.raises(
        ConfigError, match="of is rows, but the source is of kind clicks, where negatives are drawn"
    ):
        prepared({"name": "clicks", "data": data, "model": {"kind": "dlrm"}})
    assert not (tmp_path / "data").exists()
    with pytest.raises(
        ConfigError, match="of is rows, which only by: fraction and by: column use, not by: time"
    ):
        SplitConfig(by="time", valid="1d", test="1d", of="rows")


GIVEN = np.array(["train"] * 6 + ["valid", "test"] * 2)
COLUMNS: dict[str, tuple[str, Any, dict[str, int]]] = {
    "all splits": ("split", GIVEN, {"train": 1800, "valid": 600, "test": 600}),
    "other words": (
        "Subset",
        np.where(GIVEN == "test", " TEST", "Training"),
        {"train": 2160, "valid": 240, "test": 600},
    ),
    "no test": (
        "phase",
        np.where(GIVEN == "valid", "dev", "train"),
        {"train": 2400, "valid": 600, "test": 0},
    ),
    "booleans": ("is_test", GIVEN == "test", {"train": 2160, "valid": 240, "test": 600}),
    "numbers": ("isTrain", (GIVEN == "train").astype(int), {"train": 1620, "valid": 180, "test": 1200}),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_that_names_splits_is_the_split_and_no_feature(name: str, tmp_path: Path) -> None:
    column, values, samples = COLUMNS[name]
    draws = np.random.default_rng(0)
    columns = {"item": draws.integers(0, 9, ROWS), "age": draws.integers(16, 80, ROWS)}
    content = draft(tmp_path, {**columns, column: np.tile(values, ROWS // 10)})
    assert (content["data"]["split"]["by"], content["data"]["split"]["column"]) == ("column", column)
    dataset = prepared(content)
    assert column not in dataset.schema.names
    drawn = 240 if samples["valid"] in (180, 240) else 0
    counts = {split: dataset.samples(split) for split in ("train", "valid", "test")}
    assert sum(counts.values()) == ROWS
    assert counts["test"] == samples["test"]
    assert counts["valid"] == pytest.approx(samples["valid"], abs=drawn / 4)


UNCLEAR = {
    "split": ["train", "test", "unknown"],
    "fold": ["1", "2", "3"],
    "set": ["red", "blue", "train"],
    "kind": ["train", "test"],
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_a_column_that_does_not_clearly_name_splits_does_not_split(name: str, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    content = draft(tmp_path, {"item": draws.integers(0, 9, ROWS), name: np.resize(UNCLEAR[name], ROWS)})
    assert content["data"]["split"]["by"] == "fraction"


def test_users_of_a_split_by_column_are_features_only_if_they_return(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    split = np.tile(GIVEN, ROWS // 10)
    user = draws.integers(0, 100, ROWS)
    for returning in (True, False):
        (tmp_path / "log.csv").unlink(missing_ok=True)
        users = user if returning else np.where(split == "train", user, user + 100)
        content = draft(tmp_path, {"user": users, "item": draws.integers(0, 9, ROWS), "split": split})
        features = [feature["name"] for feature in content["data"]["source"]["schema"]["sparse"]]
        assert ("user" in features) == returning


def test_a_column_that_names_the_split_of_some_rows_is_neither_a_split_nor_a_feature(
    tmp_path: Path,
) -> None:
    split = [None if row == 7 else name for row, name in enumerate(np.tile(GIVEN, ROWS // 10).tolist())]
    content = draft(
        tmp_path, {"item": np.random.default_rng(0).integers(0, 9, ROWS), "split": pl.Series(split)}
    )
    assert content["data"]["split"]["by"] == "fraction"
    assert [feature["name"] for feature in content["data"]["source"]["schema"]["sparse"]] == ["item"]


def split_of(tmp_path: Path, columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Draft a recipe; return its split, and the reasons of columns that are left out."""
    draws = np.random.default_rng(0)
    log = {"item": draws.integers(0, 9, ROWS), "click": draws.integers(0, 2, ROWS), **columns}
    pl.DataFrame(log).write_csv(tmp_path / "log.csv")
    (tmp_path / "log.yaml").unlink(missing_ok=True)
    text = write_draft((str(tmp_path / "log.csv"),), tmp_path / "log.yaml")[0].read_text()
    content = yaml.safe_load(text)
    ignored = dict(line[10:].split(": ", 1) for line in text.splitlines() if line.startswith("      #   "))
    return content["data"]["split"], ignored


def test_a_flag_of_most_rows_does_not_name_splits(tmp_path: Path) -> None:
    rare = np.resize([0] * 9 + [1], ROWS)
    # of clicks, as robots are filtered
    assert split_of(tmp_path, {"is_valid": 1 - rare})[0]["by"] == "fraction"
    # of two variants
    assert split_of(tmp_path, {"is_test": np.resize([0, 1], ROWS)})[0]["by"] == "fraction"
    assert split_of(tmp_path, {"is_valid": rare})[0]["valid"] == ["1"]
    assert split_of(tmp_path, {"is_test": rare.astype(float)})[0]["test"] == ["1.0"]


def test_of_several_columns_that_name_splits_one_is_used_and_none_is_a_feature(tmp_path: Path) -> None:
    names = np.tile(GIVEN, ROWS // 10)
    split, ignored = split_of(tmp_path, {"is_train": (names == "train").astype(int), "dataset": names})
    assert split["column"] == "dataset"
    assert "dataset" in ignored["is_train"]


def test_a_split_that_contradicts_the_time_or_has_no_labels_is_drafted_with_a_doubt(tmp_path: Path) -> None:
    order = np.resize(["train", "test"], ROWS)
    times = np.arange(ROWS) * 900 + FIRST
    for split, doubts in ((order, False), (np.sort(order), True)):
        split_of(tmp_path, {"time": times, "split": split})
        assert ("later than the test" in (tmp_path / "log.yaml").read_text()) == doubts
    click = np.where(order == "test", 0, np.random.default_rng(1).integers(0, 2, ROWS))
    assert split_of(tmp_path, {"split": order, "click": click})[0]["test"] == ["test"]
    assert "same label" in (tmp_path / "log.yaml").read_text()


def test_folds_of_a_cross_validation_are_no_feature(tmp_path: Path) -> None:
    folds = np.resize(np.arange(5), ROWS)
    split, ignored = split_of(tmp_path, {"kfold": folds})
    assert split["by"] == "fraction"
    hint = yaml.safe_load(ignored["kfold"].partition("data.split: ")[2])
    content = yaml.safe_load((tmp_path / "log.yaml").read_text())
    content["data"] |= {"split": hint, "path": str(tmp_path / "data")}
    dataset = prepared(content)
    assert [dataset.samples(split) for split in ("train", "valid", "test")] == [1800, 600, 600]
    assert "kfold" not in split_of(tmp_path, {"kfold": folds**2})[1]
