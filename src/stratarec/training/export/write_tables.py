"""Tables of an export: every row in the codec that it had at home, some rows at a time.

A record is copied as it is, less its optimizer state. Rows that were in level 0 when training ended are float32
there, and stay so beside their record: they are the popular ones, and scores are then those of `predict`. Rows without
a record that are in no slot have never been trained; their initial values are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stratarec.embedding import EmbeddingBagConfig
from stratarec.embedding.codecs import CodecConfig, FloatRows
from stratarec.embedding.tables.cached import CachedTables
from stratarec.errors import CheckpointError
from stratarec.io.tensors import ChunkedTensor
from stratarec.serving.export_manifest import FLOATS, ROWS, ExportedTable
from stratarec.training.run.open_run import TrainedModel

# Of a table, at a time.
_PIECE_BYTES = 8 << 20


class TableWriter:
    """What is written of one table of a trained model."""

    def __init__(self, trained: TrainedModel, config: EmbeddingBagConfig) -> None:
        self._collection, self._config = trained.model.embeddings, config
        tables = self._collection.engine.tables_of(config.name)
        config_at_home = tables.codec.config if isinstance(tables, CachedTables) else CodecConfig()
        self._cached = tables if isinstance(tables, CachedTables) and config_at_home.kind != "fp32" else None
        self._step = max(_PIECE_BYTES // (4 * config.embedding_dim), 1)
        found = [self._cached.rows_in_slots(config.name, *span) for span in self._spans()] if self._cached else []
        self._in_slots = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
        self.about = ExportedTable(
            rows=config.num_embeddings,
            width=config.embedding_dim,
            codec=config_at_home.kind,
            parameters=config_at_home.parameters,
            float32_rows=len(self._in_slots),
        )

    def tensors(self) -> dict[str, Tensor | ChunkedTensor]:
        """By the names that `ExportedTable.tensors` gives."""
        parts: dict[str, Callable[[], Iterator[Tensor]]] = {self._config.name: self._rows}
        if self._cached:
            parts = {
                self._config.name: partial(self._records, self._cached),
                ROWS + self._config.name: lambda: iter([torch.from_numpy(self._in_slots)]),
                FLOATS + self._config.name: self._slots,
            }
        specs = self.about.tensors(self._config.name)
        return {
            name: ChunkedTensor(dtype=specs[name].dtype, shape=specs[name].shape, parts=parts[name]) for name in specs
        }

    def _spans(self) -> Iterator[tuple[int, int]]:
        rows = self._config.num_embeddings
        return ((first, min(first + self._step, rows)) for first in range(0, rows, self._step))

    def _floats(self, first: int, last: int) -> Tensor:
        return finite(self._collection.rows(self._config.name, first, last)["weight"], f"table {self._config.name!r}")

    def _rows(self) -> Iterator[Tensor]:
        return (self._floats(*span) for span in self._spans())

    def _slots(self) -> Iterator[Tensor]:
        """The rows that are in slots."""
        for first, last in self._spans():
            begin, end = np.searchsorted(self._in_slots, [first, last])
            if begin < end:
                yield self._floats(first, last)[self._in_slots[begin:end] - first]

    def _records(self, cached: CachedTables) -> Iterator[Tensor]:
        codec = self.about.record
        for first, last in self._spans():
            records, home = cached.read_records(self._config.name, first, last)
            weights = self._floats(first, last)
            kept = np.ascontiguousarray(records[:, : codec.record_bytes])
            others = np.flatnonzero(~home)
            source = FloatRows.without_state(weights.contiguous().reshape(-1).cpu().numpy(), codec.width)
            bad = codec.encode(source, others, kept, others, np.zeros(len(others), dtype=np.uint64), 0)
            if bad >= 0:
                raise CheckpointError(
                    f"table {self._config.name!r}, row {first + int(others[bad])}: a weight that "
                    f"{codec.config.kind} cannot hold; export an earlier checkpoint of the run"
                )
            yield torch.from_numpy(kept)


def finite(tensor: Tensor, name: str) -> Tensor:
    """The tensor, which must hold finite numbers."""
    # A sum is finite where all are, and takes a twentieth of the time; it may be infinite where none is.
    if not (torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all()):
        raise CheckpointError(f"{name} has a weight that is no finite number: export an earlier checkpoint of the run")
    return tensor
