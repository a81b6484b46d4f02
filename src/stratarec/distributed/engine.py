"""The engine of tables that are shared among ranks: an ordinary `Engine` of this rank's own rows, and an exchange.

Every method that touches rows is a collective: all ranks call it, in the same order, also those whose batch is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratarec.distributed.collectives import Channel, never
from stratarec.distributed.exchange import FlatExchange, Routed
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharding import Sharding
from stratarec.distributed.wire import Wire, WireKind
from stratarec.embedding.engine import Engine
from stratarec.embedding.health import Health
from stratarec.embedding.module import EmbeddingCollection
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.prepared import Flight, Prepared
from stratarec.embedding.tiers import TierConfig
from stratarec.embedding.validation import Validator
from stratarec.errors import StrataError, TrainingError
from stratarec.jagged import KeyedJagged


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """What travels between ranks, and how."""

    wire: WireKind = "fp32"
    """Format of rows."""
    gradient_wire: WireKind = "fp32"
    """Format of gradients."""


class SharedBatch:
    """A batch whose rows are in level 0 of all their owners; a `Handle`."""

    __slots__ = ("__weakref__", "_own", "number", "routed")

    def __init__(self, routed: Routed, own: Prepared | None, number: int) -> None:
        self.routed, self._own, self.number = routed, own, number

    @property
    def own(self) -> Prepared | None:
        """What this rank's own tables prepared; None where it has none."""
        return self._own

    @property
    def features(self) -> KeyedJagged:
        """As they were given."""
        return self.routed.features

    def release(self) -> None:
        """See `Handle.release`."""
        if self._own is not None:
            self._own.release()

    def release_unused(self) -> None:
        """See `Handle.release_unused`."""
        if self._own is not None:
            self._own.release_unused()


class SharedEngine:
    """Tables over ranks, looked up and trained as one `Engine` would.

    Parameters
    ----------
    sharding : Sharding
        The same on all ranks.
    mesh : Mesh
    optimizer : RowOptimizerConfig
    seed : int
        Initial weights are a function of (seed, table name, row), whatever the sharding.
    tiers : TierConfig
        Of this rank; tables that it has no rows of are left out.
    exchange : ExchangeConfig
    """

    def __init__(
        self, sharding: Sharding, mesh: Mesh, optimizer: RowOptimizerConfig, seed: int, tiers: TierConfig,
        exchange: ExchangeConfig,
    ) -> None:  # fmt: skip
        self.configs, self.sharding, self.mesh = sharding.tables, sharding, mesh
        self.optimizer, self.tiers = optimizer, tiers
        mine = sharding.configs(mesh.rank)
        held = {table.name for table in mine}
        own_tiers = replace(tiers, tables={name: tier for name, tier in tiers.tables.items() if name in held})
        self.own = Engine(mine, optimizer, seed, own_tiers) if mine else None
        keys, dims = (self.own.pooled_keys, self.own.dims) if self.own else ((), ())
        self._exchange = FlatExchange(
            sharding, mesh.rank, (Wire(exchange.wire, seed, mesh.rank), Wire(exchange.gradient_wire, seed, mesh.rank)),
            dict(zip(keys, np.cumsum([0, *dims]).tolist(), strict=False)), sum(dims),
            self.own.row_order if self.own else (),
        )  # fmt: skip
        self.pooled_keys, self.dims = self._exchange.pooled_keys, self._exchange.dims
        self.sequence_keys, self.row_order = self._exchange.sequence_keys, self._exchange.row_order
        self.health = self.own.health if self.own else Health()
        self.flight = self.own.flight if self.own else Flight()
        self.resident = not tiers.tables
        self.step = self.batches = 0
        self._validator = Validator((*self.pooled_keys, *self.sequence_keys))

    # A step

    def prepare(self, features: KeyedJagged) -> SharedBatch:
        """See `Engine.prepare`; an error of one rank is raised on all of them."""
        return self._prepare(features, lambda own, asked: own.prepare(asked), never)

    def prepare_now(self, features: KeyedJagged) -> SharedBatch:
        """See `Engine.prepare_now`."""
        return self._prepare(features, lambda own, asked: own.prepare_now(asked), never)

    def prepare_ahead(self, features: KeyedJagged, lookahead: int, stopped: Callable[[], bool]) -> SharedBatch:
        """See `Engine.prepare_ahead`. It does not wait for ranks that do not come once `stopped` is true."""
        return self._prepare(features, lambda own, asked: own.prepare_ahead(asked, lookahead, stopped), stopped)

    def _prepare(
        self, features: KeyedJagged, prepare: Callable[[Engine, KeyedJagged], Prepared], stopped: Callable[[], bool]
    ) -> SharedBatch:
        channel = self.mesh.ids
        routed = self._route(features, channel, stopped)
        own: Prepared | None = None
        failed: StrataError | None = None
        try:
            own = prepare(self.own, routed.own) if self.own else None
        except StrataError as error:
            failed = error
        batch = SharedBatch(routed, own, self.batches)
        try:
            channel.agree(failed, stopped)
        except BaseException:
            batch.release()
            raise
        self.batches += 1
        return batch

    def _route(self, features: KeyedJagged, channel: Channel, stopped: Callable[[], bool] = never) -> Routed:
        return self._exchange.route(features, self._validator, channel, stopped)

    def look_up(self, prepared: SharedBatch) -> tuple[Tensor, ...]:
        """See `Engine.look_up`."""
        found = self.own.look_up(prepared.own) if self.own and prepared.own else ()
        return self._exchange.rows(prepared.routed, found, self.mesh.rows, prepared.number)

    def read(self, features: KeyedJagged) -> tuple[Tensor, ...]:
        """See `Engine.read`."""
        self.health.require()
        channel = self.mesh.rows
        routed = self._route(features, channel)
        found = self.own.read(routed.own) if self.own else ()
        return self._exchange.rows(routed, found, channel, self.batches)

    def update(self, prepared: SharedBatch, pooled: Tensor, rows: Sequence[Tensor], weights: Tensor | None) -> None:
        """See `Engine.update`; there are no per-sample weights."""
        routed = prepared.routed
        own_pooled, *own_rows = self._exchange.gradients(routed, pooled, rows, self.mesh.rows, prepared.number)
        if self.own and prepared.own:
            self.own.update(prepared.own, own_pooled, own_rows, None)
        self.step += 1

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self.optimizer.learning_rate * self.optimizer.schedule.factor(self.step)

    # Tables by name

    def tables_of(self, name: str) -> SharedRows:
        """Rows of the table `name`, from all ranks."""
        self.health.require()
        return SharedRows(self)

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """None: no rank has a view of a whole table."""
        return iter(())

    # Saving

    def save(self, directory: Path, previous: Path | None) -> dict[str, Any]:
        """Refused: see `docs/architecture.md`, "Many processes"."""
        raise TrainingError("tables that are shared among ranks cannot be saved yet")

    def load(self, directory: Path, manifest: Mapping[str, Any]) -> str:
        """Refused, as `save`."""
        raise TrainingError("tables that are shared among ranks cannot be loaded yet")

    def close(self) -> None:
        """Give back files and threads of this rank's own tables."""
        if self.own:
            self.own.close()

    # Accounting: of this rank

    def bytes_by_memory(self) -> dict[str, int]:
        """See `Engine.bytes_by_memory`; of this rank's own tables."""
        return self.own.bytes_by_memory() if self.own else {"dram": 0}

    def bytes_by_part(self) -> dict[str, int]:
        """See `Engine.bytes_by_part`; of this rank's own tables."""
        return self.own.bytes_by_part() if self.own else {}


class SharedRows:
    """Rows of tables by name and number, gathered from their owners; every method is a collective."""

    def __init__(self, engine: SharedEngine) -> None:
        self._engine = engine

    def table(self, name: str) -> dict[str, Tensor]:
        """See `Tables.table`; a copy on every rank."""
        rows = next(table.num_embeddings for table in self._engine.configs if table.name == name)
        return self.part(name, 0, rows)

    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """See `Tables.part`; a copy on every rank."""
        sharding, channel = self._engine.sharding, self._engine.mesh.rows
        owners, own = sharding.owner(name, np.arange(first, last, dtype=np.int64))
        counts = np.bincount(owners, minlength=channel.ranks).tolist()
        mine = own[owners == channel.rank]
        part = self._own_part(name, mine)
        found = {}
        for state, (width, flat) in self._kinds(name, part).items():
            sizes = [count * width for count in counts]
            taken = channel.exchange(flat.repeat(channel.ranks), [flat.numel()] * channel.ranks, sizes)
            rows = torch.empty(last - first, width)
            rows[torch.from_numpy(np.argsort(owners, kind="stable"))] = taken.view(-1, width)
            found[state] = rows if state in ("weight", self._engine.optimizer.full_state) else rows.view(-1)
        return found

    def _own_part(self, name: str, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[str, Tensor]:
        own = self._engine.own
        if own is None or not len(rows):
            return {}
        # Neighbouring rows of a table are neighbours on every rank that shares it.
        return own.tables_of(name).part(name, int(rows[0]), int(rows[-1]) + 1)

    def _kinds(self, name: str, part: Mapping[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
        """Width and this rank's floats of the weights and of each optimizer state."""
        optimizer = self._engine.optimizer
        width = next(table.embedding_dim for table in self._engine.configs if table.name == name)
        widths = {"weight": width, optimizer.row_state: 1, optimizer.full_state: width}
        return {
            state: (size, part[state].contiguous().view(-1) if part else torch.empty(0))
            for state, size in widths.items()
            if state
        }


class ShardedCollection(EmbeddingCollection[SharedBatch]):
    """An embedding collection whose tables are shared among the ranks of a mesh.

    To models it is what `TieredEmbeddingBagCollection` is. Each rank passes its own batch; with one rank it trains the
    same bits as that class. Where tables travel whole (`Place.travel` of ``pooled``) and wires are fp32, the tables get
    the bits that one process gets on the batches of all ranks one after another; else they agree up to the rounding of
    sums.

    Parameters
    ----------
    sharding, mesh, optimizer, seed, tiers, exchange
        As those of `SharedEngine`.
    """

    def __init__(
        self, sharding: Sharding, mesh: Mesh, *, optimizer: RowOptimizerConfig | None = None, seed: int = 0,
        tiers: TierConfig | None = None, exchange: ExchangeConfig | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            SharedEngine(
                sharding, mesh, optimizer or RowOptimizerConfig(), seed, tiers or TierConfig(),
                exchange or ExchangeConfig(),
            )
        )  # fmt: skip
