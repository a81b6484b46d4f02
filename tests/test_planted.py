"""What others put where an output or a temporary file is going to be is never followed, and never removed."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pyarrow as pa
import pytest
import yaml

from recipes import tiny
from stratarec.cli import main
from stratarec.embedding.stores.scratch import hold
from stratarec.errors import StorageError
from stratarec.files import write_atomic, write_json, write_text
from stratarec.opening import SpecialFileError, create, is_leftover, open_regular, remove_leftovers, temporary_name

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, its data set and its run."""
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
    """A copy of it as the working directory, beside a file that somebody cares about."""
    shutil.copytree(trained, tmp_path / "work")
    (tmp_path / "precious").write_text("mine")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "work"


def plant(path: Path, how: str, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    {"link": lambda: path.symlink_to(target), "file": lambda: path.write_text("mine"), "pipe": lambda: os.mkfifo(path)}[
        how
    ]()


COMMANDS: dict[str, tuple[list[str], str]] = {
    "predict": (["predict", "-q", "run"], "run/.predictions-test.parquet{}.tmp"),
    "train": (["train", "-q", "r.yaml", "--resume", "train.max_steps=5"], "run/.recipe.json{}.tmp"),
    "plan": (["plan", "r.yaml", "-o", "plan.json"], ".plan.json{}.tmp"),
    "profile": (["profile", "data", "-o", "p.html"], ".p.html{}.tmp"),
    "export": (["export", "run", "-o", "out"], ".out{}.tmp"),
    "prepare": (["prepare", "-q", "r.yaml", "data.path=new"], "new.preparing/.plan.json{}.tmp"),
}


@pytest.mark.parametrize("how", ["link", "file", "pipe"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_names_of_earlier_versions_are_not_used(home: Path, command: str, how: str) -> None:
    arguments, name = COMMANDS[command]
    if command == "prepare":
        assert main(["prepare", "-q", "r.yaml", "data.path=new", "data.split.valid=0.2"]) == 0
        shutil.rmtree(home / "new")
        (home / "new.preparing").mkdir()
        write_json(home / "new.preparing" / "stratarec.json", {"kind": "half-prepared data set", "format": 1})
    planted = home / name.format("")
    plant(planted, how, home.parent / "precious")
    assert main(arguments) == 0
    assert (home.parent / "precious").read_text() == "mine"
    if command != "prepare":  # whose work directory is its own, and goes
        assert planted.is_symlink() if how == "link" else planted.exists()


@pytest.mark.parametrize("how", ["link", "file", "pipe"])
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "prepare"])
def test_a_name_that_was_foreseen_is_an_error_that_leaves_everything_as_it_is(
    home: Path, command: str, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, name = COMMANDS[command]
    monkeypatch.setattr(secrets, "token_hex", lambda size: TOKEN[: 2 * size])
    planted = home / name.format(f".{TOKEN}")
    plant(planted, how, home.parent / "precious")
    removed = command in ("train", "predict")  # leftovers of a dead process; links and pipes are none
    if removed:
        assert main(arguments) == (0 if how == "file" else 2)
    else:
        assert main(arguments) == 2
    found = capsys.readouterr().err
    assert (home.parent / "precious").read_text() == "mine"
    if not removed or how != "file":
        assert "cannot write" in found
        assert "File exists" in found
        assert found.count("\n") == 1
        assert planted.is_symlink() if how == "link" else planted.exists()


def test_a_final_name_that_is_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a.json").symlink_to(tmp_path / "precious")
    write_json(tmp_path / "a.json", [1])
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "a.json").is_symlink()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_that_the_umask_leaves(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode


def test_names_of_any_length_and_script_have_temporary_names(tmp_path: Path) -> None:
    for name in ("x" * 255, "é" * 127, "汉" * 85, "a\nb"):
        write_text(tmp_path / name, "x")
        assert is_leftover(temporary_name(tmp_path / name).name)
    assert len({temporary_name(tmp_path / "a") for _ in range(100)}) == 100


@pytest.mark.parametrize("error", [ValueError("no"), pa.ArrowInvalid("no"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "a").write_text("before")

    def fail(file: Any) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        write_atomic(tmp_path / "a", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "before"


WRITER = """
import sys, time
from pathlib import Path
from stratarec.files import write_atomic
def write(file):
    file.write(b"half"); file.flush(); print("writing", flush=True); time.sleep(60)
write_atomic(Path(sys.argv[1]), write)
"""


def killed(path: Path, check: Callable[[], object] = lambda: None) -> None:
    """Let a process begin to write `path` and kill it; `check` is called while it writes."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        check()
        writer.send_signal(signal.SIGKILL)


def test_what_a_killed_process_left_is_known_and_removed_by_the_next(home: Path) -> None:
    def leftovers() -> list[Path]:
        return [path for path in (home / "run").rglob("*") if is_leftover(path.name)]

    def stays() -> None:
        remove_leftovers(home / "run")
        assert len(leftovers()) == 1

    killed(home / "run" / "recipe.json", stays)
    assert len(leftovers()) == 1
    assert main(["train", "-q", "r.yaml", "--resume", "train.max_steps=5"]) == 0
    assert not leftovers()
    killed(home / "run" / "predictions-test.parquet")
    killed(home / "run" / "stratarec.json")
    assert main(["train", "-q", "r.yaml", "--overwrite"]) == 0
    assert not leftovers()


def test_leftovers_of_a_killed_prepare_do_not_reach_the_data_set(home: Path) -> None:
    work = home / "new.preparing"
    for file in ("output/train/shard-00000.parquet", "spilled/00000000.arrow", "counts/00000.json", "origin.json"):
        killed(work / file)
    write_json(work / "stratarec.json", {"kind": "half-prepared data set", "format": 1})
    assert main(["prepare", "-q", "r.yaml", "data.path=new"]) == 0
    assert not [path for path in (home / "new").rglob("*") if ".tmp" in path.name]


def test_a_file_of_the_user_is_no_leftover(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (f".notes.{TOKEN}.tmp", ".recipe.json.tmp", ".recipe.json.0123.tmp", f"recipe.json.{TOKEN}.tmp"):
        (home / "run" / name).write_text("mine")
        assert main(["train", "-q", "r.yaml", "--overwrite"]) == 2
        assert f"run also holds {name}" in capsys.readouterr().err
        assert (home / "run" / name).read_text() == "mine"
        (home / "run" / name).unlink()


@pytest.mark.parametrize(
    ("place", "arguments"),
    [("new.preparing", ["prepare", "-q", "r.yaml", "data.path=new"])],
)
def test_a_link_in_the_place_of_a_directory_is_refused(
    home: Path, place: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for target in ("elsewhere", "nowhere"):
        (home / "elsewhere").mkdir(exist_ok=True)
        (home / place).symlink_to(home / target)
        assert main(arguments) == 2
        assert f"{place} is a link, expected a directory or nothing" in capsys.readouterr().err
        assert not list((home / "elsewhere").iterdir())
        (home / place).unlink()


def test_links_in_a_half_prepared_data_set_are_not_written_through(home: Path) -> None:
    arguments = ["prepare", "-q", "r.yaml", "data.path=new"]
    (home / "elsewhere").mkdir()
    (home / "elsewhere" / "00000.json").write_text("mine")
    assert main([*arguments, "data.split.valid={}"]) == 2
    # What a killed `prepare` leaves, and a link that somebody put there.
    script = "import os, stratarec.data.counting as c; c.Counts.count = lambda *a: os._exit(1)"
    assert forked.run(arguments, before=script).returncode == 1
    (home / "new.preparing" / "counts").rmdir()
    (home / "new.preparing" / "counts").symlink_to(home / "elsewhere")
    assert main(arguments) == 0
    assert {path.name: path.read_text() for path in (home / "elsewhere").iterdir()} == {"00000.json": "mine"}


def test_a_link_that_looks_like_a_run_set_aside_costs_no_run(home: Path) -> None:
    shutil.copytree(home / "run", home / "other")
    before = sorted(path.name for path in (home / "other").rglob("*"))
    (home / ".run.replaced").symlink_to(home / "other")
    main(["train", "-q", "r.yaml", "--resume", "train.max_steps=5"])
    assert sorted(path.name for path in (home / "other").rglob("*")) == before


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match=r"\.lock"):
        hold(tmp_path / "store")
    assert (tmp_path / "precious").read_text() == "mine"


def test_only_files_are_opened_as_files(tmp_path: Path) -> None:
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
            with pytest.raises(SpecialFileError, match=f"{what}.*, expected a file"):
                open_regular(path)
        assert time.monotonic() - began < 5
    (tmp_path / "file").write_text("x")
    (tmp_path / "to-file").symlink_to("file")
    with open_regular(tmp_path / "to-file") as file:
        assert file.read() == b"x"
    with pytest.raises(FileExistsError):
        create(tmp_path / "to-file")
