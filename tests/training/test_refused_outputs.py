"""Scores that cannot be written: one line, exit code 2, and nothing is left behind."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import yaml

from recipes import DISK_BYTES, fill_disk, tiny
from stratarec.cli import main

FILE_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    (root / "r.yaml").write_text(yaml.safe_dump(tiny(root, max_steps=3)))
    for command in ("prepare", "train"):
        assert main([command, "-q", str(root / "r.yaml")]) == 0
    # Kernels are compiled and hashes known before anything is limited.
    assert main(["predict", "-q", str(root / "run"), "-o", str(root / "before.parquet")]) == 0
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def run(arguments: list[str], wrapper: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [*wrapper, sys.executable, "-m", "stratarec.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["predict", "export"])
def test_a_run_on_a_read_only_file_system_is_one_line(trained: Path, command: str) -> None:
    where = trained / "run"
    mount = f'mount --bind {where} {where} && mount -o remount,bind,ro {where} && exec "$@"'
    wrapper = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    if not shutil.which("unshare") or subprocess.run([*wrapper, "true"], check=False, capture_output=True).returncode:
        pytest.skip("user and mount namespaces are not permitted here")
    before = contents(trained)
    done = run([command, "-q", str(where)], wrapper)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"stratarec: cannot write {where}/\S+: no permission to write in {where}; .*\n", done.stderr)
    assert contents(trained) == before
    output = trained / f"{command}.out"
    assert run([command, "-q", str(where), "-o", str(output)], wrapper).returncode == 0
    assert output.exists()


@pytest.mark.parametrize("output", ["new.parquet", "old.parquet"])
def test_a_file_that_cannot_grow_is_one_line_and_nothing_is_left(trained: Path, tmp_path: Path, output: str) -> None:
    (tmp_path / "old.parquet").write_bytes(b"earlier scores")
    # The log of hashes and other small files are written all the same.
    done = forked.run(["predict", "-q", str(trained / "run"), "-o", str(tmp_path / output)], before=FILE_LIMIT)
    assert (done.returncode, done.stdout) == (2, "")
    expected = f"cannot write {tmp_path / output}: File too large; free space or name another path"
    assert done.stderr == f"stratarec: {expected}\n"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"old.parquet": b"earlier scores"}


def test_a_full_disk_is_one_line_and_nothing_is_left(trained: Path, small_disk: Path) -> None:
    fill_disk(small_disk / "filler", 0)
    done = forked.run(["predict", "-q", str(trained / "run"), "-o", str(small_disk / "scores.parquet")])
    assert (done.returncode, done.stdout) == (2, "")
    expected = f"cannot write {small_disk}/scores.parquet: No space left on device; free space or name another path"
    assert done.stderr == f"stratarec: {expected}\n"
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    assert (small_disk / "filler").stat().st_size <= DISK_BYTES
