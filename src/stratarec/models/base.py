"""Common parts of all models: embeddings, history pooling, and a network from vectors to one
logit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.schema import Schema, SparseFeature
from stratarec.embedding import EmbeddingBagConfig, EmbeddingCollection, Embeddings, Handle
from stratarec.embedding.rings import sequence_room
from stratarec.errors import ConfigError, TrainingError
from stratarec.kernels.row_index import RowIndex, take
from stratarec.kernels.runtime.accelerator import CPU, on_device, transfers_of
from stratarec.models.calibration import Calibration
from stratarec.models.config import VectorsConfig
from stratarec.models.heads import MMoE, SharedBottom, build_heads
from stratarec.models.history import History, HistoryLists, HistoryWindows, build_pooling
from stratarec.models.request import Request, Segments, chosen
from stratarec.models.zoo.fields import Terms
from stratarec.models.zoo.trees import MEMBERS, TreeMembers


def build_tables(
    config: VectorsConfig,
    schema: Schema,
    table_rows: Mapping[str, int],
    first_rows: Mapping[str, int] | None = None,
) -> list[EmbeddingBagConfig]:
    """Return one table for each vocabulary. Histories and sequences are not pooled if the model
    needs their single rows.

    `first_rows` gives the table sizes from which the bound of initial weights is computed, unless
    `config` sets the bound. By default these are `table_rows`.
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
    """The part that differs between models. It maps dense ``[B, F_dense]`` and vectors ``[B, F,
    W]`` to logits.

    Logits are ``[B]``, or ``[B, T]`` for T labels. The constructor takes `config` and the counts
    F_dense and F. The third argument of `forward` is the `Segments` of shared vectors, or None.
    Models with tower modules take one more argument: a count N in the constructor, and in `forward`
    numbers ``[B, N]`` that only the last layers use.
    """

    config: ClassVar[type[VectorsConfig]]
    """Class of the ``model`` section of a recipe for this model; its `kind` is the name of the
    model.
    """
    captured: ClassVar[bool] = False
    """Whether a CUDA graph can repeat a training step on an NVIDIA GPU. `forward` must then queue
    the same kernels for all batches of a shape: without copies from the host, waits, random numbers
    or state."""
    tower: ClassVar[type[Any] | None] = None
    """Class of this model's `TowerModule`; None if towers can only send their vectors."""
    out: nn.Linear | Terms | SharedBottom | MMoE
    """The last layer, or the heads of several labels."""

    def set_features(self, names: tuple[str, ...]) -> None:
        """Set the names of the features, in the order of their vectors; most models do not need the
        names.
        """

    def logits(self, columns: Tensor) -> Tensor:
        """Apply the last layer; for a single label, return ``[B]`` instead of ``[B, 1]``."""
        logits: Tensor = self.out(columns)
        return logits.squeeze(-1)


class Network(nn.Module):
    """The dense part of a model: pools histories and sequences, then calls `score`.

    The vector of an event in a sequence is the sum of the rows of its columns. Attention compares
    it with the sum of the vectors of the features to which the columns refer (`of` in the schema).
    Both sums are in the same vector space, and computing them needs no weights.
    """

    labels: tuple[str, ...]
    """Names of the labels, in the order of the logits."""
    weighted_means: tuple[str, ...]
    """Features with a weighted mean."""

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
        # The columns of each history or sequence, and the pooled vectors with which attention
        # compares its events.
        self.event_columns = tuple(tuple(feature.name for feature in columns) for columns in behaviours)
        self.sequence_keys = tuple(name for columns in self.event_columns for name in columns)
        self.targets = tuple(
            tuple(pooled_keys.index(feature.of) for feature in columns if feature.of)
            for columns in behaviours
        )
        for columns, targets in zip(self.event_columns, self.targets, strict=True):
            if config.history.pooling == "target_attention" and not targets:
                raise ConfigError(
                    f"model.history.pooling is target_attention, and sparse feature {columns[0]!r} has no "
                    "`of` to compare its events with: add it to the schema, or set another pooling"
                )
        self.poolings = nn.ModuleList(
            build_pooling(self.width, columns[0].max_length, config.history) for columns in behaviours
        )
        self.projections = Projections(schema, config.table_width, self.width, pooled_keys)
        self.score = score(len(schema.dense), len(pooled_keys) + len(behaviours))
        self.correction: tuple[float, ...] = ()
        """Correction that is added to the logit of each label, except in training; empty for none.
        If training keeps a share s of the negatives and weights positives by w, it multiplies the
        odds by w / s, and the correction is log(s / w) (Elkan 2001, theorem 2)."""
        self.calibration: Calibration | None = None
        """Map that is applied to the corrected logits; None if no map was fitted."""
        self.skips_trees = False
        """Whether the logits of trees are zeros."""

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph can repeat a training step."""
        return len(self.labels) == 1 and getattr(self.score, "captured", False)

    @property
    def trees(self) -> TreeMembers | None:
        """Members of an ensemble that are boosted trees; None for other models."""
        return getattr(self.score, "trees", None)

    @property
    def tree_columns(self) -> int:
        """Number of columns behind the dense features in the input of the network outside
        training.
        """
        return 0 if self.trees is None else MEMBERS

    @property
    def behaviours(self) -> list[tuple[tuple[str, ...], Any]]:
        """Columns and pooling of each history or sequence."""
        return list(zip(self.event_columns, self.poolings, strict=True))

    def lists(self, request: Request, size: int) -> tuple[RowIndex | None, ...]:
        """Return `Request.lists` for a batch of `size` samples."""
        starts = request.starts
        lists = [None if starts is None else RowIndex.of_lengths(starts.diff(), rows=size, room=size)]
        for (first, *_), pooling in self.behaviours:
            rows = sequence_room(int(request.bags_of(first)[-1]))
            lists += pooling.lists(request.windows_of(first, size), rows)
        return tuple(lists)

    def fault(self) -> str:
        """Check tensors on which more than arithmetic depends, such as nodes of trees, because they
        may come from a file. Return what is wrong, or an empty string.
        """
        for name, module in self.named_modules():
            check = None if module is self else getattr(module, "fault", None)
            if check is not None and (reason := check()):
                return f"{name} has {reason}"
        return ""

    def inputs(self, dense: Tensor, sparse: KeyedJagged) -> Tensor:
        """Return the dense features, followed by the logits of trees if there are any. Training
        does not use these.
        """
        if self.trees is None or self.training:
            return dense
        logits = (
            dense.new_zeros(len(dense), self.tree_columns)
            if self.skips_trees
            else self.trees(dense, sparse)
        )
        return torch.cat([dense, logits], dim=1)

    def set_labels(self, labels: tuple[str, ...], config: VectorsConfig) -> None:
        """Set the labels. For several labels, heads replace the last layer."""
        self.labels = labels
        config.check_labels(labels)
        if len(labels) > 1:
            assert isinstance(self.score, Score)
            assert isinstance(self.score.out, nn.Linear | Terms)
            self.score.out = build_heads(self.score.out.in_features, len(labels), config.heads, config.mlp)

    def set_weighted(self, schema: Schema, config: VectorsConfig) -> None:
        """Set the features that are pooled by weighted means."""
        weighted = schema.weighted if config.pooling == "mean" else ()
        self.weighted_means = tuple(feature.name for feature in weighted)

    def forward(
        self,
        dense: Tensor,
        pooled: Tensor,
        histories: Sequence[History] = (),
        segments: Segments | None = None,
    ) -> Tensor:
        """Return ``[B]`` logits, or ``[B, T]`` for several labels, or ``[B, K]`` in training for K
        ensemble members.

        Parameters
        ----------
        dense : Tensor
            ``[B, F_dense]``.
        pooled : Tensor
            ``[B, sum of table widths]`` pooled embeddings; the tensor may be overwritten.
        histories : sequence of History
            Rows of the features without pooling, in the order of `sequence_keys`.
        segments : Segments
            Which samples share pooled embeddings; by default each sample has its own.
        """
        vectors = self.projections.of_pooled(pooled, segments)
        if segments is not None and any(
            segments.shared[place] for targets in self.targets for place in targets
        ):
            vectors, segments = segments.expand(vectors), None
        wide = [
            replace(history, rows=self.projections.of_rows(name, history.rows))
            for name, history in zip(self.sequence_keys, histories, strict=True)
        ]
        extra = [
            pooling(_query(vectors, targets), _joined(columns))
            for pooling, targets, columns in zip(
                self.poolings, self.targets, self._by_column(wide), strict=True
            )
        ]
        return self._logits(dense, vectors, extra, segments)

    def padded(self, dense: Tensor, pooled: Tensor, *sequences: Tensor) -> Tensor:
        """Compute the same as `forward`, for export.

        Each history is given as two tensors: rows ``[B, L, D]`` and a mask ``[B, L]``.
        """
        vectors = self.projections.of_pooled(pooled)
        wide = list(map(self.projections.of_rows, self.sequence_keys, sequences[::2]))
        parts = zip(
            self.poolings,
            self.targets,
            self._by_column(wide),
            self._by_column(sequences[1::2]),
            strict=True,
        )
        extra = [
            pooling.padded(_query(vectors, targets), _sum(rows), masks[0])  # type: ignore[operator]
            for pooling, targets, rows, masks in parts
        ]
        return self._logits(dense, vectors, extra)

    def _by_column(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """Group the values of `sequence_keys` by history and sequence."""
        ends = list(accumulate(len(columns) for columns in self.event_columns))
        return [
            values[end - len(columns) : end] for columns, end in zip(self.event_columns, ends, strict=True)
        ]

    def _logits(
        self, dense: Tensor, vectors: Tensor, extra: Sequence[Tensor], segments: Segments | None = None
    ) -> Tensor:
        if extra:
            vectors = torch.cat(
                [vectors, *(vector.unsqueeze(1).to(vectors.dtype) for vector in extra)], dim=1
            )
            segments = segments and segments.with_unshared(len(extra))
        logits: Tensor = self.score(dense, vectors, segments)
        return self._corrected(logits)

    def _corrected(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        if self.training:
            return logits
        if any(self.correction):
            several = logits.ndim > 1
            logits = logits + (
                on_device(torch.tensor(self.correction), logits) if several else self.correction[0]
            )
        return logits if self.calibration is None else self.calibration(logits)


def _query(vectors: Tensor, targets: Sequence[int]) -> Tensor:
    """Return the sum ``[B, D]`` of the `targets` among ``[B, F, D]`` vectors; attention compares
    events with it.
    """
    return vectors[:, targets[0]] if len(targets) == 1 else chosen(vectors, targets).sum(1)


def _joined(columns: Sequence[History]) -> History:
    """Sum the rows of several columns of a sequence, which have equal windows."""
    return (
        columns[0]
        if len(columns) == 1
        else replace(columns[0], rows=_sum([column.rows for column in columns]))
    )


def _sum(rows: Sequence[Tensor]) -> Tensor:
    """Sum tensors of equal shape, in the given order."""
    return sum(rows[1:], rows[0])


class CTRModel(nn.Module):
    """Complete model: embedding tables and a network, from a batch to logits.

    Parameters
    ----------
    embeddings : EmbeddingCollection
        Embedding tables, which are not parameters of the module. A backward pass updates them
        unless the caller looked the rows up itself (`LookedUp`).
    network : Network
        The network, whose weights are trained by a dense optimizer.
    """

    def __init__(self, embeddings: EmbeddingCollection[Any], network: Network) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.network = network
        self.device = CPU
        """Device of the network. Rows of tables are not moved to it: `TierConfig.device` places
        them.
        """

    def place(self, device: torch.device) -> None:
        """Move the network to a device. Call it before an optimizer is built for its weights."""
        try:
            self.network.to(device)
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"{device} has too little memory for the network alone: set train.device to cpu"
            ) from error
        self.device = device
        self.embeddings.engine.transfers = transfers_of(device)

    def forward(self, batch: Batch, request: Request | None = None, handle: Handle | None = None) -> Tensor:
        """Return ``[B]`` float32 logits, or ``[B, T]`` for several labels.

        Parameters
        ----------
        request : Request
            Result of `request` for the batch, if it was computed ahead.
        handle : StagedBatch or LookedUp
            Result of ``embeddings.stage(request.features)``, if it was computed ahead, or the rows
            of this batch.
        """
        logits: Tensor = self.network(*self.vectors(batch, request or self.request(batch), handle))
        return logits

    def request(self, batch: Batch) -> Request:
        """Return the ids to look up; each distinct value of a deduplication group appears once."""
        request = Request.of(batch, self.network.sequence_keys, self.network.weighted_means)
        return (
            replace(request, lists=self.network.lists(request, batch.size)) if self.on_device else request
        )

    @property
    def on_device(self) -> bool:
        """Whether the network reads lists of a batch, because it or all rows are on a device."""
        return self.device.type != "cpu" or bool(getattr(self.embeddings.engine, "queued", False))

    def lookup_zero(
        self, batch: Batch, request: Request | None = None, handle: Handle | None = None
    ) -> Tensor:
        """Return a zero that depends on the lookups.

        A rank without samples uses it as its loss, so that it takes part in the exchanges of the
        backward pass.
        """
        output = self.embeddings(handle or (request or self.request(batch)).features)
        total: Tensor = output.pooled.sum() + sum(bags.values.sum() for bags in output.sequences.values())
        return total

    def vectors(
        self, batch: Batch, request: Request, handle: Handle | None = None
    ) -> tuple[Tensor, Tensor, list[History], Segments | None]:
        """Return the network's inputs: dense numbers, pooled vectors, histories, and `Segments` of
        shared vectors.
        """
        # The copy to the device starts first, so that it overlaps with the lookups.
        # Training does not use trees, so only scoring removes deduplication for them.
        sparse = (
            batch.sparse if self.network.trees is None or self.network.training else batch.expanded().sparse
        )
        dense = self.embeddings.engine.transfers.up(self.network.inputs(batch.dense, sparse))
        return dense, *self.look_up(request, batch.size, self.network.sequence_keys, handle)

    def look_up(
        self, request: Request, size: int, sequences: Sequence[str], handle: Handle | None = None
    ) -> tuple[Tensor, list[History], Segments | None]:
        """Return pooled vectors, histories and segments for a batch of `size` samples."""
        return self.arrange(self.embeddings(handle or request.features), request, size, sequences)

    def arrange(
        self, output: Embeddings, request: Request, size: int, sequences: Sequence[str]
    ) -> tuple[Tensor, list[History], Segments | None]:
        """Return pooled vectors, histories and segments for a batch of `size` samples, from the
        result of its lookup.

        On a device, the vectors of segments are expanded: there are no segments then.
        """
        # A group may have more distinct values than there are samples.
        pooled = output.pooled if len(output.pooled) == size else output.pooled[:size]
        if not request.lists:
            histories = []
            for key in sequences:
                bags = output.sequences[key]
                windows = request.windows.get(key) or HistoryWindows.of_bags(bags.offsets, size)
                histories.append(History(rows=bags.values, windows=windows))
            return pooled, histories, Segments.of(request, output.pooled_keys)
        of_segments, *others = request.lists
        lists: dict[str, HistoryLists] = {}
        for (columns, _), pair in zip(
            self.network.behaviours, zip(others[::2], others[1::2], strict=True), strict=True
        ):
            lists |= dict.fromkeys(columns, pair)
        histories = [
            History.on_device(output.sequences[key].values, request.windows_of(key, size), lists[key])
            for key in sequences
        ]
        if of_segments is not None:
            pooled = _expanded(pooled, output, request.shared, of_segments)
        return pooled, histories, None


def _expanded(pooled: Tensor, output: Embeddings, shared: frozenset[str], index: RowIndex) -> Tensor:
    """Return pooled vectors ``[B, W]`` of samples. In `pooled`, the features `shared` have a row
    for each segment.
    """
    parts, first, index = [], 0, index.on_device(pooled)
    for is_shared, members in groupby(
        zip(output.pooled_keys, output.dims, strict=True), lambda entry: entry[0] in shared
    ):
        width = sum(width for _, width in members)
        part = pooled[:, first : first + width]
        parts.append(take(part, index) if is_shared else part)
        first += width
    return torch.cat(parts, dim=1)


def autocast(precision: str, device: torch.device = CPU, *, cached: bool = True) -> torch.autocast:
    """Return the autocast context for `precision` on a device; for ``float32`` it is disabled.

    A CUDA graph needs a context that is not `cached`, because casts of weights must be part of the
    graph.
    """
    return torch.autocast(
        device.type, dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=cached
    )


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return ``[B]`` probabilities of a click."""
    with np.errstate(over="ignore"):  # a logit of -800 is a probability of 0
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


class Projections(nn.ModuleList):
    """Linear layers without bias that project vectors to width D, one for each vocabulary with
    another width.

    Shapes: B samples, F pooled features, D width of the network's input vectors.

    Parameters
    ----------
    schema : Schema
        Features, and the vocabulary of each.
    table_width : callable
        Returns the width of a vocabulary's table.
    width : int
        D.
    pooled_keys : tuple of str
        Pooled features, in the order of their vectors.
    """

    def __init__(
        self, schema: Schema, table_width: Callable[[str], int], width: int, pooled_keys: tuple[str, ...]
    ) -> None:
        other = [name for name in schema.vocabularies() if table_width(name) != width]
        super().__init__(nn.Linear(table_width(name), width, bias=False) for name in other)
        self.width = width
        vocabularies = {feature.name: feature.vocabulary for feature in schema.sparse}
        self._widths = {name: table_width(vocabulary) for name, vocabulary in vocabularies.items()}
        self._places = {name: other.index(table) for name, table in vocabularies.items() if table in other}
        self._pooled = pooled_keys

    def of_rows(self, name: str, rows: Tensor) -> Tensor:
        """Project rows of a feature's table to ``[..., D]``."""
        if name not in self._places:
            return rows
        wide: Tensor = self[self._places[name]](rows)
        return wide.float()

    def of_pooled(self, pooled: Tensor, segments: Segments | None = None) -> Tensor:
        """Project pooled embeddings to ``[B, F, D]``.

        With `segments`, a shared feature has one row per segment, and its rows after them are
        undefined.
        """
        if not len(self):
            return pooled.view(pooled.shape[0], -1, self.width)
        parts = list(torch.split(pooled, [self._widths[name] for name in self._pooled], dim=1))
        for place, name in enumerate(self._pooled):
            if name in self._places:
                shared = segments is not None and segments.shared[place]
                part = parts[place]
                parts[place] = (
                    self._of_segments(name, part, segments) if shared else self.of_rows(name, part)
                )
        return torch.stack(parts, dim=1)

    def _of_segments(self, name: str, part: Tensor, segments: Segments | None) -> Tensor:
        # Rows beyond the segments are undefined, and could be NaN in the gradient of the layer.
        assert segments is not None
        count = segments.starts.numel() - 1
        wide = self.of_rows(name, part[:count])
        return torch.cat([wide, wide.new_zeros(len(part) - count, self.width)])
