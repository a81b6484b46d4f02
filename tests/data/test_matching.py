"""Test that a model accepts only data whose ids and numbers mean the same as in training, and a
recipe only the data that it describes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from errors import missing, refuses
from recipes import prepared, tiny
from stratarec.cli import main
from stratarec.config.validate import first_difference
from stratarec.data.dataset.compatibility import check_prepared
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.csv import CsvConfig
from stratarec.data.vocabulary import Vocabulary, VocabularyConfig, VocabularyLimits
from stratarec.errors import ConfigError, DatasetError
from stratarec.io.sealed import write_sealed
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer

VALUES = 40


def write_log(path: Path, *, rising: bool, rows: int = 4000, scale: float = 1.0, seed: int = 0) -> None:
    """Write a log whose clicks follow from its values. `rising` reverses the frequencies of the
    values.
    """
    draws = np.random.default_rng(seed)
    rank = np.minimum((VALUES * draws.random(rows) ** 3).astype(int), VALUES - 1)
    value = VALUES - 1 - rank if rising else rank
    label = draws.random(rows) < np.where(value % 2, 0.8, 0.2)
    frame = pl.DataFrame(
        {"label": label, "item": value, "text": [f"v{i}" for i in value], "d": scale * rank}
    )
    path.parent.mkdir(exist_ok=True)
    frame.write_parquet(path, row_group_size=500)


def content(root: Path, name: str, **data: Any) -> dict[str, Any]:
    """Return a recipe for the log `name` in `root`."""
    schema = {
        "dense": [{"name": "d", "transform": "none"}],
        "sparse": [{"name": "item"}, {"name": "text", "max_length": 7}],
    }
    source = {"kind": "parquet", "paths": [str(root / "logs" / f"{name}.parquet")], "schema": schema}
    options = {"vocabulary": {"min_count": 1}, "split": {"valid": 0.1, "test": 0.2}, **data}
    return {
        "name": "matching",
        "data": {"path": str(root / name), "source": source, **options},
        "model": {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
        "train": {
            "run": str(root / "run"),
            "batch_size": 64,
            "epochs": 4,
            "report": False,
            "embedding": {"learning_rate": 0.1},
            "average": {"decay": 0},
            "early_stopping": {"patience": 0},
        },
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write logs with falling and rising frequencies, prepare both, and train a run on the
    first.
    """
    root = tmp_path_factory.mktemp("trained")
    for name in ("falling", "rising"):
        write_log(root / "logs" / f"{name}.parquet", rising=name == "rising")
        prepare(Recipe.from_dict(content(root, name)).data)
    recipe = Recipe.from_dict(content(root, "falling"))
    assert Trainer(recipe, Dataset.open(recipe.data.path)).train()["test"]["auc"] > 0.7
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """Copy the folder so that the run refers to its own data set."""
    shutil.copytree(trained, tmp_path / "copy")
    recipe = tmp_path / "copy" / "run" / "recipe.json"
    content = json.loads(recipe.read_text().replace(str(trained), str(tmp_path / "copy")))
    del content["hash"]
    write_sealed(recipe, content)
    return tmp_path / "copy"


def run_refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail and return its one line of output."""
    capsys.readouterr()
    assert main([arguments[0], "-q", *arguments[1:]]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_data_set_whose_ids_mean_other_values_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = Dataset.open(root / "falling"), Dataset.open(root / "rising")
    assert own.table_rows() == other.table_rows()
    for command in ("evaluate", "predict"):
        line = run_refused([command, str(root / "run"), str(root / "rising")], capsys)
        assert not missing("vocabulary item", line)
    assert not list((root / "run").glob("predictions*"))


def test_the_same_rows_prepared_elsewhere_match(root: Path) -> None:
    config = content(root, "falling", path=str(root / "again"), keep_rows=False, groups="none")
    again = prepare(Recipe.from_dict(config).data)
    assert again.fingerprint != Dataset.open(root / "falling").fingerprint
    for command in (["evaluate"], ["predict", "-o", str(root / "scores.parquet")]):
        assert main([command[0], "-q", str(root / "run"), str(root / "again"), *command[1:]]) == 0


def test_data_replaced_after_training_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = content(root, "rising", path=str(root / "falling"))
    prepare(Recipe.from_dict(config).data, overwrite=True)
    for command in ("evaluate", "predict", "export"):
        assert not missing("vocabulary item", run_refused([command, str(root / "run")], capsys))
    (root / "r.yaml").write_text(yaml.safe_dump(config))
    before = {path: path.read_bytes() for path in (root / "run").rglob("*") if path.is_file()}
    line = run_refused(["train", "--resume", str(root / "r.yaml"), "train.epochs=5"], capsys)
    assert not missing("vocabulary item", line)
    assert {path: path.read_bytes() for path in (root / "run").rglob("*") if path.is_file()} == before


def test_of_other_features_only_the_names_are_shown() -> None:
    """Each feature has a dozen fields."""
    features = [{"name": name, "kind": "single"} for name in "abcdef"]
    difference = first_difference({"sparse": features}, {"sparse": features[2:]})
    assert difference is not None
    assert (difference.field, difference.want, difference.have) == (
        "sparse (names that differ)",
        ["a", "b"],
        [],
    )
    difference = first_difference({"sparse": features}, {"sparse": features[::-1]})
    assert difference is not None
    assert difference.field == "sparse[0].name"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recipe, ``r.yaml``, and its data set."""
    root = tmp_path_factory.mktemp("small")
    (root / "r.yaml").write_text(yaml.safe_dump(tiny(root)))
    prepared(Recipe.from_dict(tiny(root)).data)
    return root


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.split.test=0.5", "data.split.test is 0.5 in the recipe, but {path} was prepared with 0.2"),
        ("data.split.seed=1", "data.split.seed is 1"),
        ("data.split.valid=0", "data.split.valid is 0"),
        ("data.vocabulary.min_count=3", "data.vocabulary.min_count is 3"),
        ("data.vocabulary.overrides={C1: {min_count: 2}}", "data.vocabulary.overrides.C1 is"),
        ("data.source.samples=6001", "data.source.samples is 6001"),
        ("data.groups=none", "data.groups is 'none'"),
        ("data.source={kind: csv, paths: [x]}", "data.source.kind is 'csv'"),
    ],
)
def test_a_recipe_for_other_data_is_refused(
    small: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = message.format(path=small / "data")
    for command in ("train", "plan"):
        line = run_refused([command, str(small / "r.yaml"), override], capsys)
        assert expected in line
        assert not missing("--overwrite", line)
    assert not (small / "run").exists()


def text_log(path: Path, first: int = 0) -> None:
    lines = ["label\tC1", *(f"{i % 2}\tv{first + i % 7}" for i in range(300))]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines))


def text_config(root: Path, *logs: str, **changes: Any) -> PrepareConfig:
    schema = Schema(sparse=(SparseFeature(name="C1"),))
    source = CsvConfig(paths=tuple(str(root / log) for log in logs), schema=schema)
    return PrepareConfig(
        source=source, path=str(root / "data"), vocabulary=VocabularyConfig(min_count=1), **changes
    )


def test_logs_are_identified_by_content(tmp_path: Path) -> None:
    for place in ("a", "b", "c"):
        text_log(tmp_path / place / "day.tsv", first=3 if place == "c" else 0)
    config = text_config(tmp_path, "a/day.tsv")
    dataset = prepare(config)
    os.utime(tmp_path / "a" / "day.tsv")
    assert prepare(config).fingerprint == dataset.fingerprint
    assert prepare(text_config(tmp_path, "b/day.tsv")).fingerprint == dataset.fingerprint
    assert not check_prepared(text_config(tmp_path, "b/day.tsv"), dataset)
    with refuses(ConfigError, "data.source.paths logs"):
        check_prepared(text_config(tmp_path, "c/day.tsv"), dataset)
    with refuses(DatasetError, "logs"):
        prepare(text_config(tmp_path, "c/day.tsv"))
    assert "cannot compare" in check_prepared(text_config(tmp_path, "gone/day.tsv"), dataset)


def test_a_change_of_one_byte_with_the_old_time_is_another_log(tmp_path: Path) -> None:
    text_log(tmp_path / "a" / "day.tsv")
    config = text_config(tmp_path, "a/day.tsv")
    prepare(config)
    path = tmp_path / "a" / "day.tsv"
    status, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with refuses(DatasetError, "logs"):
        prepare(config)


def vocabulary(values: Sequence[Any], counts: Sequence[int] | None = None) -> Vocabulary:
    column = pl.Series(values, dtype=pl.Int64 if isinstance(values[0], int) else pl.String)
    counted = pl.DataFrame({"value": column, "count": counts or range(len(values), 0, -1)})
    return Vocabulary.rank(
        counted.with_columns(held_out=pl.lit(0, pl.Int64)), VocabularyLimits(min_count=1, tail_buckets=3)
    )
