"""Groups of tables of one width that share kernel calls: the interface that the engine uses.

There are two kinds: the rows of `ResidentTables` are all in level 0, the rows of `CachedTables` pass through the slots
of a cache. Both pool from `SlotMemory` and are updated there by the same kernels, which see only slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import StepClock
from stratarec.embedding.slots import SlotMemory, StagedBatch
from stratarec.errors import CheckpointError, ConfigError
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.update import Gradients, RowUpdate


class BatchStamp(NamedTuple):
    """When a batch's rows are brought in: two clocks, and what to do when there is no room.

    Parameters
    ----------
    value : int
        What the slots of this batch are stamped with; one more than the batch before.
    horizon : int
        Slots of this stamp or a later one are not given up.
    write : int
        Number of the batch since the first one ever trained, which never comes again: the noise that rounds a row
        which goes home now is a function of it.
    make_room : callable
        Returns when all earlier batches are done; called, with nothing half moved, where a batch does not fit beside
        them.
    """

    value: int
    horizon: int
    write: int
    make_room: Callable[[], None]


_MOST_SAMPLES = 128


@dataclass
class RowTraffic:
    """Rows that came into slots and that went home, so far; and of a batch now and then, what its tables asked for."""

    rows_in: int = 0
    rows_out: int = 0
    samples: list[NDArray[np.int64]] = field(default_factory=list)
    """``[2, T]`` distinct rows of a batch, and those of them that came in for it, the oldest first."""
    every: int = 16
    """Batches from one sample to the next; it doubles where samples become many."""

    def sample(self, found: NDArray[np.int64]) -> None:
        """Keep another one, or drop every second."""
        self.samples.append(found)
        if len(self.samples) > _MOST_SAMPLES:
            self.samples, self.every = self.samples[::2], 2 * self.every

    @property
    def of_a_batch(self) -> NDArray[np.float64]:
        """``[2, T]`` means of the later half of the samples: rows come into an empty cache at first."""
        found: NDArray[np.float64] = np.mean(self.samples[len(self.samples) // 2 :], axis=0)
        return found


def features_of(configs: Sequence[EmbeddingBagConfig]) -> list[tuple[EmbeddingBagConfig, str]]:
    """Every feature of a group of tables with its table, in the order of `group_layout`."""
    return [(table, name) for table in configs for name in (*table.feature_names, *table.sequence_features)]


def group_layout(
    configs: Sequence[EmbeddingBagConfig], columns: Mapping[str, int], first_slot: Sequence[int], slots: Sequence[int]
) -> GroupLayout:
    """What kernels know of tables of one width; parameters as those of `TableGroup`."""
    features = features_of(configs)
    sizes = [len(table.feature_names) + len(table.sequence_features) for table in configs]
    return GroupLayout(
        width=configs[0].embedding_dim,
        base=np.repeat(np.array(first_slot, dtype=np.int64), sizes),
        rows=np.repeat(np.array(slots, dtype=np.int64), sizes),
        column=np.array([columns.get(name, 0) for _, name in features], dtype=np.int64),
        mean=np.array([table.pooling == "mean" for table, _ in features], dtype=np.int64),
        sequence=np.array([name in table.sequence_features for table, name in features], dtype=np.int64),
        table_start=np.cumsum([0, *sizes]).astype(np.int64),
        table_features=np.arange(len(features), dtype=np.int64),
    )


class TableGroup(ABC):
    """Tables of one width, over slots of level 0.

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
        The tables, in the order of their rows in the group.
    columns : mapping of str to int
        First output column of each pooled feature.
    first_slot, slots : sequence of int
        Where each table starts in `memory`, and how many slots it has.
    step_clock : StepClock
        The steps that rows catch up with.
    """

    resident: bool
    """Whether every row lies in level 0 all the time."""
    codec: RecordCodec
    """Of the rows in a checkpoint and at home."""

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, int],
        memory: SlotMemory,
        first_slot: Sequence[int],
        slots: Sequence[int],
        step_clock: StepClock,
    ) -> None:
        self.configs, self.memory, self.step_clock = tuple(configs), memory, step_clock
        self.width = memory.width
        self.traffic = RowTraffic()
        self.features = features_of(configs)
        self.sequence_keys = tuple(name for table in configs for name in table.sequence_features)
        self.layout = group_layout(configs, columns, first_slot, slots)
        rows = np.cumsum([0, *(table.num_embeddings for table in configs)]).tolist()
        self.first_row = {table.name: first for table, first in zip(configs, rows, strict=False)}
        self.rows = int(rows[-1])
        self._sequences = np.flatnonzero(self.layout.sequence)
        self._places: tuple[tuple[str, ...], NDArray[np.int64]] = (), np.empty(0, dtype=np.int64)

    # A batch

    @abstractmethod
    def stage(self, bags: BagBatch, out: NDArray[np.int32], stamp: BatchStamp) -> StagedBatch:
        """Bring the rows of a batch into level 0, which takes the bags with what is looked up there for the ids.

        Parameters
        ----------
        out : ndarray
            ``[N]``, of which these tables may write the places of their own features.

        Raises
        ------
        StrataError
            For an id outside its table, too. All rows are as they were then, unless `Health` says otherwise.
        """

    def apply_missed_steps(self, staged: StagedBatch) -> None:
        """Let the rows of a batch take the steps that they missed, as they must before `pool`."""
        missed = self.step_clock.missed
        if missed is not None:
            self.memory.apply_missed_steps(staged, missed)

    @abstractmethod
    def read(self, bags: BagBatch, out: Tensor) -> list[Tensor]:
        """As `pool` of bags that were not staged: reads rows where they lie and leaves them there."""

    def pool(self, staged: StagedBatch, out: Tensor) -> list[Tensor]:
        """Fill these tables' columns of `out`; returns the rows of their sequence features."""
        return self._pool(staged, self.memory, out)

    def _pool(self, staged: StagedBatch, memory: SlotMemory, out: Tensor) -> list[Tensor]:
        memory.pool(staged, out)
        rows = []
        for feature in self._sequences.tolist():
            first, last = staged.bags.span(feature)
            # Not zeroed: every row is written.
            gathered = memory.empty(last - first, self.width)
            memory.gather(staged, feature, gathered)
            rows.append(gathered)
        return rows

    def update(self, staged: StagedBatch, gradients: Gradients, rule: RowUpdate) -> None:
        """Apply the row optimizer, given the gradients of what `pool` returned."""
        self.memory.update(staged, gradients, rule, self.step_clock.missed)

    def square_norms(self, staged: StagedBatch, gradients: Gradients) -> list[float]:
        """Sum of squares of the summed gradients of a batch's rows, of each table."""
        found: list[float] = self.memory.square_norms(staged, gradients).tolist()
        return found

    def weight_gradient(self, staged: StagedBatch, pooled: Tensor, out: Tensor) -> None:
        """Add the gradients of per-sample weights to `out`."""
        self.memory.weight_gradient(staged, pooled, out)

    def bags(self, features: KeyedJagged) -> BagBatch:
        """These tables' share of a batch."""
        key = self._key_places(features.keys)
        return BagBatch(
            values=features.values.numpy(),
            offsets=None if features.offsets is None else features.offsets.numpy(),
            weights=None if features.weights is None else features.weights.detach().numpy(),
            batch=features.batch_size,
            key=key,
            filled=None if features.filled is None else np.array(features.filled, dtype=np.int64)[key],
        )

    def _key_places(self, keys: tuple[str, ...]) -> NDArray[np.int64]:
        """Where each of the features is among `keys`, which are the same from batch to batch."""
        # Read and replaced whole: one thread may prepare batches while another reads one with other keys.
        known, found = self._places
        if keys != known:
            places = {name: place for place, name in enumerate(keys)}
            found = np.array([places[name] for _, name in self.features], dtype=np.int64)
            self._places = keys, found
        return found

    def check(self, bags: BagBatch, place: int) -> None:
        """`ConfigError` that names feature and table of the id at `place`, unless that is -1."""
        if place < 0:
            return
        for feature, (table, name) in enumerate(self.features):
            first, last = bags.span(feature)
            if first <= place < last:
                raise ConfigError(
                    f"feature {name!r}: id {bags.values[place]} is outside table {table.name!r}, "
                    f"expected 0 to {table.num_embeddings - 1}"
                )

    # Rows by number

    @abstractmethod
    def table(self, name: str) -> dict[str, Tensor]:
        """``weight`` ``[R, D]`` and optimizer state of a table: views where it is resident, else copies."""

    @abstractmethod
    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """Rows ``first:last`` of a table as they are now."""

    @abstractmethod
    def put(self, rows: Indices, source: FloatRows, places: Indices, write: int) -> None:
        """Overwrite rows of the group by rows `places` of `source`; `write` as in `BatchStamp`."""

    @abstractmethod
    def take(self, rows: Indices) -> FloatRows:
        """Copies of distinct rows of the group with their optimizer state, all steps taken, wherever they lie."""

    # Checkpoints

    @abstractmethod
    def save(self, directory: Path, previous: Path | None, settled: int) -> dict[str, Any]:
        """Write all rows, or what changed since `previous`, into the new directory; returns the manifest.

        Parameters
        ----------
        settled : int
            Batches stamped before are done: they will change nothing more.
        """

    @abstractmethod
    def restore(self, directory: Path, manifest: Mapping[str, Any], stamp: int) -> None:
        """Go on exactly where `save` was, by its own manifest (see `fits`), with the batch that is stamped `stamp`."""

    @abstractmethod
    def fits(self, manifest: Mapping[str, Any]) -> bool:
        """Whether a checkpoint has its rows laid out as these tables have."""

    @property
    def grows(self) -> bool:
        """Whether `restore` takes a checkpoint of tables that had fewer rows."""
        return False

    # The rest

    @abstractmethod
    def shift(self, by: int) -> None:
        """Count stamps from `by` on."""

    @property
    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes by part, as they are now."""

    @property
    def file_memory(self) -> str:
        """The memory that the part ``home_block`` is in: ``mapped`` or ``block``."""
        return "block"

    @abstractmethod
    def close(self) -> None:
        """Give back files and threads."""

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """``tables.<name>.<part>`` and the view of it, of tables that are resident."""
        if self.resident:
            for table in self.configs:
                for part, view in self.table(table.name).items():
                    yield f"tables.{table.name}.{part}", view


_BITS = 40


class TableNumbers:
    """Row r of the t-th table of a group is ``t << 40 | r`` in its files; in memory tables lie one behind the other.

    Parameters
    ----------
    sizes : sequence of int
        Rows of each table.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = np.array(sizes, dtype=np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes
        self.end = len(self._sizes) << _BITS
        """Beyond all numbers."""

    def to_files(self, rows: Indices) -> Indices:
        """From rows of the group; what rises still does."""
        table = np.searchsorted(self._first, rows, side="right") - 1
        return (table << _BITS) + rows - self._first[table]

    def to_group(self, numbers: Indices) -> Indices:
        """From numbers below `end`; `CheckpointError` where a table has not so many rows."""
        table, row = numbers >> _BITS, numbers & ((1 << _BITS) - 1)
        if (row >= self._sizes[table]).any():
            raise CheckpointError("a checkpoint has rows beyond the end of their table; use another checkpoint")
        found: Indices = self._first[table] + row
        return found
