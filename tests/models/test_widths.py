"""Test tables of different width, whose vectors a learned projection maps to the width of the
model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from models.test_deduplicated import KEYS, ROWS, batch, number_distinct, schema

from errors import refuses
from recipes import tiny
from stratarec.cli import main
from stratarec.embedding import RowOptimizerConfig
from stratarec.errors import ConfigError
from stratarec.models import CTRModel, DLRMConfig, HistoryConfig, ModelConfig, build_model
from stratarec.models.zoo.config import DCNv2Config
from stratarec.recipe import Recipe
from stratarec.serving.scorer import Scorer

DIMS = {"os": 4, "item": 16}


def config(pooling: Any = "mean", dims: dict[str, int] = DIMS, cross: bool = False) -> ModelConfig:
    shared: dict[str, Any] = {
        "embedding_dim": 8,
        "embedding_dims": dims,
        "history": HistoryConfig(pooling=pooling),
    }
    if cross:
        return DCNv2Config(deep_mlp=(8,), **shared)
    return DLRMConfig(bottom_mlp=(8,), top_mlp=(16,), **shared)


def make_model(config: ModelConfig) -> CTRModel:
    return build_model(
        config, schema(), ROWS, optimizer=RowOptimizerConfig(kind="sgd", learning_rate=0.5), seed=3
    )


def test_a_vector_is_its_projected_row() -> None:
    model, given = make_model(config()), batch().expanded(KEYS)
    assert {table.name: table.embedding_dim for table in model.embeddings.tables} == {
        "item": 16,
        "os": 4,
        "tags": 8,
    }
    assert [tuple(layer.weight.shape) for layer in model.network.projections] == [(8, 16), (8, 4)]
    item, os = (layer.weight for layer in model.network.projections)
    with torch.no_grad():
        pooled = model.embeddings(given.sparse).pooled
        actual = model.network.projections.of_pooled(pooled)
        places = dict(zip(model.embeddings.pooled_keys, pooled.split([16, 16, 4, 8], 1), strict=True))
        assert model.embeddings.pooled_keys == ("item", "history", "os", "tags")
        expected = [
            places["item"] @ item.T,
            places["history"] @ item.T,
            places["os"] @ os.T,
            places["tags"],
        ]
    torch.testing.assert_close(actual, torch.stack(expected, 1))


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "target_attention", "transformer"])
def test_distinct_values_train_like_expanded_ones(pooling: str, cross: bool) -> None:
    pair = [make_model(config(pooling, cross=cross)) for _ in range(2)]
    for step in range(4):
        grouped = number_distinct(batch(seed=step)) if step % 2 else batch(seed=step, scattered=step == 2)
        for model, given in zip(pair, (grouped, grouped.expanded(KEYS)), strict=True):
            model.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(given), given.label).backward()
        for one, other in zip(*(model.network.parameters() for model in pair), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    for table in ROWS:
        one, other = (model.embeddings.table(table)["weight"] for model in pair)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert not torch.equal(one, make_model(config(pooling)).embeddings.table(table)["weight"])


def test_a_run_with_tiers_predicts_the_scores_of_its_export(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    log = pl.DataFrame(
        {name: draws.integers(0, most, 1500) for name, most in (("click", 2), ("item", 300), ("os", 5))}
    )
    log.write_parquet(tmp_path / "log.parquet")
    config = tiny(tmp_path, epochs=1, max_steps=8)
    schema = {"label": "click", "sparse": [{"name": "item"}, {"name": "os"}]}
    config["data"]["source"] = {
        "kind": "parquet",
        "paths": [str(tmp_path / "log.parquet")],
        "schema": schema,
    }
    config["model"] |= {"embedding_dims": {"os": 4}, "embedding_dim": 8}
    config["memory"] = {"precision": "int8", "cache": {"fraction": 0.5, "ways": 8}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(config))
    assert main(["prepare", str(tmp_path / "r.yaml"), "-q"]) == 0
    assert main(["plan", str(tmp_path / "r.yaml")]) == 0
    assert main(["train", str(tmp_path / "r.yaml"), "-q"]) == 0
    assert main(["check", str(tmp_path / "run")]) == 0
    assert main(["predict", str(tmp_path / "run"), "-q", "-o", str(tmp_path / "s.parquet")]) == 0
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "e"), "-q"]) == 0
    result = pl.read_parquet(tmp_path / "s.parquet")
    scores = Scorer.open(tmp_path / "e").score(log[result["row"].to_numpy() - 1])
    np.testing.assert_allclose(result["score"], scores, rtol=1e-5)
    wrong = {**config, "model": config["model"] | {"embedding_dims": {"oz": 2}}}
    with refuses(ConfigError, "model.embedding_dims.oz"):
        Recipe.from_dict(wrong)
    with refuses(ConfigError, "model.embedding_dims.os 0 1"):
        Recipe.from_dict({**config, "model": config["model"] | {"embedding_dims": {"os": 0}}})
