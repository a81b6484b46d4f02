"""Conformance tests of `RecordStore`: a suite to subclass, and a state machine that compares a
store with a dict.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numba.core import caching
from numpy.typing import NDArray

from errors import refuses
from stratarec.embedding.stores.base import Manifest, RecordStore
from stratarec.embedding.tables.cache import mover_of
from stratarec.embedding.tables.cached import CachedTables
from stratarec.errors import CheckpointError
from stratarec.kernels.random import mix_array

Rows = NDArray[np.int64]
Records = NDArray[np.uint8]
POISON = 0xA5


def random_records(rows: Rows, record_bytes: int, seed: int) -> Records:
    """Return records ``[n, record_bytes]`` uint8 as a function of (row, seed)."""
    words = (rows[:, None].astype(np.uint64) << np.uint64(32)) | np.arange(
        -(-record_bytes // 8), dtype=np.uint64
    )
    return mix_array(words ^ np.uint64(seed << 16)).view(np.uint8)[:, :record_bytes].copy()


def read_all(store: RecordStore) -> tuple[NDArray[np.bool_], Records]:
    """Return which rows were written, and all records, poisoned where they were not written."""
    out = np.full((store.rows, store.record_bytes), POISON, np.uint8)
    return store.read(np.arange(store.rows), out), out


def assert_same_contents(store: RecordStore, written: NDArray[np.bool_], records: Records) -> None:
    """Fail unless `store` has exactly the content that `read_all` returned."""
    now_found, now_records = read_all(store)
    np.testing.assert_array_equal(now_found, written)
    np.testing.assert_array_equal(now_records, records)


def new_directory(path: Path) -> Path:
    """Create `path` and return it."""
    path.mkdir(parents=True)
    return path


def damage(path: Path, offset: int, flip: int = 0x01) -> None:
    """Flip bits of one byte of a file; hard links to the file see the change, too."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ flip]))


class FailingStore:
    """A `RecordStore` that wraps `inner`, fails on request, and has no addressable memory."""

    array = bits = None

    def __init__(self, inner: RecordStore) -> None:
        self.inner = inner
        self._failures: dict[str, tuple[BaseException, float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def fail(self, operation: str, error: BaseException, *, share: float = 0.0) -> None:
        """Make the next `operation` raise `error`, after a `share` of its rows if it has rows."""
        self._failures[operation] = error, share

    def forget(self) -> None:
        """Cancel all requested failures."""
        self._failures.clear()

    def _do(self, operation: str, first: Any, second: Any) -> Any:
        work = getattr(self.inner, operation)
        if operation not in self._failures:
            return work(first, second)
        error, share = self._failures.pop(operation)
        if operation in ("read", "write"):
            done = int(share * len(first))
            work(first[:done], second[:done])
        raise error

    def read(self, rows: Rows, out: Records) -> NDArray[np.bool_]:
        return self._do("read", rows, out)

    def write(self, rows: Rows, records: Records) -> None:
        self._do("write", rows, records)

    def checkpoint(self, directory: Path, previous: Path | None) -> Manifest:
        return self._do("checkpoint", directory, previous)

    def restore(self, directory: Path, manifest: Manifest) -> None:
        self._do("restore", directory, manifest)

    def mark_written(self, rows: Rows) -> None:
        raise ValueError("these records are not addressable memory: write them")


class FailingArray(FailingStore):
    """Failing store with addressable records, which move without the store; `mark_written` may
    fail, too.
    """

    array = property(lambda self: self.inner.array)
    bits = property(lambda self: self.inner.bits)

    def mark_written(self, rows: Rows) -> None:
        if "mark_written" in self._failures:
            raise self._failures.pop("mark_written")[0]
        self.inner.mark_written(rows)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit files of this process to `size` bytes, as if a disk filled up during a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        # Do not store kernels that compile now, because their files could be cut off.
        patch.setattr(caching.IndexDataCacheFile, "save", lambda *_: None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def make_failing(tables: CachedTables) -> FailingStore:
    """Make tables move rows through a failing store without addressable memory, which calls all its
    methods.
    """
    tables.store = store = FailingStore(tables.store)
    _move_by(tables, store)
    return store


def make_failing_array(tables: CachedTables) -> FailingArray:
    """Make tables move rows to and from the addressable memory of a failing store."""
    tables.store = store = FailingArray(tables.store)
    _move_by(tables, store)
    return store


def _move_by(tables: CachedTables, store: FailingStore) -> None:
    names = [table.name for table in tables.configs]
    tables.mover = mover_of(names, tables.directory, tables.codec, store, tables.memory)


class RecordStoreTests:
    """Conformance tests; subclass as ``TestMyRecords`` and define `make`."""

    rows = 1000
    record_bytes = 37

    def make(self, directory: Path) -> RecordStore:
        """Create an empty store of `rows` and `record_bytes` that may write files in
        `directory`.
        """
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Any:
        store = self.make(tmp_path / "store")
        yield store
        store.close()

    def fill(self, store: RecordStore, rows: Rows, seed: int) -> None:
        store.write(rows, random_records(rows, self.record_bytes, seed))

    def assert_restores(self, saved: Path, manifest: Manifest, contents: Any) -> None:
        """Check that a new store, restored from a checkpoint, has `contents`."""
        other = self.make(saved.parent / "other")
        other.restore(saved, manifest)
        assert_same_contents(other, *contents)
        other.check()
        other.close()

    def test_is_a_record_store(self, store: RecordStore) -> None:
        assert isinstance(store, RecordStore)
        assert (store.rows, store.record_bytes) == (self.rows, self.record_bytes)
        assert store.kind in ("dram", "mapped", "log", "hbm")

    def test_rows_never_written_do_not_exist(self, store: RecordStore) -> None:
        written, records = read_all(store)
        assert not written.any()
        assert (records == POISON).all()
        assert not store.written(np.arange(self.rows)).any()

    def test_writes_are_read_back_and_other_rows_stay(self, store: RecordStore) -> None:
        rows = np.array([5, 999, 0, 17, 640])
        self.fill(store, rows, seed=1)
        asked = np.array([17, 3, 0, 5, 998, 999])
        out = np.full((6, self.record_bytes), POISON, np.uint8)
        result = store.read(asked, out)
        np.testing.assert_array_equal(result, [True, False, True, True, False, True])
        np.testing.assert_array_equal(out[result], random_records(asked[result], self.record_bytes, 1))
        assert (out[~result] == POISON).all()
        np.testing.assert_array_equal(store.written(asked), result)

    def test_the_last_write_of_a_row_wins(self, store: RecordStore) -> None:
        everything = np.arange(self.rows)
        for seed in range(4):
            self.fill(store, everything[seed * 7 :: seed + 1].copy(), seed)
            if seed % 2:
                store.flush()
        expected = np.zeros((self.rows, self.record_bytes), np.uint8)
        for seed in range(4):
            part = everything[seed * 7 :: seed + 1].copy()
            expected[part] = random_records(part, self.record_bytes, seed)
        assert_same_contents(store, np.ones(self.rows, np.bool_), expected)

    def test_accepts_an_empty_set_of_rows(self, store: RecordStore) -> None:
        nothing, empty = np.empty(0, np.int64), np.empty((0, self.record_bytes), np.uint8)
        store.write(nothing, empty)
        assert len(store.read(nothing, empty)) == 0
        assert len(store.written(nothing)) == 0

    def test_refuses_rows_out_of_range_and_records_of_another_shape(self, store: RecordStore) -> None:
        one = np.zeros((1, self.record_bytes), np.uint8)
        for row in (-1, self.rows):
            with refuses(ValueError, f"{row} 0..{self.rows - 1}"):
                store.read(np.array([row]), one)
            with refuses(ValueError, f"{row} 0..{self.rows - 1}"):
                store.write(np.array([row]), one)
        with refuses(ValueError, f"2 rows {self.record_bytes}"):
            store.write(np.array([0, 1]), one)
        with refuses(ValueError, "int32"):
            store.written(np.array([1], np.int32))

    def test_rows_marked_by_the_caller_are_written(self, store: RecordStore, tmp_path: Path) -> None:
        rows = np.array([3, 900])
        if store.kind == "log":
            with pytest.raises(ValueError, match="addressable"):
                store.mark_written(rows)
            return
        before = store.checkpoint(new_directory(tmp_path / "a"), None)
        records: Any = store if store.array is None else store.array
        records[rows] = random_records(rows, self.record_bytes, 9)
        store.mark_written(rows)
        written, records = read_all(store)
        assert np.flatnonzero(written).tolist() == rows.tolist()
        manifest = store.checkpoint(new_directory(tmp_path / "b"), tmp_path / "a")
        store.restore(tmp_path / "a", before)
        assert not read_all(store)[0].any()
        store.restore(tmp_path / "b", manifest)
        assert_same_contents(store, written, records)

    def test_counts_its_memory(self, store: RecordStore) -> None:
        empty = store.memory()
        self.fill(store, np.arange(self.rows), seed=0)
        store.flush()
        full = store.memory()
        size = self.rows * self.record_bytes
        assert full.dram_bytes + full.block_bytes + full.device_bytes >= size
        assert full.dram_bytes >= empty.dram_bytes
        assert full.dram_bytes + full.block_bytes + full.device_bytes <= 2 * size + (32 << 20)

    def test_a_checkpoint_restores_into_a_new_store(self, store: RecordStore, tmp_path: Path) -> None:
        self.fill(store, np.arange(0, self.rows, 3), seed=1)
        self.fill(store, np.arange(0, self.rows, 5), seed=2)
        contents = read_all(store)
        manifest = store.checkpoint(new_directory(tmp_path / "first"), None)
        self.fill(store, np.arange(self.rows), seed=3)
        self.assert_restores(tmp_path / "first", manifest, contents)
        store.restore(tmp_path / "first", manifest)
        assert_same_contents(store, *contents)

    def test_a_cleared_store_has_no_rows(self, store: RecordStore, tmp_path: Path) -> None:
        self.fill(store, np.arange(500), seed=1)
        store.checkpoint(new_directory(tmp_path / "first"), None)
        store.clear()
        assert not read_all(store)[0].any()
        self.fill(store, np.arange(490, 510), seed=2)
        contents = read_all(store)
        manifest = store.checkpoint(new_directory(tmp_path / "second"), tmp_path / "first")
        self.assert_restores(tmp_path / "second", manifest, contents)

    def test_a_chain_of_checkpoints_survives_the_loss_of_the_others(
        self, store: RecordStore, tmp_path: Path
    ) -> None:
        generator = np.random.default_rng(0)
        previous = None
        saved = []
        for step in range(8):
            rows = generator.permutation(self.rows)[: 400 if step == 0 else 60]
            self.fill(store, rows, seed=step)
            temporary = new_directory(tmp_path / f".{step}.tmp")
            manifest = store.checkpoint(temporary, previous)
            previous = temporary.rename(tmp_path / f"step-{step}")
            saved.append((previous, manifest, read_all(store)))
        for directory, _, _ in saved[:3] + saved[4:7]:
            shutil.rmtree(directory)
        for directory, manifest, contents in (saved[3], saved[7]):
            self.assert_restores(directory, manifest, contents)

    def test_continues_from_a_restored_checkpoint(self, store: RecordStore, tmp_path: Path) -> None:
        self.fill(store, np.arange(500), seed=1)
        first = store.checkpoint(new_directory(tmp_path / "first"), None)
        self.fill(store, np.arange(400, 600), seed=2)
        store.checkpoint(new_directory(tmp_path / "abandoned"), tmp_path / "first")
        store.restore(tmp_path / "first", first)
        self.fill(store, np.arange(490, 510), seed=3)
        contents = read_all(store)
        second = store.checkpoint(new_directory(tmp_path / "second"), tmp_path / "first")
        shutil.rmtree(tmp_path / "first")
        self.assert_restores(tmp_path / "second", second, contents)

    def test_a_lost_or_failed_previous_checkpoint_loses_no_change(
        self, store: RecordStore, tmp_path: Path
    ) -> None:
        self.fill(store, np.arange(500), seed=1)
        store.checkpoint(new_directory(tmp_path / "first"), None)
        self.fill(store, np.arange(30), seed=2)
        store.checkpoint(new_directory(tmp_path / "failed"), tmp_path / "first")
        shutil.rmtree(tmp_path / "failed")
        self.fill(store, np.arange(40, 50), seed=3)
        contents = read_all(store)
        for name, previous in (("second", "first"), ("third", "failed")):
            manifest = store.checkpoint(new_directory(tmp_path / name), tmp_path / previous)
            self.assert_restores(tmp_path / name, manifest, contents)

    def test_a_checkpoint_of_an_abandoned_run_is_not_a_base(
        self, store: RecordStore, tmp_path: Path
    ) -> None:
        self.fill(store, np.arange(500), seed=1)
        first = store.checkpoint(new_directory(tmp_path / "first"), None)
        self.fill(store, np.arange(50), seed=2)
        store.checkpoint(new_directory(tmp_path / "abandoned"), tmp_path / "first")
        other = self.make(tmp_path / "other")
        other.restore(tmp_path / "first", first)
        # The same rows, and so the same positions, as in the abandoned run, with other records.
        self.fill(other, np.arange(50), seed=3)
        other.checkpoint(new_directory(tmp_path / "second"), tmp_path / "first")
        contents = read_all(other)
        manifest = other.checkpoint(new_directory(tmp_path / "third"), tmp_path / "abandoned")
        other.restore(tmp_path / "third", manifest)
        assert_same_contents(other, *contents)
        other.close()

    def test_unchanged_files_are_links(self, store: RecordStore, tmp_path: Path) -> None:
        self.fill(store, np.arange(self.rows), seed=1)
        store.checkpoint(new_directory(tmp_path / "first"), None)
        self.fill(store, np.arange(10), seed=2)
        store.checkpoint(new_directory(tmp_path / "second"), tmp_path / "first")
        shared = {path.stat().st_ino for path in (tmp_path / "first").iterdir()}
        new = [path for path in (tmp_path / "second").iterdir() if path.stat().st_ino not in shared]
        assert sum(path.stat().st_size for path in new) < self.rows * self.record_bytes / 4

    def test_restoring_names_a_damaged_or_missing_file(self, store: RecordStore, tmp_path: Path) -> None:
        self.fill(store, np.arange(self.rows), seed=1)
        manifest = store.checkpoint(new_directory(tmp_path / "good"), None)
        path = next((tmp_path / "good").glob("*.safetensors"))
        damage(path, path.stat().st_size // 2)
        with pytest.raises(CheckpointError, match=str(path)):
            store.restore(tmp_path / "good", manifest)
        path.unlink()
        with pytest.raises(CheckpointError, match=str(path)):
            store.restore(tmp_path / "good", manifest)

    def test_restoring_refuses_records_of_another_size(self, store: RecordStore, tmp_path: Path) -> None:
        manifest = store.checkpoint(new_directory(tmp_path / "good"), None)
        with refuses(CheckpointError, "record_bytes"):
            store.restore(tmp_path / "good", {**manifest, "record_bytes": self.record_bytes + 1})


class RecordStoreMachine(RuleBasedStateMachine):
    """Random operations on a store and a dict; subclass and define `make`."""

    rows = 60
    record_bytes = 37
    root: Path

    def make(self, directory: Path) -> RecordStore:
        """Create an empty store of `rows` and `record_bytes` that may write files in
        `directory`.
        """
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self._temporary = tempfile.TemporaryDirectory()
        self.root = Path(self._temporary.name)
        self.store: RecordStore
        self.contents: dict[int, int] = {}
        self.saved: list[tuple[Path, Manifest, dict[int, int]]] = []
        self.previous: Path | None = None
        self.writes = self.checkpoints = 0

    @initialize()
    def begin(self) -> None:
        self.store = self.make(self.root / "store")

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        rows = np.array(
            data.draw(st.lists(st.integers(0, self.rows - 1), unique=True, max_size=self.rows)), np.int64
        )
        self.writes += 1
        self.store.write(rows, random_records(rows, self.record_bytes, self.writes))
        self.contents.update(dict.fromkeys(rows.tolist(), self.writes))

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        rows = np.array(
            data.draw(st.permutations(range(self.rows)))[: data.draw(st.integers(0, self.rows))], np.int64
        )
        self._compare(rows)

    def _compare(self, rows: Rows) -> None:
        out = np.full((len(rows), self.record_bytes), POISON, np.uint8)
        actual = self.store.read(rows, out)
        assert actual.tolist() == [int(row) in self.contents for row in rows]
        assert (self.store.written(rows) == actual).all()
        for row, there, record in zip(rows, actual, out, strict=True):
            seed = self.contents.get(int(row))
            expected = (
                random_records(np.array([row]), self.record_bytes, seed)[0] if seed is not None else POISON
            )
            assert (record == expected).all(), f"row {row}, written: {there}"

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule(keep=st.booleans())
    def checkpoint(self, keep: bool) -> None:
        self.checkpoints += 1
        directory = new_directory(self.root / f"checkpoint-{self.checkpoints}")
        manifest = self.store.checkpoint(directory, self.previous)
        self.saved.append((directory, manifest, dict(self.contents)))
        if not keep and self.previous is not None:
            shutil.rmtree(self.previous)
            self.saved = [entry for entry in self.saved if entry[0] != self.previous]
        self.previous = directory

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), reopen=st.booleans())
    def restore(self, data: st.DataObject, reopen: bool) -> None:
        directory, manifest, contents = data.draw(st.sampled_from(self.saved))
        if reopen:
            self.store.close()
            self.store = self.make(self.root / "store")
        self.store.restore(directory, manifest)
        self.contents = dict(contents)
        self.previous = directory

    @precondition(lambda self: hasattr(self.store, "compact"))
    @rule()
    def compact(self) -> None:
        self.store.compact()

    @invariant()
    def checksums_hold(self) -> None:
        if hasattr(self, "store"):
            self.store.check()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self._compare(np.arange(self.rows))
            self.store.close()
        self._temporary.cleanup()
