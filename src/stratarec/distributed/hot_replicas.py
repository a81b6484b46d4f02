"""Hot rows: every rank has a copy of them with their optimizer state, and all copies take the same steps.

They are the first rows of tables, because ids are ranked by frequency. Hot rows of all tables are numbered together,
width by width, table by table. The owner of a row by its table's place keeps the row, too, and receives its values when
rows are read by name or saved.

Their gradients are summed over ranks with those of the network: a step sends one float for each column of a hot row and
one for each row, independent of the batch. This is the plainest form of FAE's replication (arXiv 2103.00686). Summing
only looked-up rows, first within hosts, was tried: steps had 0.69 to 0.88 of the speed without copies in five of six
cases.

Shapes: H hot rows of all tables, n some of them, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratarec.distributed.sharding import Rows, Sharding
from stratarec.embedding.codecs import FloatRows
from stratarec.embedding.config import EmbeddingBagConfig, RowPart
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.slots import Level0, SlotMemory
from stratarec.embedding.tables.base import group_layout
from stratarec.errors import ConfigError
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.random import table_key
from stratarec.kernels.update import Gradients, RowUpdate


class HotGradients(NamedTuple):
    """Gradients ``[U, D]`` of a batch's distinct rows of one width, and the hot ones among them.

    `numbers` are the ascending numbers of the hot rows, `places` their places among the distinct rows.
    """

    numbers: Rows
    places: Rows
    gradients: Tensor


def check_hot(hot: Mapping[str, int], sharding: Sharding, optimizer: RowOptimizerConfig, *, towers: bool) -> None:
    """Raise `ConfigError` for hot rows that cannot be trained.

    These are rows outside their table, hot rows of an optimizer that changes rows outside the batch, and hot rows in
    the exchange by towers.
    """
    if hot and towers:
        raise ConfigError(
            "hot.copies copies hot rows to all ranks, which distributed.exchange sptt does not support: set "
            "distributed.exchange to flat, or hot.copies to null"
        )
    if hot and optimizer.clocked:
        raise ConfigError(
            "hot.copies does not support train.embedding.rows all, which changes rows in every step: set it to batch, "
            "or hot.copies to null"
        )
    tables = {table.name: table for table in sharding.tables}
    for name, rows in hot.items():
        if name not in tables:
            raise ConfigError(f"hot rows of table {name!r}, expected one of {', '.join(tables)}")
        if not 0 < rows <= tables[name].num_embeddings:
            raise ConfigError(f"table {name!r}: {rows} first rows are hot, expected 1 to {tables[name].num_embeddings}")
        if sharding.places[name].travel != "rows":
            raise ConfigError(f"table {name!r} has hot rows and is pooled by its owner: let its rows travel")


class Replicas:
    """Copies of hot rows on this rank.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Complete tables whose rows are exchanged, in the order of widths.
    hot : mapping of str to int
        Table -> number of its first rows that are hot.
    optimizer : RowOptimizerConfig
    seed : int
        Seed of initial weights, which are those of the owners.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], hot: Mapping[str, int], optimizer: RowOptimizerConfig, seed: int
    ) -> None:  # fmt: skip
        self._hot, self.first, by_width = dict(hot), dict[str, int](), dict[int, list[EmbeddingBagConfig]]()
        for table in tables:
            by_width.setdefault(table.embedding_dim, []).extend([table] if table.name in hot else [])
        by_width = {width: mine for width, mine in by_width.items() if mine}
        self.widths, bounds = tuple(by_width), [0]
        self._tables = {table.name: table for mine in by_width.values() for table in mine}
        for mine in by_width.values():
            rows = [hot[table.name] for table in mine]
            starts = bounds[-1] + np.cumsum([0, *rows])
            self.first |= {table.name: int(start) for table, start in zip(mine, starts, strict=False)}
            bounds.append(int(starts[-1]))
        # ``[widths + 1]`` first row of each width.
        self.bounds = np.array(bounds, dtype=np.int64)
        level0 = Level0()
        self._memory = [
            level0.slots(last - first, width, optimizer)
            for width, (first, last) in zip(self.widths, pairwise(bounds), strict=True)
        ]
        self._layouts = [_layout(memory) for memory in self._memory]
        for table in self._tables.values():
            self._fill(table, table_key(seed, table.name))
        # This rank's flat gradients of a step; None once their sums are applied.
        self.pending: Tensor | None = None

    @property
    def rows(self) -> int:
        """H."""
        return int(self.bounds[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of weights and state."""
        return sum(memory.nbytes for memory in self._memory)

    def _fill(self, table: EmbeddingBagConfig, key: int) -> None:
        rows, width = self._hot[table.name], self.widths.index(table.embedding_dim)
        slot = self.first[table.name] - int(self.bounds[width])
        config = EmbeddingBagConfig(
            name=table.name, num_embeddings=rows, embedding_dim=table.embedding_dim, sequence_features=("rows",),
            initial=table.initial, part=RowPart(first=0, stride=1, rows=table.num_embeddings),
        )  # fmt: skip
        self._memory[width].fill(slot, slot + rows, key, config)

    def numbers(self, name: str, rows: Rows) -> Rows:
        """Return the number of each row of a table, -1 for rows that are not hot."""
        if name not in self._hot:
            return np.full(len(rows), -1, dtype=np.int64)
        return np.where(rows < self._hot[name], rows + self.first[name], -1)

    def read(self, numbers: Rows, out: Tensor, places: Rows) -> None:
        """Fill the rows `places` of `out` ``[U, D]`` with rows of one width."""
        width = self.widths.index(out.shape[1])
        weights = self._memory[width].views(0, self._memory[width].slots)["weight"]
        out[torch.from_numpy(places)] = weights[torch.from_numpy(numbers - self.bounds[width])]

    def store_gradients(self, buffers: Iterable[HotGradients]) -> None:
        """Store this rank's gradients of hot rows, by width, until `apply` receives their sums over all ranks."""
        # After the columns of all rows, 1 for each row that this rank looks up: other rows take no step.
        flat = torch.zeros(sum(self._sizes) + self.rows)
        *columns, asked = self._split(flat)
        for buffer in buffers:
            if len(buffer.numbers):
                width = self.widths.index(buffer.gradients.shape[1])
                at, places = torch.from_numpy(buffer.numbers), torch.from_numpy(buffer.places)
                rows = columns[width].view(-1, self.widths[width])
                rows[at - self.bounds[width]] = buffer.gradients[places]
                asked[at] = 1.0
        self.pending = flat

    def apply(self, sums: Tensor, rule: RowUpdate) -> None:
        """Apply a step to all rows that some rank looks up, given the sum of `pending` over ranks."""
        self.pending = None
        *columns, asked = self._split(sums)
        for width, memory in enumerate(self._memory):
            first, last = self.bounds[width : width + 2]
            # By the flags, not by gradients: a looked-up row with a gradient of 0 is still moved by Adam.
            rows = np.flatnonzero(asked[first:last].numpy())
            if not len(rows):
                continue
            bags = BagBatch(values=rows, offsets=None, weights=None, batch=len(rows), key=np.zeros(1, dtype=np.int64))
            summed = columns[width].view(-1, memory.width)[torch.from_numpy(rows)]
            gradients = Gradients(torch.empty(len(rows), 0), [summed])
            memory.update(memory.stage(self._layouts[width], bags), gradients, rule, None)

    @property
    def _sizes(self) -> list[int]:
        """Floats of the rows of each width."""
        return [memory.slots * memory.width for memory in self._memory]

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return views of the rows of each width, and of the number of ranks that look up each row."""
        views: list[Tensor] = list(flat.split([*self._sizes, self.rows]))  # type: ignore[no-untyped-call]
        return views

    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """Return views of weights and state of neighbouring hot rows of a table."""
        width = self.widths.index(self._tables[name].embedding_dim)
        slot = self.first[name] - int(self.bounds[width])
        return self._memory[width].views(slot + first, slot + last)

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """Table, first and last row of all hot rows."""
        return [(name, 0, self._hot[name]) for name in self._tables]

    def owned(self, sharding: Sharding, name: str, rank: int) -> tuple[Rows, FloatRows]:
        """Return the hot rows of a table that a rank owns: their numbers there, and their values."""
        rows = np.arange(self._hot[name], dtype=np.int64)
        # Owners keep their rows, so that checkpoints and layouts do not depend on copies.
        owners, numbers = sharding.owner(name, rows)
        mine = owners == rank
        width = self.widths.index(self._tables[name].embedding_dim)
        return numbers[mine], self._memory[width].read(self.numbers(name, rows[mine]) - self.bounds[width])


def _layout(memory: SlotMemory) -> GroupLayout:
    """Return the layout of slots as a table that is looked up row by row."""
    table = EmbeddingBagConfig(
        name="rows", num_embeddings=memory.slots, embedding_dim=memory.width, sequence_features=("rows",)
    )
    return group_layout([table], {}, [0], [memory.slots])
