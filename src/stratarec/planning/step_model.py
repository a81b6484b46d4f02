"""How long a training step takes: the work of a step and the rates of a machine in, seconds of each part out.

`table_seconds` predicts the work on one table wherever its rows are; the planner compares placements by it.
`step_time` adds the dense network, transfers to a device, the exchange between ranks and the reduction of gradients.
Every prediction of a step comes from these two: `stratarec plan`, `--device`, `--hosts`, reports and benchmarks.

**Tables.** Bytes over a measured bandwidth, reads over a measured rate, and the engine's own costs, which are most of
the time where batches are small (`machine.WorkCosts`). Float32 rows of level 0 are pooled and updated alike wherever a
table's home is. With level 0 in the memory of a GPU, rows are pooled and updated at its rate, missing rows and their
victims cross the bus, and the host's cores work on nothing but the directory and the records.

**Exchange.** An alpha-beta model of T hosts of L ranks, G = T L. Bytes that a rank receives from others in one
direction, of B samples and F pooled features of width D at b bytes a row (gradients travel back by as many, ids come
first; where distinct rows travel, F is the number of rows a sample)::

    flat          B F b (G - L) / G  from other hosts    B F b (L - 1) / G  from its own
    SPTT          B F b (T - 1) / T  from other hosts    B F b (L - 1) / L  from its own
    with towers   of the first, 1 / c of it

(G - L) / G is (T - 1) / T: SPTT alone moves as many bytes between hosts, among T - 1 peers instead of G - 1; the module
of a tower divides them by its compression c. Ranks of a host share its link to others. A collective takes latency,
which grows by its peers, and bytes over a rate. The network's gradients are reduced over all ranks, those of a tower's
module over the ranks of its host.

**Overlap.** With lookahead a block device works at the same time as the processors, and rows are fetched on the cores
that training leaves free. Everything else is sequential.

Assumed: every rank and link is like the others and loads are even; a network that carries all links at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import pydantic

from stratarec.distributed.wire import Wire, WireKind
from stratarec.embedding.codecs import CodecConfig
from stratarec.errors import ConfigError
from stratarec.kernels.codec.kinds import KINDS
from stratarec.planning.bytes import Home, RowShape, block_bytes, record_bytes
from stratarec.planning.machine import Cluster, Machine, Tiers, check_positive

# Bytes that a log writes for each byte of a row, rewriting of segments included.
_LOG_WRITES = 2.0
_ID_BYTES = 4  # of tables of less than 2^31 rows

PENALTY = {name: kind.penalty for name, kind in KINDS.items()}
"""Cost of a lower precision under ``precision: auto``, as a share of the table's compute seconds.

With 0.5 for int8, a table goes to a slower tier in float32 rather than into DRAM in int8 when that costs it less than
half its compute time; with 50 for int4 that codec is left for what nothing else can hold. The figures are a
judgement, not a measurement: int8 under a cache trains to the accuracy of float32 (arXiv 2010.11305), int4 does not
always."""

Nonnegative = Annotated[float, pydantic.Field(ge=0, lt=1 << 62)]


@dataclass(frozen=True, kw_only=True)
class TableSeconds:
    """Predicted seconds of the table work of one step."""

    compute: Nonnegative = 0.0
    """Pooling, gradients by row and the update, in level 0."""
    staging: Nonnegative = 0.0
    """Tags, and rows that move between level 0 and their home: memory traffic, encoding, decoding."""
    device: Nonnegative = 0.0
    """Reads and writes of the block device, or row traffic of mapped memory."""

    def __add__(self, other: TableSeconds) -> TableSeconds:
        return TableSeconds(
            compute=self.compute + other.compute,
            staging=self.staging + other.staging,
            device=self.device + other.device,
        )

    def share(self, ranks: int) -> TableSeconds:
        """Return the seconds of one of `ranks` ranks that share the tables evenly."""
        return TableSeconds(
            compute=self.compute / ranks, staging=self.staging / ranks, device=self.device / ranks
        )  # fmt: skip

    @property
    def total(self) -> float:
        """Seconds one after the other, as without lookahead."""
        return self.compute + self.staging + self.device


@dataclass(frozen=True, kw_only=True)
class TableWork:
    """Work of one batch on one table: rows looked up and updated, rows fetched and written back."""

    shape: RowShape
    lookups: float
    """Ids of the batch."""
    distinct: float
    """Distinct rows of the batch."""
    home: Home = "level0"
    codec: CodecConfig = field(default_factory=CodecConfig)
    ways: int = 0
    """Slots of a set of the cache."""
    misses: float = 0.0
    """Distinct rows that level 0 does not hold; as many are written back for them."""


def table_seconds(work: TableWork, tiers: Tiers) -> TableSeconds:
    """Predict the seconds of one table in a step, without `EngineCosts`' share of each group of tables."""
    shape = work.shape
    moved = tiers.level0.lookup_seconds(shape, work.lookups, work.distinct)
    compute = tiers.costs.compute.seconds(moved, work.lookups, work.distinct)
    if work.home == "level0":
        return TableSeconds(compute=compute)
    record = record_bytes(work.codec, shape)
    moved = tiers.staging_seconds(shape, record, work.ways, work.distinct, work.misses)
    staging = tiers.costs.staging.seconds(moved, work.lookups, work.misses)
    if tiers.hbm is None:  # a GPU encodes and decodes as fast as it reads
        kind = KINDS[work.codec.kind]
        coding = 1 / kind.encode_rate + 1 / kind.decode_rate
        staging += work.misses * 4 * shape.width * coding / tiers.threads
    device = 0.0
    if work.home == "log" and tiers.block is not None:
        blocks = block_bytes(record) / tiers.block.read_bytes
        written = _LOG_WRITES * record / tiers.block.write_bytes_per_second
        device = work.misses * (blocks / tiers.block.reads_per_second + written)
    elif work.home == "mapped" and tiers.mapped is not None:
        device = work.misses * 2 * record / tiers.mapped.row_bytes_per_second
    return TableSeconds(compute=compute, staging=staging, device=device)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one rank in one step. By default there is no network, no exchange and no transfer."""

    batch: int
    """Samples of a rank."""
    features: int = 0
    """Pooled rows of a sample."""
    width: int = 0
    """D, floats of a row."""
    lookups: float = 0.0
    """Ids of a sample, all features together."""
    flops: float = 0.0
    """Floating-point operations of the network for a sample, forward and backward, without modules of towers."""
    parameters: int = 0
    """Parameters of the network, without modules of towers."""
    tower_flops: float = 0.0
    """Operations of the modules of all towers for a sample, forward and backward."""
    tower_parameters: int = 0
    """Parameters of the modules of all towers."""
    gradient_bytes: Literal[2, 4] = 4
    """Bytes of a parameter's gradient on the wire."""
    flat_rows: float = 0.0
    """Rows a sample that the flat exchange sends, where distinct rows travel; 0: one a feature."""
    up_bytes: float = 0.0
    """Bytes from the host to the device of the network."""
    down_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, may_be_zero=tuple(name for name in self.__dataclass_fields__ if name != "batch"))


@dataclass(frozen=True, kw_only=True)
class ExchangeModel:
    """How pooled rows and their gradients travel."""

    kind: Literal["flat", "sptt"] = "flat"
    wire: WireKind = "fp32"
    compression: float = 1.0
    """Columns of a tower's vectors over those of its module's output; 1 without modules."""

    def __post_init__(self) -> None:
        if not self.compression >= 1:
            raise ConfigError(f"exchange.compression is {self.compression:g}, expected 1 or more")
        if self.kind == "flat" and self.compression != 1:
            raise ConfigError(
                f"exchange.compression is {self.compression:g}, expected 1: only towers, of sptt, compress"
            )


@dataclass(frozen=True, kw_only=True)
class ExchangeBytes:
    """Bytes that a rank sends in one step; it receives as many."""

    inside: float
    between: float
    inside_peers: tuple[int, ...]
    """Number of other ranks in each collective."""
    between_peers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of the parts of one step of a rank."""

    samples: int
    """Samples of a rank."""
    tables: TableSeconds
    network: float = 0.0
    """Forward, backward and update of the dense network, and packing for the exchange."""
    up: float = 0.0
    """Transfer to the device of the network."""
    down: float = 0.0
    reduction: float = 0.0
    """Reduction of the gradients of dense parameters."""
    inside: float = 0.0
    """Exchange inside a host."""
    between: float = 0.0
    """Exchange between hosts."""
    lookahead: int = 0
    """Batches staged ahead."""
    busy_share: float = 1.0
    """Share of the cores that the threads of a step occupy; 0 for a step of a GPU."""

    @property
    def dense(self) -> float:
        """Seconds of everything but the tables."""
        return self.network + self.up + self.down + self.reduction + self.inside + self.between

    @property
    def compute(self) -> float:
        """Seconds of looking up, updating and the network."""
        return self.tables.compute + self.network

    @property
    def total(self) -> float:
        """Seconds of the step.

        Training is sequential. With lookahead staging takes the cores that training leaves free, and the block device
        works at the same time as both.
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
        With the figures of its towers' modules where `exchange` compresses.
    tables : TableSeconds
        Table work of the rank. By default its lookups are distinct rows of level 0 without optimizer state.
    exchange : ExchangeModel
        Flat in float32 by default.
    lookahead : int
        Batches staged ahead.
    """
    exchange, rates, cluster = exchange or ExchangeModel(), machine.network, machine.cluster
    if tables is None:
        shape, lookups = RowShape(width=work.width, row_state=False, full_state=0), work.batch * work.lookups
        tables = table_seconds(TableWork(shape=shape, lookups=lookups, distinct=lookups), machine.tiers)
    sent = exchange_bytes(cluster, work, exchange)
    network = rates.fixed_seconds + rates.sptt_seconds * (exchange.kind == "sptt")
    network += packed_bytes(work, exchange) * rates.packed_seconds
    network += trained_parameters(cluster, work) * rates.parameter_seconds
    network += work.batch * (work.flops + work.tower_flops) / rates.flops_per_second
    latency_inside = sum(map(cluster.inside.latency, sent.inside_peers))
    latency_between = sum(map(cluster.between.latency, sent.between_peers))
    return StepTime(
        samples=work.batch,
        tables=tables,
        network=network,
        up=work.up_bytes / rates.up_bytes_per_second,
        down=work.down_bytes / rates.down_bytes_per_second,
        reduction=reduction_seconds(cluster, work),
        inside=latency_inside + sent.inside / cluster.inside_bytes_per_second,
        between=latency_between + sent.between * cluster.ranks / cluster.between_bytes_per_second,
        lookahead=lookahead,
        busy_share=machine.busy_share,
    )


def exchange_bytes(cluster: Cluster, work: StepWork, exchange: ExchangeModel) -> ExchangeBytes:
    """Return the bytes of one step's exchange; the formulas are at the top of this module."""
    hosts, ranks, all_ranks = cluster.hosts, cluster.ranks, cluster.all_ranks
    ids = work.batch * work.lookups * _ID_BYTES
    rows = 2.0 * work.batch * sent_rows(work, exchange) * Wire(exchange.wire, 0, 0).row_bytes(work.width)
    away = (hosts - 1) / hosts
    # Ids go to their owners among all ranks, whatever rows do.
    inside, between = ids * (ranks - 1) / all_ranks, ids * away
    if exchange.kind == "flat":
        peers = (all_ranks - 1,) * 3  # ids, rows, gradients
        return ExchangeBytes(
            inside=inside + rows * (ranks - 1) / all_ranks,
            between=between + rows * away,
            inside_peers=() if hosts > 1 else peers,
            between_peers=peers if hosts > 1 else (),
        )
    return ExchangeBytes(
        inside=inside + rows * (ranks - 1) / ranks,
        between=between + rows * away / exchange.compression,
        inside_peers=(ranks - 1,) * (2 if hosts > 1 else 3),
        between_peers=(all_ranks - 1, hosts - 1, hosts - 1) if hosts > 1 else (),
    )


def sent_rows(work: StepWork, exchange: ExchangeModel) -> float:
    """Return the rows of a sample that owners send, before any compression."""
    return work.flat_rows or work.features if exchange.kind == "flat" else work.features


def packed_bytes(work: StepWork, exchange: ExchangeModel) -> float:
    """Return the float32 bytes that a rank packs in a step: rows and their gradients, with SPTT also tower outputs."""
    passes = 1.0 if exchange.kind == "flat" else 1.0 + 1.0 / exchange.compression
    return 2.0 * work.batch * sent_rows(work, exchange) * work.width * 4 * passes


def trained_parameters(cluster: Cluster, work: StepWork) -> float:
    """Return the dense parameters that a rank adds and updates: the network's, and those of its host's tower."""
    return work.parameters + work.tower_parameters / cluster.hosts


def reduction_seconds(cluster: Cluster, work: StepWork) -> float:
    """Return the seconds in which dense gradients are reduced.

    Each rank adds a piece of every rank's gradients and sends the sum to all; or the ranks of a host do so first.
    """
    ranks, all_ranks = cluster.ranks, cluster.all_ranks
    shared = 2 * work.parameters * work.gradient_bytes
    # A host has the module of one tower, and adds its gradients by itself.
    tower = 2 * work.tower_parameters / cluster.hosts * work.gradient_bytes
    inside = shared * (ranks - 1) / (ranks if cluster.adds_by_host else all_ranks) + tower * (ranks - 1) / ranks
    between = shared * (cluster.hosts - 1) / cluster.hosts * (1 if cluster.adds_by_host else ranks)
    wires = cluster.between if cluster.hosts > 1 else cluster.inside
    latency = wires.latency(all_ranks - 1)
    if cluster.adds_by_host:
        latency = cluster.inside.latency(ranks - 1) + cluster.between.latency(cluster.hosts - 1)
    elif tower:
        latency += cluster.inside.latency(ranks - 1)
    return inside / cluster.inside_bytes_per_second + between / cluster.between_bytes_per_second + 2 * latency
