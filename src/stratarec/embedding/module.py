"""The embedding collection: an `nn.Module` that takes the place of TorchRec's `EmbeddingBagCollection`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stratarec.embedding.config import EmbeddingBagConfig, check_tables
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.stores.dram import DramStore
from stratarec.errors import ConfigError
from stratarec.jagged import JaggedTensor, KeyedJagged
from stratarec.kernels import embedding as kernel
from stratarec.kernels.memory import RECYCLER


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """What a lookup gives.

    Parameters
    ----------
    pooled : Tensor
        ``[B, sum of dims]`` float32: the pooled features side by side, in the order of `pooled_keys`.
    pooled_keys : tuple of str
        Pooled features, tables in order and features in the order of their table.
    dims : tuple of int
        Width of each pooled feature.
    sequences : mapping of str to JaggedTensor
        Unpooled features: values ``[N, D]``, offsets ``[B + 1]``.
    """

    pooled: Tensor
    pooled_keys: tuple[str, ...]
    dims: tuple[int, ...]
    sequences: Mapping[str, JaggedTensor]

    def __getitem__(self, key: str) -> Tensor:
        """``[B, D]`` view of the pooled feature `key`."""
        if key not in self.pooled_keys:
            raise ConfigError(f"no pooled feature {key!r}; there are {', '.join(self.pooled_keys)}")
        place = self.pooled_keys.index(key)
        first = sum(self.dims[:place])
        return self.pooled[:, first : first + self.dims[place]]


class TieredEmbeddingBagCollection(nn.Module):
    """Embedding tables that train themselves: backward applies a fused row optimizer in place.

    Dimensions: F features, B samples, L ids in a bag, D width. Bag (f, b) of table t gives ::

        pooled[b, f] = sum over l of weights[f, b, l] * table_t[ids[f, b, l]]     (divided by L for mean pooling)

    and a sequence feature gives ``table_t[ids[f, b, l]]`` for every l. With two features over three samples::

        feature    sample 0    sample 1    sample 2
        "color"    [4]         []          [4, 1]        -> [3, D]; sample 1 is zeros
        "shape"    [0, 2]      [2]         [2]           -> [3, D]

    Tables are no `nn.Parameter`: dense optimizers do not see them. Each backward is one optimizer step: the gradients
    of a row, over all features that share its table, are summed in ascending order of lookup position and applied
    once. Two forwards before two backwards are two steps. Results have the same bits at any number of threads.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Tables of equal width share memory and kernel calls.
    optimizer : RowOptimizerConfig
        Row optimizer, with its learning-rate schedule over this module's own steps.
    seed : int
        Initial weights are a function of (seed, table name, row).

    Raises
    ------
    ConfigError
        For repeated names; in forward for a missing feature or an id outside its table.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], *, optimizer: RowOptimizerConfig | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.tables = tuple(tables)
        check_tables(self.tables)
        self.optimizer = optimizer or RowOptimizerConfig()
        self.step = 0
        self.pooled_keys = tuple(name for table in self.tables for name in table.feature_names)
        self.dims = tuple(table.embedding_dim for table in self.tables for _ in table.feature_names)
        self.sequence_keys = tuple(name for table in self.tables for name in table.sequence_features)
        columns = dict(zip(self.pooled_keys, np.cumsum([0, *self.dims]).tolist(), strict=False))
        widths = dict.fromkeys(table.embedding_dim for table in self.tables)
        self._groups = [
            _WidthGroup([table for table in self.tables if table.embedding_dim == width], columns, self.optimizer, seed)
            for width in widths
        ]
        # Autograd runs backward only for outputs of something that requires a gradient.
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def learning_rate(self) -> float:
        """The rate that the next backward will use."""
        return self.optimizer.learning_rate * self.optimizer.schedule.factor(self.step)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return sum(group.store.nbytes for group in self._groups)

    def forward(self, features: KeyedJagged) -> Embeddings:
        """Look up every feature of the collection; `features` may hold more, in any order."""
        missing = [key for key in (*self.pooled_keys, *self.sequence_keys) if key not in features.keys]
        if missing:
            raise ConfigError(f"the batch lacks {', '.join(missing)}; it has {', '.join(features.keys)}")
        pooled, *rows = _Lookup.apply(self._anchor, features.weights, features, self)  # type: ignore[no-untyped-call]
        sequences = {}
        for key, values in zip(self._sequence_order(), rows, strict=True):
            place, size = features.keys.index(key), features.batch_size
            offsets = features.bag_offsets()[place * size : (place + 1) * size + 1]
            sequences[key] = JaggedTensor(values=values, offsets=offsets - offsets[0])
        return Embeddings(pooled=pooled, pooled_keys=self.pooled_keys, dims=self.dims, sequences=sequences)

    def table(self, name: str) -> dict[str, Tensor]:
        """``weight`` ``[R, D]`` and optimizer state of a table, as views: writing them changes the model."""
        for group in self._groups:
            if name in group.store.tables:
                return group.store.views(name)
        raise ConfigError(f"no table {name!r}; there are {', '.join(table.name for table in self.tables)}")

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """``tables.<name>.<part>`` and the view of it, for every table and part."""
        for table in self.tables:
            for part, view in self.table(table.name).items():
                yield f"tables.{table.name}.{part}", view

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, view in self.named_state():
            destination[prefix + name] = view
        destination[prefix + "step"] = torch.tensor(self.step)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        expected = dict(self.named_state())
        for name, view in expected.items():
            found = state_dict.get(prefix + name)
            if found is None:
                missing_keys.append(prefix + name)
            elif found.shape != view.shape:
                error_msgs.append(f"{prefix + name} is {tuple(found.shape)}, expected {tuple(view.shape)}")
            else:
                view.copy_(found)
        if prefix + "step" in state_dict:
            self.step = int(state_dict[prefix + "step"])
        else:
            missing_keys.append(prefix + "step")
        known = {prefix + name for name in (*expected, "step")}
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]

    def _sequence_order(self) -> list[str]:
        return [key for group in self._groups for key in group.sequence_keys]

    def extra_repr(self) -> str:
        rows = sum(table.num_embeddings for table in self.tables)
        return f"{len(self.tables)} tables, {rows:,} rows, {self.nbytes / 2**20:.1f} MiB, {self.optimizer.kind}"

    def _pool(self, features: KeyedJagged) -> tuple[Tensor, ...]:
        """Pooled output and the rows of each sequence feature, without autograd."""
        pooled = RECYCLER.empty(features.batch_size, sum(self.dims))
        rows = []
        for group in self._groups:
            rows += group.forward(features, pooled.numpy())
        return (pooled, *rows)

    def _update(self, features: KeyedJagged, pooled: Tensor, rows: Sequence[Tensor]) -> None:
        """One optimizer step from the gradients of `_pool`'s outputs."""
        rule = self.optimizer.rule(self.step)
        start = 0
        for group in self._groups:
            group.update(features, pooled.numpy(), rows[start : start + len(group.sequence_keys)], rule)
            start += len(group.sequence_keys)
        self.step += 1


class _WidthGroup:
    """The tables of one width: their store, and the layout that kernels read."""

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, int],
        optimizer: RowOptimizerConfig,
        seed: int,
    ) -> None:
        width = tables[0].embedding_dim
        self.store = DramStore({table.name: table.num_embeddings for table in tables}, width, optimizer, seed)
        self.features = [(table, name) for table in tables for name in (*table.feature_names, *table.sequence_features)]
        self.sequence_keys = [name for table in tables for name in table.sequence_features]
        sizes = [len(table.feature_names) + len(table.sequence_features) for table in tables]
        self.layout = kernel.Group(
            width=width,
            base=np.array([self.store.first_row[table.name] for table, _ in self.features], dtype=np.int64),
            rows=np.array([table.num_embeddings for table, _ in self.features], dtype=np.int64),
            column=np.array([columns.get(name, 0) for _, name in self.features], dtype=np.int64),
            mean=np.array([table.pooling == "mean" for table, _ in self.features], dtype=np.int64),
            sequence=np.array([name in table.sequence_features for table, name in self.features], dtype=np.int64),
            table_start=np.cumsum([0, *sizes]).astype(np.int64),
            table_features=np.arange(len(self.features), dtype=np.int64),
        )
        self.workspace = kernel.Workspace()

    def lookups(self, features: KeyedJagged) -> kernel.Lookups:
        places = {name: place for place, name in enumerate(features.keys)}
        return kernel.Lookups(
            values=features.values.numpy(),
            offsets=None if features.offsets is None else features.offsets.numpy(),
            weights=None if features.weights is None else features.weights.detach().numpy(),
            batch=features.batch_size,
            key=np.array([places[name] for _, name in self.features], dtype=np.int64),
        )

    def forward(self, features: KeyedJagged, out: NDArray[np.float32]) -> list[Tensor]:
        """Fill this group's columns of `out`; returns the rows of its sequence features."""
        lookups = self.lookups(features)
        self._check(lookups, kernel.pool(self.store.weights, self.layout, lookups, out))
        rows = []
        for feature in np.flatnonzero(self.layout.sequence):
            first, last = lookups.span(int(feature))
            gathered = RECYCLER.empty(last - first, self.layout.width)
            bad = kernel.gather(self.store.weights, self.layout, lookups, int(feature), gathered.numpy())
            self._check(lookups, bad)
            rows.append(gathered)
        return rows

    def _check(self, lookups: kernel.Lookups, place: int) -> None:
        if place < 0:
            return
        for feature, (table, name) in enumerate(self.features):
            first, last = lookups.span(feature)
            if first <= place < last:
                raise ConfigError(
                    f"feature {name!r}: id {lookups.values[place]} is outside table {table.name!r}, "
                    f"expected 0 to {table.num_embeddings - 1}"
                )

    def update(
        self, features: KeyedJagged, pooled: NDArray[np.float32], rows: Sequence[Tensor], rule: kernel.RowUpdate
    ) -> None:
        start = np.zeros(len(self.features), dtype=np.int64)
        ends = np.cumsum([0, *(part.numel() for part in rows)])
        start[np.flatnonzero(self.layout.sequence)] = ends[:-1]
        flat = torch.cat([part.reshape(-1) for part in rows]) if len(rows) > 1 else None
        single = rows[0].reshape(-1) if len(rows) == 1 else torch.zeros(1)
        kernel.update(
            self.store.weights,
            self.store.row_state,
            self.store.full_state,
            self.layout,
            self.lookups(features),
            pooled,
            (single if flat is None else flat).numpy(),
            start,
            rule,
            self.workspace,
        )


class _Lookup(torch.autograd.Function):
    """Forward pools; backward updates the tables and gives gradients to per-sample weights alone."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights: Tensor | None, features: KeyedJagged, module: TieredEmbeddingBagCollection
    ) -> tuple[Tensor, ...]:
        ctx.features, ctx.module = features, module
        ctx.set_materialize_grads(True)
        return module._pool(features)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, pooled: Tensor, *rows: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        module: TieredEmbeddingBagCollection = ctx.module
        features: KeyedJagged = ctx.features
        pooled = pooled.float().contiguous()
        gradient = None
        if features.weights is not None and ctx.needs_input_grad[1]:
            gradient = torch.zeros_like(features.weights)
            for group in module._groups:
                kernel.weight_gradient(
                    group.store.weights,
                    group.layout,
                    group.lookups(features),
                    pooled.numpy(),
                    gradient.numpy(),
                )
        module._update(features, pooled, [part.float().contiguous() for part in rows])
        return None, gradient, None, None
