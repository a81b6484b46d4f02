"""Test that the data set does not depend on which process runs the pieces of `prepare`, in which
order and how often.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stratarec.data import threads
from stratarec.data.prepare import executor as executors
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.executor import LEASE, Pass, grant, leased, revoke, revoke_leases
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.clicks import ClicksConfig
from stratarec.data.sources.csv import CsvConfig
from stratarec.data.sources.parquet import ParquetConfig
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.errors import StorageError
from stratarec.progress import Progress


class ScatteredExecutor:
    """Run the pieces in reverse order, each with a copy of the pass, and some of them twice."""

    readers = 3

    def __init__(self) -> None:
        self.pieces = 0

    def begin(self, work: Path, logs: Sequence[str]) -> None:
        self.token = grant(work)
        self.work = work

    def run(self, data_pass: Pass, numbers: Sequence[int], progress: Progress) -> None:
        for number in [*reversed(numbers), *numbers[:1]]:
            copy: Pass = pickle.loads(pickle.dumps(data_pass))
            assert copy.memory(number) > 0
            with leased(self.work, self.token):
                progress.advance(sum(copy(number)))
            self.pieces += 1


def frame(rows: int = 3000) -> pl.DataFrame:
    draws = np.random.default_rng(5)
    user = draws.integers(0, 150, rows)
    columns = {
        "user_id": user,
        "session_id": user * 3 + draws.integers(0, 3, rows),
        "timestamp": 1_700_000_000 + np.sort(draws.integers(0, 200_000, rows)),
        "item_id": draws.zipf(1.5, rows) % 400,
        "shop": user % 11,
        "price": draws.normal(3.0, 2.0, rows).round(3),
        "clicked": draws.integers(0, 2, rows),
    }
    return pl.DataFrame(columns)


SCHEMA = Schema(
    label="clicked",
    dense=(DenseFeature(name="price"),),
    sparse=(
        SparseFeature(name="item_id"),
        SparseFeature(name="shop"),
        SparseFeature(name="seen", kind="history", of="item_id", max_length=5),
    ),
    time="timestamp",
    session="session_id",
    user="user_id",
)
PLAIN = Schema(label="clicked", dense=SCHEMA.dense, sparse=SCHEMA.sparse[:2])


def write_logs(root: Path) -> None:
    rows = frame()
    for number in range(3):
        part = rows[number * 1000 : number * 1000 + 1000]
        part.write_csv(root / f"log{number}.csv")
        part.write_parquet(root / f"log{number}.parquet", row_group_size=150)


def sources(root: Path) -> dict[str, Any]:
    return {
        "csv": CsvConfig(paths=(f"{root}/*.csv",), schema=SCHEMA),
        "plain parquet": ParquetConfig(paths=(f"{root}/*.parquet",), schema=PLAIN),
        "parquet": ParquetConfig(paths=(f"{root}/log1.parquet",), schema=SCHEMA),
        "clicks": ClicksConfig(paths=(f"{root}/*.parquet",), negatives=2, negative_window="12h"),
        "synthetic": SyntheticConfig(samples=3000, scale=0.0005),
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize(
    "kind",
    [
        "csv",
        "parquet",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("plain parquet", "clicks", "synthetic")),
    ],
)
def test_pieces_give_the_same_bytes_in_any_order_and_when_repeated(tmp_path: Path, kind: str) -> None:
    write_logs(tmp_path)
    source = sources(tmp_path)[kind]
    scattered = ScatteredExecutor()
    for path, executor in (("one", None), ("many", scattered)):
        prepare(
            PrepareConfig(source=source, path=str(tmp_path / path), shard_samples=700),
            name="same",
            executor=executor,
        )
    assert scattered.pieces > 6
    assert contents(tmp_path / "one") == contents(tmp_path / "many")
    assert not (tmp_path / "many.preparing").exists()


@pytest.mark.parametrize("kind", ["csv", "plain parquet"])
def test_the_bytes_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write_logs(tmp_path)
    for count in (1, 3):
        monkeypatch.setattr(threads, "thread_count", lambda count=count: count)
        path = str(tmp_path / f"{count}")
        prepare(PrepareConfig(source=sources(tmp_path)[kind], path=path, shard_samples=700), name="same")
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_a_task_of_an_earlier_call_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revoke_leases(tmp_path)
    assert not (tmp_path / LEASE).exists()
    token = grant(tmp_path)
    with leased(tmp_path, token) as check, leased(tmp_path, token):
        check()
        monkeypatch.setattr(executors, "_PATIENCE_SECONDS", 0.0)
        for begin in (revoke_leases, grant):
            with pytest.raises(StorageError, match="in use by tasks of an earlier call"):
                begin(tmp_path)
        check()
        revoke(tmp_path)
        with pytest.raises(StorageError, match="another call"):
            check()
    again = grant(tmp_path)
    for expired_token in (token, ""):
        with pytest.raises(StorageError, match="another call"), leased(tmp_path, expired_token):
            pytest.fail("worked without a lease")
    with leased(tmp_path, again):
        pass
    revoke_leases(tmp_path)
    for place in (tmp_path, tmp_path / "elsewhere"):
        with pytest.raises(StorageError, match="does not exist"), leased(place, again):
            pytest.fail("worked without a lease")
