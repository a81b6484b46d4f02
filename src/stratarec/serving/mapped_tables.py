"""Tables that are only read: rows are looked up where they lie in a mapped file, by the kernels that training uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig
from stratarec.embedding.codecs import FloatRows
from stratarec.embedding.tables.base import features_of, group_layout
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.codec import decode
from stratarec.kernels.codec.layout import RecordLayout
from stratarec.kernels.pooling import gather, pool
from stratarec.models.history import History, HistoryWindows

Floats = NDArray[np.float32]
Records = NDArray[np.uint8]
Indices = NDArray[np.int64]

# Ids of rows that were decoded are made here.
_ANY = 1 << 31
# Of a table, decoded at a time to be checked.
_PIECE = 8 << 20


@dataclass(frozen=True, kw_only=True)
class FloatTables:
    """Float32 tables that lie in one array."""

    weights: Floats
    """``[R * D]``, which may be a mapped file and is never written."""
    place: Mapping[str, int]
    """Where each table begins."""


@dataclass(frozen=True, kw_only=True)
class EncodedTable:
    """A table of which each row is a record, but for some in float32."""

    layout: RecordLayout
    records: Records
    """``[rows, record_bytes]``."""
    kept: Indices
    """``[K]`` rows that are in float32, rising."""
    floats: Floats
    """``[K, D]``."""

    def fault(self) -> str:
        """What is wrong with its rows, which may be anybody's; empty if nothing is."""
        if len(self.kept) and not (self.kept[0] >= 0 and self.kept[-1] < len(self.records)):
            return "rows outside of the table"
        if (np.diff(self.kept) <= 0).any():
            return "rows that do not rise"
        width = self.layout.width
        step = max(_PIECE // (4 * width), 1)
        out = np.empty((min(step, len(self.records)), width), dtype=np.float32)
        for first in range(0, len(self.records), step):
            part = self.records[first : first + step]
            _decode(self.layout, part, np.arange(len(part), dtype=np.int64), out)
            if not np.isfinite(out[: len(part)]).all():
                return "a number that is not finite"
        return ""

    def decode(self, ids: NDArray[np.int32], out: Floats) -> None:
        """Rows `ids` into `out` ``[len(ids), D]``."""
        _decode(self.layout, self.records, ids.astype(np.int64), out)
        if len(self.kept):
            place = np.minimum(np.searchsorted(self.kept, ids), len(self.kept) - 1)
            here = np.flatnonzero(self.kept[place] == ids)
            out[here] = self.floats[place[here]]


class ReadOnlyTables:
    """Pools and looks up rows of tables.

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
    floats : FloatTables
        Those in float32.
    encoded : mapping of str to EncodedTable
        The others: of them, the rows that a batch asks for are decoded.
    histories : sequence of str
        Unpooled features, in the order in which the network takes them.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        floats: FloatTables,
        encoded: Mapping[str, EncodedTable],
        histories: Sequence[str],
    ) -> None:
        self._histories, self._encoded = tuple(histories), encoded
        widths = {table.embedding_dim for table in configs}
        features = [(name, table.embedding_dim) for table in configs for name in table.feature_names]
        ends = np.cumsum([0, *(width for _, width in features)]).tolist()
        self.columns = ends[-1]
        columns = {name: end for (name, _), end in zip(features, ends, strict=False)}
        plain = [table for table in configs if table.name not in encoded]
        coded = [table for table in configs if table.name in encoded]
        # Tables of one width are one lookup.
        self._plain = [_float_group(some, floats, columns) for some in _sets(plain, len(widths))]
        self._coded = [
            (features_of(some), group_layout(some, columns, [0] * len(some), [_ANY] * len(some)))
            for some in _sets(coded, len(widths))
        ]

    def look_up(self, features: KeyedJagged) -> tuple[Tensor, list[History]]:
        """Pooled rows ``[B, columns]``, and the rows of each history.

        Ids are within their tables, as those of a vocabulary are.
        """
        pooled = torch.empty(features.batch_size, self.columns)
        rows: dict[str, Tensor] = {}
        for wanted, layout, weights in self._plain:
            bags = _bags(features, features.values.numpy(), wanted)
            rows |= _read(weights, layout, bags, wanted, pooled)
        for wanted, layout in self._coded:
            bags = _bags(features, np.arange(len(features.values), dtype=np.int32), wanted)
            rows |= _read(self._decoded(features, bags, wanted, layout.width), layout, bags, wanted, pooled)
        return pooled, [_history(rows[name], features, name) for name in self._histories]

    def _decoded(
        self, features: KeyedJagged, bags: BagBatch, wanted: Sequence[tuple[EmbeddingBagConfig, str]], width: int
    ) -> Floats:
        """``[N * D]`` the row of every id of some encoded tables; the others are left as they are."""
        ids, out = features.values.numpy(), np.empty((len(features.values), width), dtype=np.float32)
        for place, (table, _) in enumerate(wanted):
            first, last = bags.span(place)
            self._encoded[table.name].decode(ids[first:last], out[first:last])
        return out.reshape(-1)


def _sets(configs: Sequence[EmbeddingBagConfig], widths: int) -> list[list[EmbeddingBagConfig]]:
    return [[table] for table in configs] if widths > 1 else [list(configs)] if configs else []


def _float_group(
    configs: Sequence[EmbeddingBagConfig], floats: FloatTables, columns: Mapping[str, int]
) -> tuple[list[tuple[EmbeddingBagConfig, str]], GroupLayout, Floats]:
    width, start = configs[0].embedding_dim, min(floats.place[table.name] for table in configs)
    first = [(floats.place[table.name] - start) // width for table in configs]
    layout = group_layout(configs, columns, first, [table.num_embeddings for table in configs])
    return features_of(configs), layout, floats.weights[start:]


def _decode(layout: RecordLayout, records: Records, places: Indices, out: Floats) -> None:
    slots = np.arange(len(places), dtype=np.int64)
    decode(layout, records, places, FloatRows.without_state(out.reshape(-1), layout.width).parts, slots)


def _bags(features: KeyedJagged, values: NDArray[np.int32], wanted: Sequence[tuple[object, str]]) -> BagBatch:
    key = np.array([features.keys.index(name) for _, name in wanted], dtype=np.int64)
    offsets = features.bag_offsets().numpy()
    weights = None if features.weights is None else features.weights.numpy()
    return BagBatch(values=values, offsets=offsets, weights=weights, batch=features.batch_size, key=key)


def _read(
    weights: Floats, layout: GroupLayout, bags: BagBatch, wanted: Sequence[tuple[object, str]], pooled: Tensor
) -> dict[str, Tensor]:
    """Pool into `pooled`; the rows of features that are not pooled."""
    wrong, rows = [pool(weights, layout, bags, pooled)], {}
    for place in np.flatnonzero(layout.sequence).tolist():
        first, last = bags.span(place)
        found = rows[wanted[place][1]] = torch.empty(last - first, layout.width)
        wrong.append(gather(weights, layout, bags, place, found))
    assert max(wrong) < 0, "an id outside its table"
    return rows


def _history(rows: Tensor, features: KeyedJagged, name: str) -> History:
    bags = features[name]
    return History(rows=rows, windows=HistoryWindows(start=bags.offsets[:-1], length=bags.lengths()))
