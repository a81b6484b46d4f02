"""The engine of tables that are shared among ranks: an ordinary `Engine` of this rank's own rows, and an exchange.

Every method that touches rows is a collective: all ranks call it, in the same order, also those whose batch is empty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.distributed.collectives import never
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.exchange.all_to_all import Dispatched, FlatExchange
from stratarec.distributed.hot_replicas import Replicas, check_hot
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_rows import SharedRows
from stratarec.distributed.sharding import Sharding
from stratarec.distributed.wire import Wire, WireKind
from stratarec.embedding.checkpoint import RANK_GROUPS
from stratarec.embedding.collection import EmbeddingCollection
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.engine import Engine
from stratarec.embedding.lookup_engine import LookupEngine, Prepared
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import StrataError


class SharedBatch:
    """A batch whose rows are in level 0 of all their owners; a `Handle`."""

    __slots__ = ("__weakref__", "dispatched", "own")

    def __init__(self, dispatched: Dispatched, own: Prepared | None) -> None:
        self.dispatched = dispatched
        self.own = own
        """What this rank's own tables prepared; None where it has none."""

    @property
    def features(self) -> KeyedJagged:
        """As they were given."""
        return self.dispatched.features

    def release(self) -> None:
        """See `Handle.release`."""
        if self.own is not None:
            self.own.release()

    def release_unused(self) -> None:
        """See `Handle.release_unused`."""
        if self.own is not None:
            self.own.release_unused()


class SharedEngine(LookupEngine[SharedBatch]):
    """Tables over ranks, looked up and trained as one `Engine` would.

    Parameters
    ----------
    sharding : Sharding
        The same on all ranks.
    mesh : Mesh
        By towers, only the ranks of this host exchange rows, as they are, and the features are those of its tables.
    optimizer : RowOptimizerConfig
    seed : int
        Initial weights are a function of (seed, table name, row), whatever the sharding.
    tiers : TierConfig
        Of this rank; tables that it has no rows of are left out.
    config : DistributedConfig
        Says the wires.
    hot : mapping of str to int
        Table -> first rows that every rank has; see `Replicas`.
    """

    def __init__(
        self, sharding: Sharding, mesh: Mesh, optimizer: RowOptimizerConfig, seed: int, tiers: TierConfig,
        config: DistributedConfig, hot: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.sharding, self.mesh = sharding, mesh
        hot = {name: rows for name, rows in (hot or {}).items() if rows}
        mesh.check_same({"hot rows": hot})
        check_hot(hot, sharding, optimizer, towers=mesh.inside is not None)
        mine = sharding.configs(mesh.rank)
        own_tiers = replace(tiers, tables=_own_tiers(mine, tiers, hot))
        self.own = Engine(mine, optimizer, seed, own_tiers) if mine else None
        self._circle = mesh if mesh.inside is None else mesh.inside
        kinds: tuple[WireKind, WireKind] = (
            (config.wire, config.gradient_wire) if mesh.inside is None else ("fp32", "fp32")
        )
        wire, gradient_wire = (Wire(kind, seed, mesh.rank) for kind in kinds)
        shared = sharding.within(mesh.rank - self._circle.rank, self._circle.ranks)
        super().__init__(sharding.tables, shared.tables, optimizer, tiers, self.own)
        self.replicas: Replicas | None = None
        if hot:
            travelling = [table for table in sharding.tables if sharding.places[table.name].travel == "rows"]
            self.replicas = Replicas(travelling, hot, optimizer, seed)
        # Whether rows of this rank's own tables are older than the copies; the rule of the step that copies wait for.
        self._older, self._rule = False, self.step_clock.rule
        self._exchange = FlatExchange(shared, self._circle, (wire, gradient_wire), self.own, self.replicas)
        self.row_order = self._exchange.row_order
        # Ids travel before a batch is looked up: even where every row is in level 0, preparing it is work to do ahead.
        self.resident = False

    # A step

    def prepare(self, features: KeyedJagged) -> SharedBatch:
        """See `Engine.prepare`; an error of one rank is raised on all of them."""
        return self._prepare(features, lambda own, asked: own.prepare(asked))

    def prepare_now(self, features: KeyedJagged) -> SharedBatch:
        """See `Engine.prepare_now`."""
        return self._prepare(features, lambda own, asked: own.prepare_now(asked))

    def prepare_ahead(self, features: KeyedJagged, lookahead: int, stopped: Callable[[], bool]) -> SharedBatch:
        """See `Engine.prepare_ahead`. It does not wait for ranks that do not come once `stopped` is true."""
        return self._prepare(features, lambda own, asked: own.prepare_ahead(asked, lookahead, stopped), stopped)

    def _prepare(
        self, features: KeyedJagged, prepare: Callable[[Engine, KeyedJagged], Prepared],
        stopped: Callable[[], bool] = never,
    ) -> SharedBatch:  # fmt: skip
        dispatched = self._exchange.dispatch(features, self.batches, self._circle.ids, stopped)
        own: Prepared | None = None
        failed: StrataError | None = None
        try:
            # Whether a batch fits differs from rank to rank; who could train must not wait for one that cannot.
            own = prepare(self.own, dispatched.own) if self.own else None
        except StrataError as error:
            failed = error
        batch = SharedBatch(dispatched, own)
        try:
            self.mesh.ids.agree(failed, stopped)
        except BaseException:
            batch.release()
            raise
        # After all agreed: a batch that one rank refused counts on none, or noise of wires would differ.
        self.batches += 1
        return batch

    def look_up(self, prepared: SharedBatch) -> tuple[Tensor, ...]:
        """See `Engine.look_up`."""
        # Between ids and rows only this rank's own tables are asked, so no rank waits for another here.
        found = self.own.look_up(prepared.own) if self.own and prepared.own else _nothing()
        self._sum_hot_rows()
        return self._exchange.combine(found, prepared.dispatched)

    def read(self, features: KeyedJagged) -> tuple[Tensor, ...]:
        """See `Engine.read`."""
        self.health.require()
        self._sum_hot_rows()
        dispatched = self._exchange.dispatch(features, self.batches, self._circle.rows)
        found = self.own.read(dispatched.own) if self.own else _nothing()
        return self._exchange.combine(found, dispatched)

    def update(self, prepared: SharedBatch, pooled: Tensor, rows: Sequence[Tensor], weights: Tensor | None) -> None:
        """See `Engine.update`; there are no per-sample weights."""
        # Two batches may be looked up before the first one is trained, so the sums of the last step may still wait.
        self._sum_hot_rows()
        self._rule = self.step_clock.rule
        own_pooled, *own_rows = self._exchange.combine_backward((pooled, *rows), prepared.dispatched)
        if self.own and prepared.own:
            self.own.update(prepared.own, own_pooled, own_rows, None)
        else:
            # A rank without tables has no engine that counts; schedules are the same on all.
            self.step_clock.step += 1

    # Tables by name

    def tables_of(self, name: str) -> SharedRows:
        """Rows of the table `name`, from all ranks."""
        self.health.require()
        self._give_owners()
        return SharedRows(self.sharding, self.mesh.rows, self.own, self.optimizer)

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """None: no rank has a view of a whole table."""
        return iter(())

    # Saving

    def save(self, directory: Path, previous: Path | None) -> dict[str, Any]:
        """See `Engine.save`: every rank writes its own rows beside the others; all get the manifest of all."""
        channel = self.mesh.files
        self._give_owners()
        mine = channel.together(lambda: self.own.save(directory, previous, self.mesh.rank) if self.own else {})
        # Every rank gets the whole manifest, for the checks of loading; only the first writes it down.
        parts = [json.loads(content) for content in channel.gather(json.dumps(mine).encode())]
        found: dict[str, Any] = next(part for part in parts if part)
        return {**found, "groups": [group for part in parts if part for group in part["groups"]]}

    def load(self, directory: Path, manifest: Mapping[str, Any]) -> str:
        """See `Engine.load`: by the same ranks and sharding as they were, else row by row."""
        channel = self.mesh.files
        ranks = {int(group["name"].removeprefix("group-")) // RANK_GROUPS for group in manifest["groups"]}

        def agreed(same: bool) -> bool:
            return all(each for (each,) in channel.everyones([same and max(ranks) < channel.ranks]))

        def loaded() -> str:
            if self.own:
                return self.own.load(directory, manifest, self.mesh.rank, agreed)
            agreed(self.mesh.rank not in ranks)
            self.step_clock.load_position(manifest["step"], manifest["earlier"], manifest.get("changes", ()))
            return ""

        reason = channel.together(loaded)
        self._take_copies()
        self.batches = int(manifest["batches"])
        return next((found.decode() for found in channel.gather(reason.encode()) if found), "")

    def initialize_from(
        self, directory: Path, manifest: Mapping[str, Any], optimizer: RowOptimizerConfig
    ) -> None:  # fmt: skip
        """See `EmbeddingCollection.initialize_from`: every rank takes its own rows."""

        def begun() -> None:
            if self.own:
                self.own.initialize_from(directory, manifest, optimizer)

        self.mesh.files.together(begun)
        self._take_copies()

    # Hot rows

    @property
    def hot_gradients(self) -> Tensor | None:
        """Flat float32 that is to be added over ranks and given to `train_hot_rows`; None where nothing is."""
        return None if self.replicas is None else self.replicas.pending

    def train_hot_rows(self, sums: Tensor) -> None:
        """Let all copies take the step of the last batch, given the sums over ranks of `hot_gradients`."""
        assert self.replicas is not None
        with self.health.changing("an optimizer step"):
            self.replicas.apply(sums, self._rule)
        self._older = True

    def _sum_hot_rows(self) -> None:
        """Train the hot rows of a step whose sums nobody made with those of a network; a collective."""
        given = self.hot_gradients
        if given is not None:
            self.train_hot_rows(self.mesh.rows.sum(given))

    def _give_owners(self) -> None:
        """Give this rank's own tables the values of their hot rows; a collective."""
        self._sum_hot_rows()
        if not self._older or self.replicas is None:
            return
        for table in self.own.configs if self.own else ():
            if self.own and table.name in self.replicas.first:
                rows, copies = self.replicas.owned(self.sharding, table.name, self.mesh.rank)
                group = self.own.tables_of(table.name)
                # Straight into slots: what a rank owns of hot rows never leaves level 0 (`_own_tiers`).
                places = np.arange(len(rows), dtype=np.int64)
                group.write_rows(rows + group.first_row[table.name], copies, places, self.batches)
        self._older = False

    def _take_copies(self) -> None:
        """Take the values of all hot rows from their owners; a collective."""
        self._older = False
        if self.replicas is None:
            return
        # Sums of steps after the checkpoint, or of tables that are no more.
        self.replicas.pending = None
        for name, first, last in self.replicas.parts:
            found = self.tables_of(name).part(name, first, last)
            for state, view in self.replicas.part(name, first, last).items():
                view.copy_(found[state])

    def close(self) -> None:
        """Give back files and threads of this rank's own tables."""
        if self.own:
            self.own.close()

    # Accounting: of this rank

    def bytes_by_memory(self) -> dict[str, int]:
        """See `Engine.bytes_by_memory`; of this rank's own tables."""
        return _with(self.own.bytes_by_memory() if self.own else {}, "dram", self._copied_bytes)

    def bytes_by_part(self) -> dict[str, int]:
        """See `Engine.bytes_by_part`; of this rank's own tables."""
        return _with(self.own.bytes_by_part() if self.own else {}, "level0", self._copied_bytes)

    @property
    def _copied_bytes(self) -> int:
        return 0 if self.replicas is None else self.replicas.nbytes


class ShardedCollection(EmbeddingCollection[SharedBatch]):
    """An embedding collection whose tables are shared among the ranks of a mesh.

    To models it is what `TieredEmbeddingBagCollection` is. Each rank passes its own batch; with one rank it trains the
    same bits as that class. Where tables travel whole (`Place.travel` of ``pooled``) and wires are fp32, the tables get
    the bits that one process gets on the batches of all ranks one after another; else they agree up to the rounding of
    sums.

    Parameters
    ----------
    sharding, mesh, optimizer, seed, tiers, config, hot
        As those of `SharedEngine`.
    """

    def __init__(
        self, sharding: Sharding, mesh: Mesh, *, optimizer: RowOptimizerConfig | None = None, seed: int = 0,
        tiers: TierConfig | None = None, config: DistributedConfig | None = None,
        hot: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            SharedEngine(
                sharding, mesh, optimizer or RowOptimizerConfig(), seed, tiers or TierConfig(),
                config or DistributedConfig(), hot,
            )
        )  # fmt: skip


def _own_tiers(
    tables: Sequence[EmbeddingBagConfig], tiers: TierConfig, hot: Mapping[str, int]
) -> dict[str, TableTier]:  # fmt: skip
    """Those of a rank's own tables: what it owns of hot rows has slots, to which copies are written at any time."""
    found = {}
    for table in tables:
        if table.name not in tiers.tables:
            continue
        tier, part = tiers.tables[table.name], table.numbering
        if table.name in hot:
            # Its own rows in front of a row of the whole table.
            own = min(max(-(-(hot[table.name] - part.first) // part.stride), 0), table.num_embeddings)
            tier = replace(tier, hot_rows=own)
        found[table.name] = tier
    return found


def _with(found: dict[str, int], name: str, more: int) -> dict[str, int]:
    return {**found, name: found.get(name, 0) + more}


def _nothing() -> tuple[Tensor, ...]:
    """What a rank without tables answers with: a pooled output without columns."""
    return (torch.empty(0, 0),)
