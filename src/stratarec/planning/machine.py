"""Rates of a machine: measured here once and cached, taken from a data sheet, or assumed for a
cluster.

`measure_tiers` measures the sequential and random-row bandwidth of DRAM, the sequential writes and
random reads (by 64 threads) of each configured path, and the engine's own costs. For a GPU,
`stratarec doctor --gpu` measures the memory and the bus; this module then measures the engine's
costs with rows in GPU memory. Measurements are cached in ``$XDG_CACHE_HOME/stratarec/tiers.json``
(``~/.cache`` by default), by host, device and mount point.

The engine's costs are a time per step, per table, per id and per row, in addition to the time of
moving bytes. To measure them, tables of a few shapes are trained for some steps, once entirely in
level 0 and once under a cache. A least-squares fit of relative errors then divides the measured
seconds among bytes, steps, tables, ids and rows. With batches of a few hundred samples, the
engine's costs are most of the time.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.batch.jagged import KeyedJagged
from stratarec.distributed.measure import Collective
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.engine import Engine
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import ConfigError, DatasetError
from stratarec.io.atomic import (
    cache_directory,
    create_locked,
    make_directory,
    read_json,
    remove_leftovers_of,
    storage_errors,
    temporary_name,
    write_json,
)
from stratarec.kernels.bandwidth import read_blocks, sum_parts, sum_rows
from stratarec.kernels.runtime.cores import memory_bytes
from stratarec.kernels.runtime.memory import allocate
from stratarec.kernels.runtime.threads import use_torch_threads
from stratarec.planning.bytes import STAMP_BYTES, TAG_BYTES, RowShape
from stratarec.planning.config import MemoryConfig

READ_BYTES = 4096
PARALLEL_READS = 64
_ROW_FLOATS = 64
_DRAM_BYTES = 256 << 20
_FILE_BYTES = 256 << 20
_WRITE_BYTES = 4 << 20
_SECONDS = 0.5
_READS_A_CALL = 32

SHAPES = (
    (3, 12, 320, 4), (3, 12, 3000, 12), (3, 48, 320, 12), (3, 48, 3000, 4), (30, 12, 320, 12), (30, 12, 3000, 4),
    (30, 48, 320, 4), (30, 48, 3000, 12), (12, 24, 1200, 2), (12, 24, 1200, 12), (30, 12, 3000, 12),
)  # fmt: skip
"""Tables, floats per row, samples per batch, and skew. Ids of a table with R rows are drawn as ``R
* u ** skew``, with u uniform in [0, 1)."""
_TABLE_BYTES, _CACHE_SHARE, _WAYS = 96 << 20, 0.2, 32
_WARM_SAMPLES, _STEPS, _BATCHES = 40_000, 6, 6
_SWEPT_BYTES = 24 << 20


@dataclass(frozen=True, kw_only=True)
class WorkCosts:
    """Coefficients that predict the seconds of one kind of table work from its bytes and its
    counts.
    """

    bytes_factor: float = 1.0
    """Factor on the time that the bytes take at the memory's bandwidth."""
    step: float = 0.0
    """Seconds per step for each group of tables of the same shape."""
    table: float = 0.0
    """Seconds per step for each table."""
    lookup: float = 0.0
    """Seconds per lookup."""
    row: float = 0.0
    """Seconds per distinct row for `EngineCosts.compute`, per fetched row for
    `EngineCosts.staging`.
    """

    def seconds(self, moved: float, lookups: float, rows: float) -> float:
        """Return the seconds of the work on one table in a step, without `step`.

        Parameters
        ----------
        moved : float
            Seconds that moving its bytes alone takes.
        lookups : float
            Number of lookups.
        rows : float
            Number of rows: distinct rows for `EngineCosts.compute`, fetched rows for
            `EngineCosts.staging`.
        """
        return self.bytes_factor * moved + self.table + self.lookup * lookups + self.row * rows


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """Costs of both kinds of table work. By default only moving bytes takes time."""

    compute: WorkCosts = field(default_factory=WorkCosts)
    """Costs of looking up and updating rows in level 0."""
    staging: WorkCosts = field(default_factory=WorkCosts)
    """Costs of fetching rows into level 0."""


@dataclass(frozen=True, kw_only=True)
class DramTier:
    """Size of a memory, and its bandwidth when all threads use it at once."""

    sequential_bytes_per_second: float = math.inf
    row_bytes_per_second: float
    """Bandwidth of reading random rows of 256 bytes."""
    bytes: int = 0
    """Size of the memory."""

    def lookup_seconds(self, shape: RowShape, lookups: float, distinct: float) -> float:
        """Return the seconds that memory traffic takes when a table's rows are pooled and updated.

        Pooled vectors and their gradients are streamed once. For each distinct row, pooling reads
        the weights, and the update reads and writes the slot.

        Parameters
        ----------
        shape : RowShape
            Floats and optimizer state of a row.
        lookups, distinct : float
            Numbers of lookups and of distinct rows in a batch.
        """
        passing = 2 * lookups * 4 * shape.width / self.sequential_bytes_per_second
        return passing + distinct * (4 * shape.width + 2 * shape.slot_bytes) / self.row_bytes_per_second

    def staging_seconds(self, row_bytes: int, ways: int, distinct: float, misses: float) -> float:
        """Return the seconds that memory traffic takes when rows are staged.

        For each distinct row, the tags and stamps of a set are read. For each missing row, its
        bytes are moved twice: once for the row and once for the row that it replaces.

        Parameters
        ----------
        row_bytes : int
            Bytes of a slot and a record together.
        ways : int
            Slots of a set of the cache.
        distinct, misses : float
            Numbers of distinct rows in a batch, and of those that are not in level 0.
        """
        moved = distinct * ways * (TAG_BYTES + STAMP_BYTES) + 2 * misses * row_bytes
        return moved / self.row_bytes_per_second


@dataclass(frozen=True, kw_only=True)
class HbmTier(DramTier):
    """Memory of a GPU, and the bus between it and the host."""

    up_bytes_per_second: float
    """Bandwidth of the bus from the host to the GPU."""
    down_bytes_per_second: float
    engine: EngineCosts = field(default_factory=EngineCosts)
    """Costs of table work with rows in this memory."""

    def exchange_seconds(self, slot_bytes: int, record_bytes: int, misses: float) -> float:
        """Return the seconds to move missing rows from the host into slots, and the rows that they
        replace back.

        Parameters
        ----------
        slot_bytes, record_bytes : int
            Bytes of a slot and of a record.
        misses : float
            Number of missing rows in a batch.
        """
        bus = record_bytes / self.up_bytes_per_second + record_bytes / self.down_bytes_per_second
        return misses * (bus + 2 * (slot_bytes + record_bytes) / self.row_bytes_per_second)


@dataclass(frozen=True, kw_only=True)
class BlockTier:
    """Measured rates of a directory on a block device."""

    path: str
    write_bytes_per_second: float
    """Bandwidth of sequential writes that end with a sync."""
    reads_per_second: float
    """Random reads per second, each of `read_bytes`."""
    read_bytes: int
    parallel: int
    """Number of reads in flight during the measurement."""
    direct: bool
    """Whether reads bypassed the page cache. If false, the measured reads may have come from that
    cache.
    """
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class MappedTier:
    """Measured rates of a directory whose files are mapped into memory."""

    path: str
    write_bytes_per_second: float
    """Bandwidth of sequential writes that end with a sync."""
    row_bytes_per_second: float
    """Bandwidth of reading random rows of 256 bytes from a mapping with resident pages. For a path
    on a disk this is the speed of the page cache, which is reached only while the file fits into
    that cache."""
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Memory tiers of a machine, and the costs of table work in them."""

    dram: DramTier
    threads: int = 1
    """Number of threads that the kernels use."""
    engine: EngineCosts = field(default_factory=EngineCosts)
    block: BlockTier | None = None
    mapped: MappedTier | None = None
    hbm: HbmTier | None = None
    """GPU memory; None unless rows are trained in it."""
    age_seconds: float = 0.0
    """Age of the oldest measurement."""

    @property
    def level0(self) -> DramTier:
        """Memory in which rows are trained."""
        return self.hbm or self.dram

    @property
    def costs(self) -> EngineCosts:
        """Costs of table work with rows in `level0`."""
        return self.hbm.engine if self.hbm else self.engine

    def staging_seconds(
        self,
        shape: RowShape,
        record_bytes: int,
        ways: int,
        distinct: float,
        misses: float,
        *,
        in_gpu_memory: bool = False,
    ) -> float:
        """Return the seconds of memory and bus traffic when rows are staged.

        Parameters
        ----------
        shape : RowShape
            Floats and optimizer state of a row.
        record_bytes : int
            Bytes of a record.
        ways, distinct, misses
            As for `DramTier.staging_seconds`.
        in_gpu_memory : bool
            Whether records are in GPU memory, as the slots are, and do not cross the bus.
        """
        if self.hbm is None:
            return self.dram.staging_seconds(shape.slot_bytes + record_bytes, ways, distinct, misses)
        if in_gpu_memory:
            tags = self.dram.staging_seconds(0, ways, distinct, misses)
            return tags + 2 * misses * (shape.slot_bytes + record_bytes) / self.hbm.row_bytes_per_second
        moved = self.dram.staging_seconds(record_bytes, ways, distinct, misses)
        return moved + self.hbm.exchange_seconds(shape.slot_bytes, record_bytes, misses)


def check_positive(config: object, *, may_be_zero: tuple[str, ...] = ()) -> None:
    """Raise `ConfigError` if a number in `config` is not more than 0. Fields in `may_be_zero` may
    also be 0, and any field may be infinite.
    """
    name = type(config).__name__.lower()
    for entry in fields(config):  # type: ignore[arg-type]
        value = getattr(config, entry.name)
        if isinstance(value, int | float) and not (value > 0 or (value == 0 and entry.name in may_be_zero)):
            least = "0 or more" if entry.name in may_be_zero else "more than 0"
            raise ConfigError(f"{name}.{entry.name} is {value:g}, expected {least}")


@dataclass(frozen=True, kw_only=True)
class NetworkRates:
    """Rates of the device that runs a rank's dense network."""

    flops_per_second: float = math.inf
    """Measured floating-point operations per second of a network's layers."""
    fixed_seconds: float = 0.0
    """Seconds per step that do not depend on the batch size: the interpreter and many small
    operations.
    """
    up_bytes_per_second: float = math.inf
    """Bandwidth from the host's memory to the device."""
    down_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        check_positive(self, may_be_zero=("fixed_seconds",))


FREE = Collective(alpha=0.0, alpha_peer=0.0)
"""A collective without latency."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts and ranks, and the links between them. By default one rank on one host."""

    hosts: int = 1
    ranks: int = 1
    """Number of ranks per host."""
    inside_bytes_per_second: float = math.inf
    """Bandwidth from a rank to the other ranks of its host, in one direction."""
    between_bytes_per_second: float = math.inf
    """Bandwidth from a host to the other hosts, in one direction. The ranks of a host share it."""
    inside: Collective = FREE
    """Latency of a collective among the ranks of one host."""
    between: Collective = FREE
    """Latency of a collective among ranks of several hosts."""
    adds_by_host: bool = False
    """Whether gradients of dense parameters are first added inside each host, as GPU collectives
    do. `Channel.sum` does not."""

    def __post_init__(self) -> None:
        check_positive(self, may_be_zero=("adds_by_host",))

    @property
    def all_ranks(self) -> int:
        """Number of ranks of all hosts together (G)."""
        return self.hosts * self.ranks


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one rank: its memory, its network device and its cluster."""

    tiers: Tiers
    network: NetworkRates = field(default_factory=NetworkRates)
    cluster: Cluster = field(default_factory=Cluster)
    busy_share: float = 1.0
    """Share of the cores that the threads of a step occupy. Staging of coming batches uses the
    other cores.
    """


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates of a GPU, per second, and the size of its memory in bytes."""

    float32_flops: float
    bf16_flops: float
    up_bytes: float
    """Bytes per second from pinned host memory to the GPU."""
    down_bytes: float
    row_bytes: float
    """Bytes per second when random rows of the GPU's memory are read."""
    memory_bytes: float
    origin: str
    """Source of the figures, as text for reports."""
    trains_rows: bool = True
    """Whether the kernels of rows run on the device."""
    device: str = ""
    """torch's name of the GPU, so that table work can be timed on it; empty if the rates are from a
    data sheet.
    """

    def network(self, *, bf16: bool) -> NetworkRates:
        """Return the rates of a network on this device. The time to launch kernels is not
        included.
        """
        return NetworkRates(
            flops_per_second=self.bf16_flops if bf16 else self.float32_flops,
            up_bytes_per_second=self.up_bytes,
            down_bytes_per_second=self.down_bytes,
        )

    def tier(self, engine: EngineCosts) -> HbmTier:
        """Return the device's memory as a tier in which table work has the costs `engine`."""
        return HbmTier(
            sequential_bytes_per_second=self.row_bytes,
            row_bytes_per_second=self.row_bytes,
            bytes=round(self.memory_bytes),
            up_bytes_per_second=self.up_bytes,
            down_bytes_per_second=self.down_bytes,
            engine=engine,
        )


CARDS = {
    "t4": (8.1e12, 65e12, 16e9, 320e9, 16e9),
    "a10": (31.2e12, 125e12, 32e9, 600e9, 24e9),
    "l4": (30.3e12, 121e12, 32e9, 300e9, 24e9),
    "rtx4090": (82.6e12, 165e12, 32e9, 1008e9, 24e9),
    "a100": (19.5e12, 312e12, 32e9, 2039e9, 80e9),
    "h100": (67e12, 989e12, 64e9, 3350e9, 80e9),
    "h200": (67e12, 989e12, 64e9, 4800e9, 141e9),
}
"""Card -> peak float32 operations and 16-bit operations per second, PCIe bytes per second in each
direction, memory bytes per second, and memory size in bytes."""
_REACHED_FLOPS, _REACHED_LINK, _REACHED_MEMORY = 0.4, 0.8, 0.5
"""Shares of the peak rates that are assumed to be reached; `DeviceRates.origin` reports them."""
_TOO_OLD = ("t4",)
"""Cards that Triton's kernels do not run on."""
_LAUNCHES = WorkCosts(step=5e-4, lookup=5e-9)
"""Assumed costs of table work on a card. A group of tables needs about 25 kernel launches; 426,000
lookups took the host of an H200 2.1 ms."""


def card_rates(name: str) -> DeviceRates:
    """Return the rates of a card in `CARDS`, estimated as fixed shares of the peaks in its data
    sheet.
    """
    float32, bf16, link, memory, size = CARDS[name.lower()]
    origin = (
        f"{name}: {_REACHED_FLOPS:.0%} of the operations of its data sheet, {_REACHED_LINK:.0%} of its "
        f"PCIe link, {_REACHED_MEMORY:.0%} of its memory's bandwidth; nothing was measured"
    )
    return DeviceRates(
        float32_flops=_REACHED_FLOPS * float32,
        bf16_flops=_REACHED_FLOPS * bf16,
        up_bytes=_REACHED_LINK * link,
        down_bytes=_REACHED_LINK * link,
        row_bytes=_REACHED_MEMORY * memory,
        memory_bytes=size,
        trains_rows=name.lower() not in _TOO_OLD,
        origin=origin,
    )


def measure_tiers(
    memory: MemoryConfig,
    *,
    rates: DeviceRates | None = None,
    again: bool = False,
    cache: Path | None = None,
) -> Tiers:
    """Return the rates of the tiers that `memory` names: cached ones if there are any, else
    measured now.

    A measurement takes a few seconds per tier and needs 256 MiB of DRAM or of space in the path.
    The numbers of free bytes are never cached.

    Parameters
    ----------
    rates : DeviceRates
        Rates of the GPU, if rows are trained in its memory. Table work is timed on it if
        `rates.device` is set, otherwise its costs are assumed.
    again : bool
        Whether to measure again and replace cached measurements.
    cache : Path
        File of cached measurements; by default `cache_file`.

    Raises
    ------
    StorageError
        If a path cannot be written.
    """
    store = _Cache(cache or cache_file(), again)
    threads = use_torch_threads()
    dram = DramTier(**store.get(f"dram|{threads}", _measure_dram), bytes=memory_bytes())
    engine = store.get(f"engine|{threads}", lambda: measure_engine(Tiers(dram=dram)))
    block = mapped = None
    if memory.block is not None:
        path = memory.block.path
        measured = store.get(_key("block", path), partial(_measure_block, Path(path)))
        block = BlockTier(path=path, free_bytes=_free_bytes(path), **measured)
    if memory.mapped is not None:
        path = memory.mapped.path
        measured = store.get(_key("mapped", path), partial(_measure_mapped, Path(path)))
        mapped = MappedTier(path=path, free_bytes=_free_bytes(path), **measured)
    tiers = Tiers(dram=dram, threads=threads, engine=_engine_costs(engine), block=block, mapped=mapped)
    if rates is not None:
        tiers = replace(tiers, hbm=rates.tier(EngineCosts(compute=_LAUNCHES, staging=tiers.engine.staging)))
        if rates.device:
            costs = store.get(f"hbm|{rates.origin}|{threads}", partial(measure_engine, tiers, rates.device))
            tiers = replace(tiers, hbm=rates.tier(_engine_costs(costs)))
    return replace(tiers, age_seconds=store.age)


def _engine_costs(measured: dict[str, Any]) -> EngineCosts:
    return EngineCosts(**{name: WorkCosts(**costs) for name, costs in measured.items()})


def cache_file() -> Path:
    """Return the path of the user's file of cached measurements."""
    return cache_directory() / "tiers.json"


class _Cache:
    """File of cached measurements. Each has a key and the time of the measurement."""

    def __init__(self, path: Path, again: bool) -> None:
        self._path = path
        self._again = again
        self.age = 0.0

    def get(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        key = f"{socket.gethostname()}|{key}"
        entries = self._read()
        if self._again or key not in entries:
            entries = {**entries, key: {"created": time.time(), "measured": measure()}}
            write_json(self._path, entries)
        self.age = max(self.age, time.time() - entries[key]["created"])
        measured: dict[str, Any] = entries[key]["measured"]
        return measured

    def _read(self) -> dict[str, Any]:
        # If the cache is missing or damaged, everything is measured again.
        with contextlib.suppress(DatasetError):
            content = read_json(self._path)
            if isinstance(content, dict):
                return content
        return {}


def _key(kind: str, path: str) -> str:
    """Return a cache key for the file system of a directory. All directories of a file system share
    a measurement.
    """
    make_directory(Path(path))
    mount = Path(path).resolve()
    while not mount.is_mount():
        mount = mount.parent
    return f"{kind}|{mount.stat().st_dev}|{mount}"


def _free_bytes(path: str) -> int:
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def _rate(work: Callable[[], object], amount: int, seconds: float = _SECONDS) -> float:
    """Call `work` repeatedly for `seconds`, and return `amount` per second of the shortest call.

    Other processes disturb the shortest call least. `amount` is the work of one call, for example
    its bytes.
    """
    work()
    shortest, began = float("inf"), time.perf_counter()
    while True:  # at least once, even if other processes have the cores all the time
        start = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - start)
        if time.perf_counter() - began > seconds:
            return amount / shortest


def _row_rate(values: NDArray[np.float32]) -> float:
    """Measure the bytes per second when random rows of `values` are read."""
    rows = np.random.default_rng(0).integers(0, len(values) // _ROW_FLOATS, 1 << 18, dtype=np.uint64)
    return _rate(
        lambda: sum_rows(values, rows, width=_ROW_FLOATS), rows.size * _ROW_FLOATS * values.itemsize
    )


def _measure_dram() -> dict[str, Any]:
    values = allocate(_DRAM_BYTES // 4)
    values.fill(1.0)
    return {
        "sequential_bytes_per_second": _rate(lambda: sum_parts(values), values.nbytes),
        "row_bytes_per_second": _row_rate(values),
    }


def _measure_block(path: Path) -> dict[str, Any]:
    with _scratch(path) as (file, written):
        reads, direct = _read_rate(file)
    return {
        "write_bytes_per_second": written,
        "reads_per_second": reads,
        "read_bytes": READ_BYTES,
        "parallel": PARALLEL_READS,
        "direct": direct,
    }


def _measure_mapped(path: Path) -> dict[str, Any]:
    with _scratch(path) as (file, written):
        values = np.memmap(file, dtype=np.float32, mode="r")
        sum_parts(values)  # Makes every page resident, as pages of a mapped table are after some time.
        by_row = _row_rate(values)
        del values
    return {"write_bytes_per_second": written, "row_bytes_per_second": by_row}


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[tuple[Path, float]]:
    """Write a file of random bytes in `path`, and yield the file and the bytes per second of
    writing it.

    The file is removed afterwards. If this process is killed, the next measurement in `path`
    removes the file; the lock on a file shows that its process is still running.
    """
    make_directory(path)
    remove_leftovers_of(path / "tiers")
    file = temporary_name(path / "tiers")
    # Random bytes, because zeros would make a file system or device that compresses appear too
    # fast.
    block = np.random.default_rng(1).bytes(_WRITE_BYTES)
    try:
        with storage_errors(path), create_locked(file) as out:
            began = time.perf_counter()
            for _ in range(_FILE_BYTES // _WRITE_BYTES):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
            yield file, _FILE_BYTES / (time.perf_counter() - began)
    finally:
        file.unlink(missing_ok=True)


def _read_rate(file: Path) -> tuple[float, bool]:
    """Return the random reads per second with `PARALLEL_READS` threads, and whether the reads were
    direct.
    """
    descriptor, direct = _open_direct(file)
    if hasattr(os, "posix_fadvise"):  # drop the file's pages from the page cache
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    buffers = np.frombuffer(mmap.mmap(-1, PARALLEL_READS * READ_BYTES), dtype=np.uint8).reshape(
        PARALLEL_READS, -1
    )
    deadline = [0.0]

    def read(thread: int) -> int:
        noise = np.random.default_rng(thread)
        done = 0
        while True:  # at least once, as in `_rate`
            offsets = noise.integers(0, _FILE_BYTES // READ_BYTES, _READS_A_CALL) * READ_BYTES
            done += read_blocks(descriptor, buffers[thread], offsets)
            if time.perf_counter() > deadline[0]:
                return done

    try:
        read_blocks(descriptor, buffers[0], np.zeros(1, dtype=np.int64))  # compiles
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            began = time.perf_counter()
            deadline[0] = began + 2 * _SECONDS
            done = sum(pool.map(read, range(PARALLEL_READS)))
            return done / (time.perf_counter() - began), direct
    finally:
        os.close(descriptor)


def _open_direct(file: Path) -> tuple[int, bool]:
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    with contextlib.suppress(OSError):
        descriptor = os.open(file, flags)
        # Some file systems accept O_DIRECT when they open a file, but then refuse the first read.
        with contextlib.suppress(OSError):
            buffer = mmap.mmap(-1, READ_BYTES)
            if os.preadv(descriptor, [buffer], 0) == READ_BYTES:
                return descriptor, flags != os.O_RDONLY
        os.close(descriptor)
    return os.open(file, os.O_RDONLY), False


def measure_engine(tiers: Tiers, device: str = "cpu") -> dict[str, Any]:
    """Measure the fields of `EngineCosts` with rows on `device`. This takes a few seconds and
    tables of 96 MiB.
    """
    lines: dict[str, list[tuple[float, ...]]] = {"compute": [], "staging": []}
    for tables, width, batch, skew in SHAPES:
        for name, line in _lines(tables, width, batch, skew, tiers, device):
            lines[name].append(line)
    return {name: _fitted(np.array(some)) for name, some in lines.items()}


def _lines(
    tables: int, width: int, batch: int, skew: float, tiers: Tiers, device: str
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield one equation of the fit for each kind of work: its name (``compute`` or ``staging``)
    and the numbers.

    The numbers are predicted seconds of memory traffic; groups, tables, lookups and rows of a step;
    and the measured seconds of a step.
    """
    optimizer = RowOptimizerConfig()
    shape, names = RowShape.of(width, optimizer), tuple(f"t{number}" for number in range(tables))
    rows = max(_TABLE_BYTES // (tables * shape.slot_bytes), 1)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=width, feature_names=(name,))
        for name in names
    ]
    slots = max(int(_CACHE_SHARE * rows), 2 * _WAYS)
    draws, lookups = np.random.default_rng(0), tables * batch

    def draw(count: int) -> NDArray[np.int64]:
        """Draw the ids of `count` batches, one batch per row of the result."""
        ids: NDArray[np.int64] = (rows * draws.random((count, lookups)) ** skew).astype(np.int64)
        return ids

    def batches(ids: NDArray[np.int64]) -> list[KeyedJagged]:
        values = map(torch.from_numpy, ids)
        return [
            KeyedJagged(keys=names, values=batch_ids, offsets=None, batch_size=batch)
            for batch_ids in values
        ]

    trained = draw(_BATCHES)
    distinct = sum(len(np.unique(ids)) for ids in trained.reshape(-1, batch)) / _BATCHES
    gradient = torch.full((batch, tables * width), 1e-3, device=device)
    with torch.no_grad():
        engine = Engine(configs, optimizer, 0, TierConfig(device=device))

        def train(features: KeyedJagged) -> None:
            handle = engine.stage(features)
            engine.look_up(handle)
            engine.update_rows(handle, (gradient,))

        def seconds(work: Callable[[KeyedJagged], None], batches: Sequence[KeyedJagged]) -> float:
            endless = cycle(batches)

            def timed() -> None:
                work(next(endless))
                if device != "cpu":
                    torch.accelerator.synchronize(torch.device(device))

            return cold_seconds(timed, _STEPS)

        moved = tiers.level0.lookup_seconds(shape, lookups, distinct)
        yield "compute", (moved, 1, tables, lookups, distinct, seconds(train, batches(trained)))
        engine.close()
        cached = {name: TableTier(cache_rows=slots) for name in names}
        engine = Engine(configs, optimizer, 0, TierConfig(tables=cached, ways=_WAYS, device=device))
        for features in batches(draw(max(_WARM_SAMPLES // batch, 2))):
            engine.stage(features).release()
        (group,), fresh = engine.tables, batches(draw(_STEPS + 1))
        before = group.traffic.rows_in
        took = seconds(lambda features: engine.stage(features).release(), fresh)
        misses = (group.traffic.rows_in - before) / len(fresh)
        moved = tiers.staging_seconds(shape, shape.slot_bytes, _WAYS, distinct, misses)
        yield "staging", (moved, 1, tables, lookups, misses, took)
        engine.close()


def cold_seconds(
    work: Callable[[], object],
    rounds: int,
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the median seconds per call of `work`, over at least `rounds` calls and `seconds`,
    after a first call.

    Between calls other memory is touched, which empties the processor's caches. In training,
    lookups and the network alternate, so neither finds its own rows and code in those caches.
    """
    between = np.zeros(_SWEPT_BYTES, np.uint8)
    work()
    times, first = list[float](), time.perf_counter()
    while len(times) < rounds or time.perf_counter() - first < seconds:
        between += 1
        began = clock()
        work()
        times.append(clock() - began)
    return median(times)


def _fitted(lines: NDArray[np.float64]) -> dict[str, float]:
    """Return the fields of `WorkCosts`, nonnegative, with the least squared relative errors on
    `lines`.

    One more equation asks for a `bytes_factor` of 1, because noise could otherwise make it 0.
    """
    from scipy.optimize import nnls  # imported here because cached measurements do not need it

    counts, seconds = lines[:, :-1] / lines[:, -1:], np.ones(len(lines))
    counts = np.vstack([counts, np.eye(1, counts.shape[1])])
    scale = counts.max(axis=0)
    costs, _ = nnls(counts / scale, np.append(seconds, 1.0))
    names = ("bytes_factor", "step", "table", "lookup", "row")
    return dict(zip(names, (costs / scale).tolist(), strict=True))
