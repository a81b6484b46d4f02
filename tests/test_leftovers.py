"""Test files while they are written: they are complete or absent, and the next start removes those
of a killed process.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
import yaml

from errors import refuses
from recipes import tiny
from stratarec.cli import main
from stratarec.io.atomic import (
    SpecialFileError,
    create_locked,
    is_leftover,
    open_regular,
    remove_leftovers,
    temporary_name,
    write_json,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recipe, its data set and its run."""
    root = tmp_path_factory.mktemp("trained")
    content = tiny(Path(), max_steps=3)
    content["data"]["path"], content["train"]["run"] = "data", "run"
    (root / "r.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for command in ("prepare", "train"):
            assert main([command, "-q", "r.yaml"]) == 0
    return root


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the recipe, data set and run to the working directory."""
    shutil.copytree(trained, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "work"


WRITER = """
import sys, time
from pathlib import Path
from stratarec.io.atomic import write_atomic
def write(file):
    file.write(b"half"); file.flush(); print("writing", flush=True); time.sleep(60)
write_atomic(Path(sys.argv[1]), write)
"""


def kill_writer(path: Path, check: Callable[[], object] = lambda: None) -> None:
    """Start a process that writes `path`, call `check` while it writes, and kill it."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        check()
        writer.send_signal(signal.SIGKILL)


def test_leftovers_of_a_killed_process_are_removed_by_the_next_start(home: Path) -> None:
    def leftovers(folder: str = "run") -> list[Path]:
        return [path for path in (home / folder).rglob("*") if is_leftover(path.name)]

    def stays() -> None:
        remove_leftovers(home / "run")
        assert len(leftovers()) == 1

    kill_writer(home / "run" / "recipe.json", stays)
    assert len(leftovers()) == 1
    # Leftovers of ended processes are all treated the same.
    for name in ("predictions-test.parquet", "stratarec.json"):
        temporary_name(home / "run" / name).touch()
    assert main(["train", "-q", "r.yaml", "--overwrite"]) == 0
    assert not leftovers()
    work = home / "new.preparing"
    for file in (
        "output/train/shard-00000.parquet",
        "spilled/00000000.arrow",
        "counts/00000.json",
        "origin.json",
    ):
        (work / file).parent.mkdir(parents=True, exist_ok=True)
        temporary_name(work / file).touch()
    write_json(work / "stratarec.json", {"kind": "half-prepared data set", "format": 1})
    assert main(["prepare", "-q", "r.yaml", "data.path=new"]) == 0
    assert not leftovers("new")


TERMINATE = """
import os, signal, threading
from pathlib import Path
before = set(Path().rglob("*"))
def is_temporary(path):
    return path not in before and (path.name.startswith(".") or path.name.endswith(".preparing"))
def terminate_when_something_is_written():
    while not any(map(is_temporary, Path().rglob("*"))):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=terminate_when_something_is_written, daemon=True).start()
"""


@pytest.mark.parametrize(
    ("command", "consequence"),
    [
        (
            ["prepare", "r.yaml", "data.path=new"],
            "finished parts are kept; run the same command again to resume",
        ),
        (
            ["predict", "run", "-o", "scores.csv"],
            "unfinished outputs are removed; run the same command again",
        ),
        (["export", "run", "-o", "exported"], "unfinished outputs are removed; run the same command again"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_sigterm_ends_a_command_in_one_line_and_leaves_no_hidden_files(
    home: Path, command: list[str], consequence: str
) -> None:
    before = set(home.rglob("*"))
    done = forked.run([command[0], "-q", *command[1:]], before=TERMINATE)
    assert done.returncode == 143, done.stderr
    assert done.stderr == f"stratarec: stopped by SIGTERM; {consequence}\n"
    assert not [path for path in set(home.rglob("*")) - before if path.name.startswith(".")]
    assert main([command[0], "-q", *command[1:]]) == 0


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-pipe").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        began = time.monotonic()
        for path, what in {
            tmp_path / "pipe": "a pipe, which can be read only once",
            tmp_path / "to-pipe": "a pipe",
            tmp_path / "folder": "Is a directory",
            tmp_path / "socket": "a socket",
            Path("/dev/zero"): "a device",
            Path("/dev/null"): "a device",
        }.items():
            with refuses(SpecialFileError, what):
                open_regular(path)
        assert time.monotonic() - began < 5
    (tmp_path / "file").write_text("x")
    (tmp_path / "to-file").symlink_to("file")
    with open_regular(tmp_path / "to-file") as file:
        assert file.read() == b"x"
    with pytest.raises(FileExistsError):
        create_locked(tmp_path / "to-file")


def test_an_error_after_a_signal_that_an_import_swallowed_is_reported_as_the_signal() -> None:
    """An import that catches all exceptions leaves modules partly loaded, so the command fails
    later.
    """
    code = (
        "import os, signal\n"
        "from stratarec.cli.run_command import _signals_as_exceptions\n"
        "with _signals_as_exceptions():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except BaseException:\n"
        "        pass\n"
        "    raise RecursionError\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "stratarec.errors.Terminated"
