"""Tables that are only read: rows are looked up where they lie in a mapped file, by the kernels that training uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding import EmbeddingBagConfig
from stratarec.jagged import KeyedJagged
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.pooling import gather, pool
from stratarec.models.history import History, Windows

Floats = NDArray[np.float32]


class ReadOnlyTables:
    """Pools and looks up rows of tables.

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
    weights : mapping of str to ndarray
        Table -> ``[rows * D]`` float32, which may be a mapped file and is never written.
    histories : sequence of str
        Unpooled features, in the order in which the network takes them.
    """

    def __init__(
        self, configs: Sequence[EmbeddingBagConfig], weights: Mapping[str, Floats], histories: Sequence[str]
    ) -> None:
        self._histories = tuple(histories)
        self._tables: list[tuple[tuple[str, ...], GroupLayout, Floats]] = []
        column = 0
        for table in configs:
            names = (*table.feature_names, *table.sequence_features)
            self._tables.append((names, _layout(table, column), weights[table.name]))
            column += len(table.feature_names) * table.embedding_dim
        self.columns = column

    def look_up(self, features: KeyedJagged) -> tuple[Tensor, list[History]]:
        """Pooled rows ``[B, columns]``, and the rows of each history.

        Ids are within their tables, as those of a vocabulary are.
        """
        pooled, offsets = torch.empty(features.batch_size, self.columns), features.bag_offsets()
        rows: dict[str, Tensor] = {}
        for names, layout, weights in self._tables:
            bags = BagBatch(
                values=features.values.numpy(),
                offsets=offsets.numpy(),
                weights=None,
                batch=features.batch_size,
                key=np.array([features.keys.index(name) for name in names], dtype=np.int64),
            )
            wrong = [pool(weights, layout, bags, pooled)]
            for place in np.flatnonzero(layout.sequence):
                first, last = bags.span(int(place))
                rows[names[place]] = torch.empty(last - first, layout.width)
                wrong.append(gather(weights, layout, bags, int(place), rows[names[place]]))
            assert max(wrong) < 0, "an id outside its table"
        return pooled, [_history(rows[name], features, name) for name in self._histories]


def _layout(table: EmbeddingBagConfig, column: int) -> GroupLayout:
    pooled, unpooled = len(table.feature_names), len(table.sequence_features)
    features = pooled + unpooled
    return GroupLayout(
        width=table.embedding_dim,
        base=np.zeros(features, dtype=np.int64),
        rows=np.full(features, table.num_embeddings, dtype=np.int64),
        column=column + table.embedding_dim * np.arange(features, dtype=np.int64),
        mean=np.full(features, table.pooling == "mean", dtype=np.int64),
        sequence=np.repeat(np.array([0, 1], dtype=np.int64), [pooled, unpooled]),
        table_start=np.array([0, features], dtype=np.int64),
        table_features=np.arange(features, dtype=np.int64),
    )


def _history(rows: Tensor, features: KeyedJagged, name: str) -> History:
    bags = features[name]
    return History(rows=rows, windows=Windows(start=bags.offsets[:-1], length=bags.lengths()))
