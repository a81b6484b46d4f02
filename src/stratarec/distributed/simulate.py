"""An alpha-beta model of a training step on machines that are not here: T hosts of L ranks, G = T L.

Bytes a rank receives from others in one direction, of B samples and F pooled features of width D at b bytes a row of it
(gradients travel back by as many, ids come first; where distinct rows travel, F is how many a sample)::

    flat          B F b (G - L) / G  from other hosts    B F b (L - 1) / G  from its own
    SPTT          B F b (T - 1) / T  from other hosts    B F b (L - 1) / L  from its own
    with towers   of the first, 1 / c of it

(G - L) / G is (T - 1) / T: SPTT alone moves as many bytes between hosts, among T - 1 peers instead of G - 1; the module
of a tower divides them by its compression c. Ranks of a host share its link to others. A collective takes latency,
which grows by its peers, and bytes over a rate. The network's gradients are reduced over all ranks, those of a tower's
module over the ranks of its host.

Assumed: every rank and link is like the others and loads are even; a network that carries all links at once; nothing
of the exchange is hidden behind other work, so a step is the sum of its parts. Caches and tiers are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from stratarec.config.validate import check_finite
from stratarec.distributed.measure import Collective
from stratarec.distributed.wire import Wire, WireKind
from stratarec.errors import ConfigError


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
    flat_rows: float = 0.0
    """Rows a sample that the flat exchange sends, where distinct rows travel; 0: one a feature."""

    def __post_init__(self) -> None:
        _positive(self, none=("tower_flops", "tower_parameters", "flat_rows"))


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
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
    sptt_seconds: float = 0.0
    """More of a step by SPTT: what asking peers and joining what they ask takes."""
    packed_seconds: float = 0.0
    """Of a rank for each byte that it packs for others and unpacks of theirs, in float32 whatever the wire."""
    parameter_seconds: float = 0.0
    """Of a rank for each dense parameter that it trains: gradients flattened, added and spread, and the optimizer."""

    def __post_init__(self) -> None:
        _positive(self, none=("fixed_seconds", "sptt_seconds", "packed_seconds", "parameter_seconds"))


@dataclass(frozen=True, kw_only=True)
class ExchangeModel:
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


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes a step that a rank sends, which are as many as it receives."""

    inside: float
    between: float
    inside_peers: tuple[int, ...]
    """Of each collective, how many other ranks are in it."""
    between_peers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of the parts of a step."""

    compute: float
    reduction: float
    """Of the gradients of dense parameters."""
    inside: float
    """Exchange inside a host."""
    between: float
    """Exchange between hosts."""

    @property
    def total(self) -> float:
        """One part after the other."""
        return self.compute + self.reduction + self.inside + self.between


_ID_BYTES = 4  # of tables of less than 2^31 rows
# Passes over a looked-up row: read to pool, read and written by the update.
_TOUCHES = 3


def traffic(cluster: Cluster, workload: Workload, exchange: ExchangeModel) -> StepBytes:
    """What travels in a step; see the head of this module."""
    hosts, ranks, everyone = cluster.hosts, cluster.ranks, cluster.all_ranks
    ids = workload.batch * workload.lookups * _ID_BYTES
    rows = 2.0 * workload.batch * sent_rows(workload, exchange) * Wire(exchange.wire, 0, 0).row_bytes(workload.width)
    away = (hosts - 1) / hosts
    # Ids go to their owners among all ranks, whatever rows do.
    inside, between = ids * (ranks - 1) / everyone, ids * away
    if exchange.kind == "flat":
        peers = (everyone - 1,) * 3  # ids, rows, gradients
        return StepBytes(
            inside=inside + rows * (ranks - 1) / everyone,
            between=between + rows * away,
            inside_peers=() if hosts > 1 else peers,
            between_peers=peers if hosts > 1 else (),
        )
    return StepBytes(
        inside=inside + rows * (ranks - 1) / ranks,
        between=between + rows * away / exchange.compression,
        inside_peers=(ranks - 1,) * (2 if hosts > 1 else 3),
        between_peers=(everyone - 1, hosts - 1, hosts - 1) if hosts > 1 else (),
    )


def sent_rows(workload: Workload, exchange: ExchangeModel) -> float:
    """Rows a sample that owners send before any is compressed."""
    return workload.flat_rows or workload.features if exchange.kind == "flat" else workload.features


def packed_bytes(workload: Workload, exchange: ExchangeModel) -> float:
    """Bytes of float32 that a rank packs in a step: rows and their gradients, by SPTT once more what towers tell."""
    passes = 1.0 if exchange.kind == "flat" else 1.0 + 1.0 / exchange.compression
    return 2.0 * workload.batch * sent_rows(workload, exchange) * workload.width * 4 * passes


def trained_parameters(cluster: Cluster, workload: Workload) -> float:
    """Dense parameters that a rank adds and updates: of the network, and of the module of its host's tower."""
    return workload.parameters + workload.tower_parameters / cluster.hosts


def step_time(cluster: Cluster, workload: Workload, exchange: ExchangeModel, calibration: MeasuredCosts) -> StepTime:
    """Seconds of the parts of a step.

    Parameters
    ----------
    workload : Workload
        With the figures of its towers' modules where `exchange` compresses.
    """
    moved = traffic(cluster, workload, exchange)
    touched = workload.batch * workload.lookups * workload.width * 4 * _TOUCHES
    flops = workload.batch * (workload.flops + workload.tower_flops)
    latency_inside = sum(map(calibration.inside.latency, moved.inside_peers))
    latency_between = sum(map(calibration.between.latency, moved.between_peers))
    fixed = calibration.fixed_seconds + calibration.sptt_seconds * (exchange.kind == "sptt")
    packed = packed_bytes(workload, exchange) * calibration.packed_seconds
    trained = trained_parameters(cluster, workload) * calibration.parameter_seconds
    computed = flops / calibration.flops_per_second + touched / calibration.row_bytes_per_second
    return StepTime(
        compute=fixed + packed + trained + computed,
        reduction=reduction_seconds(cluster, workload, calibration),
        inside=latency_inside + moved.inside / cluster.inside_bytes_per_second,
        between=latency_between + moved.between * cluster.ranks / cluster.between_bytes_per_second,
    )


def reduction_seconds(cluster: Cluster, workload: Workload, calibration: MeasuredCosts) -> float:
    """Gradients: a rank adds a piece of what all have, and sends the sum to them, or those of a host do it first."""
    ranks, everyone = cluster.ranks, cluster.all_ranks
    shared = 2 * workload.parameters * workload.gradient_bytes
    # A host has the module of one tower, and adds its gradients by itself.
    own = 2 * workload.tower_parameters / cluster.hosts * workload.gradient_bytes
    inside = shared * (ranks - 1) / (ranks if cluster.adds_by_host else everyone) + own * (ranks - 1) / ranks
    between = shared * (cluster.hosts - 1) / cluster.hosts * (1 if cluster.adds_by_host else ranks)
    wires = calibration.between if cluster.hosts > 1 else calibration.inside
    latency = wires.latency(everyone - 1)
    if cluster.adds_by_host:
        latency = calibration.inside.latency(ranks - 1) + calibration.between.latency(cluster.hosts - 1)
    elif own:
        latency += calibration.inside.latency(ranks - 1)
    return inside / cluster.inside_bytes_per_second + between / cluster.between_bytes_per_second + 2 * latency
