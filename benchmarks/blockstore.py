"""The SSD store: random reads compared with `fio`, read-modify-write compared with RocksDB, and
write amplification.

Both stores get the same DRAM and use direct reads, so that neither gains memory through the page
cache. Set TMPDIR to a directory on the disk to measure; the benchmark needs about 9 GiB there.
"""

from __future__ import annotations

import itertools
import json
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.registry import PeerMissing, import_peer
from benchmarks.timing import alternate
from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.embedding.stores.ssd_layout import SsdConfig

Rows = NDArray[np.int64]
Records = NDArray[np.uint8]

RECORD_BYTES = 64 * 4 + 4  # 64 float32 weights and the state of row-wise Adagrad
LOOKUPS = 16_384  # a batch, of which about half are distinct rows
PIECE = 1 << 16


def run(quick: bool) -> dict[str, Any]:
    """Check correctness, then measure reads, read-modify-write and write amplification, each in a
    fresh directory.
    """
    rows, rounds, batches, seconds = (400_000, 3, 10, 1) if quick else (8_000_000, 7, 50, 4)
    import_peer("rocksdict")
    if shutil.which("fio") is None:
        raise PeerMissing(
            "fio is not installed: `apt-get install fio`, or your system's package of that name"
        )
    gate()
    reads = read_fraction(rows, seconds, 3 if quick else 7)
    pairs = read_modify_write(rows, rounds, batches)
    writes = [
        {"rows written": skew, **amplification(rows // 2, skew, quick)} for skew in ("uniform", "skewed")
    ]
    return {
        "config": {
            "rows": rows,
            "record_bytes": RECORD_BYTES,
            "dram_bytes": pairs.pop("dram_bytes"),
            "lookups": LOOKUPS,
            "skew": "P(row) ~ 1 / (row + 1)",
            "rounds": rounds,
            "batches_a_round": batches,
            "fio": "io_uring, depth 128, direct random reads of 4 KiB",
            "rocksdb": pairs.pop("config"),
        },
        "metrics": {
            "read_fraction_of_fio": reads["fraction"],
            "ratio_rocksdb": pairs["ratio"],
            "ratio_rocksdb_median_round": pairs["ratio_median"],
            "write_amplification": max(entry["write_amplification"] for entry in writes),
            "space_amplification": max(entry["space_amplification"] for entry in writes),
        },
        "samples": {"reads": reads, "read_modify_write": pairs, "rows": writes},
    }


def gate() -> None:
    """Check a small SSD store against an array under the load of the benchmark."""
    rows = 20_000
    expected = np.zeros((rows, RECORD_BYTES), np.uint8)
    with scratch() as folder:
        store = ssd_store(folder, rows, segment_bytes=1 << 20)
        load(store, rows, expected)
        for ids in itertools.islice(skewed(rows), 200):
            records = np.empty((len(ids), RECORD_BYTES), np.uint8)
            if not store.read(ids, records).all() or (records != expected[ids]).any():
                raise AssertionError("the SSD store returned records that differ from those written")
            records += np.uint8(1)
            store.write(ids, records)
            expected[ids] = records
        store.check()
        store.close()


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a temporary directory and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="stratarec-blockstore-") as folder:
        yield Path(folder)


def drain(store: SsdRecords) -> None:
    """Run the pending compaction now, which a background thread would otherwise do later."""
    store._compact_quietly()


def ssd_store(folder: Path, rows: int, segment_bytes: int = 0) -> SsdRecords:
    """Create an empty SSD store."""
    config = SsdConfig(segment_bytes=segment_bytes)
    return SsdRecords(folder / "log", rows=rows, record_bytes=RECORD_BYTES, config=config)


def initial(first: int, last: int) -> Records:
    """Return incompressible records of the rows [first, last)."""
    return np.random.default_rng(first).integers(0, 256, (last - first, RECORD_BYTES), np.uint8)


def load(store: SsdRecords, rows: int, expected: Records | None = None) -> None:
    """Write every row once, in order."""
    for first in range(0, rows, PIECE):
        records = initial(first, min(first + PIECE, rows))
        store.write(np.arange(first, first + len(records)), records)
        if expected is not None:
            expected[first : first + len(records)] = records
    store.flush()


def skewed(rows: int, seed: int = 1) -> Iterator[Rows]:
    """Yield batches of distinct ascending rows; row r is drawn with a probability proportional to 1
    / (r + 1).
    """
    generator = np.random.default_rng(seed)
    while True:
        drawn = np.floor((rows + 1.0) ** generator.random(LOOKUPS)).astype(np.int64) - 1
        yield np.unique(np.minimum(drawn, rows - 1))


def read_fraction(rows: int, seconds: int, rounds: int) -> dict[str, Any]:
    """Compare blocks per second of `SsdRecords.read` and of fio: medians of alternating rounds.

    One call reads no block twice.
    """
    with scratch() as folder:
        store = SsdRecords(folder / "log", rows=rows, record_bytes=RECORD_BYTES)
        load(store, rows)
        # fio reads a file as large as the segments. It must be written, as reads of a sparse file
        # skip the disk.
        fio(
            folder / "fio",
            store.segments.file_bytes,
            "--rw=write",
            "--bs=4m",
            "--refill_buffers",
            "--end_fsync=1",
        )
        per_block, generator = store.layout.per_block, np.random.default_rng(0)
        out = np.empty((PIECE // 4, RECORD_BYTES), np.uint8)
        ours, theirs = [], []
        for number in range(rounds + 1):
            blocks, began = 0, time.perf_counter()
            while (spent := time.perf_counter() - began) < seconds:
                # Rows were written in order, so each of these rows is in another block.
                wanted = generator.permutation(rows // per_block)[: len(out)] * per_block
                wanted += generator.integers(0, per_block, len(wanted))
                before = time.perf_counter()
                store.read(wanted, out[: len(wanted)])
                began += before - began - spent  # exclude the time to draw the rows
                blocks += len(wanted)
            options = ("--rw=randread", "--bs=4k", f"--runtime={seconds}", "--time_based")
            iops = fio(folder / "fio", store.segments.file_bytes, *options)["read"]["iops"]
            if number:
                ours.append(blocks / spent)
                theirs.append(float(iops))
        store.close()
    return {
        "ours_iops": median(ours),
        "fio_iops": median(theirs),
        "fraction": median(ours) / median(theirs),
        "fraction_low": min(a / b for a, b in zip(ours, theirs, strict=True)),
        "fraction_high": max(a / b for a, b in zip(ours, theirs, strict=True)),
    }


def fio(path: Path, size: int, *options: str) -> dict[str, Any]:
    """Run fio on one file and return its report of the job."""
    command = [
        "fio",
        "--name=blockstore",
        f"--filename={path}",
        f"--size={size}",
        "--direct=1",
        "--ioengine=io_uring",
    ]
    command += ["--iodepth=128", "--output-format=json", *options]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(process.stdout[process.stdout.index("{") :])["jobs"][0]
    return report


class RocksRecords:
    """RocksDB as a store of records: bloom filters, sorted multi-gets on several threads, no
    write-ahead log.
    """

    def __init__(self, folder: Path, dram_bytes: int, threads: int) -> None:
        rocks = import_peer("rocksdict")
        options, blocks = rocks.Options(raw_mode=True), rocks.BlockBasedOptions()
        memtable = min(64 << 20, dram_bytes // 8)
        self.config = {
            "memtables": 3,
            "memtable_bytes": memtable,
            "block_cache_bytes": dram_bytes - 3 * memtable,
        }
        blocks.set_block_cache(rocks.Cache.new_hyper_clock_cache(self.config["block_cache_bytes"], 0))
        blocks.set_block_size(4096)
        blocks.set_bloom_filter(10.0, False)
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
        blocks.set_format_version(5)
        options.set_block_based_table_factory(blocks)
        options.create_if_missing(True)
        options.set_write_buffer_size(memtable)
        options.set_max_write_buffer_number(3)
        options.set_compression_type(rocks.DBCompressionType.none())
        options.set_level_compaction_dynamic_level_bytes(True)
        options.set_target_file_size_base(64 << 20)
        options.set_max_bytes_for_level_base(256 << 20)
        options.set_max_background_jobs(4)
        options.set_bytes_per_sync(1 << 20)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        self._rocks = rocks
        self._db = rocks.Rdict(str(folder / "rocks"), options)
        write = rocks.WriteOptions()
        write.disable_wal = True
        self._db.set_write_options(write)
        self.threads = threads
        self._pool = ThreadPoolExecutor(32)

    def read(self, rows: Rows, out: Records) -> None:
        """Fill `out` with the records of `rows`, all of which must have been written."""
        keys, parts = [struct.pack(">q", row) for row in rows.tolist()], self.threads
        slices = [keys[len(keys) * i // parts : len(keys) * (i + 1) // parts] for i in range(parts)]
        lookups = map(self._db.get, slices) if parts == 1 else self._pool.map(self._db.get, slices)
        values = b"".join(itertools.chain.from_iterable(lookups))
        out[:] = np.frombuffer(values, np.uint8).reshape(out.shape)

    def write(self, rows: Rows, records: Records) -> None:
        """Write the records of `rows`."""
        batch, content, size = self._rocks.WriteBatch(raw_mode=True), records.tobytes(), records.shape[1]
        for i, row in enumerate(rows.tolist()):
            batch.put(struct.pack(">q", row), content[i * size : (i + 1) * size])
        self._db.write(batch)

    def flush(self) -> None:
        """Flush the memtables."""
        self._db.flush()

    def drain(self) -> None:
        """Wait for running and pending flushes and compactions."""
        names = (
            "num-running-flushes",
            "mem-table-flush-pending",
            "num-running-compactions",
            "compaction-pending",
        )
        while any(self._db.property_int_value(f"rocksdb.{name}") for name in names):
            time.sleep(0.01)

    def close(self) -> None:
        """Close the database."""
        self._pool.shutdown()
        self._db.close()


def read_modify_write(rows: int, rounds: int, count: int) -> dict[str, Any]:
    """Time alternating rounds of `count` batches of skewed rows that are read, changed and written
    back.

    A round includes the background work that it causes, so that each store pays for its own
    compaction.
    """
    with scratch() as folder:
        ours = ssd_store(folder, rows)
        # Locations, dirty bits, and 16 MiB for buffers. RocksDB gets the same DRAM.
        budget = rows * ours.layout.location_type.itemsize + rows // 8 + (16 << 20)
        peer = RocksRecords(folder, budget, threads=1)
        for first in range(0, rows, PIECE):
            records = initial(first, min(first + PIECE, rows))
            ids = np.arange(first, first + len(records))
            ours.write(ids, records)
            peer.write(ids, records)
        ours.flush()
        peer.flush()
        peer.drain()
        batches = skewed(rows)
        multi_get = multi_get_seconds(peer, batches)
        peer.threads = min(multi_get, key=lambda threads: multi_get[threads])
        todo = [next(batches) for _ in range(count * (rounds + 1))]

        def ours_round(step: int) -> None:
            for ids in todo[count * step : count * (step + 1)]:
                modify(ours, ids)
            drain(ours)

        def peer_round(step: int) -> None:
            for ids in todo[count * step : count * (step + 1)]:
                modify(peer, ids)
            peer.drain()

        seconds = alternate({"ours": ours_round, "rocksdb": peer_round}, rounds, warmup=1)
        compare(ours, peer, rows)
        dram = ours.memory().dram_bytes
        if dram > budget:
            raise AssertionError(f"the SSD store uses {dram} bytes of DRAM, the budget is {budget}")
        ours.close()
        peer.close()
    distinct = count * float(np.mean([len(ids) for ids in todo]))
    return {
        "ratio": sum(seconds["rocksdb"]) / sum(seconds["ours"]),
        "ratio_median": median(seconds["rocksdb"]) / median(seconds["ours"]),
        "ours_rows_a_second": distinct * rounds / sum(seconds["ours"]),
        "rocksdb_rows_a_second": distinct * rounds / sum(seconds["rocksdb"]),
        "dram_bytes": budget,
        "ours_dram_bytes": dram,
        "rocksdb_read_seconds_by_threads": multi_get,
        "config": {
            **peer.config,
            "multi-get threads": peer.threads,
            "wal": False,
            "bloom_bits": 10,
            "direct": True,
        },
        "seconds": seconds,
    }


def modify(store: SsdRecords | RocksRecords, rows: Rows) -> None:
    """Read the records of `rows`, change every byte, and write them back."""
    records = np.empty((len(rows), RECORD_BYTES), np.uint8)
    store.read(rows, records)
    records += np.uint8(1)
    store.write(rows, records)


def multi_get_seconds(peer: RocksRecords, batches: Iterator[Rows]) -> dict[int, float]:
    """Return the median seconds of a batch read of RocksDB for several numbers of threads."""
    seconds = {}
    for threads in (1, 4, 8, 16, 32):
        peer.threads, trials = threads, []
        for ids in itertools.islice(batches, 5):
            out, began = np.empty((len(ids), RECORD_BYTES), np.uint8), time.perf_counter()
            peer.read(ids, out)
            trials.append(time.perf_counter() - began)
        seconds[threads] = median(trials)
    return seconds


def compare(ours: SsdRecords, peer: RocksRecords, rows: int) -> None:
    """Check that both stores hold the same records after the same work."""
    for ids in itertools.islice(skewed(rows, seed=9), 5):
        mine, theirs = (np.empty((len(ids), RECORD_BYTES), np.uint8) for _ in range(2))
        ours.read(ids, mine)
        peer.read(ids, theirs)
        if (mine != theirs).any():
            raise AssertionError("the SSD store and RocksDB hold different records after the same writes")


def amplification(rows: int, skew: str, quick: bool) -> dict[str, Any]:
    """Measure write and space amplification after writing the table three times to warm up (twice
    if `quick`).
    """
    generator, batches = np.random.default_rng(2), skewed(rows)
    table = rows * RECORD_BYTES
    with scratch() as folder:
        store = SsdRecords(folder / "log", rows=rows, record_bytes=RECORD_BYTES)
        load(store, rows)
        written, before, largest, began = 0, 0, 0.0, time.perf_counter()
        warmup, end = (1 * table, 2 * table) if quick else (2 * table, 4 * table)
        while written < end:
            ids = (
                next(batches) if skew == "skewed" else np.unique(generator.integers(0, rows, LOOKUPS // 2))
            )
            if written < warmup <= written + ids.size * RECORD_BYTES:
                before, began = store.segments.bytes_written, time.perf_counter()
            store.write(ids, np.zeros((len(ids), RECORD_BYTES), np.uint8))
            written += ids.size * RECORD_BYTES
            largest = max(largest, store.segments.file_bytes / table)
        drain(store)
        measured = written - warmup
        result = {
            "write_amplification": (store.segments.bytes_written - before) / measured,
            "space_amplification": largest,
            "mib_a_second": measured / 2**20 / (time.perf_counter() - began),
        }
        store.close()
    return result
