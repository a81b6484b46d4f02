"""Engine of tables that are sharded across ranks: an `Engine` of this rank's rows, and an exchange.

Every method that accesses rows is a collective: all ranks call it in the same order, including
those with an empty batch.
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
from stratarec.distributed.all_to_all import Dispatched, FlatExchange
from stratarec.distributed.collectives import Channel, never
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharding import Sharding
from stratarec.distributed.wire import Wire
from stratarec.distributed.wire_formats import WireKind
from stratarec.embedding.checkpoint import RANK_GROUPS
from stratarec.embedding.collection import EmbeddingCollection
from stratarec.embedding.engine import Engine
from stratarec.embedding.lookup_engine import LookupEngine, StagedBatch
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tiers import TierConfig
from stratarec.errors import StrataError


class ShardedBatch:
    """Handle of a batch whose rows are in level 0 of all their owners.

    Parameters
    ----------
    dispatched : Dispatched
        Handle of the batch in the exchange.
    local : StagedBatch or None
        Handle of this rank's tables; None if it has no tables.
    """

    __slots__ = ("__weakref__", "dispatched", "local")

    def __init__(self, dispatched: Dispatched, local: StagedBatch | None) -> None:
        self.dispatched = dispatched
        self.local = local

    @property
    def features(self) -> KeyedJagged:
        """Features of this rank's batch."""
        return self.dispatched.features

    def release(self) -> None:
        if self.local is not None:
            self.local.release()

    def release_unused(self) -> None:
        if self.local is not None:
            self.local.release_unused()


class ShardedEngine(LookupEngine[ShardedBatch]):
    """Engine of tables on several ranks.

    Parameters
    ----------
    sharding : Sharding
        Equal on all ranks.
    mesh : Mesh
        With the exchange by towers, the mesh of this host's ranks. They exchange rows as fp32, and
        batches have only the features of the host's tables.
    optimizer : RowOptimizerConfig
        Row optimizer of all tables.
    seed : int
        Initial weights are a function of (seed, table name, row), independent of the sharding.
    tiers : TierConfig
        Tiers of this rank; tables without rows on it are ignored.
    config : DistributedConfig
        Sets the wires.
    """

    def __init__(
        self,
        sharding: Sharding,
        mesh: Mesh,
        optimizer: RowOptimizerConfig,
        seed: int,
        tiers: TierConfig,
        config: DistributedConfig,
    ) -> None:
        self.sharding = sharding
        self.mesh = mesh
        mine = sharding.configs(mesh.rank)
        names = {table.name for table in mine}
        local_tiers = replace(
            tiers, tables={name: tier for name, tier in tiers.tables.items() if name in names}
        )
        self.local = Engine(mine, optimizer, seed, local_tiers) if mine else None
        self._circle = mesh if mesh.inside is None else mesh.inside
        kinds: tuple[WireKind, WireKind] = (
            (config.wire, config.gradient_wire) if mesh.inside is None else ("fp32", "fp32")
        )
        wire, gradient_wire = (Wire(kind, seed, mesh.rank) for kind in kinds)
        here = sharding.within(mesh.rank - self._circle.rank, self._circle.ranks)
        super().__init__(sharding.tables, here.tables, optimizer, tiers, self.local)
        self._exchange = FlatExchange(here, self._circle, (wire, gradient_wire), self.local)
        self.row_order = self._exchange.row_order
        # Ids are exchanged before a lookup, so staging ahead is useful even if all rows are in
        # level 0.
        self.resident = False

    def stage(self, features: KeyedJagged) -> ShardedBatch:
        """Stage this rank's batch `features`; an error of one rank is raised on all of them."""
        return self._stage(features, lambda local, asked: local.stage(asked))

    def stage_now(self, features: KeyedJagged) -> ShardedBatch:
        return self._stage(features, lambda local, asked: local.stage_now(asked))

    def stage_ahead(
        self, features: KeyedJagged, lookahead: int, stopped: Callable[[], bool]
    ) -> ShardedBatch:
        """Stage a batch ahead of time.

        Parameters
        ----------
        features : KeyedJagged
            Ids of this rank's batch.
        lookahead : int
            The call waits for the backward pass of the batch `lookahead` + 1 before this one.
        stopped : callable
            Waits for other ranks are aborted when it returns true.
        """
        return self._stage(
            features, lambda local, asked: local.stage_ahead(asked, lookahead, stopped), stopped
        )

    def _stage(
        self,
        features: KeyedJagged,
        stage: Callable[[Engine, KeyedJagged], StagedBatch],
        stopped: Callable[[], bool] = never,
    ) -> ShardedBatch:
        dispatched = self._exchange.dispatch(features, self.batches, self._circle.ids, stopped)
        local: StagedBatch | None = None
        failed: StrataError | None = None
        try:
            # A batch may fit on some ranks only. These ranks must not wait for a rank on which it
            # does not fit.
            local = stage(self.local, dispatched.local) if self.local else None
        except StrataError as error:
            failed = error
        batch = ShardedBatch(dispatched, local)
        try:
            self.mesh.ids.agree(failed, stopped)
        except BaseException:
            batch.release()
            raise
        # Counted only after all ranks agreed. The noise of wires depends on this number, so it must
        # be equal on all ranks, and a batch that one rank refused counts on no rank.
        self.batches += 1
        return batch

    def look_up(self, handle: ShardedBatch) -> tuple[Tensor, ...]:
        # Only local tables are looked up between ids and rows, so no rank waits for another here.
        outputs = self.local.look_up(handle.local) if self.local and handle.local else _nothing()
        return self._exchange.combine(outputs, handle.dispatched)

    def read(self, features: KeyedJagged) -> tuple[Tensor, ...]:
        self.health.require()
        dispatched = self._exchange.dispatch(features, self.batches, self._circle.rows)
        outputs = self.local.read(dispatched.local) if self.local else _nothing()
        return self._exchange.combine(outputs, dispatched)

    def update_rows(
        self,
        handle: ShardedBatch,
        gradients: Sequence[Tensor],
        scale: float = 1.0,
        weights: Tensor | None = None,
    ) -> None:
        local = self._exchange.combine_backward(gradients, handle.dispatched)
        if self.local and handle.local:
            self.local.update_rows(handle.local, local, scale)
        else:
            # A rank without tables has no local engine that counts steps, but schedules need the
            # count on all ranks.
            self.step_clock.step += 1

    def tables_of(self, name: str) -> ShardedRows:
        """Return access to the rows of the table `name` on all ranks."""
        self.health.require()
        return ShardedRows(self.sharding, self.mesh.rows, self.local, self.optimizer)

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """Return nothing: no rank has a view of a complete table."""
        return iter(())

    def save(self, directory: Path, previous: Path | None) -> dict[str, Any]:
        """Save every rank's rows in one directory; return the manifest of all ranks.

        Parameters
        ----------
        directory : Path
            New directory, equal on all ranks.
        previous : Path or None
            Directory of the last save or load; None to write all rows.
        """
        channel = self.mesh.files
        mine = channel.run_everywhere(
            lambda: self.local.save(directory, previous, self.mesh.rank) if self.local else {}
        )
        # Every rank gets the complete manifest, to check it when it is loaded. Only the first rank
        # writes it.
        parts = [json.loads(content) for content in channel.gather(json.dumps(mine).encode())]
        manifest: dict[str, Any] = next(part for part in parts if part)
        return {**manifest, "groups": [group for part in parts if part for group in part["groups"]]}

    def load(self, directory: Path, manifest: Mapping[str, Any]) -> str:
        """Load the checkpoint in `directory`, row by row if ranks or sharding have changed since it
        was saved.

        `manifest` is the result of `save`. Returns why bits may differ from those of the saved run,
        see `EmbeddingCollection.load`.
        """
        channel = self.mesh.files
        ranks = {int(group["name"].removeprefix("group-")) // RANK_GROUPS for group in manifest["groups"]}

        def agreed(same: bool) -> bool:
            return all(flag for (flag,) in channel.gather_ints([same and max(ranks) < channel.ranks]))

        def loaded() -> str:
            if self.local:
                return self.local.load(directory, manifest, self.mesh.rank, agreed)
            agreed(self.mesh.rank not in ranks)
            self.step_clock.load_position(
                manifest["step"], manifest["earlier"], manifest.get("changes", ())
            )
            return ""

        reason = channel.run_everywhere(loaded)
        self.batches = int(manifest["batches"])
        return next((text.decode() for text in channel.gather(reason.encode()) if text), "")

    def initialize_from(
        self, directory: Path, manifest: Mapping[str, Any], optimizer: RowOptimizerConfig
    ) -> None:
        """Start from the rows of another run's checkpoint; every rank reads its rows.

        Parameters
        ----------
        directory : Path
            Directory of the tables in the checkpoint.
        manifest : mapping
            Result of the other run's `save`.
        optimizer : RowOptimizerConfig
            Row optimizer of the other run, with which missed steps are applied.
        """

        def begin() -> None:
            if self.local:
                self.local.initialize_from(directory, manifest, optimizer)

        self.mesh.files.run_everywhere(begin)

    def close(self) -> None:
        """Release files and threads of the local tables."""
        if self.local:
            self.local.close()

    def bytes_by_memory(self) -> dict[str, int]:
        """Return memory (such as ``dram``) -> bytes of tables that this rank uses there."""
        return self.local.bytes_by_memory() if self.local else {}

    def bytes_by_part(self) -> dict[str, int]:
        """Return part of the engine (`lookup_engine.PARTS`) -> bytes that this rank uses."""
        return self.local.bytes_by_part() if self.local else {}


class ShardedCollection(EmbeddingCollection[ShardedBatch]):
    """Embedding collection whose tables are sharded across the ranks of a mesh.

    Models use it like `TieredEmbeddingBagCollection`. Each rank passes its batch. A single rank
    trains the same bits as with that class. If `Place.travel` of all tables is ``pooled`` and wires
    are fp32, tables get the bits of one process that trains on the concatenated batches of all
    ranks; else they agree up to the rounding of sums.

    Parameters
    ----------
    sharding, mesh, optimizer, seed, tiers, config
        Arguments of `ShardedEngine`.
    """

    def __init__(
        self,
        sharding: Sharding,
        mesh: Mesh,
        *,
        optimizer: RowOptimizerConfig | None = None,
        seed: int = 0,
        tiers: TierConfig | None = None,
        config: DistributedConfig | None = None,
    ) -> None:
        super().__init__(
            ShardedEngine(
                sharding,
                mesh,
                optimizer or RowOptimizerConfig(),
                seed,
                tiers or TierConfig(),
                config or DistributedConfig(),
            )
        )


def _nothing() -> tuple[Tensor, ...]:
    """Return the output of a rank without tables: a pooled output without columns."""
    return (torch.empty(0, 0),)


class ShardedRows:
    """Access to rows of tables by name and number, gathered from their owners; every method is a
    collective.

    Parameters
    ----------
    sharding : Sharding
        Owners of all rows.
    channel : Channel
        Channel of all ranks, for the calling thread.
    local : Engine or None
        Engine of this rank's rows; None if it has no rows.
    optimizer : RowOptimizerConfig
        Determines the state of rows.
    """

    def __init__(
        self, sharding: Sharding, channel: Channel, local: Engine | None, optimizer: RowOptimizerConfig
    ) -> None:
        self._sharding = sharding
        self._channel = channel
        self._local = local
        self._optimizer = optimizer

    def table(self, name: str) -> dict[str, Tensor]:
        """Return a copy of weights and state of the table `name`, on every rank."""
        rows = next(table.num_embeddings for table in self._sharding.tables if table.name == name)
        return self.part(name, 0, rows)

    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """Return copies of weights and state of rows ``first:last`` of `name`, on every rank."""
        sharding, channel = self._sharding, self._channel
        owners, local = sharding.owner(name, np.arange(first, last, dtype=np.int64))
        counts = np.bincount(owners, minlength=channel.ranks).tolist()
        mine = local[owners == channel.rank]
        part = self._local_part(name, mine)
        rows_by_state = {}
        for state, (width, flat) in self._kinds(name, part).items():
            sizes = [count * width for count in counts]
            received = channel.exchange(flat.repeat(channel.ranks), [flat.numel()] * channel.ranks, sizes)
            # The rows of each rank follow those of the rank before, in ascending order: the stable
            # order by owner.
            rows = torch.empty(last - first, width)
            rows[torch.from_numpy(np.argsort(owners, kind="stable"))] = received.view(-1, width)
            rows_by_state[state] = (
                rows if state in ("weight", *self._optimizer.full_state) else rows.view(-1)
            )
        if "clock" in rows_by_state:
            rows_by_state["clock"] = rows_by_state["clock"].view(torch.int32)
        return rows_by_state

    def _local_part(self, name: str, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[str, Tensor]:
        local = self._local
        if local is None or not len(rows):
            return {}
        # Neighbouring rows of a table are neighbours on every rank that shares it.
        return local.tables_of(name).part(name, int(rows[0]), int(rows[-1]) + 1)

    def _kinds(self, name: str, part: Mapping[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
        """Return width and this rank's floats of the weights and of each optimizer state."""
        optimizer = self._optimizer
        width = next(table.embedding_dim for table in self._sharding.tables if table.name == name)
        widths = {"weight": width, optimizer.row_state: 1, **dict.fromkeys(optimizer.full_state, width)}
        if optimizer.clocked:
            # Integers are sent as floats with the same bits.
            widths["clock"] = 1
        return {
            state: (size, part[state].contiguous().view(-1).view(torch.float32) if part else torch.empty(0))
            for state, size in widths.items()
            if state
        }
