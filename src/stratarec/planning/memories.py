"""What this machine's memories give, measured once and kept.

Of DRAM, sequential and random-row bandwidth, and what the engine takes beside it; of a path, sequential writes and
random direct reads of 64 threads.

Measurements are kept in ``$XDG_CACHE_HOME/stratarec/tiers.json`` (``~/.cache`` by default), by host, device and mount
point.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.errors import DatasetError
from stratarec.io.atomic import cache_directory, make_directory, read_json, storage_error, write_json
from stratarec.io.opening import create, remove_leftovers_of, temporary_name
from stratarec.kernels.bandwidth import read_blocks, sum_parts, sum_rows
from stratarec.kernels.runtime.memory import allocate
from stratarec.kernels.runtime.threads import use_torch_threads
from stratarec.planning.config import MemoryConfig
from stratarec.planning.engine_costs import EngineCosts, WorkCosts, measure_engine

READ_BYTES = 4096
PARALLEL_READS = 64
_ROW_FLOATS = 64
_DRAM_BYTES = 256 << 20
_FILE_BYTES = 256 << 20
_WRITE_BYTES = 4 << 20
_SECONDS = 0.5
_READS_A_CALL = 32


@dataclass(frozen=True, kw_only=True)
class DramTier:
    """Memory, by all threads."""

    sequential_bytes_per_second: float
    row_bytes_per_second: float
    """Of random rows of 256 bytes."""
    bytes: int
    """All of it."""


@dataclass(frozen=True, kw_only=True)
class BlockTier:
    """A directory on a block device."""

    path: str
    write_bytes_per_second: float
    """Sequential, synced at the end."""
    reads_per_second: float
    """Random reads of `read_bytes`."""
    read_bytes: int
    parallel: int
    """Reads in flight."""
    direct: bool
    """Whether reads went around the page cache; where the file system has no direct reads they may be cached ones."""
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class MappedTier:
    """A directory whose files are mapped into memory."""

    path: str
    write_bytes_per_second: float
    """Sequential, synced at the end."""
    row_bytes_per_second: float
    """Of random rows of 256 bytes through a mapping whose pages are there. A path on a disk is so measured from the
    page cache, which is where its rows come from only as long as it fits there."""
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """What there is to place tables in."""

    dram: DramTier
    threads: int
    """Of kernels."""
    engine: EngineCosts = field(default_factory=EngineCosts)
    """What work on tables takes beside its bytes."""
    block: BlockTier | None = None
    mapped: MappedTier | None = None
    age_seconds: float = 0.0
    """Of the oldest measurement among them."""


def measure_tiers(memory: MemoryConfig, *, again: bool = False, cache: Path | None = None) -> Tiers:
    """The tiers that `memory` names, from the cache or measured now.

    Takes a few seconds a tier when measured, and 256 MiB of DRAM or of the path. Free bytes are always those of now.

    Parameters
    ----------
    again : bool
        Measure even what is in the cache.
    cache : Path
        File of measurements; the user's own by default.

    Raises
    ------
    StorageError
        When a path cannot be written.
    """
    store = _Cache(cache or cache_file(), again)
    threads = use_torch_threads()
    dram = DramTier(**store.get(f"dram|{threads}", _measure_dram), bytes=_physical_bytes())
    engine = store.get(f"engine|{threads}", lambda: measure_engine(dram))
    block = mapped = None
    if memory.block is not None:
        found = store.get(_key("block", memory.block.path), lambda: _measure_block(Path(memory.block.path)))  # type: ignore[union-attr]
        block = BlockTier(path=memory.block.path, free_bytes=_free_bytes(memory.block.path), **found)
    if memory.mapped is not None:
        found = store.get(_key("mapped", memory.mapped.path), lambda: _measure_mapped(Path(memory.mapped.path)))  # type: ignore[union-attr]
        mapped = MappedTier(path=memory.mapped.path, free_bytes=_free_bytes(memory.mapped.path), **found)
    costs = EngineCosts(**{name: WorkCosts(**each) for name, each in engine.items()})
    return Tiers(dram=dram, threads=threads, engine=costs, block=block, mapped=mapped, age_seconds=store.age)


def cache_file() -> Path:
    """Where measurements are kept."""
    return cache_directory() / "tiers.json"


class _Cache:
    """Measurements by key, each with the time it was taken."""

    def __init__(self, path: Path, again: bool) -> None:
        self._path, self._again = path, again
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
        # A cache that is missing or damaged is measured anew.
        with contextlib.suppress(DatasetError):
            content = read_json(self._path)
            if isinstance(content, dict):
                return content
        return {}


def _key(kind: str, path: str) -> str:
    """Return the key of the file system that a directory is on: all of its directories share a measurement."""
    make_directory(Path(path))
    mount = Path(path).resolve()
    while not mount.is_mount():
        mount = mount.parent
    return f"{kind}|{mount.stat().st_dev}|{mount}"


def _free_bytes(path: str) -> int:
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _rate(work: Callable[[], object], amount: int, seconds: float = _SECONDS) -> float:
    """`amount`, which one call of `work` does, over the shortest call: others who use the machine do not count."""
    work()
    shortest, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - start)
    return amount / shortest


def _row_rate(values: NDArray[np.float32]) -> float:
    """Bytes a second of random rows."""
    rows = np.random.default_rng(0).integers(0, len(values) // _ROW_FLOATS, 1 << 18, dtype=np.uint64)
    return _rate(lambda: sum_rows(values, rows, width=_ROW_FLOATS), rows.size * _ROW_FLOATS * values.itemsize)


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
        sum_parts(values)  # Maps every page: rows of a mapped table are touched again and again.
        by_row = _row_rate(values)
        del values
    return {"write_bytes_per_second": written, "row_bytes_per_second": by_row}


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[tuple[Path, float]]:
    """Write a file of random bytes in `path`; yield it and the bytes a second at which it was written.

    The file is removed afterwards, or by the next measurement there if this process is killed: it is locked until then.
    """
    make_directory(path)
    remove_leftovers_of(path / "tiers")
    file = temporary_name(path / "tiers")
    # Not zeros: a file system or a device that compresses would flatter itself.
    block = np.random.default_rng(1).bytes(_WRITE_BYTES)
    try:
        with create(file) as out:
            began = time.perf_counter()
            for _ in range(_FILE_BYTES // _WRITE_BYTES):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
            yield file, _FILE_BYTES / (time.perf_counter() - began)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        file.unlink(missing_ok=True)


def _forget(file: Path) -> None:
    """Drop a file's pages from the page cache, where the system can."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read_rate(file: Path) -> tuple[float, bool]:
    """Random reads a second with `PARALLEL_READS` threads, and whether they were direct."""
    _forget(file)
    descriptor, direct = _open_direct(file)
    buffers = np.frombuffer(mmap.mmap(-1, PARALLEL_READS * READ_BYTES), dtype=np.uint8).reshape(PARALLEL_READS, -1)
    deadline = [0.0]

    def read(thread: int) -> int:
        noise = np.random.default_rng(thread)
        done = 0
        while time.perf_counter() < deadline[0]:
            offsets = noise.integers(0, _FILE_BYTES // READ_BYTES, _READS_A_CALL) * READ_BYTES
            done += read_blocks(descriptor, buffers[thread], offsets)
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
        # Some file systems open a file directly and refuse the first read.
        with contextlib.suppress(OSError):
            buffer = mmap.mmap(-1, READ_BYTES)
            if os.preadv(descriptor, [buffer], 0) == READ_BYTES:
                return descriptor, flags != os.O_RDONLY
        os.close(descriptor)
    return os.open(file, os.O_RDONLY), False
