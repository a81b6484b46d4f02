"""The `distributed` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stratarec.config.units import parse_rate
from stratarec.config.validate import check_ranges
from stratarec.distributed.wire_formats import DenseWireKind, WireKind
from stratarec.errors import ConfigError

ShardingKind = Literal["auto", "table", "row"]
ExchangeKind = Literal["auto", "flat", "sptt"]


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Connections between the processes of a run, if it has several, and the division of work."""

    timeout: float = 60.0
    """Seconds that a rank waits for the others before it fails."""
    hosts: int | None = None
    """Number of hosts; None to compute it from torchrun's LOCAL_WORLD_SIZE."""
    exchange: ExchangeKind = "auto"
    """``flat``: every rank exchanges rows with every other rank. ``sptt``: the tables of tower t
    are on host t and looked up there, and only tower outputs are sent between hosts; it needs as
    many hosts as ``model.towers`` has towers. ``auto``: ``sptt`` if the numbers of hosts and towers
    are equal and its steps are shorter, as measured on each rank and predicted for
    ``distributed.network``, else ``flat``. Both train the same model, up to rounding."""
    network: str = "1Gbit"
    """Bandwidth from a host to other hosts, such as ``25Gbit``; only ``exchange: auto`` uses it."""
    sharding: ShardingKind = "auto"
    """``table``: each table is on one rank. ``row``: the rows of each table are divided among all
    ranks, or with ``sptt`` among the ranks of a host. ``auto``: complete tables where the load of
    ranks is then balanced."""
    wire: WireKind = "fp32"
    """Format of rows between ranks."""
    gradient_wire: WireKind = "fp32"
    """Format of gradients of rows between ranks. Adaptive optimizers divide by the size of a row's
    gradients, so rounding can change weights, first those of rare rows, by several learning rates
    after some steps. Runs still repeat to the bit."""
    dense_wire: DenseWireKind = "fp32"
    """Format of the network's gradients between ranks; they are added in float32."""

    def __post_init__(self) -> None:
        parse_rate(self.network, "distributed.network")
        check_ranges(self, "distributed.", timeout="[1, 86400]", hosts="[1, inf)")

    def by_towers(self, towers: int, hosts: int) -> bool:
        """Return whether the exchange is ``sptt``, or may be, for a model with `towers` towers on
        `hosts` hosts.

        Raises
        ------
        ConfigError
            If ``sptt`` is set but the numbers of towers and hosts differ.
        """
        if self.exchange == "sptt" and not (towers == hosts > 1):
            have = f"model.towers has {towers} towers" if towers else "the model has no towers"
            raise ConfigError(
                f"distributed.exchange is sptt, but {have} and the number of hosts is {hosts}: expected "
                "two or more "
                "hosts with one tower each; write towers with `stratarec plan --towers "
                f"{max(hosts, 2)} --write`"
            )
        return towers == hosts > 1 and self.exchange != "flat"
