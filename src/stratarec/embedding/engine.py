"""The embedding engine of one process, without autograd: it stages, looks up and trains batches,
and saves tables.

A batch is staged in one of two ways. `stage`, on the training thread, raises an error if there is
no room next to the in-flight batches. `stage_ahead`, on another thread, waits. When it stages batch
n with a lookahead of k, it first waits for the backward pass of batch n - k - 1, and then keeps the
rows of batches n - k and later in their slots. So n and k alone determine which slots may be
reused, not which batches happen to be finished. Moves, and with them the rounding of evicted rows,
are therefore the same in every run. If slots became free whenever a batch finishes, bits would
differ from run to run.

If the norm of all gradients is clipped (`gradient_norm`), squares are summed in the order of first
lookups within a table, in float64, and across tables by an exactly rounded sum: the norm has the
same bits wherever rows are. Weight decay is added afterwards and is not part of the norm, as in
torch's optimizers.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding.checkpoint import checked, initialize_tables, load_tables, same_layout, save_tables
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig, EmbeddingBagConfig, check_tables
from stratarec.embedding.homes import HOMES, HomeKind, NewStore
from stratarec.embedding.lookup_engine import Health, LookupEngine, StagedBatch
from stratarec.embedding.optimizers import RowOptimizerConfig, StepClock
from stratarec.embedding.slots import Level0
from stratarec.embedding.slots.memory import PackedBatch, StagedBags, Tensors
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.ssd_layout import DEAD_BYTES, SsdConfig, location_bytes, plan_layout
from stratarec.embedding.tables.base import BatchStamp, TableGroup
from stratarec.embedding.tables.cache import Directory
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tables.resident import ResidentTables
from stratarec.embedding.tiers import TierConfig
from stratarec.errors import CheckpointError, ConfigError, TrainingError
from stratarec.kernels.bags import first_falling
from stratarec.kernels.runtime.memory import RECYCLER, buffer_bytes
from stratarec.kernels.update import Gradients, row_numbers
from stratarec.progress import timed, traced

_ID_TYPES = (torch.int32, torch.int64)


class Validator:
    """Checks the batches of one collection. Ids are checked by the kernels that read them.

    Parameters
    ----------
    keys : tuple of str
        Features that every batch must have.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = keys
        # Batches usually have the same keys, which are then checked once.
        self._checked: tuple[str, ...] | None = None

    def check(self, features: KeyedJagged) -> None:
        """Raise a `ConfigError` for missing features and for invalid ids, offsets or weights."""
        if features.keys != self._checked:
            missing = [key for key in self._keys if key not in features.keys]
            if missing:
                raise ConfigError(
                    f"the batch lacks features {', '.join(missing)}; it has {', '.join(features.keys)}"
                )
            self._checked = features.keys
        values, offsets, weights = features.values, features.offsets, features.weights
        if values.device.type != "cpu":
            raise ConfigError(
                f"ids are on {values.device}; pass ids on the CPU, whatever the device of the rows"
            )
        if values.dtype not in _ID_TYPES or values.dim() != 1 or not values.is_contiguous():
            raise ConfigError(
                f"ids are {_words(values.dtype)} of shape {tuple(values.shape)}, expected contiguous int32 "
                "or int64 of one dimension"
            )
        if offsets is not None:
            _check_offsets(features)
        # Kernels read weights by address: with another type or shape they would read beyond the
        # end.
        if weights is not None and (weights.dtype != torch.float32 or weights.shape != values.shape):
            raise ConfigError(
                f"weights are {_words(weights.dtype)} of shape {tuple(weights.shape)}, expected float32 of "
                f"shape {tuple(values.shape)}, one for each id"
            )


def _check_offsets(features: KeyedJagged) -> None:
    offsets = features.offsets
    assert offsets is not None
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.is_contiguous():
        raise ConfigError(
            f"offsets are {_words(offsets.dtype)} of shape {tuple(offsets.shape)}, expected contiguous "
            "int32 or int64 of one dimension"
        )
    total = features.values.numel()
    place = first_falling(offsets.numpy(), total)
    if place < 0:
        return
    size = max(features.batch_size, 1)
    key = features.keys[min(place // size, len(features.keys) - 1)] if features.keys else ""
    begin, end = int(offsets[place]), int(offsets[min(place + 1, offsets.numel() - 1)])
    raise ConfigError(
        f"feature {key!r}, sample {place % size}: its ids are {begin} to {end}, expected ascending offsets "
        f"within 0 to {total}"
    )


def _words(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


Configs = list[EmbeddingBagConfig]
StoreKey = tuple[int, HomeKind, CodecConfig]


def build_tables(
    configs: Sequence[EmbeddingBagConfig],
    columns: Mapping[str, int],
    step_clock: StepClock,
    seed: int,
    tiers: TierConfig,
    health: Health,
    level0: Level0,
) -> list[TableGroup]:
    """Build table groups: tables that are completely in level 0 by width, all others by width, home
    and codec.

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
        All tables.
    columns : mapping of str to int
        First output column of each pooled feature.
    step_clock : StepClock
        Row optimizer, and the steps that rows missed.
    seed : int
        Seed of initial weights and rounding noise.
    tiers : TierConfig
        Homes, codecs and caches of the tables that are not completely in level 0.
    health : Health
        Set to failed if rows may be incomplete.
    level0 : Level0
        Allocates the slots.

    Raises
    ------
    ConfigError
        If `tiers` names a table that does not exist, or a cached table is too large.
    StorageError
        If a store cannot be opened; stores that were opened before are closed.
    """
    unknown = sorted(set(tiers.tables) - {table.name for table in configs})
    if unknown:
        raise ConfigError(
            f"tiers names table {unknown[0]!r}; there are {', '.join(table.name for table in configs)}"
        )
    resident: dict[int, Configs] = {}
    cached: dict[StoreKey, Configs] = {}
    for table in configs:
        tier = tiers.tables.get(table.name)
        if tier is None:
            resident.setdefault(table.embedding_dim, []).append(table)
        else:
            cached.setdefault((table.embedding_dim, tier.home, tier.codec), []).append(table)
    groups = [
        (key, members)
        for key, tables in cached.items()
        for members in _split_by_store(key, tables, step_clock.optimizer)
    ]
    codecs = [RecordCodec.of(config, width, step_clock.optimizer) for (width, _, config), _ in groups]
    rows = [_rows(members) for _, members in groups]
    budgets = _share_budget(
        tiers.log_budget_bytes,
        {
            place: plan_layout(rows[place], codecs[place].record_bytes, SsdConfig()).padded_bytes
            for place, (key, _) in enumerate(groups)
            if key[1] == "log"
        },
    )
    built: list[TableGroup] = [
        ResidentTables(same, columns, step_clock, seed, level0) for same in resident.values()
    ]
    try:
        for place, (key, members) in enumerate(groups):
            # Built before the store allocates memory or files, because it rejects tables that are
            # too large.
            directory = Directory(members, tiers.tables, policy=tiers.policy, ways=tiers.ways, seed=seed)
            if key[1] == "hbm" and not level0.slots(0, key[0], step_clock.optimizer).queued:
                raise ConfigError(
                    f"table {members[0].name!r} has home 'hbm', but rows are trained on {level0.device}: "
                    "set the device to a GPU, or the home to dram"
                )
            new = NewStore(rows[place], codecs[place].record_bytes, None, level0, budgets.get(place, 0))
            store = open_store(key[1], tiers, f"group-{place:02d}", members, new)
            built.append(
                CachedTables(members, columns, directory, codecs[place], store, step_clock, health, level0)
            )
    except Exception:
        for group in built:
            # The caller gets no reference to these groups, so their files and threads are closed
            # here.
            group.close()
        raise
    return built


def _share_budget(total: int | None, block_bytes: Mapping[int, int]) -> dict[int, int]:
    """Return each SSD store's share of `total`: `DEAD_BYTES`, and a part of the rest in proportion
    to its blocks.
    """
    if total is None:
        return {}
    remaining, blocks = total - len(block_bytes) * DEAD_BYTES, max(sum(block_bytes.values()), 1)
    if remaining < 0:
        raise ConfigError(
            f"memory.block.budget is {total}, but {len(block_bytes)} SSD stores (one for all tables of a "
            f"width and precision) need {DEAD_BYTES} bytes each in addition to their rows: raise it to "
            f"more than {len(block_bytes) * DEAD_BYTES}"
        )
    return {place: DEAD_BYTES + remaining * size // blocks for place, size in block_bytes.items()}


def _rows(configs: Sequence[EmbeddingBagConfig]) -> int:
    return sum(table.num_embeddings for table in configs)


def _split_by_store(key: StoreKey, configs: Configs, optimizer: RowOptimizerConfig) -> list[Configs]:
    """Split tables of one `key` by store: tables share an SSD store if their locations then need no
    more memory.
    """
    width, home, codec = key
    if home != "log":
        return [configs]
    record_bytes, stores = RecordCodec.of(codec, width, optimizer).record_bytes, [configs[:1]]
    for table in configs[1:]:
        together = [*stores[-1], table]
        alone = sum(location_bytes(member.num_embeddings, record_bytes) for member in together)
        # Fewer stores have fewer open segments, but wider locations would cost memory for every
        # row.
        if location_bytes(_rows(together), record_bytes) <= alone:
            stores[-1] = together
        else:
            stores.append([table])
    return stores


def open_store(
    home: HomeKind, tiers: TierConfig, name: str, configs: Configs, new: NewStore
) -> RecordStore:
    """Open an empty store for the rows of a group of tables.

    Parameters
    ----------
    home : str
        Name of the kind of home, such as ``log``.
    tiers : TierConfig
        Directories of the homes.
    name : str
        Name of the store's directory or file below the directory of its home, if that has one.
    configs : list of EmbeddingBagConfig
        The tables.
    new : NewStore
        Sizes of the store.
    """
    first_row = np.cumsum([0, *(table.num_embeddings for table in configs)]).tolist()
    frequent = [
        (first, tiers.tables[table.name].dram_rows)
        for first, table in zip(first_row, configs, strict=False)
    ]
    path = getattr(tiers, HOMES[home].path) / name if HOMES[home].path else None
    return HOMES[home].open(new._replace(path=path, frequent=frequent))


_LAST_STAMP, _SHIFT = 2**31 - 2, 2**30
_NO_SLOTS = np.empty(0, dtype=np.int32)


class Engine(LookupEngine[StagedBatch]):
    """The tables of one process, their row optimizer and the in-flight batches.

    One thread trains a collection, and another may stage batches for it (`Prefetcher`).

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
        All tables.
    optimizer : RowOptimizerConfig
        Row optimizer of all tables.
    seed : int
        Initial weights are a function of (seed, table name, row).
    tiers : TierConfig
        Tables whose home is outside level 0.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        optimizer: RowOptimizerConfig,
        seed: int,
        tiers: TierConfig,
    ) -> None:
        check_tables(tuple(configs))
        optimizer.schedule.require_steps()
        super().__init__(configs, configs, optimizer, tiers)
        self._columns = sum(self.dims)
        columns = dict(zip(self.pooled_keys, np.cumsum([0, *self.dims]).tolist(), strict=False))
        self._seed = seed
        self._output_bytes = 0
        self.tables: tuple[TableGroup, ...] = tuple(
            build_tables(self.configs, columns, self.step_clock, seed, tiers, self.health, self.level0)
        )
        self.resident = all(tables.resident for tables in self.tables)
        self.row_order = tuple(key for tables in self.tables for key in tables.sequence_keys)
        # A batch has a number and a stamp. The number counts all staged batches, for the rounding
        # noise. The stamp, by which slots are ordered by age, is the number minus `_origin`, which
        # grows before stamps exceed 32 bits.
        self._origin = 0
        self._validator = Validator((*self.pooled_keys, *self.sequence_keys))
        self._staging = threading.Lock()
        self._stepping = threading.Lock()

    # A step

    def stage(self, features: KeyedJagged, tensors: Tensors = ()) -> StagedBatch:
        """Bring the rows of a batch into level 0, in addition to the rows of the in-flight batches.

        Parameters
        ----------
        features : KeyedJagged
            Ids of the batch.
        tensors : sequence of Tensor or None
            Further tensors of the batch, which travel to the device of the rows in the same copy
            (`StagedBatch.packed`).

        Raises
        ------
        ConfigError
            For a missing feature, an id outside its table, or arrays that are not a jagged batch.
        TrainingError
            If the rows do not fit.
        """
        horizon = self.in_flight.oldest(self.batches)
        return self._stage(features, tensors, horizon, lambda number: self._refuse())

    def stage_now(self, features: KeyedJagged, tensors: Tensors = ()) -> StagedBatch:
        self.health.require()
        waiting = self.in_flight.unused()
        if waiting is not None:
            raise TrainingError(
                f"batch {waiting} was staged but not looked up: pass the handle that stage returned (not "
                "its features or a copy of them), or call its release()"
            )
        return self.stage(features, tensors)

    @traced("stage ahead")
    def stage_ahead(
        self, features: KeyedJagged, lookahead: int, stopped: Callable[[], bool], tensors: Tensors = ()
    ) -> StagedBatch:
        """Stage a batch on another thread. Waits for the backward pass of the batch `lookahead` + 1
        before it.

        Raises
        ------
        WaitAbandoned
            If `stopped` returns true, or the tables are closed, during the wait.
        """
        horizon = self.batches - lookahead
        self.in_flight.wait_for(horizon, stopped)
        return self._stage(
            features, tensors, horizon, lambda number: self.in_flight.wait_for(number, stopped)
        )

    def _stage(
        self, features: KeyedJagged, tensors: Tensors, horizon: int, make_room: Callable[[int], None]
    ) -> StagedBatch:
        # An error instead of a wait: two threads that stage batches would number them in a random
        # order.
        if not self._staging.acquire(blocking=False):
            raise TrainingError(
                "another thread is staging a batch of this collection: stage batches on one thread"
            )
        try:
            self.health.require()
            self._validator.check(features)
            in_flight, number = self.in_flight, self.batches
            in_flight.start(number)
            self.batches += 1
            try:
                value, order = self._stamp(number), self.level0.order
                order.after(horizon)

                def wait_for_room() -> None:
                    make_room(number)
                    order.after(number)

                stamp = BatchStamp(value, value - (number - horizon), number, wait_for_room)
                slots = (
                    _NO_SLOTS
                    if self.resident
                    else RECYCLER.empty(features.values.numel()).view(torch.int32).numpy()
                )
                with timed(self.seconds, "bring in"):
                    staged = [tables.stage(tables.bags(features), slots, stamp) for tables in self.tables]
                    packed = PackedBatch(())  # of a model with dense features only
                    if self.tables:
                        packed = self.tables[0].memory.pack(staged, tensors, self._columns)
            except BaseException:
                # The number is not reused: rounding noise is a function of it and must never
                # repeat.
                in_flight.done(number)
                raise
            return StagedBatch(features, packed, number, in_flight, order.ready())
        finally:
            self._staging.release()

    def _stamp(self, number: int) -> int:
        if number - self._origin > _LAST_STAMP:
            for tables in self.tables:
                tables.shift(_SHIFT)
            self._origin += _SHIFT
        return number - self._origin

    def _refuse(self) -> None:
        in_flight = len(self.in_flight)
        if in_flight > 1:
            raise TrainingError(
                f"{in_flight} batches are between stage and backward, and their rows do not fit level 0 "
                "together; "
                "raise cache_rows, call backward before the next forward, or release() "
                "batches without backward"
            )

    @traced("look up rows")
    def look_up(self, handle: StagedBatch) -> tuple[Tensor, ...]:
        self.health.require()
        handle.look_up(self.in_flight)
        self.level0.order.start(handle.ready)
        try:
            for tables, staged in zip(self.tables, handle.staged, strict=True):
                tables.apply_missed_steps(staged)
            return self.pool_staged(handle.staged, handle.features.batch_size, with_room=False)
        except BaseException:
            handle.release()
            raise

    def pool_staged(
        self, staged: Sequence[StagedBags], size: int, *, with_room: bool = True
    ) -> tuple[Tensor, ...]:
        """Pool a batch of `size` samples from the staged bags of each table group; return the
        output of `look_up`.

        If `with_room`, rows of zeros may follow the rows of a sequence feature, so that the number
        of its rows is one of a few sizes (`rings.room_for`).
        """
        rows, pooled = list[Tensor](), self.level0.empty(size, self._columns)
        for tables, part in zip(self.tables, staged, strict=True):
            rows += (tables.pool_with_room if with_room else tables.pool)(part, pooled)
        self._output_bytes = max(
            self._output_bytes, sum(buffer_bytes(part.numel()) for part in (pooled, *rows))
        )
        return (pooled, *rows)

    # A step that is queued as a whole: `begin`, `pool_staged`, `queue_updates`, `end`

    @property
    def queued(self) -> bool:
        """Whether whole steps can be queued, because all rows are trained in a device's memory."""
        return bool(self.tables) and all(tables.memory.queued for tables in self.tables)

    def begin(self, handle: StagedBatch) -> None:
        """Queue the work before a step of `handle`, and apply the steps that its rows missed."""
        self.health.require()
        handle.look_up(self.in_flight)
        try:
            self.level0.order.start(handle.ready)
            for tables, staged in zip(self.tables, handle.staged, strict=True):
                tables.apply_missed_steps(staged)
            handle.finish()
        except BaseException:
            handle.release()
            raise

    def row_numbers(self, step: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the row optimizer's parameters for `step` alone, and those for all steps."""
        return row_numbers(self.step_clock.rule_of(step))

    def queue_updates(
        self, staged: Sequence[StagedBags], gradients: Sequence[Tensor], numbers: Tensor, ok: Tensor
    ) -> None:
        """Queue one step of the row optimizer.

        Parameters
        ----------
        staged : sequence of StagedBags
            Staged bags of each table group.
        gradients : sequence of Tensor
            Gradients of the outputs of `pool_staged`.
        numbers : Tensor
            First result of `row_numbers`, as float32 on the device.
        ok : Tensor
            ``[1]`` int32 on the device. If it is 0, the step changes nothing.
        """
        constants = self.row_numbers(self.step)[1]
        for tables, part, of_part in self._by_tables(staged, gradients):
            tables.memory.queue_update(part, of_part, numbers, constants, ok)

    def end(self, handle: StagedBatch) -> None:
        """Count the step of the batch `handle`, which is queued, and release its rows."""
        try:
            for tables, staged in zip(self.tables, handle.staged, strict=True):
                tables.mark_trained(staged)
            self.step_clock.step += 1
        finally:
            handle.release()

    def read(self, features: KeyedJagged) -> tuple[Tensor, ...]:
        self.health.require()
        self._validator.check(features)
        self.level0.order.join()
        pooled = self.level0.empty(features.batch_size, self._columns)
        return (
            pooled,
            *(row for tables in self.tables for row in tables.read(tables.bags(features), pooled)),
        )

    def gradient_norm(self, handle: StagedBatch, gradients: Sequence[Tensor]) -> float:
        """Return the norm of the gradients of a batch, after the gradients of each row are summed.

        Parameters
        ----------
        handle, gradients
            As for `update_rows`.
        """
        self.transfers.wait()
        squares = [
            square
            for tables, staged, of_tables in self._by_tables(handle.staged, gradients)
            for square in tables.memory.square_norms(staged, of_tables).tolist()
        ]
        # `fsum` rounds once, so the grouping of tables changes no bit.
        return math.sqrt(math.fsum(squares))

    @traced("update rows")
    def update_rows(
        self,
        handle: StagedBatch,
        gradients: Sequence[Tensor],
        scale: float = 1.0,
        weights: Tensor | None = None,
    ) -> None:
        with self._stepping:
            self.health.require()
            handle.finish()
            try:
                self.transfers.wait()
                if weights is not None:
                    for tables, staged in zip(self.tables, handle.staged, strict=True):
                        tables.memory.weight_gradient(staged, gradients[0], weights)
                with self.health.changing("an optimizer step"):
                    rule = self.step_clock.rule_of(self.step, scale)
                    for tables, staged, of_tables in self._by_tables(handle.staged, gradients):
                        tables.update(staged, of_tables, rule)
                    # Last, so that an interrupted step is not counted; the tables are then failed
                    # anyway.
                    self.step_clock.step += 1
            finally:
                handle.release()

    def _by_tables(
        self, staged: Sequence[StagedBags], gradients: Sequence[Tensor]
    ) -> Iterator[tuple[TableGroup, StagedBags, Gradients]]:
        """Yield each table group with its part of a batch and its gradients."""
        pooled, *rows = gradients
        start = 0
        for tables, part in zip(self.tables, staged, strict=True):
            end = start + len(tables.sequence_keys)
            yield tables, part, Gradients(pooled, rows[start:end])
            start = end

    # Tables by name

    def tables_of(self, name: str) -> TableGroup:
        """Return the group that contains the table `name`."""
        self.health.require()
        for tables in self.tables:
            if name in tables.first_row:
                return tables
        raise ConfigError(f"no table {name!r}; there are {', '.join(table.name for table in self.configs)}")

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        self.health.require()
        for tables in self.tables:
            yield from tables.named_views()

    # Saving

    def save(self, directory: Path, previous: Path | None, rank: int = 0) -> dict[str, Any]:
        """Save the tables, as `EmbeddingCollection.save` does.

        Parameters
        ----------
        directory, previous : Path
            As for `EmbeddingCollection.save`.
        rank : int
            Rank of this process, which determines the names of its files.
        """
        self.health.require()
        self._require_nothing_ahead("saved")
        # Rows of in-flight batches are saved in their current state, and again in the next
        # checkpoint.
        oldest_stamp = self.in_flight.oldest(self.batches) - self._origin
        self.level0.order.after(self.batches)
        with self._stepping, self.health.changing("saving"):
            groups = save_tables(self.tables, directory, previous, oldest_stamp, rank)
        return {
            "step": self.step,
            "earlier": self.step_clock.earlier,
            "changes": [list(change) for change in self.step_clock.changes],
            "batches": self.batches,
            "origin": self._origin,
            "lookahead": self.tiers.lookahead,
            "groups": groups,
        }

    def load(
        self,
        directory: Path,
        manifest: Mapping[str, Any],
        rank: int = 0,
        agreed: Callable[[bool], bool] = lambda same: same,
    ) -> str:
        """Load the tables, as `EmbeddingCollection.load` does.

        Parameters
        ----------
        directory, manifest
            As for `EmbeddingCollection.load`.
        rank : int
            As for `save`.
        agreed : callable
            Returns true if its argument is true in all processes. The argument is whether this
            process has the layout of the checkpoint.
        """
        # A failed collection may be loaded, which repairs it.
        if self.health.state == "closed":
            self.health.require()
        self._require_nothing_ahead("loaded")
        self.level0.order.after(self.batches)
        manifest = checked(directory, manifest)
        batches, origin = int(manifest["batches"]), int(manifest["origin"])
        groups = manifest["groups"]
        # All ranks must agree: a rank that transfers rows has another origin than a rank that
        # restores them exactly.
        same = agreed(same_layout(self.tables, groups, rank))
        load_tables(
            self.tables,
            directory,
            groups,
            batches,
            batches - origin,
            rank=rank if same else None,
            fresh=self._fresh,
            health=self.health,
        )
        self.health.recover()
        self.in_flight.end()
        self.step_clock.load_position(manifest["step"], manifest["earlier"], manifest.get("changes", ()))
        self.batches = batches
        self._origin = origin if same else batches
        if not same:
            return "the rows were transferred into other tiers"
        before, now = int(manifest["lookahead"]), self.tiers.lookahead
        if before != now and not all(tables.resident or tables.codec.is_exact for tables in self.tables):
            return f"memory.lookahead was {before} and is {now} now, so encoded rows are rounded at other steps"
        return ""

    def initialize_from(
        self, directory: Path, manifest: Mapping[str, Any], optimizer: RowOptimizerConfig
    ) -> None:
        self.health.require()
        if not self._fresh:
            raise CheckpointError(
                f"these tables were already trained; load the rows in {directory} into new tables"
            )
        manifest = checked(directory, manifest)
        ended = StepClock(optimizer)
        ended.load_position(manifest["step"], manifest["earlier"], manifest.get("changes", ()))
        initialize_tables(
            self.tables, directory, manifest["groups"], self._seed, ended.missed, health=self.health
        )
        self.step_clock.load_position(0, manifest["earlier"] + manifest["step"], ())

    @property
    def _fresh(self) -> bool:
        """Whether the tables have their initial values."""
        return self.health.state == "open" and not (self.step or self.batches or self.step_clock.earlier)

    def _require_nothing_ahead(self, what: str) -> None:
        waiting = self.in_flight.unused()
        if waiting is not None:
            raise TrainingError(
                f"tables cannot be {what} while batch {waiting} is staged and not looked up: train or "
                "release() it first (with a Prefetcher: drain)"
            )

    def close(self) -> None:
        if self.health.state == "closed":
            return
        self.health.close()
        self.in_flight.end()
        with self._stepping:
            for tables in self.tables:
                tables.close()

    # Accounting

    def bytes_by_memory(self) -> dict[str, int]:
        ring = self.level0.ring
        total: Counter[str] = Counter(dram=self.level0.scratch.nbytes + ring.nbytes)
        if self.level0.on_device:
            total["hbm"] = ring.device_bytes
        for tables, parts in self._bytes():
            if self.level0.on_device:
                total["hbm"] += parts.pop("level0") + parts.pop("home_hbm", 0)
            files = parts.pop("home_block", 0)
            total["dram"] += sum(parts.values())
            if files:
                total[tables.file_memory] += files
        return dict(total)

    def bytes_by_part(self) -> dict[str, int]:
        ring = self.level0.ring
        workspace = self.level0.scratch.nbytes + ring.nbytes + ring.device_bytes
        total: Counter[str] = Counter(workspace=workspace, outputs=2 * self._output_bytes)
        for _, parts in self._bytes():
            total.update(parts)
        return dict(total)

    def _bytes(self) -> Iterator[tuple[TableGroup, dict[str, int]]]:
        if self.health.state == "closed":
            self.health.require()
        for tables in self.tables:
            yield tables, tables.nbytes
