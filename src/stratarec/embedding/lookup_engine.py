"""What every engine of embedding tables is: the one of a process, and the one that shares its tables among several.

The module, and whoever prepares batches ahead, know engines by this alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.handle import Handle, InFlightBatches
from stratarec.embedding.health import Health
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.slots import Level0
from stratarec.embedding.step_clock import StepClock
from stratarec.embedding.tiers import TierConfig
from stratarec.kernels.runtime.accelerator import Transfers

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
