"""What every model is: embeddings, history pooling, and a network from vectors to one logit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stratarec.batch.batch import Batch
from stratarec.data.schema import Schema, SparseFeature
from stratarec.embedding import EmbeddingBagConfig, EmbeddingCollection, Handle
from stratarec.errors import ConfigError, TrainingError
from stratarec.kernels.runtime.accelerator import CPU, beside, transfers_of
from stratarec.models.calibration import Calibration
from stratarec.models.heads import HeadsConfig, MMoE, SharedBottom, build_heads
from stratarec.models.history import History, HistoryWindows
from stratarec.models.layers import MLP, Initialization
from stratarec.models.projections import Projections
from stratarec.models.request import Request
from stratarec.models.runs import Runs, chosen
from stratarec.models.sequence import HistoryConfig, build_pooling
from stratarec.models.towers.tower_config import TowersConfig
from stratarec.models.zoo.fields import Terms


@dataclass(frozen=True, kw_only=True)
class VectorsConfig:
    """What all models share: the vectors they start from."""

    kind: str
    """Names the model."""
    first_order: ClassVar[bool] = False
    """Whether a row has its value's first-order weight behind its vector."""
    layer_counts: ClassVar[tuple[str, ...]] = ()
    """Fields that say how many layers there are, as lists of sizes do: an export may not ask for many."""
    default_overrides: ClassVar[Mapping[str, Any]] = {}
    """Field of a recipe, as ``train.embedding.kind`` -> the value for this model where the recipe leaves it out."""
    embedding_dim: int = 16
    """D, width of every vector that the network takes."""
    embedding_dims: Mapping[str, int] = field(default_factory=dict)
    """Vocabulary -> width of its table, where that is another than `embedding_dim`: a learned linear projection takes
    its vectors there (mixed dimensions, Ginart et al. 2019, arXiv 1909.11810). Small vocabularies need less."""
    pooling: Literal["mean", "sum"] = "mean"
    """How multi-valued features are pooled; by weight, where they have weights."""
    history: HistoryConfig = field(default_factory=HistoryConfig)
    """How histories and sequences are pooled."""
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    """How several labels share the network."""
    towers: TowersConfig | None = None
    """Groups of features that tell the rest of the model less than their vectors; null for none."""
    dropout: float = 0.0
    """Share of the outputs of each hidden layer that a training step leaves out; those of a history's attention have
    none."""
    initialization: Initialization = "dlrm"
    """First weights of linear layers: Xavier's normal ones, with random biases (``dlrm``) or zeros (``xavier``)."""
    initial_logit: Literal["click_rate", "zero"] = "click_rate"
    """The bias of the last layer of a new model: the log-odds of the click rate, or 0. From 0 all rows first learn the
    rate together, by which products of small rows find a way that they may not find otherwise."""
    initial_rows: float = 0.0
    """First weights of rows are uniform within plus and minus this; 0 for 1 / sqrt(rows of a table), which gives
    small tables rows many times as large as those of large ones. A table that grows keeps to the rows it began with."""
    batch_norm: bool = False
    """Whether each hidden layer normalizes over the batch before its ReLU; those of a history's attention do not. Of
    several ranks each does so over its own samples."""

    one_label: ClassVar[bool] = False
    """Whether the model supports one label only."""

    def __post_init__(self) -> None:
        if self.embedding_dim < 1:
            raise ConfigError(f"model.embedding_dim is {self.embedding_dim}, expected at least 1")
        if not 0 <= self.initial_rows < math.inf:
            raise ConfigError(f"model.initial_rows is {self.initial_rows}, expected a finite number of 0 or more")
        for name, width in self.embedding_dims.items():
            if width < 1:
                raise ConfigError(f"model.embedding_dims.{name} is {width}, expected at least 1")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout is {self.dropout}, expected 0 or more and less than 1")

    def mlp(self, inputs: int, sizes: Sequence[int], *, last: int | None = None) -> MLP:
        """An `MLP` with the dropout and the batch normalization of this model."""
        return MLP(inputs, sizes, dropout=self.dropout, batch_norm=self.batch_norm, last=last)

    def table_width(self, vocabulary: str) -> int:
        """Of the table of a vocabulary."""
        return self.embedding_dims.get(vocabulary, self.vector_width)

    @property
    def vector_width(self) -> int:
        """Of what the network is given of a value: its vector, and its first-order weight where a model has such."""
        return self.embedding_dim + self.first_order

    def check_labels(self, names: Sequence[str]) -> None:
        """Refuse several labels where the model supports one."""
        if self.one_label and len(names) > 1:
            raise ConfigError(
                f"model.kind is {self.kind}, which supports one label; got {', '.join(names)}. Set model.kind to "
                "another one, such as dlrm"
            )

    def check_vocabularies(self, names: Collection[str]) -> None:
        """Refuse widths of vocabularies that there are not."""
        other = next((name for name in self.embedding_dims if name not in names), None)
        if other is not None:
            raise ConfigError(f"model.embedding_dims.{other}: no such vocabulary; there are {', '.join(names)}")


def build_tables(
    config: VectorsConfig, schema: Schema, table_rows: Mapping[str, int], first_rows: Mapping[str, int] | None = None
) -> list[EmbeddingBagConfig]:
    """One table a vocabulary; histories and sequences that need every row are looked up without pooling.

    With `first_rows`, all rows of a table that has grown begin as those did that it had first.
    """
    first_rows = first_rows or table_rows
    unpooled = config.history.pooling != "mean"
    config.check_vocabularies(schema.vocabularies())

    def is_sequence(feature: SparseFeature) -> bool:
        return unpooled and feature.kind in ("history", "sequence")

    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=table_rows[name],
            embedding_dim=config.table_width(name),
            pooling=config.pooling,
            initial=config.initial_rows or float(first_rows[name] ** -0.5),
            feature_names=tuple(feature.name for feature in features if not is_sequence(feature)),
            sequence_features=tuple(feature.name for feature in features if is_sequence(feature)),
        )
        for name, features in schema.vocabularies().items()
    ]


class Score(nn.Module):
    """The part that differs from model to model: dense ``[B, F_dense]`` and vectors ``[B, F, W]`` -> ``[B]``, or
    ``[B, T]`` where there are T labels. It is made from its `config` and the counts F_dense and F.

    A third argument says which vectors samples share, or is None. Models with tower modules take one argument more,
    both times: numbers ``[B, N]`` that interact with nothing else before the last layers.
    """

    config: ClassVar[type[VectorsConfig]]
    """What a recipe says of this model; its `kind` names it."""
    out: nn.Linear | Terms | SharedBottom | MMoE
    """The last layer, or what several labels have in its place."""

    def take_features(self, names: tuple[str, ...]) -> None:
        """Learn which features the vectors are of, in order; most models need not know."""


class Network(nn.Module):
    """The dense part of a model: pools histories and sequences, then leaves the rest to `score`.

    An event of a sequence is the sum of the rows of its columns, and what attention compares it with is the sum of the
    vectors of the features that these are of: that takes no weights of its own, and leaves both in one space.
    """

    labels: tuple[str, ...]
    """What logits are of."""
    weighted_means: tuple[str, ...]
    """The features of which the mean is taken by their weights."""

    def __init__(
        self,
        config: VectorsConfig,
        schema: Schema,
        pooled_keys: tuple[str, ...],
        score: Callable[[int, int], nn.Module],
    ) -> None:
        super().__init__()
        self.width = config.vector_width
        behaviours = tuple(schema.behaviours.values()) if config.history.pooling != "mean" else ()
        self.event_columns = tuple(tuple(feature.name for feature in columns) for columns in behaviours)
        """The columns of each history and sequence."""
        self.sequence_keys = tuple(name for columns in self.event_columns for name in columns)
        self.targets = tuple(
            tuple(pooled_keys.index(feature.of) for feature in columns if feature.of) for columns in behaviours
        )
        """Which pooled vectors each is compared with."""
        for columns, targets in zip(self.event_columns, self.targets, strict=True):
            if config.history.pooling == "target_attention" and not targets:
                raise ConfigError(
                    f"model.history.pooling is target_attention, and sparse feature {columns[0]!r} has no `of` to "
                    "compare its events with: name it in the schema, or take another pooling"
                )
        self.poolings = nn.ModuleList(
            build_pooling(self.width, columns[0].max_length, config.history) for columns in behaviours
        )
        self.projections = Projections(schema, config.table_width, self.width, pooled_keys)
        self.score = score(len(schema.dense), len(pooled_keys) + len(behaviours))
        self.correction: tuple[float, ...] = ()
        """Added to the logit of each label wherever the network is not trained, none by default: the logarithm of the
        share of negatives that it saw, over how many times a positive sample counted as one of these. So much larger
        the odds are that it learned (Elkan 2001, theorem 2)."""
        self.calibration: Calibration | None = None
        """What becomes of them after that, where a correction was fitted."""

    def take_labels(self, labels: tuple[str, ...], config: VectorsConfig) -> None:
        """Give the logits of `labels`: of several by heads in place of the last layer."""
        self.labels = labels
        config.check_labels(labels)
        if len(labels) > 1:
            assert isinstance(self.score, Score)
            assert isinstance(self.score.out, nn.Linear | Terms)
            self.score.out = build_heads(self.score.out.in_features, len(labels), config.heads, config.mlp)

    def take_weighted(self, schema: Schema, config: VectorsConfig) -> None:
        """Expect weights of the features that have them."""
        weighted = schema.weighted if config.pooling == "mean" else ()
        self.weighted_means = tuple(feature.name for feature in weighted)

    def forward(
        self, dense: Tensor, pooled: Tensor, histories: Sequence[History] = (), runs: Runs | None = None
    ) -> Tensor:
        """``[B]`` logits; ``[B, T]`` of several labels; in training ``[B, K]`` where a model has K members.

        Parameters
        ----------
        dense : Tensor
            ``[B, F_dense]``.
        pooled : Tensor
            ``[B, .]`` pooled embeddings, as wide as their tables; may be overwritten.
        histories : sequence of History
            The unpooled features, those of `sequence_keys`.
        runs : Runs
            Which pooled embeddings samples share; by default none.
        """
        vectors = self.projections.of_pooled(pooled, runs)
        if runs is not None and any(runs.shared[place] for targets in self.targets for place in targets):
            vectors, runs = runs.expand(vectors), None
        wide = [
            replace(history, rows=self.projections.of_rows(name, history.rows))
            for name, history in zip(self.sequence_keys, histories, strict=True)
        ]
        extra = [
            pooling(_query(vectors, targets), _joined(columns))
            for pooling, targets, columns in zip(self.poolings, self.targets, self._by_column(wide), strict=True)
        ]
        return self._logits(dense, vectors, extra, runs)

    def padded(self, dense: Tensor, pooled: Tensor, *sequences: Tensor) -> Tensor:
        """As `forward` from tensors alone, for export: rows ``[B, L, D]`` and mask ``[B, L]`` of each history."""
        vectors = self.projections.of_pooled(pooled)
        wide = list(map(self.projections.of_rows, self.sequence_keys, sequences[::2]))
        parts = zip(self.poolings, self.targets, self._by_column(wide), self._by_column(sequences[1::2]), strict=True)
        extra = [
            pooling.padded(_query(vectors, targets), _sum(rows), masks[0])  # type: ignore[operator]
            for pooling, targets, rows, masks in parts
        ]
        return self._logits(dense, vectors, extra)

    def _by_column(self, found: Sequence[Any]) -> list[Sequence[Any]]:
        """What there is for each of `sequence_keys`, by history and sequence."""
        ends = list(accumulate(len(columns) for columns in self.event_columns))
        return [found[end - len(columns) : end] for columns, end in zip(self.event_columns, ends, strict=True)]

    def _logits(self, dense: Tensor, vectors: Tensor, extra: Sequence[Tensor], runs: Runs | None = None) -> Tensor:
        if extra:
            vectors = torch.cat([vectors, *(vector.unsqueeze(1).to(vectors.dtype) for vector in extra)], dim=1)
            runs = runs and runs.beside(len(extra))
        logits: Tensor = self.score(dense, vectors, runs)
        return self._corrected(logits)

    def _corrected(self, logits: Tensor) -> Tensor:
        found = logits.float()
        if self.training:
            return found
        if any(self.correction):
            found = found + (self.correction[0] if found.ndim == 1 else beside(torch.tensor(self.correction), found))
        return found if self.calibration is None else self.calibration(found)


def _query(vectors: Tensor, targets: Sequence[int]) -> Tensor:
    """``[B, D]`` from ``[B, F, D]``: what a history or sequence is compared with."""
    return vectors[:, targets[0]] if len(targets) == 1 else chosen(vectors, targets).sum(1)


def _joined(columns: Sequence[History]) -> History:
    """Events of several columns, whose windows are the same."""
    return columns[0] if len(columns) == 1 else replace(columns[0], rows=_sum([column.rows for column in columns]))


def _sum(rows: Sequence[Tensor]) -> Tensor:
    """Of tensors of one shape, in their order."""
    return sum(rows[1:], rows[0])


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
        self.device = CPU
        """Where the network is; rows stay where they are."""

    def place(self, device: torch.device) -> None:
        """Take the network to a device, before anything is made of its weights."""
        try:
            self.network.to(device)
        except torch.OutOfMemoryError as error:
            raise TrainingError(f"{device} has too little memory for the network alone: leave it on the cpu") from error
        self.device, self.embeddings.engine.transfers = device, transfers_of(device)

    def forward(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """``[B]`` float32 logits; ``[B, T]`` of several labels.

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
        return Request.of(batch, self.network.sequence_keys, self.network.weighted_means)

    def nothing(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """A zero that depends on what is looked up: for a batch without samples of which others have some."""
        found = self.embeddings(prepared or (request or self.request(batch)).features)
        total: Tensor = found.pooled.sum() + sum(bags.values.sum() for bags in found.sequences.values())
        return total

    def vectors(
        self, batch: Batch, request: Request, prepared: Handle | None = None
    ) -> tuple[Tensor, Tensor, list[History], Runs | None]:
        """What the network takes: dense, pooled, unpooled histories, and which pooled vectors samples share."""
        # Up before rows are looked up: it is there by then.
        dense = self.embeddings.engine.transfers.up(batch.dense)
        return dense, *self.looked_up(request, batch.size, self.network.sequence_keys, prepared)

    def looked_up(
        self, request: Request, size: int, sequences: Sequence[str], prepared: Handle | None = None
    ) -> tuple[Tensor, list[History], Runs | None]:
        """As `vectors`, of so many samples."""
        found = self.embeddings(prepared or request.features)
        histories = []
        for key in sequences:
            bags = found.sequences[key]
            # Behind the batch's samples there may be empty bags.
            offsets = bags.offsets[: size + 1]
            windows = request.windows.get(key) or HistoryWindows(start=offsets[:-1], length=offsets.diff())
            histories.append(History(rows=bags.values, windows=windows))
        # A group may have more distinct values than there are samples.
        pooled = found.pooled if len(found.pooled) == size else found.pooled[:size]
        return pooled, histories, Runs.of(request, found.pooled_keys)


def autocast(precision: str, device: torch.device = CPU) -> torch.autocast:
    """The context in which the network runs on a device."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """``[B]`` probabilities of a click."""
    with np.errstate(over="ignore"):  # a logit of -800 is a probability of 0
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
