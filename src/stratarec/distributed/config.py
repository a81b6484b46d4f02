"""The `distributed` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stratarec.distributed.wire import WireKind
from stratarec.errors import ConfigError

ShardingKind = Literal["auto", "table", "row"]


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a run find each other and share their work; without effect where there is one."""

    timeout: float = 60.0
    """Seconds that a rank waits for the others before it gives up."""
    hosts: int | None = None
    """Hosts of the mesh; None: what torchrun says, by LOCAL_WORLD_SIZE."""
    sharding: ShardingKind = "auto"
    """``table``: every table whole on one rank. ``row``: row by row over all ranks. ``auto``: whole where that
    balances."""
    wire: WireKind = "fp32"
    """Format of rows between ranks: ``fp32``, ``fp16``, ``bf16`` or ``int8``."""
    gradient_wire: WireKind = "fp32"
    """Format of gradients of rows between ranks."""
    overlap: bool = False
    """Send the rows of a batch that the batch before it does not change while that one trains; the bits are the same.
    It hides waits for a network and costs processor time, which ranks need to spare. It needs batches that are prepared
    ahead (``memory.lookahead``)."""

    def __post_init__(self) -> None:
        if not 1 <= self.timeout <= 86_400:
            raise ConfigError(f"distributed.timeout is {self.timeout}, expected 1 to 86400 seconds")
        if self.hosts is not None and self.hosts < 1:
            raise ConfigError(f"distributed.hosts is {self.hosts}, expected at least 1")
