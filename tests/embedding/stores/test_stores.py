"""Run the conformance suite for every store, and test that the writes of an SSD store survive
kills.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import settings

from errors import refuses
from recipes import KILLS
from store_conformance import (
    RecordStoreMachine,
    RecordStoreTests,
    assert_same_contents,
    largest_file,
    new_directory,
    random_records,
    read_all,
)
from stratarec.embedding.slots import Level0
from stratarec.embedding.stores.arrays import DramRecords, MappedRecords
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.device import DeviceRecords
from stratarec.embedding.stores.row_files import link_or_copy
from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.embedding.stores.ssd_layout import SsdConfig
from stratarec.errors import StorageError
from stratarec.kernels.blocks import aio


class ArrayRecordsTests(RecordStoreTests):
    """Additional tests of homes in memory; `test_ssd_space` tests SSD stores on full disks."""

    @pytest.mark.parametrize("size", [0, 200, 20_000])
    def test_a_checkpoint_without_space_changes_nothing(
        self, store: RecordStore, tmp_path: Path, size: int
    ) -> None:
        self.fill(store, np.arange(self.rows), seed=1)
        store.checkpoint(new_directory(tmp_path / "first"), None)
        self.fill(store, np.arange(0, self.rows, 2), seed=2)
        contents = read_all(store)
        with largest_file(size), pytest.raises(StorageError):
            store.checkpoint(new_directory(tmp_path / "failed"), tmp_path / "first" if size else None)
        assert_same_contents(store, *contents)
        self.fill(store, np.arange(0, self.rows, 4), seed=3)
        contents = read_all(store)
        manifest = store.checkpoint(new_directory(tmp_path / "second"), tmp_path / "first")
        self.assert_restores(tmp_path / "second", manifest, contents)


class TestDramRecords(ArrayRecordsTests):
    def make(self, directory: Path) -> RecordStore:
        return DramRecords(rows=self.rows, record_bytes=self.record_bytes)


class TestMappedRecords(ArrayRecordsTests):
    def make(self, directory: Path) -> RecordStore:
        return MappedRecords(directory, rows=self.rows, record_bytes=self.record_bytes)


class TestDeviceRecords(ArrayRecordsTests):
    """Records in the memory of a device; here on tensors of the CPU."""

    def make(self, directory: Path) -> RecordStore:
        return DeviceRecords(Level0(), rows=self.rows, record_bytes=self.record_bytes)


class DramMachine(RecordStoreMachine):
    def make(self, directory: Path) -> RecordStore:
        return DramRecords(rows=self.rows, record_bytes=self.record_bytes)


TestDramMachine = DramMachine.TestCase
TestDramMachine.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_untouched_rows_take_no_memory() -> None:
    store = DramRecords(rows=10_000_000, record_bytes=260)
    assert store.memory().dram_bytes == 0
    rows = np.array([0, 9_999_999])
    assert not store.read(rows, np.empty((2, 260), np.uint8)).any()
    store.write(rows, np.ones((2, 260), np.uint8))
    # Two rows at either end touch at most two huge pages of records and of each bitmap.
    assert 0 < store.memory().dram_bytes <= 6 * (2 << 20)
    store.close()


SMALL = SsdConfig(segment_bytes=16384, buffer_bytes=8192, depth=4)


class TestSsdRecords(RecordStoreTests):
    def make(self, directory: Path) -> RecordStore:
        return SsdRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=SMALL)


class TestSsdRecordsWithFrequentRows(RecordStoreTests):
    def make(self, directory: Path) -> RecordStore:
        tables = [(0, 0), (7, 20), (self.rows // 2, self.rows // 4), (self.rows - 9, 9)]
        return SsdRecords(
            directory, rows=self.rows, record_bytes=self.record_bytes, config=SMALL, frequent=tables
        )


class TestSsdRecordsOfManyBlocks(RecordStoreTests):
    record_bytes = 5000

    def make(self, directory: Path) -> RecordStore:
        return SsdRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=SMALL)


class TestSsdRecordsWithoutAsynchronousReads(RecordStoreTests):
    @pytest.fixture(autouse=True)
    def _none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(aio, "open_context", lambda depth: 0)

    def make(self, directory: Path) -> RecordStore:
        return SsdRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=SMALL)


@pytest.mark.parametrize("depth", [1, 3, 128])
def test_reads_of_every_order_and_depth_return_what_was_written(tmp_path: Path, depth: int) -> None:
    rows, generator = np.arange(20_000), np.random.default_rng(0)
    store = SsdRecords(
        tmp_path, rows=len(rows), record_bytes=260, config=SsdConfig(buffer_bytes=1 << 16, depth=depth)
    )
    records = random_records(rows, 260, 1)
    store.write(rows, records)
    store.flush()
    for order in (rows, rows[::-1].copy(), generator.permutation(rows)[:5000], rows[::15].copy(), rows[:1]):
        out = np.empty((len(order), 260), np.uint8)
        assert store.read(order, out).all()
        np.testing.assert_array_equal(out, records[order])
    store.close()


class SsdMachine(RecordStoreMachine):
    record_bytes = 700

    def make(self, directory: Path) -> RecordStore:
        config = SsdConfig(segment_bytes=8192, buffer_bytes=4096, depth=2)
        return SsdRecords(directory, rows=self.rows, record_bytes=self.record_bytes, config=config)


class FrequentRowsMachine(SsdMachine):
    def make(self, directory: Path) -> RecordStore:
        config, tables = SsdConfig(segment_bytes=8192, buffer_bytes=4096, depth=2), [(3, self.rows // 3)]
        return SsdRecords(
            directory, rows=self.rows, record_bytes=self.record_bytes, config=config, frequent=tables
        )


TestFrequentRowsMachine = FrequentRowsMachine.TestCase
TestFrequentRowsMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestSsdMachine = SsdMachine.TestCase
TestSsdMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def run_killed(tmp_path: Path, kills: int) -> list[int]:
    script = Path(__file__).with_name("killed.py")
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, script, tmp_path, str(kills)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    assert process.returncode == 0, process.stderr
    steps: list[int] = json.loads(process.stdout)
    return steps


@pytest.mark.slow
def test_the_newest_checkpoint_survives_kills(tmp_path: Path) -> None:
    steps = run_killed(tmp_path, KILLS)
    assert len(set(steps)) > KILLS // 5, f"the victims hardly got to write anything: {steps}"


def refuse(*_: object, **__: object) -> NoReturn:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False])
def test_existing_files_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"rows")
    target.write_bytes(b"mine")
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with refuses(StorageError, f"{target}"):
        link_or_copy(source, target)
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize("links", [True, False])
def test_a_planted_link_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    source, target, elsewhere = tmp_path / "source", tmp_path / "target", tmp_path / "elsewhere"
    source.write_bytes(b"rows")
    target.symlink_to(elsewhere)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with refuses(StorageError, f"{target}"):
        link_or_copy(source, target)
    assert not elsewhere.exists()


def test_a_source_that_is_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "source").symlink_to(tmp_path / "secret")
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match="cannot keep"):
        link_or_copy(tmp_path / "source", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_copy_is_complete_if_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_bytes(b"rows" * 1000)
    monkeypatch.setattr(os, "link", refuse)
    with pytest.warns(RuntimeWarning, match="hard links"):
        link_or_copy(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"rows" * 1000
