"""What every model is: embeddings, history pooling, and a network from vectors to one logit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from stratarec.data.schema import Schema, SparseFeature
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.errors import ConfigError
from stratarec.jagged import Batch
from stratarec.models.dedup import Lookup, expand_pooled, gather_windows, look_up
from stratarec.models.sequence import HistoryConfig, build_pooling


@dataclass(frozen=True, kw_only=True)
class VectorsConfig:
    """What all models share: the vectors they start from."""

    embedding_dim: int = 16
    """D, width of every embedding."""
    pooling: Literal["mean", "sum"] = "mean"
    """How multi-valued features are pooled."""
    history: HistoryConfig = field(default_factory=HistoryConfig)
    """How histories are pooled."""

    def __post_init__(self) -> None:
        if self.embedding_dim < 1:
            raise ConfigError(f"model.embedding_dim is {self.embedding_dim}, expected at least 1")


def check_sizes(field_name: str, sizes: tuple[int, ...]) -> None:
    """Layer sizes must be positive."""
    if any(size < 1 for size in sizes):
        raise ConfigError(f"model.{field_name} is {list(sizes)}, expected positive sizes")


def build_tables(config: VectorsConfig, schema: Schema, table_rows: Mapping[str, int]) -> list[EmbeddingBagConfig]:
    """One table a vocabulary; histories that need every row are looked up without pooling."""
    unpooled = config.history.pooling != "mean"

    def is_sequence(feature: SparseFeature) -> bool:
        return unpooled and feature.kind == "history"

    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=table_rows[name],
            embedding_dim=config.embedding_dim,
            pooling=config.pooling,
            feature_names=tuple(feature.name for feature in features if not is_sequence(feature)),
            sequence_features=tuple(feature.name for feature in features if is_sequence(feature)),
        )
        for name, features in schema.vocabularies().items()
    ]


class Score(nn.Module):
    """The part that differs from model to model: dense ``[B, F_dense]`` and vectors ``[B, F, D]`` -> ``[B]``."""

    out: nn.Linear
    """The last layer."""


class Network(nn.Module):
    """The dense part of a model: pools histories, then leaves the rest to `score`.

    It sees tensors alone, so that it can be exported.
    """

    def __init__(
        self,
        config: VectorsConfig,
        schema: Schema,
        pooled_keys: tuple[str, ...],
        score: Callable[[int, int], Score],
    ) -> None:
        super().__init__()
        self.width = config.embedding_dim
        sequences = schema.histories if config.history.pooling != "mean" else ()
        self.sequence_keys = tuple(feature.name for feature in sequences)
        self.targets = tuple(pooled_keys.index(feature.of) for feature in sequences)
        self.poolings = nn.ModuleList(
            build_pooling(self.width, feature.max_length, config.history) for feature in sequences
        )
        self.score = score(len(schema.dense), len(pooled_keys) + len(sequences))

    def forward(
        self, dense: Tensor, pooled: Tensor, *sequences: Tensor, inverses: Sequence[Tensor | None] = ()
    ) -> Tensor:
        """``[B]`` logits.

        Parameters
        ----------
        dense : Tensor
            ``[B, F_dense]``.
        pooled : Tensor
            ``[B, F * D]`` pooled embeddings.
        sequences : Tensor
            For each history rows ``[U, L, D]`` and mask ``[U, L]``.
        inverses : sequence of Tensor or None
            For each history ``[B]``, which of the U each sample has; None or left out where U is B.
        """
        vectors = pooled.view(pooled.shape[0], -1, self.width)
        extra = [
            pooling(vectors[:, target], rows, mask, inverse).unsqueeze(1)
            for pooling, target, rows, mask, inverse in zip(
                self.poolings,
                self.targets,
                sequences[::2],
                sequences[1::2],
                inverses or [None] * len(self.targets),
                strict=True,
            )
        ]
        if extra:
            vectors = torch.cat([vectors, *(vector.to(vectors.dtype) for vector in extra)], dim=1)
        logits: Tensor = self.score(dense, vectors)
        return logits.float()


class CTRModel(nn.Module):
    """A batch -> logits.

    Parameters
    ----------
    embeddings : TieredEmbeddingBagCollection
        Trains itself in backward; its tables are no parameters.
    network : Network
        Everything that a dense optimizer trains.
    """

    def __init__(self, embeddings: TieredEmbeddingBagCollection, network: Network) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.network = network

    def forward(self, batch: Batch, lookup: Lookup | None = None) -> Tensor:
        """``[B]`` float32 logits; `lookup` is what `look_up` gave for the batch, where that was done ahead of time."""
        inputs, inverses = self.vectors(batch, lookup or self.look_up(batch))
        return self.network(*inputs, inverses=inverses)  # type: ignore[no-any-return]

    def look_up(self, batch: Batch) -> Lookup:
        """The ids that the tables will be asked for, each distinct value of a group once."""
        return look_up(batch, self.network.sequence_keys)

    def vectors(self, batch: Batch, lookup: Lookup) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """What the network takes: dense, pooled, rows and mask of each history; and the histories' inverses."""
        found = self.embeddings(lookup.features)
        pooled = expand_pooled(found, lookup.inverses, batch.size)
        padded: list[Tensor] = []
        for key in self.network.sequence_keys:
            sequence = found.sequences[key]
            start, length = lookup.windows.get(key, (sequence.offsets[:-1], sequence.lengths()))
            longest = max(int(length.max()) if len(length) else 0, 1)
            rows = gather_windows(sequence.values, start, length, longest)
            padded += [rows, torch.arange(longest) < length.unsqueeze(1)]
        return (batch.dense, pooled, *padded), tuple(lookup.inverses.get(key) for key in self.network.sequence_keys)
