"""Test that StrataRec replaces only its own files. Everything else is refused with one line and
left unchanged.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import forked
import pytest
import yaml

from errors import missing, refuses
from recipes import last, tiny
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import DATASET
from stratarec.data.prepare.prepare import prepare
from stratarec.data.prepare.workspace import WORK
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.stores.row_files import require_same
from stratarec.errors import CheckpointError, DatasetError, StorageError, TrainingError
from stratarec.io.atomic import temporary_name
from stratarec.io.owned_directory import claim, directory_lock, move_aside, replaced_path
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer


def contents(root: Path) -> dict[str, bytes]:
    """Return every file below `root` without following links. Skip the user's cache, which any
    library may fill.
    """
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink() and ".cache" not in path.parts
    }


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a recipe, a data set, a run, and files of the user."""
    root = tmp_path_factory.mktemp("template")
    content = tiny(Path(), max_steps=3, checkpoint={"every_steps": 2})
    content["data"]["path"], content["train"]["run"] = "data", "runs/a"
    content["data"]["source"]["samples"], content["data"]["shard_samples"] = 1200, 400
    (root / "r.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(["prepare", "-q", "r.yaml"]) == 0
        assert main(["train", "-q", "r.yaml"]) == 0
    for file in ("precious/data.txt", "user/letter.txt", "file"):
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text("mine")
    for name, target in (
        ("to-precious", "precious"),
        ("to-home", "user"),
        ("to-here", "."),
        ("a-circle", "a-circle"),
    ):
        (root / name).symlink_to(target)
    return root


@pytest.fixture
def home(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the template and make it the working directory. Its folder `user` is the user's home."""
    shutil.copytree(template, tmp_path / "work", symlinks=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "work" / "user"))
    return tmp_path / "work"


PLACES = {
    "precious": "not a {kind} of StrataRec (it contains data.txt and no stratarec.json)",
    "precious/": "not a {kind} of StrataRec",
    "./runs/../precious": "not a {kind} of StrataRec",
    "to-precious": "not a {kind} of StrataRec",
    "file": "it is a file",
    "file/below": "is a file, expected a directory",
    ".": "expected the name of a new directory",
    "./": "expected the name of a new directory",
    "to-here": "not a {kind} of StrataRec",
    "..": "expected the name of a new directory",
    "/": "expected the name of a new directory",
    "user": "not a {kind} of StrataRec",
    "to-home": "not a {kind} of StrataRec",
    "a-circle": "links lead nowhere",
    "data/inside": "which is a data set",
    "runs/a/inside": "which is a run",
    "/proc": "/proc",
    "~/below": "write the directory in full",
    '"a\\0b"': "expected text without null characters",
}
COMMANDS = {"data set": ("prepare", "data.path"), "run": ("train", "train.run")}


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("overwrite", [True, False])
def test_other_directories_are_refused_and_left_unchanged(
    home: Path, kind: str, overwrite: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command, field = COMMANDS[kind]
    before = contents(home)
    for place, message in {
        **PLACES,
        {"data set": "runs/a", "run": "data"}[kind]: f"expected a {kind}",
    }.items():
        capsys.readouterr()
        assert (
            main([command, "-q", "r.yaml", f"{field}={place}", *(["--overwrite"] if overwrite else [])])
            == 2
        ), place
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, place
        assert message.format(kind=kind) in lines[0], place
        assert contents(home) == before, place


@pytest.mark.parametrize(("command", "place"), [("prepare", "data"), ("train", "runs/a")])
def test_user_files_in_an_owned_directory_prevent_its_replacement(
    home: Path, command: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / place / "notes.txt").write_text("mine")
    before = contents(home)
    assert main([command, "-q", "--overwrite", "r.yaml"]) == 2
    assert not missing(f"{place} notes.txt", capsys.readouterr().err)
    assert contents(home) == before
    (home / place / "notes.txt").unlink()
    for name in ("stratarec.json", "result.json" if command == "train" else "dataset.json"):
        temporary_name(home / place / name).write_text(
            "half wri"
        )  # a leftover of a process that was killed while writing
    assert main([command, "-q", "--overwrite", "r.yaml"]) == 0


@pytest.mark.parametrize(
    ("place", "commands"),
    [
        (
            "data",
            ["prepare r.yaml", "prepare r.yaml --overwrite", "train r.yaml train.run=b", "check data"],
        ),
        (
            "runs/a",
            ["train r.yaml --resume", "train r.yaml --overwrite", "train r.yaml train.run=runs/a/b"],
        ),
        ("runs/a", ["check runs/a"]),
    ],
)
def test_a_directory_of_a_newer_version_is_refused_and_left_unchanged(
    home: Path, place: str, commands: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    marker = home / place / "stratarec.json"
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 2'))
    before = contents(home)
    for command in commands:
        assert main(command.split()) == 2, command
        error = capsys.readouterr().err.splitlines()[-1]
        assert not missing(f"{place}/stratarec.json format 2 newer version expected 1 upgrade", error), (
            command
        )
        assert "damaged" not in error
        assert contents(home) == before, command


@pytest.mark.parametrize("number", [2, 0, "1", None])
def test_formats_of_parts_say_whether_they_are_newer(number: object) -> None:
    codec = RecordCodec(CodecConfig(), width=4, row_state=False, full_state=0).identity
    expected = {"format": 1, "layout": "rows"}
    for read, error in (
        (lambda: RecordCodec.from_identity({**codec, "format": number}), CheckpointError),
        (lambda: require_same(Path("folder"), {**expected, "format": number}, expected), CheckpointError),
        (lambda: Plan.from_dict({"format": number}), DatasetError),
    ):
        with refuses(error, "format expected" if error is DatasetError else "format") as caught:
            read()
        assert ("newer version" in str(caught.value)) == (number == 2)


def trainer(home: Path, *overrides: str) -> Trainer:
    recipe = Recipe.load(home / "r.yaml", overrides)
    return Trainer(recipe, Dataset.open(recipe.data.path))


def test_a_run_without_a_checkpoint_restores_the_run_that_it_replaced(home: Path) -> None:
    before = contents(home)
    with refuses(TrainingError, "loss"):
        trainer(home, "train.dense.learning_rate=1.0e+30").train(overwrite=True)
    assert contents(home) == before
    trainer(home, "train.max_steps=2").train(overwrite=True)
    assert last(home / "runs/a").name == "step-00000002"
    assert not replaced_path(home / "runs/a").exists()


KILLED = """
import os, signal
from stratarec.training.loop import Loop
def die(self, *item):
    os.kill(os.getpid(), signal.SIGKILL)
Loop._train_step = die
"""


def test_a_killed_replacement_is_undone_by_the_next_start(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(home)
    for _ in range(2):  # the second process is killed while it replaces what the first left
        assert forked.run(["train", "-q", "--overwrite", "r.yaml"], before=KILLED).returncode == -9
        assert replaced_path(home / "runs/a").is_dir()
    capsys.readouterr()
    assert main(["train", "-q", "r.yaml"]) == 2
    assert not missing("step-00000003", capsys.readouterr().err)
    assert contents(home) == before


def test_a_replaced_data_set_is_recovered_after_a_kill_between_the_renames(home: Path) -> None:
    before = contents(home)
    move_aside(home / "data", DATASET)
    assert main(["prepare", "-q", "r.yaml"]) == 0
    assert contents(home) == before
    # A data set that was replaced completely is removed.
    os.rename(home / "data", replaced_path(home / "data"))
    (home / "data").mkdir()
    for name, content in before.items():
        if name.startswith("data/"):
            (home / name).parent.mkdir(exist_ok=True)
            (home / name).write_bytes(content)
    assert main(["prepare", "-q", "r.yaml"]) == 0
    assert contents(home) == before


def test_the_earlier_data_set_stays_until_the_new_one_is_complete(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(home)
    assert main(["prepare", "-q", "--overwrite", "r.yaml", "data.split.valid=0.000000001"]) == 2
    assert "valid split" in capsys.readouterr().err
    assert {name: content for name, content in contents(home).items() if ".preparing" not in name} == before


def test_files_that_appear_during_preparation_are_not_replaced(home: Path) -> None:
    recipe = Recipe.load("r.yaml", ["data.path=later"])

    class Intruder:
        def start(self, task: str, total: int, unit: str, done: int = 0, *, at_most: bool = False) -> None:
            if task == "encode":
                Path("later").mkdir()
                Path("later/data.txt").write_text("mine")

        def advance(self, amount: int, note: str = "") -> None: ...
        def finish(self) -> None: ...
        def say(self, message: str) -> None: ...

    with refuses(StorageError, "data.txt"):
        prepare(recipe.data, progress=Intruder())
    assert Path("later/data.txt").read_text() == "mine"
    Path("later/data.txt").unlink()
    Path("later").rmdir()
    assert prepare(recipe.data).samples("train")


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_two_processes_in_one_directory_are_refused(
    home: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    busy, arguments = home / "runs/a", ["--resume", "train.max_steps=9"]
    if command == "prepare":
        busy, arguments = home / "data.preparing", ["--overwrite"]
        claim(busy, WORK)
    before = contents(home)
    with directory_lock(busy):
        assert main([command, "-q", "r.yaml", *arguments]) == 2
        assert not missing(f"process {os.getpid()}", capsys.readouterr().err)
    assert contents(home) == before
    assert main([command, "-q", "r.yaml", *arguments]) == 0


def test_a_run_may_resume_from_inside_its_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "runs/a")
    shared = ["../../r.yaml", f"train.run={home / 'runs/a'}", f"data.path={home / 'data'}"]
    assert main(["train", "-q", "--resume", *shared, "train.max_steps=5"]) == 0
    assert last(home / "runs/a").name == "step-00000005"
