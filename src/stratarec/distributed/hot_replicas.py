"""Hot rows: every rank has a copy of them with their optimizer state, and all copies take the same steps.

They are the first rows of tables, because ids are ranked and tail buckets stand before the values. Hot rows of all
tables together are numbered, width by width, table by table. Whoever owns a row by its table's place keeps it, too, and
gets its values when somebody asks for them by name or saves them.

Their gradients are weights' gradients like those of the network, and are added with them: a step sends one float for
each of their columns and one for each row, whatever the batch looks up. That is FAE's replication in its plainest form
(arXiv 2103.00686). Sums of looked-up rows alone, inside hosts before between them, were tried: steps were 0.69 to 0.88
times as fast as without copies in five cells of six, so machinery does not pay.

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
    """Of one width, those of the hot rows that a batch looks up."""

    numbers: Rows
    """Of the rows, ascending."""
    places: Rows
    """Where they lie among the batch's distinct rows."""
    gradients: Tensor
    """``[U, D]`` of all distinct rows of the width."""


def check_hot(hot: Mapping[str, int], sharding: Sharding, optimizer: RowOptimizerConfig, *, towers: bool) -> None:
    """Refuse hot rows that cannot be trained.

    Raises
    ------
    ConfigError
        For rows that a table lacks, a table that is pooled by its owner, an optimizer that changes rows which a batch
        lacks, and the exchange by towers.
    """
    if hot and towers:
        raise ConfigError(
            "hot rows are copied to all ranks, and by towers no row leaves its host: set distributed.exchange to flat, "
            "or hot.copies to null"
        )
    if hot and optimizer.clocked:
        raise ConfigError(
            "hot rows take the steps of batches that look them up, and train.embedding.rows of all changes them in "
            "every step: set it to batch, or hot.copies to null"
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
    """This rank's copies.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Whole tables, all whose rows travel: widths come in their order.
    hot : mapping of str to int
        Table -> how many first rows.
    optimizer : RowOptimizerConfig
    seed : int
        Of initial weights, which are those that the owners begin with.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], hot: Mapping[str, int], optimizer: RowOptimizerConfig, seed: int
    ) -> None:  # fmt: skip
        self._hot, self.first, found = dict(hot), dict[str, int](), dict[int, list[EmbeddingBagConfig]]()
        for table in tables:
            found.setdefault(table.embedding_dim, []).extend([table] if table.name in hot else [])
        found = {width: mine for width, mine in found.items() if mine}
        self.widths, bounds = tuple(found), [0]
        self._tables = {table.name: table for mine in found.values() for table in mine}
        for mine in found.values():
            rows = [hot[table.name] for table in mine]
            starts = bounds[-1] + np.cumsum([0, *rows])
            self.first |= {table.name: int(start) for table, start in zip(mine, starts, strict=False)}
            bounds.append(int(starts[-1]))
        self.bounds = np.array(bounds, dtype=np.int64)
        """``[widths + 1]`` where the rows of each width begin."""
        level0 = Level0()
        self._memory = [
            level0.slots(last - first, width, optimizer)
            for width, (first, last) in zip(self.widths, pairwise(bounds), strict=True)
        ]
        self._layouts = [_layout(memory) for memory in self._memory]
        for table in self._tables.values():
            self._fill(table, table_key(seed, table.name))
        self.pending: Tensor | None = None
        """This rank's gradients of a step, flat; None once their sums are applied."""

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
        """The number of each row of a table, -1 where it is not hot."""
        if name not in self._hot:
            return np.full(len(rows), -1, dtype=np.int64)
        return np.where(rows < self._hot[name], rows + self.first[name], -1)

    # By number

    def read(self, numbers: Rows, out: Tensor, places: Rows) -> None:
        """Fill the rows `places` of `out` ``[U, D]`` with rows of one width."""
        width = self.widths.index(out.shape[1])
        weights = self._memory[width].views(0, self._memory[width].slots)["weight"]
        out[torch.from_numpy(places)] = weights[torch.from_numpy(numbers - self.bounds[width])]

    # A step

    def note(self, buffers: Iterable[HotGradients]) -> None:
        """Keep a rank's gradients of hot rows until the sums over ranks are `apply`-ed.

        Parameters
        ----------
        buffers : iterable of HotGradients
            Of each width.
        """
        # Behind the columns of all rows, 1 for each that this rank looks up: a row that nobody does takes no step.
        flat = torch.zeros(sum(self._sizes) + self.rows)
        *columns, asked = self._split(flat)
        for found in buffers:
            if len(found.numbers):
                width = self.widths.index(found.gradients.shape[1])
                at, places = torch.from_numpy(found.numbers), torch.from_numpy(found.places)
                rows = columns[width].view(-1, self.widths[width])
                rows[at - self.bounds[width]] = found.gradients[places]
                asked[at] = 1.0
        self.pending = flat

    def apply(self, sums: Tensor, rule: RowUpdate) -> None:
        """The step of all rows that some rank looks up, given the sum over ranks of what is `pending`."""
        self.pending = None
        *columns, asked = self._split(sums)
        for width, memory in enumerate(self._memory):
            first, last = self.bounds[width : width + 2]
            # A row whose gradient is 0 is looked up all the same, and Adam moves it: gradients cannot tell.
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
        """Views of the rows of each width, and of the numbers of ranks that look up each row."""
        found: list[Tensor] = list(flat.split([*self._sizes, self.rows]))  # type: ignore[no-untyped-call]
        return found

    # By table

    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """Views of neighbouring hot rows of a table: weights and state."""
        width = self.widths.index(self._tables[name].embedding_dim)
        slot = self.first[name] - int(self.bounds[width])
        return self._memory[width].views(slot + first, slot + last)

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """Table, first and last row of all hot rows."""
        return [(name, 0, self._hot[name]) for name in self._tables]

    def owned(self, sharding: Sharding, name: str, rank: int) -> tuple[Rows, FloatRows]:
        """The hot rows of a table that a rank owns: their numbers there, and their values."""
        rows = np.arange(self._hot[name], dtype=np.int64)
        # Owners keep theirs, so that checkpoints and layouts know nothing of copies.
        owners, own = sharding.owner(name, rows)
        mine = owners == rank
        width = self.widths.index(self._tables[name].embedding_dim)
        return own[mine], self._memory[width].read(self.numbers(name, rows[mine]) - self.bounds[width])


def _layout(memory: SlotMemory) -> GroupLayout:
    """Slots as a table that is looked up row by row."""
    table = EmbeddingBagConfig(
        name="rows", num_embeddings=memory.slots, embedding_dim=memory.width, sequence_features=("rows",)
    )
    return group_layout([table], {}, [0], [memory.slots])
