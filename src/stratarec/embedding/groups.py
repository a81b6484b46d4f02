"""Tables of one width that share kernel calls: whole in level 0, or cached there with a home elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.cache.row_cache import RowCache, put_rows, rows_of
from stratarec.embedding.codecs import CodecConfig, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.rows import FloatRows
from stratarec.embedding.stores.chain import Chain
from stratarec.embedding.stores.memory import allocate_bits, clear_bits, row_chunks, set_rows
from stratarec.errors import ConfigError, TrainingError
from stratarec.jagged import KeyedJagged
from stratarec.kernels import embedding as kernel
from stratarec.kernels.memory import RECYCLER
from stratarec.kernels.random import fill_uniform, table_key
from stratarec.kernels.records import set_bits

Ids = NDArray[np.int32] | NDArray[np.int64]


class Group:
    """What both kinds share: the layout that kernels read, forward and update over level 0.

    Parameters
    ----------
    first_slot, slots : sequence of int
        Where each table starts in level 0, and how many slots it has.
    columns : mapping of str to int
        First output column of each pooled feature.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, int],
        level0: FloatRows,
        first_slot: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        self.tables, self.level0 = tuple(tables), level0
        self.features = [(table, name) for table in tables for name in (*table.feature_names, *table.sequence_features)]
        self.sequence_keys = [name for table in tables for name in table.sequence_features]
        sizes = [len(table.feature_names) + len(table.sequence_features) for table in tables]
        self.layout = kernel.GroupLayout(
            width=level0.width,
            base=np.repeat(np.array(first_slot, dtype=np.int64), sizes),
            rows=np.repeat(np.array(slots, dtype=np.int64), sizes),
            column=np.array([columns.get(name, 0) for _, name in self.features], dtype=np.int64),
            mean=np.array([table.pooling == "mean" for table, _ in self.features], dtype=np.int64),
            sequence=np.array([name in table.sequence_features for table, name in self.features], dtype=np.int64),
            table_start=np.cumsum([0, *sizes]).astype(np.int64),
            table_features=np.arange(len(self.features), dtype=np.int64),
        )
        self.workspace = kernel.Workspace()
        self._sequences = np.flatnonzero(self.layout.sequence)
        self._no_sequences = np.zeros(len(self.features), dtype=np.int64), np.zeros(1, dtype=np.float32)
        self._keys: tuple[str, ...] = ()
        self._places = np.empty(0, dtype=np.int64)

    def _key_places(self, keys: tuple[str, ...]) -> NDArray[np.int64]:
        """Where each of the group's features is among `keys`, which are the same from batch to batch."""
        if keys != self._keys:
            places = {name: place for place, name in enumerate(keys)}
            self._places = np.array([places[name] for _, name in self.features], dtype=np.int64)
            self._keys = keys
        return self._places

    def lookups(self, features: KeyedJagged, values: Ids) -> kernel.BagBatch:
        """The group's share of a batch; `values` are ids, or the slots that staging put in their place."""
        key = self._key_places(features.keys)
        return kernel.BagBatch(
            values=values,
            offsets=None if features.offsets is None else features.offsets.numpy(),
            weights=None if features.weights is None else features.weights.detach().numpy(),
            batch=features.batch_size,
            key=key,
            filled=None if features.filled is None else np.array(features.filled, dtype=np.int64)[key],
        )

    def forward(self, features: KeyedJagged, values: Ids, out: NDArray[np.float32]) -> list[Tensor]:
        """Fill this group's columns of `out`; returns the rows of its sequence features."""
        return self._forward(self.lookups(features, values), self.level0, self.layout, out)

    def _forward(
        self, lookups: kernel.BagBatch, level0: FloatRows, layout: kernel.GroupLayout, out: NDArray[np.float32]
    ) -> list[Tensor]:
        self.check(lookups, kernel.pool(level0.weights, layout, lookups, out))
        rows = []
        for feature in self._sequences:
            first, last = lookups.span(int(feature))
            gathered = RECYCLER.empty(last - first, layout.width)
            self.check(lookups, kernel.gather(level0.weights, layout, lookups, int(feature), gathered.numpy()))
            rows.append(gathered)
        return rows

    def check(self, lookups: kernel.BagBatch, place: int) -> None:
        """`ConfigError` that names feature and table of the id at `place`, unless that is -1."""
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
        self, features: KeyedJagged, values: Ids, pooled: NDArray[np.float32], rows: Sequence[Tensor],
        rule: kernel.RowUpdate,
    ) -> None:  # fmt: skip
        """Apply the row optimizer, given the gradients of what `forward` returned."""
        start, flat = self._no_sequences
        if rows:
            start = np.zeros(len(self.features), dtype=np.int64)
            start[self._sequences] = np.cumsum([0, *(part.numel() for part in rows)])[:-1]
            flat = torch.cat([part.reshape(-1) for part in rows]).numpy()
        kernel.update(
            self.level0.weights, self.level0.row_state, self.level0.full_state, self.layout,
            self.lookups(features, values), pooled, flat, start, rule, self.workspace,
        )  # fmt: skip

    def weight_gradient(
        self, features: KeyedJagged, values: Ids, pooled: NDArray[np.float32], out: NDArray[np.float32]
    ) -> None:
        """Add the gradients of per-sample weights to `out`."""
        kernel.weight_gradient(self.level0.weights, self.layout, self.lookups(features, values), pooled, out)


class SlotRecords:
    """Level 0 as float32 records: what a checkpoint of tables that lie whole in level 0 reads and writes."""

    def __init__(self, level0: FloatRows, codec: RecordCodec) -> None:
        self._level0, self._codec = level0, codec
        self.shape = (level0.slots, codec.record_bytes)

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        records = np.empty((len(rows), self._codec.record_bytes), dtype=np.uint8)
        places = np.arange(len(rows), dtype=np.int64)
        bad = self._codec.encode(self._level0, rows, records, places, np.zeros(len(rows), dtype=np.uint64), 0)
        if bad >= 0:
            raise TrainingError(f"row {rows[bad]} of the tables of width {self._level0.width} is not finite")
        return records

    def __setitem__(self, rows: NDArray[np.int64], records: NDArray[np.uint8], /) -> None:
        self._codec.decode(records, np.arange(len(rows), dtype=np.int64), self._level0, rows)


def state_views(level0: FloatRows, optimizer: RowOptimizerConfig, first: int, last: int) -> dict[str, Tensor]:
    """``weight`` ``[R, D]`` and the optimizer state of slots ``first:last``, sharing level 0's memory."""
    width = level0.width

    def matrix(array: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(array[first * width : last * width]).view(-1, width)

    views = {"weight": matrix(level0.weights)}
    if optimizer.row_state:
        views[optimizer.row_state] = torch.from_numpy(level0.row_state[first:last])
    if optimizer.full_state:
        views[optimizer.full_state] = matrix(level0.full_state)
    return views


class DenseGroup(Group):
    """Tables that lie whole in level 0: a slot is a row.

    Initial weights are uniform in +-1/sqrt(rows), a function of (seed, table name, row).
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, int],
        optimizer: RowOptimizerConfig,
        seed: int,
    ) -> None:
        rows = [table.num_embeddings for table in tables]
        first = np.cumsum([0, *rows]).tolist()
        width = tables[0].embedding_dim
        self._optimizer = optimizer
        level0 = FloatRows.allocate(
            first[-1], width, row_state=bool(optimizer.row_state), full_state=bool(optimizer.full_state)
        )
        super().__init__(tables, columns, level0, first[:-1], rows)
        self._changed = allocate_bits(first[-1])
        self._chain = Chain()
        config = CodecConfig(kind="fp32")
        self.codec = RecordCodec(
            config, width=width, row_state=bool(optimizer.row_state), full_state=bool(optimizer.full_state)
        )
        self._span = {
            table.name: (begin, begin + size) for table, begin, size in zip(tables, first, rows, strict=False)
        }
        self._viewed = False
        for table in tables:
            bound = table.num_embeddings**-0.5
            begin, end = (place * width for place in self._span[table.name])
            weights = level0.weights[begin:end].reshape(-1, width)
            fill_uniform(weights, key=table_key(seed, table.name), low=-bound, high=bound)

    def views(self, table: str) -> dict[str, Tensor]:
        """``weight`` ``[R, D]`` and the optimizer state of a table, sharing level 0's memory."""
        # Whoever holds a view may write it at any time, which nothing here would see: from now on all rows are saved.
        self._viewed = True
        return state_views(self.level0, self._optimizer, *self._span[table])

    def update(
        self, features: KeyedJagged, values: Ids, pooled: NDArray[np.float32], rows: Sequence[Tensor],
        rule: kernel.RowUpdate,
    ) -> None:  # fmt: skip
        super().update(features, values, pooled, rows, rule)
        # Before the first checkpoint there is nothing that changes would be counted from.
        if self._chain.started:
            kernel.mark_rows(self.layout, self.lookups(features, values), self._changed)

    def save(self, directory: Path, previous: Path | None) -> dict[str, Any]:
        """Write all rows, or those that changed since `previous`, into the new directory; returns the manifest."""
        home = directory / "home"
        home.mkdir(parents=True)
        total = self.level0.slots
        files = self._chain.save(
            home,
            None if previous is None or self._viewed else previous / "home",
            SlotRecords(self.level0, self.codec),
            lambda: row_chunks(total),
            lambda: set_rows(self._changed),
        )
        clear_bits(self._changed)
        return {"home": {"layout": "rows", "rows": total, "record_bytes": self.codec.record_bytes, "files": files}}

    def restore(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        """Take all rows from what `save` wrote."""
        files = manifest["home"]["files"]
        self._chain.verify(directory / "home", files)
        # Pieces are loaded as they are asked for.
        for _ in self._chain.load(directory / "home", files, SlotRecords(self.level0, self.codec)):
            pass
        clear_bits(self._changed)

    def fits(self, manifest: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is of rows that lie whole in level 0."""
        return "cache" not in manifest

    def put(self, rows: NDArray[np.int64], level0: FloatRows, slots: NDArray[np.int64], write: int) -> None:
        """Overwrite rows of the group."""
        parts = rows_of(level0, slots, self.codec)
        put_rows(parts, self.level0, rows)
        set_bits(self._changed, rows)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by part."""
        return {"level0": self.level0.nbytes, "metadata": self._changed.nbytes}


class TieredGroup(Group):
    """Tables whose rows are at home in a store and pass through the slots of a cache."""

    def __init__(self, tables: Sequence[EmbeddingBagConfig], columns: Mapping[str, int], cache: RowCache) -> None:
        start = cache.layout.slot_start
        super().__init__(tables, columns, cache.level0, start[:-1].tolist(), np.diff(start).tolist())
        self.cache = cache

    def stage(
        self, features: KeyedJagged, out: NDArray[np.int32], *, batch: int, horizon: int, settle: Callable[[], None]
    ) -> None:  # fmt: skip
        """Bring the rows of a batch into level 0 and write their slots to `out`; see `RowCache.stage`."""
        lookups = self.lookups(features, features.values.numpy())
        self.check(lookups, self.cache.stage(self.layout, lookups, out, batch=batch, horizon=horizon, settle=settle))

    def read(self, features: KeyedJagged, out: NDArray[np.float32]) -> list[Tensor]:
        """As `forward` of ids that were not staged: reads rows where they lie and leaves everything as it is."""
        lookups = self.lookups(features, features.values.numpy())
        spans = [lookups.span(feature) for feature in range(len(self.features))]
        rows = [self._rows_of(feature, lookups.values[first:last]) for feature, (first, last) in enumerate(spans)]
        distinct, place = np.unique(np.concatenate(rows), return_inverse=True)
        values = np.empty(len(lookups.values), dtype=np.int64)
        for (first, last), part in zip(spans, np.split(place, np.cumsum([len(part) for part in rows])), strict=False):
            values[first:last] = part
        zeros = np.zeros_like(self.layout.base)
        layout = replace(self.layout, base=zeros, rows=zeros + max(len(distinct), 1))
        return self._forward(replace(lookups, values=values), self.cache.read(distinct), layout, out)

    def _rows_of(self, feature: int, ids: Ids) -> NDArray[np.int64]:
        """The group's rows of a feature's ids, checked."""
        table, name = self.features[feature]
        wrong = (ids < 0) | (ids >= table.num_embeddings)
        if wrong.any():
            raise ConfigError(
                f"feature {name!r}: id {ids[wrong][0]} is outside table {table.name!r}, "
                f"expected 0 to {table.num_embeddings - 1}"
            )
        return ids.astype(np.int64) + int(self.cache.layout.first_row[self.tables.index(table)])

    def read_rows(self, table: str, first: int, last: int) -> FloatRows:
        """Rows ``first:last`` of a table as they are now."""
        start = self.cache.layout.first_row[self.cache.names.index(table)]
        return self.cache.read(np.arange(start + first, start + last, dtype=np.int64))

    @property
    def codec(self) -> RecordCodec:
        """Of the rows at rest."""
        return self.cache.codec

    def save(self, directory: Path, previous: Path | None) -> dict[str, Any]:
        """See `RowCache.save`."""
        return self.cache.save(directory, previous)

    def restore(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        """See `RowCache.restore`."""
        self.cache.restore(directory, manifest)

    def fits(self, manifest: Mapping[str, Any]) -> bool:
        """See `RowCache.fits`."""
        return "cache" in manifest and self.cache.fits(manifest)

    def put(self, rows: NDArray[np.int64], level0: FloatRows, slots: NDArray[np.int64], write: int) -> None:
        """See `RowCache.put`."""
        self.cache.put(rows, level0, slots, write)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by part."""
        return self.cache.nbytes
