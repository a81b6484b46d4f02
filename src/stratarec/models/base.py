"""What every model is: embeddings, history pooling, and a network from vectors to one logit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stratarec.batch import Batch
from stratarec.data.schema import Schema, SparseFeature
from stratarec.embedding import EmbeddingBagConfig, EmbeddingCollection, Handle
from stratarec.errors import ConfigError
from stratarec.models.history import History, Windows
from stratarec.models.request import Request
from stratarec.models.runs import Runs
from stratarec.models.sequence import HistoryConfig, build_pooling
from stratarec.models.towers import TowersConfig


@dataclass(frozen=True, kw_only=True)
class VectorsConfig:
    """What all models share: the vectors they start from."""

    embedding_dim: int = 16
    """D, width of every embedding."""
    pooling: Literal["mean", "sum"] = "mean"
    """How multi-valued features are pooled."""
    history: HistoryConfig = field(default_factory=HistoryConfig)
    """How histories are pooled."""
    towers: TowersConfig | None = None
    """Groups of features that tell the rest of the model less than their vectors; null for none."""

    def __post_init__(self) -> None:
        if self.embedding_dim < 1:
            raise ConfigError(f"model.embedding_dim is {self.embedding_dim}, expected at least 1")


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
    """The part that differs from model to model: dense ``[B, F_dense]`` and vectors ``[B, F, D]`` -> ``[B]``.

    A third argument says which vectors samples share, or is None; a fourth are numbers ``[B, N]`` that interact with
    nothing else before the last layers, or None.
    """

    out: nn.Linear
    """The last layer."""


class Network(nn.Module):
    """The dense part of a model: pools histories, then leaves the rest to `score`."""

    def __init__(
        self,
        config: VectorsConfig,
        schema: Schema,
        pooled_keys: tuple[str, ...],
        score: Callable[[int, int], nn.Module],
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
        self.correction = 0.0
        """Added to logits wherever the network is not trained: the logarithm of the share of negatives that it saw."""

    def forward(
        self, dense: Tensor, pooled: Tensor, histories: Sequence[History] = (), runs: Runs | None = None
    ) -> Tensor:
        """``[B]`` logits.

        Parameters
        ----------
        dense : Tensor
            ``[B, F_dense]``.
        pooled : Tensor
            ``[B, F * D]`` pooled embeddings; may be overwritten.
        histories : sequence of History
            Unpooled histories.
        runs : Runs
            Which pooled embeddings samples share; by default none.
        """
        vectors = pooled.view(len(pooled), -1, self.width)
        if runs is not None and any(runs.shared[target] for target in self.targets):
            vectors, runs = runs.expand(vectors), None
        extra = [
            pooling(vectors[:, target], history)
            for pooling, target, history in zip(self.poolings, self.targets, histories, strict=True)
        ]
        return self._logits(dense, vectors, extra, runs)

    def padded(self, dense: Tensor, pooled: Tensor, *sequences: Tensor) -> Tensor:
        """As `forward` from tensors alone, for export: rows ``[B, L, D]`` and mask ``[B, L]`` of each history."""
        vectors = pooled.view(pooled.shape[0], -1, self.width)
        extra = [
            pooling.padded(vectors[:, target], rows, mask)  # type: ignore[operator]
            for pooling, target, rows, mask in zip(
                self.poolings, self.targets, sequences[::2], sequences[1::2], strict=True
            )
        ]
        return self._logits(dense, vectors, extra)

    def _logits(self, dense: Tensor, vectors: Tensor, extra: Sequence[Tensor], runs: Runs | None = None) -> Tensor:
        if extra:
            vectors = torch.cat([vectors, *(vector.unsqueeze(1).to(vectors.dtype) for vector in extra)], dim=1)
            runs = runs and runs.beside(len(extra))
        logits: Tensor = self.score(dense, vectors, runs)
        return self._corrected(logits)

    def _corrected(self, logits: Tensor) -> Tensor:
        return logits.float() if self.training or not self.correction else logits.float() + self.correction


class CTRModel(nn.Module):
    """A batch -> logits.

    Parameters
    ----------
    embeddings : EmbeddingCollection
        Trains itself in backward; its tables are no parameters.
    network : Network
        Everything that a dense optimizer trains.
    """

    def __init__(self, embeddings: EmbeddingCollection[Any], network: Network) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.network = network

    def forward(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """``[B]`` float32 logits.

        Parameters
        ----------
        request : Request
            What `request` gave for the batch, where that was done ahead of time.
        prepared : Prepared
            What ``embeddings.prepare(request.features)`` gave, likewise.
        """
        return self.network(*self.vectors(batch, request or self.request(batch), prepared))  # type: ignore[no-any-return]

    def request(self, batch: Batch) -> Request:
        """The ids that the tables will be asked for, each distinct value of a group once."""
        return Request.of(batch, self.network.sequence_keys)

    def nothing(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """A zero that depends on what is looked up: for a batch without samples of which others have some."""
        found = self.embeddings(prepared or (request or self.request(batch)).features)
        total: Tensor = found.pooled.sum() + sum(bags.values.sum() for bags in found.sequences.values())
        return total

    def vectors(
        self, batch: Batch, request: Request, prepared: Handle | None = None
    ) -> tuple[Tensor, Tensor, list[History], Runs | None]:
        """What the network takes: dense, pooled, unpooled histories, and which pooled vectors samples share."""
        return batch.dense, *self.looked_up(request, batch.size, self.network.sequence_keys, prepared)

    def looked_up(
        self, request: Request, size: int, sequences: Sequence[str], prepared: Handle | None = None
    ) -> tuple[Tensor, list[History], Runs | None]:
        """As `vectors`, of so many samples."""
        found = self.embeddings(prepared or request.features)
        histories = []
        for key in sequences:
            bags = found.sequences[key]
            windows = request.windows.get(key) or Windows(start=bags.offsets[:-1], length=bags.lengths())
            histories.append(History(rows=bags.values, windows=windows))
        # A group may have more distinct values than there are samples.
        pooled = found.pooled if len(found.pooled) == size else found.pooled[:size]
        return pooled, histories, Runs.of(request, found.pooled_keys)
