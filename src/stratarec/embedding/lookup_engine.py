"""Base class of embedding engines. It contains their common parts: health, in-flight batches,
clocks and names.

`embedding.collection` and `embedding.prefetch` use engines only through this interface. `Engine`
trains the tables of one process; `distributed.sharded_engine` distributes tables over several.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig, StepClock
from stratarec.embedding.slots import Level0
from stratarec.embedding.slots.memory import PackedBatch, StagedBags
from stratarec.embedding.tiers import TierConfig
from stratarec.errors import StrataError, TrainingError
from stratarec.kernels.runtime.accelerator import Transfers, open_device


class Health:
    """Whether the rows of a collection are consistent: `open`, `failed` or `closed`.

    An SSD store is read and written before any slot changes. So its error, such as a full disk,
    does no damage, and the state stays `open`. The state becomes `failed` if rows may be
    incomplete: after an interrupt during a change, or if rows are swapped with an addressable home
    and one of them does not fit its codec.
    """

    def __init__(self) -> None:
        self.state: Literal["open", "failed", "closed"] = "open"
        self._reason = ""

    def require(self) -> None:
        """Raise a `TrainingError` unless the state is `open`."""
        if self.state == "closed":
            raise TrainingError(
                "these tables are closed (Trainer.train closes its tables): build or open them again"
            )
        if self.state == "failed":
            raise TrainingError(f"these tables are incomplete ({self._reason}): load a checkpoint")

    def changing(self, what: str) -> Changing:
        """Return a context manager that sets the state to `failed` on any exception other than a
        `StrataError`.

        `what` names the change in the message, such as ``saving``.
        """
        return Changing(self, what)

    def fail(self, reason: str) -> None:
        """Set the state to `failed` because of `reason`."""
        if self.state == "open":
            self.state = "failed"
            self._reason = reason

    def recover(self) -> None:
        """Reset a failed state after all rows were loaded."""
        if self.state == "failed":
            self.state = "open"
            self._reason = ""

    def close(self) -> None:
        """Mark the tables as closed."""
        self.state = "closed"


class Changing:
    """Context manager of `Health.changing`."""

    __slots__ = ("_health", "_what")

    def __init__(self, health: Health, what: str) -> None:
        self._health = health
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, StrataError):
            self._health.fail(f"{self._what} was interrupted by {kind.__name__}")


class WaitAbandoned(Exception):
    """A wait was abandoned because the waiting thread must end."""


class Handle(Protocol):
    """A batch whose rows are ready to be looked up."""

    @property
    def features(self) -> KeyedJagged:
        """The features of the batch."""

    def release(self) -> None:
        """Release the rows: there will be no further lookup or backward pass."""

    def release_unused(self) -> None:
        """Release the rows, unless the batch was looked up: then its backward pass may follow."""


class StagedBatch:
    """A batch whose rows are in level 0. It is looked up once and has one backward pass.

    Batches are looked up in the order in which they were staged. Dropping the handle releases the
    rows. If the batch was never looked up, the next `stage` raises an error, because a batch was
    lost.

    Parameters
    ----------
    features : KeyedJagged
        The features of the batch.
    packed : PackedBatch
        The staged bags of each table group, with slots in place of ids.
    number : int
        Number of batches that were staged before this one.
    in_flight : InFlightBatches
        Batches of the collection, which contain this one.
    ready : event or None
        Event on the device after which its rows can be looked up (`StepOrder.ready`).
    """

    __slots__ = (
        "__weakref__",
        "_generation",
        "_in_flight",
        "_state",
        "features",
        "number",
        "packed",
        "ready",
    )

    def __init__(
        self,
        features: KeyedJagged,
        packed: PackedBatch,
        number: int,
        in_flight: InFlightBatches,
        ready: Any = None,
    ) -> None:
        self.features = features
        self.packed: PackedBatch | None = packed
        """None after release."""
        self.number = number
        self.ready = ready
        self._in_flight = in_flight
        self._generation = in_flight.generation
        self._state = "staged"

    @property
    def staged(self) -> tuple[StagedBags, ...]:
        """The staged bags of each table group; empty after release."""
        return () if self.packed is None else self.packed.staged

    def look_up(self, in_flight: InFlightBatches) -> None:
        """Record that the batch is looked up now.

        Parameters
        ----------
        in_flight : InFlightBatches
            Batches of the collection that looks it up.

        Raises
        ------
        TrainingError
            If an earlier batch was not looked up, or the batch is of another collection.
        """
        if in_flight is not self._in_flight or self._generation != in_flight.generation:
            raise TrainingError(
                f"batch {self.number} was staged by another collection, or before its tables were loaded "
                "or closed: stage it again"
            )
        if self._state != "staged":
            raise TrainingError(
                f"batch {self.number} was {self._state} already: stage it again to look it up again"
            )
        in_flight.look_up(self.number)
        self._state = "looked up"

    def finish(self) -> None:
        """Record that the backward pass begins; `TrainingError` if it is not the first one."""
        if self._state != "looked up":
            raise TrainingError(
                f"batch {self.number} was {self._state} already: every look-up has one backward pass"
            )
        if self._generation != self._in_flight.generation:
            raise TrainingError(
                f"batch {self.number} was looked up before its tables were loaded or closed"
            )
        self._state = "trained"

    def release(self) -> None:
        """Release the rows: there will be no further lookup or backward pass."""
        if self._state in ("staged", "looked up"):
            self._state = "released"
        packed, self.packed = self.packed, None
        if packed is not None:
            packed.release()
        if self._generation == self._in_flight.generation:
            self._in_flight.done(self.number)

    def release_unused(self) -> None:
        """Release the rows, unless the batch was looked up: then its backward pass may follow."""
        if self._state == "staged":
            self.release()

    def __del__(self) -> None:
        if self._state in ("staged", "looked up"):
            self._in_flight.drop(self.number, self._generation)


class InFlightBatches:
    """The batches of one collection that are between `stage` and the end of their backward pass.

    `generation` counts how often all handles were invalidated, by loading or closing. `changed` is
    notified whenever a batch is done; no other lock of this package is acquired while it is locked.

    Parameters
    ----------
    released : callable
        Called with the number of each batch before it counts as done.
    """

    def __init__(self, released: Callable[[int], None] = lambda number: None) -> None:
        self._released = released
        # Reentrant: the garbage collector may drop a handle on a thread that has the lock. Methods
        # enter the lock directly, five times per step, because entering it through the condition
        # takes three times as long.
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self.generation = 0
        self.waiting_for: int | None = None
        # Batches are added in ascending order, so the first key is the smallest.
        self._open: dict[int, None] = {}
        self._unused: dict[int, None] = {}
        self._dropped: deque[tuple[int, int]] = deque()
        self._lost: int | None = None

    def start(self, number: int) -> None:
        """Record that batch `number` (the number of batches staged before it) is being staged."""
        with self._lock:
            if self._dropped:
                self._sweep()
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise TrainingError(
                    f"batch {lost} was staged, and its handle dropped before it was looked up: pass every "
                    "handle to the collection, in order, or call its release()"
                )
            self._open[number] = self._unused[number] = None

    def look_up(self, number: int) -> None:
        """Record a lookup; `TrainingError` unless `number` is the first batch not looked up yet."""
        with self._lock:
            first = self.unused()
            if first != number:
                raise TrainingError(
                    f"batch {number} is looked up before batch {first}, which was staged first: pass "
                    f"handles to the collection in order, or release() that of batch {first}"
                )
            del self._unused[number]

    def unused(self) -> int | None:
        """Return the first batch that is staged, or being staged, and not looked up yet."""
        with self._lock:
            if self._dropped:
                self._sweep()
            return next(iter(self._unused), None)

    def oldest(self, default: int) -> int:
        """Return the first batch in flight, or `default`."""
        with self._lock:
            if self._dropped:
                self._sweep()
            return next(iter(self._open), default)

    def __len__(self) -> int:
        with self._lock:
            if self._dropped:
                self._sweep()
            return len(self._open)

    def done(self, number: int) -> None:
        """Record that the rows of batch `number` are released."""
        with self._lock:
            self._remove(number)
            self.changed.notify_all()

    def drop(self, number: int, generation: int) -> None:
        """Record that a destructor released batch `number`, which was staged when `generation` had
        this value.

        The record is handled later, by the next call of a method.
        """
        # This thread may be inside any method of this object. Appending to a deque is atomic, and
        # the next call of another method handles the entry (`_sweep`).
        self._dropped.append((number, generation))
        with self._lock:
            self.changed.notify_all()

    def forgive(self) -> None:
        """Ignore batches whose handles were dropped: `start` does not raise an error for them."""
        with self._lock:
            if self._dropped:
                self._sweep()
            self._lost = None

    def _sweep(self) -> None:
        while self._dropped:
            number, generation = self._dropped.popleft()
            if generation == self.generation and self._remove(number):
                self._lost = number

    def _remove(self, number: int) -> bool:
        """Remove a batch; return whether it was not looked up."""
        unused = number in self._unused
        if number in self._open:
            self._released(number)
        self._open.pop(number, None)
        self._unused.pop(number, None)
        return unused

    def wait_for(self, horizon: int, stopped: Callable[[], bool]) -> None:
        """Wait until all batches before `horizon` are done.

        Raises
        ------
        WaitAbandoned
            If `stopped` returns true, or the tables were loaded or closed.
        """
        with self._lock:
            generation, self.waiting_for = self.generation, horizon
            # A thread that waits for the batch staged here must learn that this thread waits for
            # another batch.
            self.changed.notify_all()

            def abandoned() -> bool:
                return stopped() or self.generation != generation

            try:
                self.changed.wait_for(lambda: abandoned() or self.oldest(horizon) >= horizon)
            finally:
                self.waiting_for = None
            if abandoned():
                raise WaitAbandoned

    def blocked(self) -> int | None:
        """Return the batch that a thread in `wait_for` waits for, or None."""
        with self._lock:
            if self.waiting_for is None:
                return None
            oldest = self.oldest(self.waiting_for)
            return oldest if oldest < self.waiting_for else None

    def end(self) -> None:
        """Invalidate every handle, because rows were replaced."""
        with self._lock:
            self.generation += 1
            self._open.clear()
            self._unused.clear()
            self._lost = None
            self.changed.notify_all()


AnyHandle = TypeVar("AnyHandle", bound=Handle)

PARTS = ("level0", "metadata", "home_dram", "home_block", "home_hbm", "staging", "workspace", "outputs")
"""Keys of `LookupEngine.bytes_by_part`."""


class NamedRows(Protocol):
    """Rows of tables by name and number: a `TableGroup`, or rows gathered from all ranks."""

    def table(self, name: str) -> dict[str, Tensor]: ...
    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]: ...


class LookupEngine(ABC, Generic[AnyHandle]):
    """Base class of engines: clocks, names, health and in-flight batches.

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
        All tables.
    batch_tables : sequence of EmbeddingBagConfig
        Tables whose features a batch contains.
    optimizer : RowOptimizerConfig
        Row optimizer of all tables.
    tiers : TierConfig
        Device and lookahead.
    shared : LookupEngine or None
        Engine with which this one shares clocks, health and in-flight batches.
    """

    resident: bool
    """Whether every row is in level 0."""
    row_order: tuple[str, ...]
    """Sequence features in the order in which `look_up` returns their rows."""

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        batch_tables: Sequence[EmbeddingBagConfig],
        optimizer: RowOptimizerConfig,
        tiers: TierConfig,
        shared: LookupEngine[Any] | None = None,
    ) -> None:
        self.configs = tuple(configs)
        self.optimizer = optimizer
        self.tiers = tiers
        self.pooled_keys = tuple(name for table in batch_tables for name in table.feature_names)
        self.dims = tuple(table.embedding_dim for table in batch_tables for _ in table.feature_names)
        self.sequence_keys = tuple(name for table in batch_tables for name in table.sequence_features)
        self.health: Health = Health() if shared is None else shared.health
        self.step_clock: StepClock = StepClock(optimizer) if shared is None else shared.step_clock
        self.seconds: dict[str, float] = {} if shared is None else shared.seconds
        """Part of a step -> total seconds so far; see `progress.timed`."""
        self.batches = 0
        """Number of batches ever staged, on which the rounding noise depends."""
        self.level0: Level0 = (
            Level0(open_device(tiers.device, "device")) if shared is None else shared.level0
        )
        order = self.level0.order
        self.in_flight: InFlightBatches = (
            InFlightBatches(order.released) if shared is None else shared.in_flight
        )

    @property
    def transfers(self) -> Transfers:
        """Transfers of looked-up rows to the network's device, and of gradients back."""
        return self.level0.transfers

    @transfers.setter
    def transfers(self, transfers: Transfers) -> None:
        self.level0.transfers = transfers

    @property
    def lookahead(self) -> int:
        """Number of batches to stage ahead in training; 0 if all rows are in DRAM (no gain)."""
        return 0 if self.resident and not self.level0.on_device else self.tiers.lookahead

    # Clocks

    @property
    def step(self) -> int:
        """Number of steps so far."""
        return self.step_clock.step

    # A step

    @abstractmethod
    def stage(self, features: KeyedJagged) -> AnyHandle:
        """Bring the rows of the batch `features` into level 0, in addition to the rows of the
        in-flight batches.
        """

    @abstractmethod
    def stage_now(self, features: KeyedJagged) -> AnyHandle:
        """Stage the batch `features`, which is looked up at once.

        Raises
        ------
        TrainingError
            If a staged batch still waits for its lookup.
        """

    @abstractmethod
    def stage_ahead(self, features: KeyedJagged, lookahead: int, stopped: Callable[[], bool]) -> AnyHandle:
        """Stage a batch on another thread than the one that trains.

        Parameters
        ----------
        features : KeyedJagged
            Ids of the batch.
        lookahead : int
            The call waits for the backward pass of the batch `lookahead` + 1 before this one.
        stopped : callable
            The wait is abandoned when it returns true.
        """

    @abstractmethod
    def look_up(self, handle: AnyHandle) -> tuple[Tensor, ...]:
        """Return the pooled output ``[B, sum of dims]`` and the rows of each sequence feature, in
        `row_order`.

        `handle` is that of a staged batch.
        """

    @abstractmethod
    def read(self, features: KeyedJagged) -> tuple[Tensor, ...]:
        """Look up the batch `features` for evaluation, as `look_up` does. Neither the cache nor any
        row changes.
        """

    @abstractmethod
    def update_rows(
        self,
        handle: AnyHandle,
        gradients: Sequence[Tensor],
        scale: float = 1.0,
        weights: Tensor | None = None,
    ) -> None:
        """Apply one step of the row optimizer, and release the rows.

        Parameters
        ----------
        handle : handle
            Batch that was looked up.
        gradients : sequence of Tensor
            Gradients of the outputs of `look_up`, contiguous float32.
        scale : float
            Factor on the gradients.
        weights : Tensor or None
            ``[N]`` zeros, to which the gradients of per-sample weights are added; None if they are
            not needed.
        """

    # Tables

    @abstractmethod
    def tables_of(self, name: str) -> NamedRows:
        """Return the rows of the table `name`."""

    @abstractmethod
    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``tables.<name>.<part>`` and its view for every table completely in level 0."""

    @abstractmethod
    def save(self, directory: Path, previous: Path | None) -> dict[str, Any]:
        """Save the tables, as `EmbeddingCollection.save` describes."""

    @abstractmethod
    def load(self, directory: Path, manifest: Mapping[str, Any]) -> str:
        """Load the tables, as `EmbeddingCollection.load` describes."""

    @abstractmethod
    def initialize_from(
        self, directory: Path, manifest: Mapping[str, Any], optimizer: RowOptimizerConfig
    ) -> None:
        """Start new training with the rows and optimizer state of other tables. Tiers and codecs
        may differ.

        Rows that were never trained keep their initial values. Steps and schedules start from 0,
        but Adam's bias correction continues.

        Parameters
        ----------
        directory, manifest
            As for `load`.
        optimizer : RowOptimizerConfig
            Optimizer of the other tables, with which the steps that their rows missed are applied.

        Raises
        ------
        CheckpointError
            Like `load`; also if these tables were already trained.
        """

    @abstractmethod
    def close(self) -> None:
        """Release files and threads; the engine cannot be used afterwards."""

    @abstractmethod
    def bytes_by_memory(self) -> dict[str, int]:
        """Return memory (``dram``, ``mapped``, ``block``, ``hbm``) -> bytes in use now."""

    @abstractmethod
    def bytes_by_part(self) -> dict[str, int]:
        """Return the bytes in use now, by the keys of `PARTS`.

        ``outputs`` are the activations of the largest lookup and their gradient; `bytes_by_memory`
        does not count them.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of DRAM and GPU memory for rows, metadata and the workspace of updates; file space
        is not included.
        """
        by_memory = self.bytes_by_memory()
        return by_memory["dram"] + by_memory.get("hbm", 0)
