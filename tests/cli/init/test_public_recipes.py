"""Test that recipes of public data sets read files with their columns, split by file, and train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer

RECIPES = Path(__file__).parents[3] / "src" / "stratarec" / "recipes"
PUBLIC = ("frappe_x1", "movielenslatest_x1", "criteo_x1", "criteo_x4", "avazu_x1", "taobaoad_x1")
ROWS = {"train": 80, "valid": 20, "test": 30}


def frame(schema: Schema, rows: int, rare: bool) -> pl.DataFrame:
    """Return a frame with few distinct values. With `rare`, one value is not in the training
    file.
    """
    draws = np.random.default_rng(rows)
    columns: dict[str, Any] = {schema.label_column: draws.integers(0, 2, rows)}
    columns |= {feature.name: draws.random(rows).round(3) for feature in schema.dense}
    lengths = draws.integers(0, 4, rows)
    for feature in schema.sparse:
        values = draws.integers(0, 3, rows)
        if feature.kind == "sequence":
            columns[feature.name] = ["^".join(map(str, draws.integers(0, 3, length))) for length in lengths]
        else:
            values[0] = 99 if rare else values[0]
            columns[feature.name] = values
    return pl.DataFrame(columns)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "frappe_x1" else pytest.mark.slow) for name in PUBLIC]
)
def test_files_with_the_columns_are_prepared_and_trained_on(name: str, tmp_path: Path) -> None:
    path = RECIPES / f"{name}.yaml"
    schema: Schema = Recipe.load(path).data.source.schema  # type: ignore[union-attr]
    parquet = name == "frappe_x1"
    for split, rows in ROWS.items():
        columns = frame(schema, rows, split != "train")
        columns.write_parquet(tmp_path / f"{split}.parquet") if parquet else columns.write_csv(
            tmp_path / f"{split}.csv"
        )
    small = {
        "dcnv2": ["model.deep_mlp=[8]"],
        "din": ["model.deep_mlp=[8]", "model.history.attention_mlp=[4]"],
    }
    fields = [
        f"data.source.paths=['{tmp_path}/*.{'parquet' if parquet else 'csv'}']",
        f"data.path={tmp_path}/data",
        f"train.run={tmp_path}/run",
        "train.max_steps=2",
        "train.threads=1",
        "train.early_stopping.patience=0",
        "model.embedding_dim=8",
    ]
    recipe = Recipe.load(path, [*fields, *small[Recipe.load(path).model.kind]])
    dataset = prepare(recipe.data)
    assert {split: dataset.samples(split) for split in ROWS} == ROWS
    # Values that occur only in validation and test share a row with rare values.
    once = recipe.data.vocabulary.min_count
    assert all(rows == 3 + 1 for rows in dataset.table_rows().values()), f"min_count {once}"
    assert Trainer(recipe, dataset).train()["test"]["auc"] is not None
