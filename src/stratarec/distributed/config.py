"""The `distributed` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stratarec.distributed.wire import DenseWireKind, WireKind
from stratarec.errors import ConfigError

ShardingKind = Literal["auto", "table", "row"]
ExchangeKind = Literal["auto", "flat", "sptt"]


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a run find each other and share their work; without effect where there is one."""

    timeout: float = 60.0
    """Seconds that a rank waits for the others before it gives up."""
    hosts: int | None = None
    """Hosts of the mesh; None: what torchrun says, by LOCAL_WORLD_SIZE."""
    exchange: ExchangeKind = "auto"
    """``flat``: every rank with every other. ``sptt``: the tables of tower t are on host t, are looked up inside it,
    and what the towers tell travels between ranks of equal place; it needs as many hosts as ``model.towers`` has.
    ``auto``: ``sptt`` where there are as many and they have modules, which tell less than their vectors; else ``flat``,
    which sends a row that a batch repeats once. Both train the same model, to rounding."""
    sharding: ShardingKind = "auto"
    """``table``: every table whole on one rank. ``row``: row by row over all ranks, with ``sptt`` over those of a host.
    ``auto``: whole where that balances."""
    wire: WireKind = "fp32"
    """Format of rows between ranks: ``fp32``, ``fp16``, ``bf16`` or ``int8``. A row arrives with an error of 0.02 % of
    its length by ``fp16``, 0.16 % by ``bf16`` and 0.4 % by ``int8``, whatever its size."""
    gradient_wire: WireKind = "fp32"
    """Format of gradients of rows between ranks, likewise. An optimizer that divides by a row's own gradients takes
    steps as long as its rate by them, so some weights are elsewhere by several rates after some steps, those of rare
    rows first; runs repeat to the bit all the same."""
    dense_wire: DenseWireKind = "fp32"
    """Format of gradients of the network between ranks; they are added in float32."""

    def __post_init__(self) -> None:
        if not 1 <= self.timeout <= 86_400:
            raise ConfigError(f"distributed.timeout is {self.timeout}, expected 1 to 86400 seconds")
        if self.hosts is not None and self.hosts < 1:
            raise ConfigError(f"distributed.hosts is {self.hosts}, expected at least 1")

    def by_towers(self, towers: int, hosts: int, *, modules: bool = True) -> bool:
        """Whether the exchange of a model with so many towers is ``sptt``.

        Nothing is measured for it, so a run has the same one whenever it is started or resumed.

        Parameters
        ----------
        modules : bool
            Whether the towers have any: ``model.towers.compression`` is more than 1.

        Raises
        ------
        ConfigError
            Where it is asked for and cannot be.
        """
        if self.exchange == "sptt" and not (towers == hosts > 1):
            have = f"model.towers has {towers} towers" if towers else "the model has no towers"
            raise ConfigError(
                f"distributed.exchange is sptt, {have} and there {'is' if hosts == 1 else 'are'} {hosts} "
                f"host{'s'[: hosts != 1]}: expected one tower a host, of two or more; `stratarec plan --towers "
                f"{max(hosts, 2)} --write` makes them"
            )
        return towers == hosts > 1 and (self.exchange == "sptt" or (self.exchange == "auto" and modules))
