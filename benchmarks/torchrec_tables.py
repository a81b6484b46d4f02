"""Conversion of tables and batches to TorchRec."""

from __future__ import annotations

from typing import Any

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding.config import EmbeddingBagConfig


def to_torchrec(value: EmbeddingBagConfig | KeyedJagged) -> Any:
    """Convert a table or the ids of a batch to TorchRec."""
    import torchrec

    if isinstance(value, KeyedJagged):
        return torchrec.KeyedJaggedTensor(
            keys=list(value.keys),
            values=value.values,
            offsets=value.bag_offsets().to(value.values.dtype),
            weights=value.weights,
        )
    common: dict[str, Any] = {
        "name": value.name,
        "num_embeddings": value.num_embeddings,
        "embedding_dim": value.embedding_dim,
    }
    if value.sequence_features:
        return torchrec.EmbeddingConfig(feature_names=list(value.sequence_features), **common)
    pooling = torchrec.PoolingType.MEAN if value.pooling == "mean" else torchrec.PoolingType.SUM
    return torchrec.EmbeddingBagConfig(feature_names=list(value.feature_names), pooling=pooling, **common)
