"""Buffers with the distinct rows of a batch. The requesting rank pools them and sums their
gradients.

Buffers use the same kernels as tables. The update kernel sums gradients: gradient descent with a
learning rate of -1 on zeros gives the sum in ascending order of lookup position.

Shapes: U distinct rows of all tables of one width, D width, B samples, N ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.distributed.input_dist import DistinctRows
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.tables.base import features_of, group_layout
from stratarec.kernels import pooling, update
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.runtime.memory import RECYCLER

_SUM = update.RowUpdate(
    kind="sgd", rate=-1.0, eps=0.0, decay=0.0, decoupled=False, beta1=0.0, beta2=0.0, step=1
)
# Initial value of sums: adding a number to -0.0 keeps all its bits, but adding -0.0 to +0.0 gives
# +0.0.
_NOTHING = -0.0


class RowBuffers:
    """Tables of one width whose distinct rows are exchanged.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Complete tables.
    columns : mapping of str to int
        First output column of each pooled feature.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig], columns: Mapping[str, int]) -> None:
        self.tables = tuple(tables)
        self.width = tables[0].embedding_dim
        self._layout = group_layout(self.tables, columns, [0] * len(self.tables), [0] * len(self.tables))
        self._features = features_of(self.tables)
        # Place of each sequence feature among the group's features, and its name.
        self.sequences = [
            (place, key)
            for place, (table, key) in enumerate(self._features)
            if key in table.sequence_features
        ]
        self._workspace = update.UpdateWorkspace()

    def of(self, features: KeyedJagged, distinct: Mapping[str, DistinctRows]) -> Buffer:
        """Return the buffer of a batch, with the position of each lookup's row.

        Parameters
        ----------
        features : KeyedJagged
            Ids of the batch.
        distinct : mapping of str to DistinctRows
            Distinct rows of each table that the batch needs, as `Requests.split` returns them.
        """
        counts = [distinct[table.name].rows for table in self.tables]
        first = np.cumsum([0, *counts]).tolist()
        sizes = np.diff(self._layout.table_start)
        first_row = {table.name: begin for table, begin in zip(self.tables, first, strict=False)}
        layout = replace(
            self._layout,
            base=np.repeat(np.array(first[:-1], dtype=np.int64), sizes),
            rows=np.repeat(np.array(counts, dtype=np.int64), sizes),
        )
        return Buffer(self, layout, self._bags(features, distinct), first_row, first[-1])

    def _bags(self, features: KeyedJagged, distinct: Mapping[str, DistinctRows]) -> BagBatch:
        places = {key: place for place, key in enumerate(features.keys)}
        key = np.array([places[name] for _, name in self._features], dtype=np.int64)
        bags = BagBatch(
            values=np.empty(features.values.numel(), dtype=np.int64),
            offsets=None if features.offsets is None else features.offsets.numpy(),
            weights=None,
            batch=features.batch_size,
            key=key,
            filled=None if features.filled is None else np.array(features.filled, dtype=np.int64)[key],
        )
        done = dict.fromkeys(distinct, 0)
        for feature, (table, _) in enumerate(self._features):
            first, last = bags.span(feature)
            begin = done[table.name]
            bags.values[first:last] = distinct[table.name].places.numpy()[begin : begin + last - first]
            done[table.name] += last - first
        return bags

    def sum(self, buffer: Buffer, pooled: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Return the gradients ``[U, D]`` of the distinct rows of a batch.

        Parameters
        ----------
        buffer : Buffer
            Buffer of the batch.
        pooled : Tensor
            ``[B, W]`` gradients of the pooled output.
        rows : sequence of Tensor
            ``[N, D]`` gradients of the rows of each sequence feature.
        """
        sums = RECYCLER.empty(buffer.rows, self.width).fill_(_NOTHING)
        empty = np.empty(0, dtype=np.float32)
        # Gradient descent has no state.
        slots = update.Slots(sums.view(-1).numpy(), empty, empty, empty.view(np.int32))
        update.update(
            slots, buffer.layout, buffer.bags, update.Gradients(pooled, rows), _SUM, self._workspace
        )
        return sums


@dataclass(frozen=True)
class Buffer:
    """The distinct rows of one batch, for the tables of a `RowBuffers`.

    Parameters
    ----------
    group : RowBuffers
        Tables of one width.
    layout : GroupLayout
        Layout of these tables, with the rows of each table in the buffer.
    bags : BagBatch
        Bags of the batch, with rows of the buffer in place of ids.
    first_row : mapping of str to int
        Table -> its first row in the buffer. The rows of a table are ordered by owner.
    rows : int
        Number of rows, U.
    """

    group: RowBuffers
    layout: GroupLayout
    bags: BagBatch
    first_row: Mapping[str, int]
    rows: int

    def pool(self, rows: Tensor, out: Tensor) -> list[Tensor]:
        """Pool the distinct rows of a batch; return the rows ``[N, D]`` of each sequence feature.

        Parameters
        ----------
        rows : Tensor
            ``[U, D]`` distinct rows.
        out : Tensor
            ``[B, W]``: receives the pooled rows in the columns of these tables' features.
        """
        weights = rows.view(-1).numpy()
        bad = pooling.pool(weights, self.layout, self.bags, out)
        assert bad < 0, "ids were checked when they were split"
        sequences = []
        for place, _ in self.group.sequences:
            first, last = self.bags.span(place)
            gathered = RECYCLER.empty(last - first, self.group.width)
            pooling.gather(weights, self.layout, self.bags, place, gathered)
            sequences.append(gathered)
        return sequences

    def sum(self, pooled: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Return the gradients ``[U, D]`` of the distinct rows. The arguments are the same as of
        `RowBuffers.sum`.
        """
        return self.group.sum(self, pooled, rows)


def grouped(tables: Sequence[EmbeddingBagConfig], columns: Mapping[str, int]) -> list[RowBuffers]:
    """Return a `RowBuffers` for each width of the tables; `columns` is the first output column of
    each feature.
    """
    widths: dict[int, list[EmbeddingBagConfig]] = {}
    for table in tables:
        widths.setdefault(table.embedding_dim, []).append(table)
    return [RowBuffers(mine, columns) for mine in widths.values()]
