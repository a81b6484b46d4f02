"""Rows of shared tables by name and number, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from stratarec.distributed.collectives import Channel
from stratarec.distributed.sharding import Sharding
from stratarec.embedding.engine import Engine
from stratarec.embedding.optimizers import RowOptimizerConfig


class SharedRows:
    """Rows of tables by name and number, gathered from their owners; every method is a collective.

    Parameters
    ----------
    sharding : Sharding
    channel : Channel
    own : Engine or None
        Of this rank's rows.
    optimizer : RowOptimizerConfig
        Says what state rows have.
    """

    def __init__(self, sharding: Sharding, channel: Channel, own: Engine | None, optimizer: RowOptimizerConfig) -> None:
        self._sharding, self._channel, self._own, self._optimizer = sharding, channel, own, optimizer

    def table(self, name: str) -> dict[str, Tensor]:
        """See `Tables.table`; a copy on every rank."""
        rows = next(table.num_embeddings for table in self._sharding.tables if table.name == name)
        return self.part(name, 0, rows)

    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """See `Tables.part`; a copy on every rank."""
        sharding, channel = self._sharding, self._channel
        owners, own = sharding.owner(name, np.arange(first, last, dtype=np.int64))
        counts = np.bincount(owners, minlength=channel.ranks).tolist()
        mine = own[owners == channel.rank]
        part = self._own_part(name, mine)
        found = {}
        for state, (width, flat) in self._kinds(name, part).items():
            sizes = [count * width for count in counts]
            taken = channel.exchange(flat.repeat(channel.ranks), [flat.numel()] * channel.ranks, sizes)
            # Ranks answer one after another, each with its rows in order: sorted by owner, stably, is that order.
            rows = torch.empty(last - first, width)
            rows[torch.from_numpy(np.argsort(owners, kind="stable"))] = taken.view(-1, width)
            found[state] = rows if state in ("weight", *self._optimizer.full_state) else rows.view(-1)
        if "clock" in found:
            found["clock"] = found["clock"].view(torch.int32)
        return found

    def _own_part(self, name: str, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[str, Tensor]:
        own = self._own
        if own is None or not len(rows):
            return {}
        # Neighbouring rows of a table are neighbours on every rank that shares it.
        return own.tables_of(name).part(name, int(rows[0]), int(rows[-1]) + 1)

    def _kinds(self, name: str, part: Mapping[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
        """Width and this rank's floats of the weights and of each optimizer state."""
        optimizer = self._optimizer
        width = next(table.embedding_dim for table in self._sharding.tables if table.name == name)
        widths = {"weight": width, optimizer.row_state: 1, **dict.fromkeys(optimizer.full_state, width)}
        if optimizer.clocked:
            # Whole numbers travel as the floats that have their bits.
            widths["clock"] = 1
        return {
            state: (size, part[state].contiguous().view(-1).view(torch.float32) if part else torch.empty(0))
            for state, size in widths.items()
            if state
        }
