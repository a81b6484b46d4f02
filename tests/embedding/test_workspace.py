"""What a step takes beside its rows, counted against the process."""

from __future__ import annotations

import numpy as np
import torch

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.embedding.tiers import TableTier, TierConfig


def test_groups_of_tables_share_one_workspace_whatever_the_type_of_their_ids() -> None:
    """Groups are updated one after another; ids of one are rows, int64 here, those of the other slots, int32."""

    def collection(names: str) -> TieredEmbeddingBagCollection:
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=3000, embedding_dim=4 << place, feature_names=(f"{name}1", f"{name}2")
            )
            for place, name in enumerate("abc")
            if name in names
        ]
        tiers = TierConfig(tables={name: TableTier(cache_rows=2048) for name in names if name == "b"})
        return TieredEmbeddingBagCollection(tables, tiers=tiers)

    def train(names: str) -> tuple[dict[str, torch.Tensor], int]:
        module, draws = collection(names), np.random.default_rng(3)
        for size in (50, 400, 300):
            ids = {name: torch.from_numpy(draws.integers(0, 3000, 2 * size)) for name in "abc"}
            features = KeyedJagged(
                keys=tuple(f"{name}{place}" for name in names for place in "12"),
                values=torch.cat([ids[name] for name in names]),
                offsets=None,
                batch_size=size,
            )
            module(features).pooled.square().sum().backward()
        kept = {name: module.table(name)["weight"].clone() for name in names}
        return kept, module.engine.level0.scratch.nbytes

    together, shared = train("abc")
    alone = {name: train(name) for name in "abc"}
    for name, (rows, _) in alone.items():
        assert torch.equal(together[name], rows[name])
    assert shared == max(size for _, size in alone.values())
