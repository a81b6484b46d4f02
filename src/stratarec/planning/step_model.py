"""Predict the seconds of each part of a training step from the work of the step and the rates of a
machine.

`table_seconds` predicts the work on one table in any placement; the planner uses it to compare
placements. `step_time` adds the dense network, transfers to a device, the exchange between ranks
and the reduction of gradients. Every prediction of a step uses these two functions: `stratarec
plan`, `--device`, `--hosts`, reports and benchmarks.

**Tables.** The time is the sum of bytes over a measured bandwidth, reads over a measured rate, and
the engine's own costs (`machine.WorkCosts`), which dominate if batches are small. Float32 rows in
level 0 are pooled and updated in the same way, whatever the table's home is. With level 0 in GPU
memory, rows are pooled and updated at the GPU's rate, missing rows and the rows that they replace
cross the bus, and the host handles only the cache's directory and the records.

**Exchange.** T hosts with L ranks each, G = T L ranks in total; a batch of B samples per rank, F
pooled features of width D, b bytes per row. Each rank receives, in one direction::

                  from other hosts          from its own host
    flat          B F b (G - L) / G         B F b (L - 1) / G
    SPTT          B F b (T - 1) / T         B F b (L - 1) / L
    with towers   B F b (T - 1) / (T c)     B F b (L - 1) / L

The same number of bytes returns as gradients. If distinct rows are sent, F is their number per
sample. Ids are exchanged by another thread during the step before, so their exchange is not part of
the time. As (G - L) / G equals (T - 1) / T, SPTT alone moves the same number of bytes between
hosts, but among T - 1 peers instead of G - 1; the module of a tower divides these bytes by its
compression c. The ranks of a host share its link to other hosts. A collective takes a latency,
which grows with the number of peers, plus its bytes over a rate (an alpha-beta model). Gradients of
the network are reduced over all ranks, gradients of a tower's module over the ranks of its host.

**Overlap.** With lookahead, a block device works at the same time as the processors, and rows are
fetched on the cores that training leaves free. Everything else is sequential.

**Assumptions.** All ranks and all links are equal, loads are even, and the switches carry all links
at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import pydantic

from stratarec.config.validate import check_ranges
from stratarec.distributed.wire import Wire
from stratarec.distributed.wire_formats import WireKind
from stratarec.embedding.config import CodecConfig
from stratarec.errors import ConfigError
from stratarec.kernels.codec.kinds import KINDS
from stratarec.planning.bytes import Home, RowShape, block_bytes, record_bytes
from stratarec.planning.machine import Cluster, Machine, Tiers, check_positive

# Bytes that an SSD store writes per byte of a row, including the rewriting of segments.
_SSD_WRITES = 2.0

Nonnegative = Annotated[float, pydantic.Field(ge=0, lt=1 << 62)]


@dataclass(frozen=True, kw_only=True)
class TableSeconds:
    """Predicted seconds of the table work of one step."""

    compute: Nonnegative = 0.0
    """Seconds of pooling, computing gradients per row and updating rows, in level 0."""
    staging: Nonnegative = 0.0
    """Seconds of comparing tags, and of moving, encoding and decoding rows between level 0 and
    their home.
    """
    device: Nonnegative = 0.0
    """Seconds of reads and writes on the block device, or of row traffic in mapped memory."""

    def __add__(self, other: TableSeconds) -> TableSeconds:
        return TableSeconds(
            compute=self.compute + other.compute,
            staging=self.staging + other.staging,
            device=self.device + other.device,
        )

    def share(self, ranks: int) -> TableSeconds:
        """Return the seconds of one rank if `ranks` ranks share the tables evenly."""
        return TableSeconds(
            compute=self.compute / ranks, staging=self.staging / ranks, device=self.device / ranks
        )

    @property
    def total(self) -> float:
        """Sum of all parts: the time without lookahead, when the parts run one after another."""
        return self.compute + self.staging + self.device


@dataclass(frozen=True, kw_only=True)
class TableWork:
    """Work of one batch on one table: number of rows to look up, update, fetch and write back."""

    shape: RowShape
    lookups: float
    """Number of ids in the batch."""
    distinct: float
    """Number of distinct rows in the batch."""
    home: Home = "level0"
    codec: CodecConfig = field(default_factory=CodecConfig)
    ways: int = 0
    """Slots per set of the cache."""
    misses: float = 0.0
    """Number of distinct rows that are not in level 0. As many rows are written back to make
    room.
    """
    dram_share: float = 0.0
    """Share of the misses of an SSD store whose records are in DRAM."""


def table_seconds(work: TableWork, tiers: Tiers) -> TableSeconds:
    """Predict the seconds of work on one table per step, without the costs per group of tables
    (`WorkCosts.step`).

    Parameters
    ----------
    work : TableWork
        Lookups, rows and home of the table.
    tiers : Tiers
        Measured memories and costs of the machine.
    """
    shape = work.shape
    moved = tiers.level0.lookup_seconds(shape, work.lookups, work.distinct)
    compute = tiers.costs.compute.seconds(moved, work.lookups, work.distinct)
    if work.home == "level0":
        return TableSeconds(compute=compute)
    record = record_bytes(work.codec, shape)
    in_gpu_memory = work.home == "hbm"
    moved = tiers.staging_seconds(
        shape, record, work.ways, work.distinct, work.misses, in_gpu_memory=in_gpu_memory
    )
    staging = tiers.costs.staging.seconds(moved, work.lookups, work.misses)
    if tiers.hbm is None:  # on a GPU, encoding and decoding are as fast as reading
        kind = KINDS[work.codec.kind]
        coding = 1 / kind.encode_rate + 1 / kind.decode_rate
        staging += work.misses * 4 * shape.width * coding / tiers.threads
    device = 0.0
    if work.home == "log" and tiers.block is not None:
        blocks = block_bytes(record) / tiers.block.read_bytes
        written = _SSD_WRITES * record / tiers.block.write_bytes_per_second
        device = (1 - work.dram_share) * work.misses * (blocks / tiers.block.reads_per_second + written)
    elif work.home == "mapped" and tiers.mapped is not None:
        device = work.misses * 2 * record / tiers.mapped.row_bytes_per_second
    return TableSeconds(compute=compute, staging=staging, device=device)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one rank in one step. By default there is no network, no exchange and no transfer."""

    batch: int
    """Number of samples per rank."""
    features: int = 0
    """Number of pooled vectors per sample."""
    width: int = 0
    """Floats per row (D)."""
    lookups: float = 0.0
    """Number of ids per sample, of all features together."""
    flops: float = 0.0
    """Floating-point operations of the network per sample, forward and backward, without the
    modules of towers.
    """
    parameters: int = 0
    """Number of parameters of the network, without the modules of towers."""
    tower_flops: float = 0.0
    """Floating-point operations of the modules of all towers per sample, forward and backward."""
    tower_parameters: int = 0
    """Number of parameters of the modules of all towers."""
    tower_columns: int = 0
    """Floats per sample of the outputs of all towers; 0 to compute them from
    `ExchangeModel.compression`.
    """
    gradient_bytes: Literal[2, 4] = 4
    """Bytes per dense parameter when gradients are sent."""
    flat_rows: float = 0.0
    """Rows per sample that the flat exchange sends if it sends distinct rows; 0 if it sends one row
    per feature.
    """
    up_bytes: float = 0.0
    """Bytes that move from the host to the device of the network."""
    down_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_positive(
            self, may_be_zero=tuple(name for name in self.__dataclass_fields__ if name != "batch")
        )


@dataclass(frozen=True, kw_only=True)
class ExchangeModel:
    """Way in which ranks exchange pooled rows and their gradients."""

    kind: Literal["flat", "sptt"] = "flat"
    wire: WireKind = "fp32"
    compression: float = 1.0
    """Width of a tower's vectors together, divided by the width of its module's output; 1 without
    modules.
    """

    def __post_init__(self) -> None:
        check_ranges(self, "exchange.", compression="[1, inf)")
        if self.kind == "flat" and self.compression != 1:
            raise ConfigError(
                f"exchange.compression is {self.compression:g}, expected 1: only exchange by "
                "towers (sptt) compresses"
            )


@dataclass(frozen=True, kw_only=True)
class ExchangeBytes:
    """Bytes that a rank sends in one step, inside its host and to other hosts. It receives the same
    number.
    """

    inside: float
    between: float
    inside_peers: tuple[int, ...]
    """Number of other ranks in each collective inside a host."""
    between_peers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of the parts of one step of a rank."""

    samples: int
    """Number of samples per rank."""
    tables: TableSeconds
    network: float = 0.0
    """Seconds of the dense network's forward and backward pass and update, and of packing for the
    exchange.
    """
    up: float = 0.0
    """Seconds of transfers from the host to the device of the network."""
    down: float = 0.0
    reduction: float = 0.0
    """Seconds of reducing the gradients of dense parameters over ranks."""
    inside: float = 0.0
    """Seconds of the exchange inside a host."""
    between: float = 0.0
    """Seconds of the exchange between hosts."""
    lookahead: int = 0
    """Number of batches that are staged ahead."""
    busy_share: float = 1.0
    """Share of the cores that the threads of a step occupy; 0 if the step runs on a GPU."""

    @property
    def dense(self) -> float:
        """Seconds of all parts except table work."""
        return self.network + self.up + self.down + self.reduction + self.inside + self.between

    @property
    def compute(self) -> float:
        """Seconds of looking up and updating rows, and of the network."""
        return self.tables.compute + self.network

    @property
    def total(self) -> float:
        """Seconds of the step.

        The parts of training are sequential. With lookahead, staging uses the cores that training
        leaves free, and the block device works at the same time as both.
        """
        chain = self.tables.compute + self.dense
        if not self.lookahead:
            return chain + self.tables.staging + self.tables.device
        staging = self.tables.staging
        cores = (chain + staging) * self.busy_share if self.busy_share else staging
        return max(chain, cores, self.tables.device)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; times in seconds."""
        return {**asdict(self), "step": self.total}


def step_time(
    work: StepWork,
    machine: Machine,
    *,
    tables: TableSeconds | None = None,
    exchange: ExchangeModel | None = None,
    lookahead: int = 0,
) -> StepTime:
    """Predict the parts of a step of one rank.

    Parameters
    ----------
    work : StepWork
        Work of the rank. If `exchange` compresses, it includes the modules of towers.
    machine : Machine
        Rates of the machine and of its network.
    tables : TableSeconds
        Seconds of the rank's table work. By default they are predicted as if every lookup had its
        own row in level 0, without optimizer state.
    exchange : ExchangeModel
        Way to exchange rows; flat and in float32 by default.
    lookahead : int
        Number of batches that are staged ahead.
    """
    exchange, rates, cluster = exchange or ExchangeModel(), machine.network, machine.cluster
    if tables is None:
        shape = RowShape(width=work.width, row_state=False, full_state=0)
        lookups = work.batch * work.lookups
        tables = table_seconds(TableWork(shape=shape, lookups=lookups, distinct=lookups), machine.tiers)
    sent = exchange_bytes(cluster, work, exchange)
    network = rates.fixed_seconds + work.batch * (work.flops + work.tower_flops) / rates.flops_per_second
    latency_inside = sum(map(cluster.inside.latency, sent.inside_peers))
    latency_between = sum(map(cluster.between.latency, sent.between_peers))
    inside = sent.inside / cluster.inside_bytes_per_second
    between = sent.between * cluster.ranks / cluster.between_bytes_per_second
    if exchange.kind == "flat":  # one collective sends both
        inside = max(inside - between, 0.0)
    return StepTime(
        samples=work.batch,
        tables=tables,
        network=network,
        up=work.up_bytes / rates.up_bytes_per_second,
        down=work.down_bytes / rates.down_bytes_per_second,
        reduction=reduction_seconds(cluster, work),
        inside=latency_inside + inside,
        between=latency_between + between,
        lookahead=lookahead,
        busy_share=machine.busy_share,
    )


def exchange_bytes(cluster: Cluster, work: StepWork, exchange: ExchangeModel) -> ExchangeBytes:
    """Return the bytes that a rank exchanges in one step. The module docstring has the formulas.

    Parameters
    ----------
    cluster : Cluster
        Numbers of hosts and ranks.
    work : StepWork
        Work of the rank.
    exchange : ExchangeModel
        Kind and wire of the exchange.
    """
    hosts, ranks, all_ranks = cluster.hosts, cluster.ranks, cluster.all_ranks
    sent_rows = work.flat_rows or work.features if exchange.kind == "flat" else work.features
    rows = 2.0 * work.batch * sent_rows * Wire(exchange.wire, 0, 0).row_bytes(work.width)
    away = (hosts - 1) / hosts
    if exchange.kind == "flat":
        peers = (all_ranks - 1,) * 3  # rows, losses, gradients
        return ExchangeBytes(
            inside=rows * (ranks - 1) / all_ranks,
            between=rows * away,
            inside_peers=() if hosts > 1 else peers,
            between_peers=peers if hosts > 1 else (),
        )
    sent = (
        work.tower_columns / (work.features * work.width)
        if work.tower_columns
        else 1 / exchange.compression
    )
    return ExchangeBytes(
        inside=rows * (ranks - 1) / ranks,
        between=rows * away * sent,
        inside_peers=(ranks - 1,) * (2 if hosts > 1 else 3),
        between_peers=(all_ranks - 1, hosts - 1, hosts - 1) if hosts > 1 else (),
    )


def reduction_seconds(cluster: Cluster, work: StepWork) -> float:
    """Return the seconds of reducing dense gradients over ranks.

    Each rank adds one piece of the gradients of all ranks, and sends the sum of that piece to all
    ranks. With `Cluster.adds_by_host`, the ranks of each host do this first, then the hosts.

    Parameters
    ----------
    cluster : Cluster
        Numbers of hosts and ranks, bandwidths and latencies between them.
    work : StepWork
        Numbers of parameters, and bytes of a gradient.
    """
    ranks, all_ranks = cluster.ranks, cluster.all_ranks
    shared = 2 * work.parameters * work.gradient_bytes
    # A host has the module of one tower, so only its own ranks reduce that module's gradients.
    tower = 2 * work.tower_parameters / cluster.hosts * work.gradient_bytes
    inside = (
        shared * (ranks - 1) / (ranks if cluster.adds_by_host else all_ranks) + tower * (ranks - 1) / ranks
    )
    between = shared * (cluster.hosts - 1) / cluster.hosts * (1 if cluster.adds_by_host else ranks)
    wires = cluster.between if cluster.hosts > 1 else cluster.inside
    latency = wires.latency(all_ranks - 1)
    if cluster.adds_by_host:
        latency = cluster.inside.latency(ranks - 1) + cluster.between.latency(cluster.hosts - 1)
    elif tower:
        latency += cluster.inside.latency(ranks - 1)
    return (
        inside / cluster.inside_bytes_per_second + between / cluster.between_bytes_per_second + 2 * latency
    )
