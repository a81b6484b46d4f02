"""Conversion from TorchRec's table configurations and jagged tensors, imported when needed."""

from __future__ import annotations

from typing import Any

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.errors import ConfigError


def _torchrec() -> Any:
    try:
        import torchrec
    except ImportError as error:
        raise ConfigError(f"torchrec cannot be imported: {error}; install it") from error
    return torchrec


def from_torchrec(value: Any) -> Any:
    """Convert a TorchRec `EmbeddingBagConfig`, `EmbeddingConfig` or `KeyedJaggedTensor`.

    An `EmbeddingConfig` (unpooled) becomes a table with `sequence_features`. Tensors are shared,
    not copied.
    """
    torchrec = _torchrec()
    if isinstance(value, torchrec.KeyedJaggedTensor):
        if value.inverse_indices_or_none() is not None:
            raise ConfigError(
                "from_torchrec does not support a KeyedJaggedTensor with inverse indices; expand it first"
            )
        return KeyedJagged(
            keys=tuple(value.keys()),
            values=value.values(),
            offsets=value.offsets(),
            batch_size=value.stride(),
            weights=value.weights_or_none(),
        )
    if isinstance(value, torchrec.EmbeddingBagConfig | torchrec.EmbeddingConfig):
        pooled, names = isinstance(value, torchrec.EmbeddingBagConfig), tuple(value.feature_names)
        return EmbeddingBagConfig(
            name=value.name,
            num_embeddings=value.num_embeddings,
            embedding_dim=value.embedding_dim,
            feature_names=names if pooled else (),
            sequence_features=() if pooled else names,
            pooling="mean" if pooled and value.pooling == torchrec.PoolingType.MEAN else "sum",
        )
    raise ConfigError(
        f"cannot convert {type(value).__name__} from torchrec; expected EmbeddingBagConfig, "
        "EmbeddingConfig or KeyedJaggedTensor"
    )
