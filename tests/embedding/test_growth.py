"""Test growing tables: old rows keep their values, new rows equal those of a table that was always
this large, and only trained rows are written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, TieredEmbeddingBagCollection
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.tiers import TableTier, TierConfig

WIDTH = 8
SMALL, LARGE = {"a": 300, "b": 20_000}, {"a": 450, "b": 26_000}


def make_collection(rows: dict[str, int], optimizer: RowOptimizerConfig, tiers: TierConfig | None) -> Any:
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=size,
            embedding_dim=WIDTH,
            feature_names=(f"f-{name}",),
            initial=SMALL[name] ** -0.5,
        )
        for name, size in rows.items()
    ]
    return TieredEmbeddingBagCollection(tables, optimizer=optimizer, seed=3, tiers=tiers)


def train(collection: Any, rows: dict[str, int], seed: int, many: int) -> dict[str, set[int]]:
    """Train some steps on the last rows of each table and return the ids of these rows."""
    random, touched = np.random.default_rng(seed), {name: set[int]() for name in rows}
    for _ in range(3):
        ids = {name: size - 1 - random.integers(0, min(many, size), many) for name, size in rows.items()}
        features = KeyedJagged(
            keys=tuple(f"f-{name}" for name in ids),
            values=torch.from_numpy(np.concatenate(list(ids.values())).astype(np.int32)),
            offsets=torch.arange(0, 2 * many + 1, dtype=torch.int64),
            batch_size=many,
        )
        collection(features).pooled.square().sum().backward()
        for name, new_ids in ids.items():
            touched[name].update(new_ids.tolist())
    return touched


def values(collection: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{part}": value.clone()
        for name in LARGE
        for part, value in collection.rows(name, 0, LARGE[name]).items()
        if part != "clock"
    }


TIERS = TierConfig(tables={name: TableTier(cache_rows=2048, codec=CodecConfig()) for name in SMALL}, ways=8)
OPTIMIZERS = {
    "adam": RowOptimizerConfig(kind="rowwise_adam", learning_rate=0.05),
    "adam of all rows": RowOptimizerConfig(kind="adam", learning_rate=0.05, rows="all", weight_decay=0.02),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_grown_table_matches_a_table_of_the_final_size_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The test covers every tier before and after the growth."""
    optimizer, results = OPTIMIZERS[name], []
    for number, (before, after) in enumerate([(None, None), (TIERS, None), (None, TIERS), (TIERS, TIERS)]):
        small = make_collection(SMALL, optimizer, before)
        train(small, SMALL, 1, 400)
        manifest = small.save(tmp_path / str(number))
        small.close()
        grown = make_collection(LARGE, optimizer, after)
        grown.engine.initialize_from(tmp_path / str(number), manifest, optimizer)
        train(grown, LARGE, 2, 400)
        results.append(values(grown))
        grown.close()
    for other in results[1:]:
        assert all(torch.equal(value, other[key]) for key, value in results[0].items())
    # clocked optimizers restart their step count, and new rows have missed no steps
    if not optimizer.clocked:
        large = make_collection(LARGE, optimizer, None)
        untouched = values(large)
        for key, value in results[0].items():
            rows = slice(SMALL[key[0]], LARGE[key[0]] - 400)
            assert torch.equal(value[rows], untouched[key][rows])


def test_a_delta_of_a_grown_table_contains_only_trained_rows(tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["adam"]
    small = make_collection(SMALL, optimizer, None)
    train(small, SMALL, 1, 12_000)
    paths = [tmp_path / str(number) for number in range(4)]
    manifest = small.save(paths[0])
    for number, path in enumerate(paths[1:], start=1):
        rows = {name: size + number * 100 for name, size in SMALL.items()}
        grown = make_collection(rows, optimizer, None)
        grown.engine.initialize_from(paths[number - 1], manifest, optimizer)
        touched = train(grown, rows, number, 500)
        manifest = grown.save(path, paths[number - 1])
        before = {file.stat().st_ino for file in paths[number - 1].rglob("rows-*")}
        new = sum(file.stat().st_size for file in path.rglob("rows-*") if file.stat().st_ino not in before)
        record = grown.engine.tables[0].codec.record_bytes
        assert 0 < new <= 1.25 * record * sum(map(len, touched.values()))
        again = make_collection(rows, optimizer, None)
        again.load(path, manifest)
        for name in rows:
            for part, value in grown.rows(name, 0, rows[name]).items():
                assert torch.equal(value, again.rows(name, 0, rows[name])[part])
