"""Test the command line for a new user: any mistake is one line and exit code 2, and no file is
lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import forked
import pytest
import yaml

from errors import check_refusal, missing
from recipes import tiny
from stratarec.cli import main
from stratarec.cli.run_command import parse


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a recipe, its data set and its run, and with other files."""
    root = tmp_path_factory.mktemp("cli")
    content = tiny(Path(), run="runs/tiny", max_steps=8)
    content["data"] |= {
        "path": "data/tiny",
        "source": {"kind": "synthetic", "samples": 3000, "scale": 0.0005, "seed": 3},
    }
    other = {**content, "name": "other", "data": {**content["data"], "path": "data/other"}}
    other["data"]["source"] = {**content["data"]["source"], "scale": 0.002}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name, recipe in (("r.yaml", content), ("other.yaml", other)):
            Path(name).write_text(yaml.safe_dump(recipe))
            assert main(["prepare", "-q", name]) == 0
            assert main(["plan", "-q", name, "-o", f"{name}.json"]) == 0
        assert main(["train", "-q", "r.yaml"]) == 0
        Path("empty").mkdir()
        Path("folder").mkdir()
        Path("folder/precious.txt").write_text("mine")
        Path("file").write_text("mine")
        Path("empty.yaml").touch()
        Path("list.yaml").write_text("- a\n")
        Path("raw log.csv").write_text("item,label\na,1\n")
        Path("raw.parquet").write_bytes(b"PAR1\xff")
        Path("no kind.yaml").write_text(yaml.safe_dump({**content, "model": {"embedding_dim": 4}}))
        Path("café.yaml").write_text("name: [")
    return root


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "directory"
        for path in sorted(root.rglob("*"))
    }


MISTAKES = [
    ([], "COMMAND --help"),
    (["trian", "r.yaml"], "COMMAND trian init"),
    (["train"], "recipe --help"),
    (["train", "none.yaml"], "none.yaml directory"),
    (["train", "folder"], "folder directory"),
    (["train", "/dev/null"], "/dev/null device"),
    (["prepare", "raw log.csv"], "log.csv raw log.csv"),
    (["train", "raw.parquet"], "raw.parquet UTF-8"),
    (["prepare", "folder"], "folder recipe"),
    (["train", "list.yaml"], "list.yaml list"),
    (["train", "café.yaml"], "café.yaml YAML line 1 column 8"),
    (["train", "no kind.yaml"], "kind.yaml model.kind dcnv2"),
    (["train", "r.yaml", "other.yaml"], "other.yaml field=value"),
    (["train", "r.yaml", "--bogus"], "--bogus --help"),
    (["train", "r.yaml", "train=5"], "r.yaml 5"),
    (["train", "r.yaml", "train.batch_size.x=5"], "train.batch_size.x=5 batch_size"),
    (["train", "r.yaml", "train.batch_size=["], "train.batch_size=[ YAML"),
    (["train", "r.yaml", "--resume", "--overwrite"], "--overwrite --resume"),
    (["train", "r.yaml", "--plan", "none.json"], "none.json directory"),
    (["train", "r.yaml", "--plan", "r.yaml"], "r.yaml JSON"),
    (["train", "r.yaml", "--plan", "other.yaml.json", "train.run=runs/new"], "C10 rows 4"),
    (["train", "r.yaml"], "runs/tiny step-00000008 --resume"),
    (["train", "r.yaml", "train.run=file"], "file directory"),
    (["train", "r.yaml", "train.run=file/x"], "file/x directory"),
    (["train", "r.yaml", "train.run=."], "r.yaml train.run '.' directory"),
    (["train", "r.yaml", "data.path=nowhere"], "nowhere data"),
    (["train", "r.yaml", "data.path=file"], "file data"),
    (["train", "r.yaml", "train.seed=-1"], "r.yaml train.seed -1 0 2^63 1"),
    (["prepare", "r.yaml", "data.path=."], "data.path '.' directory"),
    (["prepare", "r.yaml", "data.path=file"], "file directory"),
    (["prepare", "r.yaml", "data.path=file", "--overwrite"], "file"),
    (["prepare", "r.yaml", "data.path=file/x"], "file directory"),
    (["prepare", "r.yaml", "data.path=folder"], "folder data"),
    (["prepare", "r.yaml", "data.source.samples=10"], "data/tiny data.source.samples = 3000 10"),
    (
        ["prepare", "r.yaml", "data.path=new", "data.source={kind: csv, paths: ['gs://bucket/day_*.gz']}"],
        "gs://bucket/day_*.gz gs:// gcsfs",
    ),
    (
        ["prepare", "r.yaml", "data.path=new", "data.source={kind: csv, paths: [foo://bucket/log]}"],
        "data.source.paths foo://bucket/log",
    ),
    (["evaluate", "empty"], "recipe.json directory"),
    (["evaluate", "nowhere"], "nowhere run"),
    (["evaluate", "r.yaml"], "r.yaml"),
    (["evaluate", "data/tiny"], "data/tiny"),
    (["evaluate", "runs/tiny", "runs/tiny"], "runs/tiny"),
    (["evaluate", "runs/tiny", "--split", "all"], "--split all"),
    (["predict", "runs/tiny", "-o", "."], "directory output"),
    (["predict", "runs/tiny", "-o", "folder"], "folder directory"),
    (["predict", "runs/tiny", "-o", "file/x"], "file/x directory"),
    (["export", "runs/tiny", "-o", "."], "exists --output"),
    (["export", "runs/tiny", "-o", "folder"], "folder --output"),
    (["export", "empty"], "empty run"),
    (["profile", "empty"], "empty data"),
    (["profile", "runs/tiny"], "runs/tiny"),
    (["profile", "data/tiny", "--batch-size", "x"], "--batch-size 'x'"),
    (["profile", "data/tiny", "--batches", "-3"], "4096 -3 1"),
    (["plan", "r.yaml", "memory.dram=lots"], "memory.dram lots 4GiB"),
    (["plan", "r.yaml", "memory.precision.nope=int8"], "memory.precision.nope"),
    (["plan", "r.yaml", "-o", "."], "directory"),
    (["plan", "r.yaml", "-o", "plan.html"], "plan.html"),
    (["plan", "r.yaml", "--report", "plan.html"], "--report --towers"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: " ".join(value)[:70])
def test_a_mistake_is_one_line_with_exit_code_2_and_nothing_is_lost(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(place)
    before = tree(place)
    try:
        code = main(arguments)
    except SystemExit as leaving:  # the format of argparse
        code = int(str(leaving.code))
    result = capsys.readouterr()
    assert (code, result.out) == (2, "")
    check_refusal(message, result.err)
    assert tree(place) == before


def test_with_json_output_every_line_is_json(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert main(["evaluate", "--json", "runs/tiny"]) == 0
    result = capsys.readouterr()
    assert 0 < json.loads(result.out)["test"]["auc"] < 1
    events = [json.loads(line) for line in result.err.splitlines()]
    assert [events[0]["event"], events[-1]["event"]] == ["start", "end"]
    assert events[-1]["done"] == events[0]["total"] == 541
    assert main(["evaluate", "--json", "nowhere"]) == 2
    result = capsys.readouterr()
    error = json.loads(result.err)
    assert (error["event"], error["exit_code"], result.out) == ("error", 2, "")
    assert error["text"].startswith("nowhere is not a run")


def test_a_run_writes_its_curves_as_json(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    fields = ["train.log_every=2", "train.report=false", f"train.run={tmp_path / 'run'}"]
    assert main(["train", "--json", "r.yaml", *fields]) == 0
    result = capsys.readouterr()
    assert json.loads(result.out)["steps"] == 8
    events = [json.loads(line) for line in result.err.splitlines()]
    points = [each["step"] for each in events if "train/loss" in each.get("values", {})]
    assert points == [2, 4, 6, 8]
    assert any("valid/auc" in each.get("values", {}) for each in events)
    assert main(["prepare", "--json", "r.yaml"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"]["test"] == 541


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("stratarec tr", {"train"}),
        ("stratarec train --res", {"--resume"}),
        ("stratarec evaluate --split v", {"valid"}),
    ],
)
def test_a_shell_completes_commands_options_and_choices(
    tmp_path: Path, line: str, offered: set[str]
) -> None:
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found"),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    done = forked.run([], cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert {each.strip() for each in (tmp_path / "found").read_text().split("\n")} == offered


DEFECT = """
from stratarec.cli import run_command
def broken(args):
    raise KeyError("a key that\\nnobody expected")
run_command.COMMANDS = tuple(command._replace(run=broken) for command in run_command.COMMANDS)
"""


def test_a_defect_is_one_line_that_names_the_file_of_its_traceback(tmp_path: Path) -> None:
    broken = partial(forked.run, ["prepare", "r.yaml"], before=DEFECT, cwd=tmp_path)
    done = broken(environment={"TMPDIR": str(tmp_path)})
    assert done.returncode == 70
    assert done.stderr.count("\n") == 1
    result = re.fullmatch(
        r"stratarec: .*KeyError: 'a key that\\nnobody expected'.* (/\S+\.txt)\W*\n", done.stderr
    )
    assert result is not None
    text = Path(result[1]).read_text()
    assert Path(result[1]).parent == tmp_path
    assert Path(result[1]).stat().st_mode & 0o077 == 0
    assert "Traceback (most recent call last)" in text
    assert 'raise KeyError("a key that' in text or "in broken" in text
    assert not missing("prepare r.yaml", text)
    again = broken(environment={"TMPDIR": str(tmp_path)})
    assert result[1] not in again.stderr
    assert len(list(tmp_path.glob("stratarec-error-*.txt"))) == 2


def test_too_little_memory_is_one_line(place: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))"
    arguments = ["train", "r.yaml", f"train.run={tmp_path / 'run'}", "model.embedding_dim=60000000"]
    done = forked.run(arguments, before=limit, cwd=place, environment={"TMPDIR": str(tmp_path)})
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(
        r"stratarec: out of memory \(.*\); use smaller batches or tables, or .*\n", done.stderr
    )
    assert not list(tmp_path.glob("stratarec-error-*"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "data/tiny"],
        pytest.param(["evaluate", "-q", "runs/tiny"], marks=pytest.mark.slow),
        pytest.param(["profile", "-q", "data/tiny"], marks=pytest.mark.slow),
    ],
)
def test_a_closed_output_pipe_is_no_error(place: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "stratarec", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=place)
    os.close(writer)
    assert (done.returncode, done.stderr.replace("evaluate test: 601 samples\n", "")) == (141, "")


@pytest.mark.slow
def test_a_run_continues_when_its_progress_is_not_read(place: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "stratarec", "train", "r.yaml", f"train.run={tmp_path / 'run'}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, text=True, check=False, cwd=place)
    os.close(writer)
    assert done.returncode == 0
    assert "AUC" in done.stdout
    assert (tmp_path / "run" / "result.json").is_file()


@pytest.mark.parametrize(
    ("line", "name", "values"),
    [
        (
            "train r.yaml train.batch_size=8 -q train.epochs=2",
            "overrides",
            ["train.batch_size=8", "train.epochs=2"],
        ),
        ("evaluate run a.csv -q b.csv", "data", ["a.csv", "b.csv"]),
        ("continue run a.csv -q b.csv train.lr=0.1", "files", ["a.csv", "b.csv", "train.lr=0.1"]),
        ("compare a -q b", "runs", ["a", "b"]),
        ("init a.csv -o x.yaml b.csv", "log", ["a.csv", "b.csv"]),
    ],
)
def test_lists_of_arguments_continue_after_options(line: str, name: str, values: list[str]) -> None:
    assert getattr(parse(line.split()), name) == values
