"""Test `prepare` on a cluster of two machines: it writes the same bytes as one machine, also when a
process dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from stratarec.cli import main

if find_spec("ray") is None:  # importing it takes half a second
    pytest.skip("Ray is not installed: pip install 'stratarec[ray]'", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

PLANTED = ".shard-00000.parquet.0123456789abcdef.tmp"


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Return the environment that lets a process find the cluster."""
    with tempfile.TemporaryDirectory(prefix="sr-", dir="/tmp") as folder:  # paths of sockets must be short
        Path(folder, "ray").mkdir()
        environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        script = Path(__file__).with_name("two_machines.py")
        with subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        ) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            address = holder.stdout.readline().strip()
            assert address
            yield {**environment, "RAY_ADDRESS": address, "TEST_HOLDER": str(holder.pid)}
            holder.stdin.close()


def recipe(root: Path, kind: str, **changes: Any) -> Path:
    draws = np.random.default_rng(3)
    rows, path = 12_000, root / f"{kind}.yaml"
    user = draws.integers(0, 600, rows)
    columns = {
        "user": user,
        "visit": user * 3 + draws.integers(0, 3, rows),
        "when": 1_700_000_000 + np.sort(draws.integers(0, 200_000, rows)),
        "clicked": draws.integers(0, 2, rows),
        "item": draws.zipf(1.5, rows) % 4000,
        "shop": user % 11,
        "price": draws.normal(3.0, 2.0, rows).round(3),
    }
    schema = {
        "label": "clicked",
        "dense": [{"name": "price"}],
        "sparse": [{"name": "item"}, {"name": "shop"}],
    }
    if kind == "csv":
        history = {"name": "seen", "kind": "history", "of": "item", "max_length": 5}
        schema = {
            **schema,
            "sparse": [*schema["sparse"], history],
            "time": "when",
            "session": "visit",
            "user": "user",
        }
    files = 3 if kind == "csv" else 30  # small row groups of one file would be read together
    for number in range(files):
        part = pl.DataFrame(columns)[number * rows // files : (number + 1) * rows // files]
        (part.write_csv if kind == "csv" else part.write_parquet)(root / f"log{number:02}.{kind}")
    source = {"kind": kind, "paths": [f"{root}/*.{kind}"], "schema": schema}
    data = {"path": str(root / "ray"), "source": source, "shard_samples": 400}
    path.write_text(
        yaml.safe_dump({"name": "r", "data": data, "model": {"kind": "dlrm", "bottom_mlp": [4]}})
    )
    return path


def start(path: Path, cluster: dict[str, str], *more: str, where: str = "auto") -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "stratarec",
        "prepare",
        "-q",
        str(path),
        "--ray",
        where,
        *more,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cluster, cwd=path.parent
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def workers(holder: int) -> list[int]:
    """Return the processes of the cluster that are running a piece."""
    parents = {int(entry.name): _stat(entry) for entry in Path("/proc").iterdir() if entry.name.isdecimal()}
    below = {holder}
    for _ in range(3):
        below |= {process for process, (parent, _) in parents.items() if parent in below}
    return [process for process in below if parents.get(process, (0, ""))[1].startswith("ray::work")]


def _stat(entry: Path) -> tuple[int, str]:
    try:
        parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        return parent, (entry / "cmdline").read_text()
    except (OSError, ValueError):
        return 0, ""


def wait_for(pattern: str, folder: Path, run: subprocess.Popen[str]) -> None:
    """Wait until the file exists."""
    while not any(folder.glob(pattern)):
        assert run.poll() is None, run.communicate()
        time.sleep(0.002)


def test_a_cluster_writes_the_bytes_of_one_machine_when_workers_die(
    tmp_path: Path, cluster: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, "csv")
    assert main(["prepare", "-q", str(path), f"data.path={tmp_path / 'one'}"]) == 0
    expected = capfd.readouterr()
    run = start(path, cluster)
    killed = 0
    for stage in ("counts", "encoded"):
        wait_for(f"ray.preparing/{stage}/00*.json", tmp_path, run)
        for process in workers(int(cluster["TEST_HOLDER"]))[:1]:
            os.kill(process, signal.SIGKILL)
            killed += 1
    # The same as from a worker that died while writing.
    (tmp_path / "ray.preparing" / "output" / "train" / PLANTED).write_bytes(b"half")
    output, errors = run.communicate(timeout=120)
    assert (run.returncode, errors) == (0, "")
    assert output == expected.out.replace(str(tmp_path / "one"), str(tmp_path / "ray"))
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")
    assert killed
    assert not (tmp_path / "ray.preparing").exists()


def test_a_killed_prepare_resumes_where_it_stopped(tmp_path: Path, cluster: dict[str, str]) -> None:
    path = recipe(tmp_path, "parquet")
    work = tmp_path / "ray.preparing"
    run = start(path, cluster)
    wait_for("ray.preparing/encoded/0000[3-9].json", tmp_path, run)
    run.kill()
    run.communicate()
    assert not (tmp_path / "ray").exists()
    before = {note.name: note.stat().st_mtime_ns for note in work.glob("encoded/*.json")}
    shards = {
        shard.name: shard.stat().st_mtime_ns for shard in (work / "output").rglob("train/shard-*.parquet")
    }
    assert main(["prepare", "-q", str(path)]) == 0
    after = {
        shard.name: shard.stat().st_mtime_ns for shard in (tmp_path / "ray").rglob("train/shard-*.parquet")
    }
    finished = [f"shard-{name.removesuffix('.json')}.parquet" for name in before]
    assert len(finished) >= 1
    assert [after[name] for name in finished] == [shards[name] for name in finished]
    assert main(["prepare", "-q", str(path), f"data.path={tmp_path / 'one'}"]) == 0
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")
