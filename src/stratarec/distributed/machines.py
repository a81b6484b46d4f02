"""What a predicted step is of: a cluster, what a rank does, what ranks and collectives take, and how rows travel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from stratarec.distributed.calibration import Collective
from stratarec.distributed.wire import WireKind
from stratarec.errors import ConfigError
from stratarec.explaining import check_finite


def _positive(config: object, *, none: tuple[str, ...] = ()) -> None:
    """Refuse fields that are not more than 0, or 0 where they are named in `none`."""
    name = type(config).__name__.lower()
    check_finite(config, f"{name}.")
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if isinstance(value, int | float) and (value < 0 or (value == 0 and field.name not in none)):
            least = "0 or more" if field.name in none else "more than 0"
            raise ConfigError(f"{name}.{field.name} is {value:g}, expected {least}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines and what connects them."""

    hosts: int
    ranks: int
    """Of a host."""
    inside_bytes_per_second: float
    """A rank to the others of its host, one direction."""
    between_bytes_per_second: float
    """A host to the others, one direction; its ranks share it."""
    adds_by_host: bool = False
    """Whether gradients of dense parameters are added inside hosts first, as collectives of GPUs do. `Channel.sum`
    does not."""

    def __post_init__(self) -> None:
        _positive(self, none=("adds_by_host",))

    @property
    def all_ranks(self) -> int:
        """G."""
        return self.hosts * self.ranks


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a rank does in a step."""

    batch: int
    """Samples of a rank."""
    features: int
    """Pooled rows of a sample."""
    width: int
    """D."""
    lookups: float
    """Ids of a sample, all features together."""
    flops: float
    """Of the network a sample, forward and backward, without modules of towers."""
    parameters: int
    """Of the network, likewise."""
    tower_flops: float = 0.0
    """Of the modules of all towers a sample, forward and backward."""
    tower_parameters: int = 0
    """Of the modules of all towers."""
    gradient_bytes: Literal[2, 4] = 4
    """Of a parameter's gradient on the wire."""

    def __post_init__(self) -> None:
        _positive(self, none=("tower_flops", "tower_parameters"))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a rank and a collective were measured, or are assumed, to take."""

    flops_per_second: float
    """Of a rank in the layers of a network."""
    row_bytes_per_second: float
    """Of a rank's memory, random rows."""
    inside: Collective
    """Among ranks of a host."""
    between: Collective
    """Among ranks of several hosts."""
    fixed_seconds: float = 0.0
    """Of a step of a rank, whatever its batch: what an interpreter and many small operations take."""

    def __post_init__(self) -> None:
        _positive(self, none=("fixed_seconds",))


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How pooled rows and their gradients travel."""

    kind: Literal["flat", "sptt"] = "flat"
    wire: WireKind = "fp32"
    compression: float = 1.0
    """Columns of a tower's vectors over those that its module tells; 1 without modules."""

    def __post_init__(self) -> None:
        _positive(self)
        if self.compression < 1:
            raise ConfigError(f"exchange.compression is {self.compression:g}, expected 1 or more")
        if self.kind == "flat" and self.compression != 1:
            raise ConfigError(
                f"exchange.compression is {self.compression:g}, expected 1: only towers, of sptt, compress"
            )
