"""Rows of one width in DRAM, float32: weights and optimizer state, table after table."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.kernels.memory import allocate
from stratarec.kernels.random import fill_uniform, table_key


class DramStore:
    """All rows of the tables of one width, as plain arrays.

    Parameters
    ----------
    tables : mapping of str to int
        Table name -> rows.
    width : int
        D.
    optimizer : RowOptimizerConfig
        Decides which state lies beside the weights.
    seed : int
        Initial weights are uniform in +-1/sqrt(rows), a function of (seed, table name, row).
    """

    def __init__(self, tables: Mapping[str, int], width: int, optimizer: RowOptimizerConfig, seed: int) -> None:
        self.width = width
        self.first_row: dict[str, int] = {}
        total = 0
        for name, rows in tables.items():
            self.first_row[name] = total
            total += rows
        self.tables = dict(tables)
        self.weights = allocate(total * width)
        self.row_state = allocate(total if optimizer.row_state else 1)
        self.full_state = allocate(total * width if optimizer.full_state else 1)
        self._names = (optimizer.row_state, optimizer.full_state)
        for name, rows in tables.items():
            bound = rows**-0.5
            fill_uniform(self._weight(name), key=table_key(seed, name), low=-bound, high=bound)

    def _weight(self, table: str) -> NDArray[np.float32]:
        first = self.first_row[table] * self.width
        return self.weights[first : first + self.tables[table] * self.width].reshape(-1, self.width)

    def views(self, table: str) -> dict[str, Tensor]:
        """``weight`` ``[R, D]`` and the optimizer state of a table, sharing this store's memory."""
        first, last = self.first_row[table], self.first_row[table] + self.tables[table]
        views = {"weight": torch.from_numpy(self._weight(table))}
        row, full = self._names
        if row:
            views[row] = torch.from_numpy(self.row_state[first:last])
        if full:
            views[full] = torch.from_numpy(self.full_state[first * self.width : last * self.width]).view(-1, self.width)
        return views

    @property
    def nbytes(self) -> int:
        """Bytes of weights and optimizer state."""
        states = [array for name, array in zip(self._names, (self.row_state, self.full_state), strict=True) if name]
        return int(self.weights.nbytes + sum(array.nbytes for array in states))
