"""Groups of tables of one width that share kernel calls: the interface that the engine uses.

There are two kinds: the rows of `ResidentTables` are all in level 0, the rows of `CachedTables`
pass through the slots of a cache. Both pool from `SlotMemory` and are updated there by the same
kernels, which see only slots.
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
from stratarec.embedding.slots.memory import PackedBatch, SlotMemory, StagedBags
from stratarec.errors import CheckpointError, ConfigError
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.update import Gradients, RowUpdate


class BatchStamp(NamedTuple):
    """Number and stamp of a batch, and the action to take when there is no room for its rows.

    Parameters
    ----------
    value : int
        Stamp of the slots of this batch; one more than the stamp of the batch before.
    horizon : int
        Oldest stamp that is protected: slots with this stamp or a later one are not evicted,
        because batches that use them may be in flight.
    number : int
        Number of batches before this one since training began. It is never repeated: the noise that
        rounds an evicted row is a function of it. In methods of tables it is the argument
        `batch_number`.
    make_room : callable
        Waits until all earlier batches are done, or raises an error. It is called between moves, if
        a batch does not fit next to the earlier ones.
    """

    value: int
    horizon: int
    number: int
    make_room: Callable[[], None]


_MOST_SAMPLES = 128


@dataclass
class RowTraffic:
    """Numbers of rows fetched and evicted so far, and samples of the rows that batches need."""

    rows_in: int = 0
    rows_out: int = 0
    samples: list[NDArray[np.int64]] = field(default_factory=list)
    """``[2, T]`` arrays: per table, the distinct rows of a batch and how many of them were fetched;
    oldest first.
    """
    every: int = 16
    """Batches between two samples; doubled when there are too many samples."""

    def add_sample(self, counts: NDArray[np.int64]) -> None:
        """Add a sample. If there are more than 128 samples, drop every second one.

        Parameters
        ----------
        counts : ndarray
            ``[2, T]`` int64: for each of T tables, the distinct rows of a batch, and how many of
            them were fetched.
        """
        self.samples.append(counts)
        if len(self.samples) > _MOST_SAMPLES:
            self.samples = self.samples[::2]
            self.every = 2 * self.every

    @property
    def mean_per_batch(self) -> NDArray[np.float64]:
        """``[2, T]`` means of the later half of the samples: the cache is empty at first."""
        means: NDArray[np.float64] = np.mean(self.samples[len(self.samples) // 2 :], axis=0)
        return means


def features_of(configs: Sequence[EmbeddingBagConfig]) -> list[tuple[EmbeddingBagConfig, str]]:
    """Return ``(table, feature name)`` of all features, in the order of `group_layout`."""
    return [(table, name) for table in configs for name in (*table.feature_names, *table.sequence_features)]


def group_layout(
    configs: Sequence[EmbeddingBagConfig],
    columns: Mapping[str, int],
    first_slot: Sequence[int],
    slots: Sequence[int],
) -> GroupLayout:
    """Return the layout of tables of one width as kernels use it.

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
        The tables.
    columns : mapping of str to int
        First output column of each pooled feature.
    first_slot, slots : sequence of int
        First slot and number of slots of each table.
    """
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
    memory : SlotMemory
        Slots of all tables, with their optimizer state.
    first_slot, slots : sequence of int
        First slot in `memory` and number of slots of each table.
    step_clock : StepClock
        Provides the steps that rows missed.
    """

    resident: bool
    """Whether every row is always in level 0."""
    codec: RecordCodec
    """Codec of the rows in checkpoints and at home."""

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, int],
        memory: SlotMemory,
        first_slot: Sequence[int],
        slots: Sequence[int],
        step_clock: StepClock,
    ) -> None:
        self.configs = tuple(configs)
        self.memory = memory
        self.step_clock = step_clock
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
    def stage(self, bags: BagBatch, out: NDArray[np.int32], stamp: BatchStamp) -> StagedBags:
        """Bring the rows of a batch into level 0 and stage its bags there, with slots in place of
        ids.

        Parameters
        ----------
        bags : BagBatch
            Bags of the group's features, as `bags` returns them.
        out : ndarray
            ``[N]`` int32 slots of the complete batch; the group writes the slots of its features.
        stamp : BatchStamp
            Number and stamp of the batch.

        Raises
        ------
        StrataError
            Also for an id outside its table. All rows are then unchanged, unless `Health` has
            failed.
        """

    def apply_missed_steps(self, staged: StagedBags) -> None:
        """Apply the steps that the rows of a batch missed. Must be called before `pool`.

        Parameters
        ----------
        staged : StagedBags
            Result of `stage`; this is also its meaning in all methods below.
        """
        missed = self.step_clock.missed
        if missed is not None:
            self.memory.apply_missed_steps(staged, missed)

    @abstractmethod
    def read(self, bags: BagBatch, out: Tensor) -> list[Tensor]:
        """Pool bags that were not staged, for evaluation: rows are read where they are, and nothing
        moves.

        Parameters
        ----------
        bags : BagBatch
            Bags of the group's features, as `bags` returns them.
        out : Tensor
            ``[B, W]`` float32: receives the pooled rows in the columns of the group's features.

        Returns
        -------
        list of Tensor
            ``[N, D]`` float32 rows of each sequence feature, in the order of `sequence_keys`.
        """

    def pool(self, staged: StagedBags, out: Tensor, memory: SlotMemory | None = None) -> list[Tensor]:
        """Pool the rows of a staged batch, and return the rows of sequence features, as `read`
        does.

        Parameters
        ----------
        staged : StagedBags
            Result of `stage`.
        out : Tensor
            ``[B, W]`` float32: receives the pooled rows in the columns of the group's features.
        memory : SlotMemory, optional
            Slots to read; by default those of the group.
        """
        gathered = self.pool_with_room(staged, out, memory)
        if not gathered:
            return gathered
        counts = [last - first for first, last in map(staged.bags.span, self._sequences.tolist())]
        return [rows[:count] for rows, count in zip(gathered, counts, strict=True)]

    def pool_with_room(
        self, staged: StagedBags, out: Tensor, memory: SlotMemory | None = None
    ) -> list[Tensor]:
        """Pool like `pool`, except that rows of zeros may follow the rows of a sequence feature
        (`SlotMemory.gather`).

        The arguments are those of `pool`.
        """
        memory = memory or self.memory
        memory.pool(staged, out)
        return [memory.gather(staged, feature) for feature in self._sequences.tolist()]

    def _pool_once(
        self, packed: PackedBatch, out: Tensor, memory: SlotMemory | None = None
    ) -> list[Tensor]:
        """Pool a batch of this group alone that is not trained, and release it."""
        rows = self.pool(packed.staged[0], out, memory)
        packed.release()
        return rows

    def update(self, staged: StagedBags, gradients: Gradients, rule: RowUpdate) -> None:
        """Apply the row optimizer to the rows of a batch.

        Parameters
        ----------
        staged : StagedBags
            Result of `stage`, whose rows were pooled.
        gradients : Gradients
            Gradients of the outputs of `pool`.
        rule : RowUpdate
            Parameters of this step.
        """
        self.memory.update(staged, gradients, rule, self.step_clock.missed)
        self.mark_trained(staged)

    @abstractmethod
    def mark_trained(self, staged: StagedBags) -> None:
        """Record that a step has changed, or will change, the rows of the batch `staged`."""

    def bags(self, features: KeyedJagged) -> BagBatch:
        """Return the bags of these tables' features in batch `features`, sharing the arrays."""
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
        """Return the position in `keys` of each feature of the group; cached for equal keys."""
        # Read and replaced as one tuple: one thread may stage batches while another reads one with
        # other keys.
        cached_keys, positions = self._places
        if keys != cached_keys:
            places = {name: place for place, name in enumerate(keys)}
            positions = np.array([places[name] for _, name in self.features], dtype=np.int64)
            self._places = keys, positions
        return positions

    def check_id(self, bags: BagBatch, place: int) -> None:
        """Raise a `ConfigError` that names feature and table of an invalid id.

        Parameters
        ----------
        bags : BagBatch
            Bags that contain the id.
        place : int
            Index of the invalid id in ``bags.values``; -1 if all ids are valid.
        """
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

    def table(self, name: str) -> dict[str, Tensor]:
        """Return ``weight`` ``[R, D]`` and optimizer state of the table `name`: views if resident,
        else copies.
        """
        return self.part(
            name, 0, next(table.num_embeddings for table in self.configs if table.name == name)
        )

    @abstractmethod
    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """Return rows ``first:last`` of table `name` with optimizer state, all steps applied."""

    @abstractmethod
    def write_rows(self, rows: Indices, source: FloatRows, places: Indices, batch_number: int) -> None:
        """Overwrite rows of the group: ``rows[i]`` gets row ``places[i]`` of `source`.

        Parameters
        ----------
        rows : ndarray
            ``[n]`` int64 distinct rows of the group, in which the tables' rows follow each other.
        source : FloatRows
            Weights and optimizer state to copy.
        places : ndarray
            ``[n]`` int64 rows of `source`.
        batch_number : int
            Number of a batch (`BatchStamp.number`), of which the noise that rounds records at home
            is a function.
        """

    @abstractmethod
    def read_rows(self, rows: Indices) -> FloatRows:
        """Return copies of distinct rows of the group with their optimizer state, all steps
        applied.

        Parameters
        ----------
        rows : ndarray
            ``[n]`` int64 rows of the group.
        """

    # Checkpoints

    @abstractmethod
    def save(self, directory: Path, previous: Path | None, oldest_stamp: int) -> dict[str, Any]:
        """Write all rows, or the rows that changed since `previous`, into the new directory; return
        the manifest.

        Parameters
        ----------
        directory : Path
            Directory of this group, which is empty.
        previous : Path or None
            Directory of the last save or restore of this group, whose files are linked; None to
            write all rows.
        oldest_stamp : int
            Stamp of the oldest batch in flight: batches before it change nothing more.
        """

    @abstractmethod
    def reset(self) -> None:
        """Give every row its initial value."""

    @abstractmethod
    def restore(self, directory: Path, manifest: Mapping[str, Any], stamp: int) -> None:
        """Restore the exact state at `save`.

        Parameters
        ----------
        directory : Path
            Directory of the group that `save` wrote.
        manifest : mapping
            Result of `save`, for which `fits` is true.
        stamp : int
            Stamp of the next batch.
        """

    @abstractmethod
    def fits(self, manifest: Mapping[str, Any]) -> bool:
        """Whether the group of `manifest`, a result of `save`, has the row layout of this one."""

    @property
    def grows(self) -> bool:
        """Whether `restore` accepts a checkpoint of tables with fewer rows."""
        return False

    # Clocks and resources

    @abstractmethod
    def shift(self, by: int) -> None:
        """Subtract `by` from all stamps, so that they stay within 32 bits."""

    @property
    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes in use now, by purpose, such as ``level0``, ``metadata`` or ``home_block``."""

    @property
    def file_memory(self) -> str:
        """Memory that contains the part ``home_block``: ``mapped`` or ``block``."""
        return "block"

    @abstractmethod
    def close(self) -> None:
        """Release files and threads."""

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``tables.<name>.<part>`` and its view for each resident table."""
        if self.resident:
            for table in self.configs:
                for part, view in self.table(table.name).items():
                    yield f"tables.{table.name}.{part}", view


_BITS = 40


class TableNumbers:
    """Row numbers in files of tables that may grow: a table's numbers do not depend on the sizes of
    other tables.

    Row r of the t-th table of a group is ``t << 40 | r`` in files; in memory the rows of the tables
    are contiguous.

    Parameters
    ----------
    sizes : sequence of int
        Rows of each table.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = np.array(sizes, dtype=np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes
        self.end = len(self._sizes) << _BITS
        """One more than the largest number."""

    def to_files(self, rows: Indices) -> Indices:
        """Convert `rows` of the group, ``[n]`` int64, to their numbers in files, in this order."""
        table = np.searchsorted(self._first, rows, side="right") - 1
        return (table << _BITS) + rows - self._first[table]

    def to_group(self, numbers: Indices) -> Indices:
        """Convert `numbers` in files (``[n]`` int64, below `end`) to rows of the group.

        Raises
        ------
        CheckpointError
            If a table has fewer rows.
        """
        table, row = numbers >> _BITS, numbers & ((1 << _BITS) - 1)
        if (row >= self._sizes[table]).any():
            raise CheckpointError(
                "a checkpoint has rows beyond the end of their table; use another checkpoint"
            )
        rows: Indices = self._first[table] + row
        return rows
