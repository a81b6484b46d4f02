"""Conversion of table configurations and keyed jagged tensors to and from TorchRec, which is imported when needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stratarec.batch.jagged import InverseJagged, JaggedTensor, KeyedJagged
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

    An `EmbeddingConfig` (unpooled) becomes a table with `sequence_features`. A `KeyedJaggedTensor` with inverse
    indices becomes a tuple of `InverseJagged`, one for each run of keys that share their inverse. Tensors are shared,
    not copied, unless keys of a group must be joined.
    """
    torchrec = _torchrec()
    if isinstance(value, torchrec.KeyedJaggedTensor):
        if value.inverse_indices_or_none() is not None:
            return _groups(value)
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
        f"cannot convert {type(value).__name__} from torchrec; expected EmbeddingBagConfig, EmbeddingConfig or "
        "KeyedJaggedTensor"
    )


def to_torchrec(value: EmbeddingBagConfig | KeyedJagged | Sequence[InverseJagged]) -> Any:
    """Convert a table or the ids of a batch to TorchRec; raises a `ConfigError` if TorchRec has no equivalent.

    Groups over the same samples become one `KeyedJaggedTensor` with a stride a key and inverse indices, which
    TorchRec's unsharded modules expand after pooling.
    """
    torchrec = _torchrec()
    if isinstance(value, Sequence):
        return _variable_stride(torchrec, value)
    if isinstance(value, KeyedJagged):
        return torchrec.KeyedJaggedTensor(
            keys=list(value.keys),
            values=value.values,
            offsets=value.bag_offsets().to(value.values.dtype),
            weights=value.weights,
        )
    if value.feature_names and value.sequence_features:
        raise ConfigError(
            f"table {value.name!r} has pooled and sequence features; TorchRec needs a separate table for each kind"
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


def _variable_stride(torchrec: Any, groups: Sequence[InverseJagged]) -> Any:
    if not groups or len({group.batch_size for group in groups}) != 1:
        raise ConfigError(f"expected groups over the same samples, got {[group.batch_size for group in groups]}")
    bags = [(key, group.inverse, group.bags()[key]) for group in groups for key in group.keys]
    if any(bag.weights is not None for _, _, bag in bags):
        raise ConfigError("torchrec does not support groups with per-sample weights; expand them first")
    keys = [key for key, _, _ in bags]
    return torchrec.KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([bag.values for _, _, bag in bags]),
        lengths=torch.cat([bag.lengths() for _, _, bag in bags]),
        stride_per_key_per_rank=[[bag.batch_size] for _, _, bag in bags],
        inverse_indices=(keys, torch.stack([inverse.long() for _, inverse, _ in bags])),
    )


def _groups(value: Any) -> tuple[InverseJagged, ...]:
    names, inverses = value.inverse_indices()
    order = dict(zip(names, inverses, strict=True))
    runs: list[tuple[torch.Tensor, dict[str, JaggedTensor]]] = []
    for key, bag in value.to_dict().items():
        features = JaggedTensor(values=bag.values(), offsets=bag.offsets(), weights=bag.weights_or_none())
        bags = runs[-1][1] if runs and torch.equal(runs[-1][0], order[key]) else {}
        if bags and next(iter(bags.values())).batch_size == features.batch_size:
            bags[key] = features
        else:
            runs.append((order[key], {key: features}))
    return tuple(InverseJagged(unique=KeyedJagged.from_features(bags), inverse=inverse) for inverse, bags in runs)
