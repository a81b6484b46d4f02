"""The embedding collection: an `nn.Module` that takes the place of TorchRec's `EmbeddingBagCollection`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stratarec.embedding.config import EmbeddingBagConfig, check_tables
from stratarec.embedding.groups import DenseGroup, Ids, TieredGroup, state_views
from stratarec.embedding.homes import build_groups
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.saving import load_groups, save_groups
from stratarec.embedding.staging import Staged, Stager
from stratarec.embedding.tiers import TierConfig
from stratarec.errors import ConfigError
from stratarec.jagged import JaggedTensor, KeyedJagged
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
    tiers : TierConfig
        Tables whose rows are at home outside level 0; by default none.

    Raises
    ------
    ConfigError
        For repeated names; in forward for a missing feature or an id outside its table.
    TrainingError
        In forward, when a batch needs more slots than a table's cache has.

    Notes
    -----
    With gradients enabled, forward brings the rows of cached tables into level 0, and backward lets them go. Without,
    it reads rows where they lie and changes nothing. `stager` stages batches ahead; see `Lookahead`.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        optimizer: RowOptimizerConfig | None = None,
        seed: int = 0,
        tiers: TierConfig | None = None,
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
        self.tiers = tiers or TierConfig()
        self._groups = build_groups(self.tables, columns, self.optimizer, seed, self.tiers)
        # Batches have the same keys as a rule, which then are checked once.
        self._checked_keys: tuple[str, ...] | None = None
        self.stager = Stager([group for group in self._groups if isinstance(group, TieredGroup)])
        # Autograd runs backward only for outputs of something that requires a gradient.
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def learning_rate(self) -> float:
        """The rate that the next backward will use."""
        return self.optimizer.learning_rate * self.optimizer.schedule.factor(self.step)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for rows and all that describes them; file space is not in it."""
        return self.bytes_by_memory()["dram"]

    def bytes_by_memory(self) -> dict[str, int]:
        """Bytes in ``dram``, ``mapped`` files and ``block`` files, as they are now."""
        total: Counter[str] = Counter(dram=0)
        for group in self._groups:
            parts = group.nbytes
            files = parts.pop("home_block", 0)
            total["dram"] += sum(parts.values())
            if isinstance(group, TieredGroup) and files:
                total["mapped" if group.cache.store.kind == "mapped" else "block"] += files
        return dict(total)

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of level 0, cache metadata, homes in DRAM, file space and staging buffers, as they are now."""
        total: Counter[str] = Counter()
        for group in self._groups:
            total.update(group.nbytes)
        return dict(total)

    def forward(self, features: KeyedJagged) -> Embeddings:
        """Look up every feature of the collection; `features` may hold more, in any order."""
        self._check_keys(features.keys)
        staged = self.stager.claim(features) if torch.is_grad_enabled() else None
        inputs = (self._anchor, features.weights, features, staged, self)
        pooled, *rows = _Lookup.apply(*inputs)  # type: ignore[no-untyped-call]
        sequences = {}
        for key, values in zip(self._sequence_order(), rows, strict=True):
            place, size = features.keys.index(key), features.batch_size
            offsets = features.bag_offsets()[place * size : (place + 1) * size + 1]
            sequences[key] = JaggedTensor(values=values, offsets=offsets - offsets[0])
        return Embeddings(pooled=pooled, pooled_keys=self.pooled_keys, dims=self.dims, sequences=sequences)

    def _check_keys(self, keys: tuple[str, ...]) -> None:
        if keys == self._checked_keys:
            return
        missing = [key for key in (*self.pooled_keys, *self.sequence_keys) if key not in keys]
        if missing:
            raise ConfigError(f"the batch lacks {', '.join(missing)}; it has {', '.join(keys)}")
        self._checked_keys = keys

    def table(self, name: str) -> dict[str, Tensor]:
        """``weight`` ``[R, D]`` and optimizer state of a table.

        Of a table that lies whole in level 0 these are views: writing them changes the model. Of others they are
        copies, which take the memory of the whole table in float32; `rows` reads parts.
        """
        group = self._group_of(name)
        return group.views(name) if isinstance(group, DenseGroup) else self.rows(name, 0, self._rows_in(name))

    def rows(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """Rows ``first:last`` of a table as they are now: ``weight`` and optimizer state."""
        group = self._group_of(name)
        if isinstance(group, TieredGroup):
            found = group.read_rows(name, first, last)
            return state_views(found, self.optimizer, 0, last - first)
        return {part: view[first:last] for part, view in group.views(name).items()}

    def _rows_in(self, name: str) -> int:
        return next(table.num_embeddings for table in self.tables if table.name == name)

    def _group_of(self, name: str) -> DenseGroup | TieredGroup:
        for group in self._groups:
            if any(table.name == name for table in group.tables):
                return group
        raise ConfigError(f"no table {name!r}; there are {', '.join(table.name for table in self.tables)}")

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """``tables.<name>.<part>`` and the view of it, for every part of every table that lies whole in level 0."""
        for group in self._groups:
            if isinstance(group, DenseGroup):
                for table in group.tables:
                    for part, view in group.views(table.name).items():
                        yield f"tables.{table.name}.{part}", view

    def save(self, directory: Path, previous: Path | None = None) -> dict[str, Any]:
        """Write all tables into the new directory `directory`; returns the JSON manifest that `load` takes.

        Parameters
        ----------
        previous : Path
            Where this collection was saved last, or loaded from: only rows that changed since are written, the rest is
            linked from there.

        Raises
        ------
        StorageError
            When something cannot be written; `previous` stays as it was.
        """
        manifests = save_groups(self._groups, directory, previous)
        return {"step": self.step, "batches": self.stager.batches, "groups": manifests}

    def load(self, directory: Path, manifest: Mapping[str, Any]) -> bool:
        """Take all tables from what `save` wrote, by whatever tiers, caches and codecs.

        Returns
        -------
        bool
            Whether everything lies as it did, so that training goes on with the same bits.

        Raises
        ------
        CheckpointError
            When a file is missing or damaged, the tables are others, or they lie in other tiers and this collection
            has been trained, so that rows which the checkpoint lacks no longer have their initial values.
        """
        fresh = not (self.step or self.stager.batches)
        self.step, self.stager.batches = int(manifest["step"]), int(manifest["batches"])
        return load_groups(self._groups, directory, manifest["groups"], self.stager.batches, fresh=fresh)

    def close(self) -> None:
        """Give back the files and threads of stores; the collection is of no use afterwards."""
        for group in self.stager.groups:
            group.cache.store.close()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.stager.groups:
            raise ConfigError("tables that do not lie whole in level 0 are in no state_dict; call save and load")
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

    def _pool(self, features: KeyedJagged, staged: Staged | None) -> tuple[Tensor, ...]:
        """Pooled output and the rows of each sequence feature, without autograd."""
        pooled = RECYCLER.empty(features.batch_size, sum(self.dims))
        rows = []
        for group in self._groups:
            if staged is None and isinstance(group, TieredGroup):
                rows += group.read(features, pooled.numpy())
            else:
                rows += group.forward(features, _values(group, features, staged), pooled.numpy())
        return (pooled, *rows)

    def _update(self, staged: Staged, pooled: Tensor, rows: Sequence[Tensor]) -> None:
        """One optimizer step from the gradients of `_pool`'s outputs."""
        rule = self.optimizer.rule(self.step)
        start = 0
        for group in self._groups:
            part = rows[start : start + len(group.sequence_keys)]
            values = _values(group, staged.features, staged)
            group.update(staged.features, values, pooled.numpy(), part, rule)
            start += len(group.sequence_keys)
        self.step += 1
        self.stager.release(staged)


def _values(group: DenseGroup | TieredGroup, features: KeyedJagged, staged: Staged | None) -> Ids:
    """The ids of a batch, or where its rows were staged the slots."""
    return staged.slots if staged is not None and isinstance(group, TieredGroup) else features.values.numpy()


class _Lookup(torch.autograd.Function):
    """Forward pools; backward updates the tables and gives gradients to per-sample weights alone."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        features: KeyedJagged,
        staged: Staged | None,
        module: TieredEmbeddingBagCollection,
    ) -> tuple[Tensor, ...]:
        ctx.staged, ctx.module = staged, module
        ctx.set_materialize_grads(True)
        return module._pool(features, staged)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, pooled: Tensor, *rows: Tensor) -> tuple[Tensor | None, ...]:
        module: TieredEmbeddingBagCollection = ctx.module
        staged: Staged = ctx.staged
        features = staged.features
        pooled = pooled.float().contiguous()
        gradient = None
        if features.weights is not None and ctx.needs_input_grad[1]:
            gradient = torch.zeros_like(features.weights)
            for group in module._groups:
                values = _values(group, features, staged)
                group.weight_gradient(features, values, pooled.numpy(), gradient.numpy())
        module._update(staged, pooled, [part.float().contiguous() for part in rows])
        return None, gradient, None, None, None
