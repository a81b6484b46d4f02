"""Base class of embedding engines, with what all engines share: health, in-flight batches, clocks and names.

`embedding.collection` and `embedding.prefetch` use engines only through this interface. `Engine` trains the tables of
one process; `distributed.sharded_engine` distributes tables over several.
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
from stratarec.embedding.slots import Level0, StagedBatch
from stratarec.embedding.tiers import TierConfig
from stratarec.errors import StrataError, TrainingError
from stratarec.kernels.runtime.accelerator import Transfers


class Health:
    """Shared by all that moves or changes rows of one collection."""

    def __init__(self) -> None:
        self.state: Literal["open", "failed", "closed"] = "open"
        self._reason = ""

    def require(self) -> None:
        """`TrainingError` unless the state is `open`."""
        if self.state == "closed":
            raise TrainingError(
                "these tables were closed, which Trainer.train does at its end: build or open them anew"
            )
        if self.state == "failed":
            raise TrainingError(f"these tables are incomplete ({self._reason}): load a checkpoint")

    def require_not_closed(self) -> None:
        """As `require`, but a failed collection may pass: loading makes it whole."""
        if self.state == "closed":
            self.require()

    def changing(self, what: str) -> Changing:
        """Fail for good when the block is left by anything but its end or a `StrataError`, which means no harm done."""
        return Changing(self, what)

    def fail(self, reason: str) -> None:
        """From here on `require` refuses, because of `reason`."""
        if self.state == "open":
            self.state, self._reason = "failed", reason

    def recover(self) -> None:
        """All rows were loaded anew."""
        if self.state == "failed":
            self.state, self._reason = "open", ""

    def close(self) -> None:
        """There are no rows any more."""
        self.state = "closed"


class Changing:
    """What `Health.changing` gives."""

    __slots__ = ("_health", "_what")

    def __init__(self, health: Health, what: str) -> None:
        self._health, self._what = health, what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, StrataError):
            self._health.fail(f"{self._what} was interrupted by {kind.__name__}")


class WaitAbandoned(Exception):
    """A wait was given up: whoever waited is to end."""


class Handle(Protocol):
    """A batch whose rows are where they are looked up."""

    @property
    def features(self) -> KeyedJagged:
        """As they were given."""

    def release(self) -> None:
        """Let the rows go: there will be no (further) look-up or backward pass."""

    def release_unused(self) -> None:
        """As `release`, unless the batch was looked up: its backward pass may still come."""


class Prepared:
    """A batch whose rows are in level 0. It is looked up once, and has one backward pass.

    Batches are looked up in the order in which they were prepared. A handle that nobody holds any more lets its rows
    go; one that was never looked up then is an error of the next `prepare`, because a batch was lost.

    Parameters
    ----------
    features : KeyedJagged
        As they were given.
    staged : tuple of StagedBatch
        Each group of tables' share of the batch; its values are what kernels look up: slots, or the ids themselves.
        Empty once the rows were let go.
    number : int
        How many batches were prepared before.
    """

    __slots__ = ("__weakref__", "_generation", "_in_flight", "_state", "features", "number", "staged")

    def __init__(
        self, features: KeyedJagged, staged: tuple[StagedBatch, ...], number: int, in_flight: InFlightBatches
    ) -> None:
        self.features, self.staged, self.number = features, staged, number
        self._in_flight, self._generation, self._state = in_flight, in_flight.generation, "prepared"

    def look_up(self, in_flight: InFlightBatches) -> None:
        """Note that the batch is looked up now; `TrainingError` where that is not its turn."""
        if in_flight is not self._in_flight or self._generation != in_flight.generation:
            raise TrainingError(
                f"batch {self.number} was prepared by another collection, or before its tables were loaded or closed: "
                "prepare it again"
            )
        if self._state != "prepared":
            raise TrainingError(f"batch {self.number} was {self._state} already: prepare it again to look it up again")
        in_flight.look_up(self.number)
        self._state = "looked up"

    def finish(self) -> None:
        """Note that the backward pass begins; `TrainingError` when it is not the first one."""
        if self._state != "looked up":
            raise TrainingError(f"batch {self.number} was {self._state} already: every look-up has one backward pass")
        if self._generation != self._in_flight.generation:
            raise TrainingError(f"batch {self.number} was looked up before its tables were loaded or closed")
        self._state = "trained"

    def release(self) -> None:
        """Let the rows go: there will be no (further) look-up or backward pass."""
        if self._state in ("prepared", "looked up"):
            self._state = "released"
        self.staged = ()
        if self._generation == self._in_flight.generation:
            self._in_flight.done(self.number)

    def release_unused(self) -> None:
        """As `release`, unless the batch was looked up: its backward pass may still come."""
        if self._state == "prepared":
            self.release()

    def __del__(self) -> None:
        if self._state in ("prepared", "looked up"):
            self._in_flight.drop(self.number, self._generation)


class InFlightBatches:
    """Which batches are under way in one collection.

    `generation` counts how often all handles became void, by loading or closing. `changed` is notified whenever a batch
    is done; no other lock is taken while it is held.
    """

    def __init__(self) -> None:
        # A handle may be dropped, by the garbage collector, on a thread that holds the lock. It is entered by itself:
        # through the condition that takes three times as long, five times a step.
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self.generation = 0
        self.waiting_for: int | None = None
        # Both in ascending order, because numbers rise: the first key is the least.
        self._open: dict[int, None] = {}
        self._unused: dict[int, None] = {}
        self._dropped: deque[tuple[int, int]] = deque()
        self._lost: int | None = None

    def start(self, number: int) -> None:
        """A batch is being prepared."""
        with self._lock:
            self._sweep()
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise TrainingError(
                    f"batch {lost} was prepared, and its handle dropped before it was looked up: pass every handle to "
                    "the collection, in order, or call its release()"
                )
            self._open[number] = self._unused[number] = None

    def look_up(self, number: int) -> None:
        """`TrainingError` unless `number` is the first that was not looked up yet."""
        with self._lock:
            first = self.unused()
            if first != number:
                raise TrainingError(
                    f"batch {number} is looked up before batch {first}, which was prepared first: pass handles to the "
                    f"collection in order, or release() that of batch {first}"
                )
            del self._unused[number]

    def unused(self) -> int | None:
        """The first batch that is being prepared, or was and is not looked up yet."""
        with self._lock:
            self._sweep()
            return next(iter(self._unused), None)

    def oldest(self, default: int) -> int:
        """The first batch under way, or `default`."""
        with self._lock:
            self._sweep()
            return next(iter(self._open), default)

    def __len__(self) -> int:
        with self._lock:
            self._sweep()
            return len(self._open)

    def done(self, number: int) -> None:
        """The rows of a batch may go."""
        with self._lock:
            self._forget(number)
            self.changed.notify_all()

    def drop(self, number: int, generation: int) -> None:
        """As `done`, from a destructor: only noted, because this thread may be in the middle of anything here."""
        # A deque's append is atomic. The rest is left to whoever next asks (`_sweep`).
        self._dropped.append((number, generation))
        with self._lock:
            self.changed.notify_all()

    def forgive(self) -> None:
        """Whoever handed batches out gives up those whose handles were dropped: no later batch is refused for them."""
        with self._lock:
            self._sweep()
            self._lost = None

    def _sweep(self) -> None:
        while self._dropped:
            number, generation = self._dropped.popleft()
            if generation == self.generation and self._forget(number):
                self._lost = number

    def _forget(self, number: int) -> bool:
        """Whether the batch was not looked up."""
        unused = number in self._unused
        self._open.pop(number, None)
        self._unused.pop(number, None)
        return unused

    def wait_for(self, horizon: int, stopped: Callable[[], bool]) -> None:
        """Return when all batches before `horizon` are done.

        Raises
        ------
        Stopped
            When `stopped` says so, or the tables were loaded or closed.
        """
        with self._lock:
            generation, self.waiting_for = self.generation, horizon
            # Whoever waits for the batch that is prepared here must see that it waits for a batch itself.
            self.changed.notify_all()

            def given_up() -> bool:
                return stopped() or self.generation != generation

            try:
                self.changed.wait_for(lambda: given_up() or self.oldest(horizon) >= horizon)
            finally:
                self.waiting_for = None
            if given_up():
                raise WaitAbandoned

    def blocked(self) -> int | None:
        """The batch that somebody in `wait_for` waits for, if there is one."""
        with self._lock:
            if self.waiting_for is None:
                return None
            oldest = self.oldest(self.waiting_for)
            return oldest if oldest < self.waiting_for else None

    def end(self) -> None:
        """The rows are no longer what they were: every handle is void."""
        with self._lock:
            self.generation += 1
            self._open.clear()
            self._unused.clear()
            self._lost = None
            self.changed.notify_all()


Held = TypeVar("Held", bound=Handle)

PARTS = ("level0", "metadata", "home_dram", "home_block", "staging", "workspace", "outputs")
"""What `LookupEngine.bytes_by_part` tells apart."""


class NamedRows(Protocol):
    """Rows of tables by name and number: a `TableGroup` of one process, or rows gathered from all ranks."""

    def table(self, name: str) -> dict[str, Tensor]: ...
    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]: ...


class LookupEngine(ABC, Generic[Held]):
    """The clocks, names, health and list of batches under way of an engine; what it does to rows is each engine's own.

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
        All tables.
    asked : sequence of EmbeddingBagConfig
        Those whose features a batch has.
    optimizer : RowOptimizerConfig
    tiers : TierConfig
    own : LookupEngine or None
        Whose clocks, health and batches are this one's, too.
    """

    resident: bool
    """Whether every row is in level 0, so that nothing is to be gained by preparing ahead."""
    row_order: tuple[str, ...]
    """Sequence features in the order in which `look_up` gives their rows."""

    def __init__(
        self, configs: Sequence[EmbeddingBagConfig], asked: Sequence[EmbeddingBagConfig],
        optimizer: RowOptimizerConfig, tiers: TierConfig, own: LookupEngine[Any] | None = None,
    ) -> None:  # fmt: skip
        self.configs, self.optimizer, self.tiers = tuple(configs), optimizer, tiers
        self.pooled_keys = tuple(name for table in asked for name in table.feature_names)
        self.dims = tuple(table.embedding_dim for table in asked for _ in table.feature_names)
        self.sequence_keys = tuple(name for table in asked for name in table.sequence_features)
        self.health: Health = Health() if own is None else own.health
        self.step_clock: StepClock = StepClock(optimizer) if own is None else own.step_clock
        self.in_flight: InFlightBatches = InFlightBatches() if own is None else own.in_flight
        self.seconds: dict[str, float] = {} if own is None else own.seconds
        """Stage of a step -> time that it took so far; see `progress.timed`."""
        self.batches = 0
        """How many were ever prepared, for the noise of rounding."""
        self.level0: Level0 = Level0() if own is None else own.level0

    @property
    def transfers(self) -> Transfers:
        """How what is looked up comes to the network, and its gradient back."""
        return self.level0.transfers

    @transfers.setter
    def transfers(self, transfers: Transfers) -> None:
        self.level0.transfers = transfers

    # Clocks

    @property
    def step(self) -> int:
        """Steps so far."""
        return self.step_clock.step

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self.step_clock.learning_rate

    @property
    def rate_factor(self) -> float:
        """What the optimizer's rate is multiplied by from the next backward on, beside its schedule; 1 at first.

        Checkpoints have it, and those before it.
        """
        return self.step_clock.rate_factor

    @rate_factor.setter
    def rate_factor(self, factor: float) -> None:
        self.step_clock.rate_factor = factor

    def load_position(self, step: int) -> None:
        """Be at `step`, with rows and state that were written to the views of resident tables."""
        self.step_clock.load_position(step, self.step_clock.earlier, self.step_clock.changes)

    # A step

    @abstractmethod
    def prepare(self, features: KeyedJagged) -> Held:
        """Bring the rows of a batch into level 0, beside those of the batches under way."""

    @abstractmethod
    def prepare_now(self, features: KeyedJagged) -> Held:
        """As `prepare` for a batch that is looked up at once; refused while others wait for that."""

    @abstractmethod
    def prepare_ahead(self, features: KeyedJagged, lookahead: int, stopped: Callable[[], bool]) -> Held:
        """As `prepare` on a thread of its own, once the backward pass `lookahead` + 1 batches before is done."""

    @abstractmethod
    def look_up(self, prepared: Held) -> tuple[Tensor, ...]:
        """Pooled output ``[B, sum of dims]`` and the rows of each sequence feature, in `row_order`."""

    @abstractmethod
    def read(self, features: KeyedJagged) -> tuple[Tensor, ...]:
        """As `look_up` of a batch that was not prepared and will not be trained; changes nothing."""

    @abstractmethod
    def update(self, prepared: Held, pooled: Tensor, rows: Sequence[Tensor], weights: Tensor | None) -> None:
        """One optimizer step from the gradients of what `look_up` gave; then the rows may go."""

    # Tables

    @abstractmethod
    def tables_of(self, name: str) -> NamedRows:
        """Rows of the table `name`."""

    @abstractmethod
    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """``tables.<name>.<part>`` and the view of it, for every table that lies whole in level 0."""

    @abstractmethod
    def save(self, directory: Path, previous: Path | None) -> dict[str, Any]:
        """See `EmbeddingCollection.save`."""

    @abstractmethod
    def load(self, directory: Path, manifest: Mapping[str, Any]) -> str:
        """See `EmbeddingCollection.load`."""

    @abstractmethod
    def begin_with(
        self, directory: Path, manifest: Mapping[str, Any], optimizer: RowOptimizerConfig
    ) -> None:  # fmt: skip
        """Begin new training with the rows and optimizer state of other tables, by whatever tiers, caches and codecs.

        Rows that the others never trained keep their initial values. Steps and schedules are counted from 0; the state
        of row-wise Adam knows how many steps it is of.

        Parameters
        ----------
        directory, manifest
            As for `load`.
        optimizer : RowOptimizerConfig
            Of the other tables, by which rows take the steps that they missed.

        Raises
        ------
        CheckpointError
            As by `load`; also when these tables were trained.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back files and threads; nothing works afterwards."""

    @abstractmethod
    def bytes_by_memory(self) -> dict[str, int]:
        """Bytes in ``dram``, ``mapped`` files and ``block`` files, as they are now."""

    @abstractmethod
    def bytes_by_part(self) -> dict[str, int]:
        """Of level 0, cache metadata, homes in DRAM, file space, staging buffers and workspace, as they are now.

        ``outputs`` are activations, and in no memory's sum: what the largest look-up gave, and its gradient.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of memory for rows, all that describes them and what the update works in; file space is not in it."""
        return self.bytes_by_memory()["dram"]
