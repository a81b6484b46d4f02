"""Test that a directory has one writer: errors name it, dead processes do not block, and readers
keep their files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from errors import missing, refuses
from recipes import prepared, tiny
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import CheckpointError, StorageError
from stratarec.io.owned_directory import DirectoryKind, claim, directory_lock, list_entries
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

KIND = DirectoryKind(name="thing", field="thing", content=("inside",))

HOLD = """
import sys
from pathlib import Path
from stratarec.io.owned_directory import directory_lock
with directory_lock(Path(sys.argv[1]), shared=sys.argv[2] == "read"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def locking_process(path: Path, how: str = "write") -> Iterator[subprocess.Popen[str]]:
    """Start another process that locks `path`."""
    command = [sys.executable, "-c", HOLD, str(path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()


@pytest.fixture
def thing(tmp_path: Path) -> Path:
    claim(tmp_path / "thing", KIND)
    return tmp_path / "thing"


def test_the_process_with_the_lock_is_named(thing: Path) -> None:
    for how in ("write", "read"):
        with locking_process(thing, how) as process:
            with refuses(StorageError, f"{thing} {process.pid}"), directory_lock(thing):
                pass
            assert list_entries(thing) == ["stratarec.json"]
    with directory_lock(thing):
        pass


def test_a_killed_writer_has_no_lock(thing: Path) -> None:
    with locking_process(thing) as process:
        process.kill()
        process.wait()
    with directory_lock(thing):
        pass


def test_readers_share(thing: Path) -> None:
    with (
        locking_process(thing, "read"),
        directory_lock(thing, shared=True),
        directory_lock(thing, shared=True),
        pytest.raises(StorageError, match="is in use"),
        directory_lock(thing),
    ):
        pass
    with directory_lock(thing):
        pass


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("holding")
    prepared(Recipe.from_dict(tiny(root)).data)
    recipe = Recipe.from_dict(tiny(root, max_steps=14, report=True))
    Trainer(recipe, Dataset.open(recipe.data.path)).train()
    (root / "r.yaml").write_text(yaml.safe_dump(tiny(root, max_steps=14, report=True)))
    return root


def test_a_checkpoint_being_read_is_not_pruned(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(home / "run" / "checkpoints", folder)
    first, last = checkpoint.list_checkpoints(folder)
    with checkpoint.locked(first), checkpoint.locked(first):
        checkpoint.prune(folder, 1, set())
        assert checkpoint.list_checkpoints(folder) == [first, last]
        checkpoint.load(first)
    checkpoint.prune(folder, 1, {first})
    assert checkpoint.list_checkpoints(folder) == [first, last]
    checkpoint.prune(folder, 1, set())
    assert sorted(path.name for path in folder.iterdir()) == [last.name]
    with refuses(CheckpointError, f"{first.name}"), checkpoint.locked(first):
        pass


def test_data_being_read_are_not_replaced(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Dataset.open(home / "data").fingerprint
    with open_run(home / "run"):
        assert main(["prepare", "-q", str(home / "r.yaml"), "--overwrite"]) == 2
        assert not missing(f"{home / 'data'}", capsys.readouterr().err)
        assert not (home / "data.preparing").exists()
    assert main(["prepare", "-q", str(home / "r.yaml"), "--overwrite"]) == 0
    assert Dataset.open(home / "data").fingerprint == before
