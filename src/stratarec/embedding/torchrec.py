"""To and from TorchRec: table configurations and keyed jagged tensors. TorchRec is imported only when called."""

from __future__ import annotations

from typing import Any

import torch

from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.errors import ConfigError
from stratarec.jagged import KeyedJagged


def _torchrec() -> Any:
    try:
        import torchrec
    except ImportError as error:
        raise ConfigError(f"this needs torchrec, which does not import here: {error}") from error
    return torchrec


def from_torchrec(value: Any) -> Any:
    """Our form of a TorchRec `EmbeddingBagConfig`, `EmbeddingConfig` or `KeyedJaggedTensor`.

    An `EmbeddingConfig` (unpooled) becomes a table with `sequence_features`. Tensors are shared, not copied.
    """
    torchrec = _torchrec()
    if isinstance(value, torchrec.KeyedJaggedTensor):
        if value.inverse_indices_or_none() is not None:
            raise ConfigError("this KeyedJaggedTensor has inverse indices, which are not supported")
        return KeyedJagged(
            keys=tuple(value.keys()),
            values=value.values(),
            offsets=value.offsets().to(torch.int64),
            batch_size=value.stride(),
            weights=value.weights_or_none(),
        )
    if isinstance(value, torchrec.EmbeddingBagConfig):
        return EmbeddingBagConfig(
            name=value.name,
            num_embeddings=value.num_embeddings,
            embedding_dim=value.embedding_dim,
            feature_names=tuple(value.feature_names),
            pooling="mean" if value.pooling == torchrec.PoolingType.MEAN else "sum",
        )
    if isinstance(value, torchrec.EmbeddingConfig):
        return EmbeddingBagConfig(
            name=value.name,
            num_embeddings=value.num_embeddings,
            embedding_dim=value.embedding_dim,
            sequence_features=tuple(value.feature_names),
        )
    raise ConfigError(
        f"cannot convert {type(value).__name__} from torchrec; expected EmbeddingBagConfig, EmbeddingConfig or "
        "KeyedJaggedTensor"
    )


def to_torchrec(value: EmbeddingBagConfig | KeyedJagged) -> Any:
    """TorchRec's form of a table or of a batch's ids; raises `ConfigError` for what TorchRec has no form of."""
    torchrec = _torchrec()
    if isinstance(value, KeyedJagged):
        return torchrec.KeyedJaggedTensor(
            keys=list(value.keys),
            values=value.values,
            offsets=value.bag_offsets().to(value.values.dtype),
            weights=value.weights,
        )
    if value.feature_names and value.sequence_features:
        raise ConfigError(
            f"table {value.name!r} is looked up pooled and unpooled; TorchRec needs two tables, one of each kind"
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
