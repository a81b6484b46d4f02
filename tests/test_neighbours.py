"""Two processes on one directory, begun, stopped and killed at random moments.

Each gives what it would have given alone, or says in one line that it cannot. Never a mixture, never a finished result
that is lost, no leftovers that the next start does not remove. STRATAREC_NEIGHBOURS asks for more pairs.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing.artefacts import ROWS, TIERS, make_log, place_tables, recipe
from neighbours.commands import Command, Outcome, interleave, server, warm

from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.io.atomic import read_frame
from stratarec.recipe import Recipe
from stratarec.training import checkpoint

PAIRS = int(os.environ.get("STRATAREC_NEIGHBOURS", "5"))
SEED = int(os.environ.get("STRATAREC_NEIGHBOURS_SEED", "11"))
STEPS = 8


@dataclass
class Place:
    """A folder with a log, recipes, and what comes of them alone."""

    root: Path
    context: ForkServerContext
    alone: dict[str, Any] = field(default_factory=dict)

    def write(self, name: str, min_count: int, memory: dict[str, Any] | None = None) -> Recipe:
        """A recipe file."""
        content = recipe(self.root, self.root / "run", steps=STEPS, memory=memory).to_dict()
        content["train"]["threads"] = 1
        content["data"]["vocabulary"]["min_count"] = min_count
        (self.root / f"{name}.yaml").write_text(yaml.safe_dump(content))
        return Recipe.from_dict(content)

    @property
    def result(self) -> dict[str, Any] | None:
        """Of the run, or of the one that waits while another takes its place."""
        for folder in ("run", ".run.replaced"):
            path = self.root / folder / "result.json"
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text())
                return found
        return None

    def run(self, *arguments: str) -> Outcome:
        return Command(self.context, arguments, self.root / "alone").outcome()

    def do(self, *arguments: str) -> Outcome:
        found = self.run(*arguments)
        assert found.code == 0, str(found)
        return found

    def save(self, name: str) -> None:
        """Keep `name` to start from."""
        shutil.copytree(self.root / name, self.root / "kept" / name, dirs_exist_ok=True)

    def bring_back(self, *names: str) -> None:
        """Begin with nothing but what was kept under `names`."""
        for path in self.root.iterdir():
            if path.name.startswith((".", "run", "data", "scores", "export", ROWS)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in names:
            shutil.copytree(self.root / "kept" / name, self.root / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    memory = Path("/dev/shm")  # commands sync all that they write
    root = Path(tempfile.mkdtemp(prefix="stratarec-neighbours-", dir=memory if memory.is_dir() else None))
    try:
        yield _made(root)
    finally:
        shutil.rmtree(root)


def _made(root: Path) -> Place:
    make_log(root)
    a, b = str(root / "a.yaml"), str(root / "b.yaml")
    place = Place(root, server())
    place.write("a", 1)
    place.write("b", 2)
    with redirect_stdout(StringIO()):
        assert main(["prepare", "-q", a]) == 0
    place.save("data")
    made = place.write("log", 1, {**TIERS, "block": {"path": str(root / ROWS), "budget": "64MiB"}})
    plan = place_tables("log", made)
    assert plan is not None
    plan.save(root / "log.plan")
    warm(Path(a))
    for name, *options in (("a", a), ("seed", a, "train.seed=5"), ("longer", a, "train.max_steps=14")):
        place.do("train", "-q", *options, f"train.run={root / name}")
        place.alone[name] = json.loads((root / name / "result.json").read_text())["test"]
    (root / "a").rename(root / "run")
    place.save("run")
    place.alone["fingerprint a"] = Dataset.open(root / "data").fingerprint
    place.do("prepare", "-q", b, "--overwrite")
    place.alone["fingerprint b"] = Dataset.open(root / "data").fingerprint
    place.do("train", "-q", b, f"train.run={root / 'b'}")
    place.alone["b"] = json.loads((root / "b" / "result.json").read_text())["test"]
    return place


Pair = Callable[[Place, random.Random], None]


def _settled(place: Place, outcomes: list[Outcome]) -> None:
    """Each command has ended, with a result or with one line that says why not."""
    for found in outcomes:
        if found.code in (0, -9):
            continue
        lines = found.complained.splitlines()
        assert found.code == 2, str(found)
        assert len(lines) == 1, str(found)
        assert lines[0].startswith("stratarec: "), str(found)
        assert str(place.root) in lines[0] or "data." in lines[0], str(found)


def _no_leftovers(place: Place) -> None:
    left = [
        str(path.relative_to(place.root))
        for path in place.root.rglob("*")
        if re.search(r"\.tmp$|\.replaced$|\.old$|\.preparing$|-reading-|^\.making-", path.name)
    ]
    assert not left, left


def _train_beside_train(place: Place, draws: random.Random) -> None:
    finished = draws.random() < 0.6
    place.bring_back("data", *(["run"] if finished else []))
    a = str(place.root / "a.yaml")
    lines = [
        ("train", "-q", a, *draws.choice(([], ["--resume"], ["--overwrite"])), *draws.choice(([], ["train.seed=5"])))
        for _ in range(2)
    ]
    outcomes = interleave(place.context, draws, *lines, place.root)
    _settled(place, outcomes)
    result = place.result
    if finished or any(found.code == 0 for found in outcomes):
        assert result is not None or list((place.root / "run").glob("checkpoints/step-*/state.json")), "a lost result"
    if not finished and not any(found.code == -9 for found in outcomes):
        assert any(found.code == 0 for found in outcomes)
    again = place.run("train", "-q", a, "--resume")
    if again.code:
        again = place.do("train", "-q", a, "--resume", "train.seed=5")
    assert place.result is not None
    name = "seed" if "train.seed=5" in again.arguments else "a"
    assert place.result["test"] == place.alone[name], str(again)
    if result is not None and place.result["samples_per_second"] == result["samples_per_second"]:
        assert "has ended; this is its result" in again.said or "model" in again.said
    _no_leftovers(place)


def _prepare_beside_prepare(place: Place, draws: random.Random) -> None:
    place.bring_back(*(["data"] if draws.random() < 0.5 else []))
    there = (place.root / "data").exists()
    lines = [
        ("prepare", "-q", str(place.root / f"{draws.choice('ab')}.yaml"), *draws.choice(([], ["--overwrite"])))
        for _ in range(2)
    ]
    outcomes = interleave(place.context, draws, *lines, place.root)
    _settled(place, outcomes)
    if there or any(found.code == 0 for found in outcomes):
        waiting = place.root / ".data.replaced"
        path = place.root / "data" if (place.root / "data").exists() else waiting
        _whole(place, path)
    place.do("prepare", "-q", str(place.root / "a.yaml"), "--overwrite")
    assert _whole(place, place.root / "data") == "a"
    _no_leftovers(place)


def _whole(place: Place, path: Path) -> str:
    """Which of the two data sets is in `path`, every byte of it."""
    found = Dataset.open(path, verify="full").fingerprint
    return next(name for name in "ab" if place.alone[f"fingerprint {name}"] == found)


def _reader(place: Place, draws: random.Random) -> tuple[str, ...]:
    run = str(place.root / "run")
    return draws.choice((
        ("evaluate", "-q", run),
        ("predict", "-q", run, "-o", str(place.root / "scores.parquet")),
        ("export", "-q", run, "-o", str(place.root / "export")),
    ))  # fmt: skip


def _read_beside_train(place: Place, draws: random.Random) -> None:
    place.bring_back("data", "run")
    if draws.random() < 0.3:
        (place.root / "run" / "result.json").unlink()
    a, longer = str(place.root / "a.yaml"), "train.max_steps=14"
    how = draws.choice((["--resume", longer], ["--resume", longer], ["--overwrite"]))
    lines = [("train", "-q", a, *how), _reader(place, draws)]
    draws.shuffle(lines)
    outcomes = interleave(place.context, draws, *lines, place.root)
    _settled(place, outcomes)
    for found in outcomes:
        if found.code == 0 and found.arguments[0] != "train":
            _check_read(place, found)
        elif found.code == 2 and how[0] == "--resume":
            raise AssertionError(f"disturbed: {found}")
    place.do("train", "-q", a, "--resume", longer)
    assert place.result is not None
    assert place.result["test"] == place.alone["longer"]
    # What was killed may have left a file in a folder that is not ours, where nothing is removed that was not made.
    for path in (*place.root.glob(".export.*.tmp"), *place.root.glob(".scores.*.tmp")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    _no_leftovers(place)


def _check_read(place: Place, found: Outcome) -> None:
    """What a reader gave is of one checkpoint: one that the training between 2 steps and the end has."""
    if "checkpoints" not in place.alone:
        place.alone["checkpoints"] = _by_checkpoint(place)
    known = place.alone["checkpoints"]
    if found.arguments[0] == "evaluate":
        assert _figures(found) in known["evaluate"], str(found)
    elif found.arguments[0] == "predict":
        assert _scores(place.root / "scores.parquet") in known["predict"]
    else:
        assert _exported(place.root / "export") in known["export"]


def _figures(found: Outcome) -> list[str]:
    """What an evaluation said, but why it took its checkpoint: the end of a run may be its best where it is the end."""
    return [line for line in found.said.splitlines() if not line.startswith("model: ")]


def _scores(path: Path) -> list[float]:
    found: list[float] = read_frame(path)["score"].to_list()
    return found


def _exported(path: Path) -> list[bytes]:
    return [(path / name).read_bytes() for name in ("tables.safetensors", "network.safetensors")]


def _by_checkpoint(place: Place) -> dict[str, list[Any]]:
    """What each reader gives of each checkpoint that a training of these steps ever has."""
    root, run = place.root, place.root / "reference"
    if not run.exists():
        keep = ["train.max_steps=14", "train.checkpoint.keep=100", f"train.run={run}"]
        place.do("train", "-q", str(root / "a.yaml"), *keep)
    known: dict[str, list[Any]] = {"evaluate": [], "predict": [], "export": []}
    for path in checkpoint.list_checkpoints(run / "checkpoints"):
        one = root / "one"
        shutil.copytree(run, one, ignore=shutil.ignore_patterns("result.json", "step-*"))
        shutil.copytree(path, one / "checkpoints" / path.name)
        known["evaluate"].append(_figures(place.do("evaluate", "-q", str(one))))
        place.do("predict", "-q", str(one), "-o", str(one / "scores.parquet"))
        known["predict"].append(_scores(one / "scores.parquet"))
        place.do("export", "-q", str(one), "-o", str(one / "export"))
        known["export"].append(_exported(one / "export"))
        shutil.rmtree(one)
    return known


def _train_beside_prepare(place: Place, draws: random.Random) -> None:
    place.bring_back("data", "run")
    reading = draws.random() < 0.4
    a, b = (str(place.root / f"{name}.yaml") for name in "ab")
    user = ("evaluate", "-q", str(place.root / "run")) if reading else ("train", "-q", a, "--overwrite")
    lines = [user, ("prepare", "-q", draws.choice((a, b)), "--overwrite")]
    draws.shuffle(lines)
    outcomes = interleave(place.context, draws, *lines, place.root)
    _settled(place, outcomes)
    for found in outcomes:
        if found.code == 0 and found.arguments[0] == "train":
            assert place.result is not None
            assert place.result["test"] == place.alone["a"], str(found)
    place.do("prepare", "-q", a, "--overwrite")
    assert _whole(place, place.root / "data") == "a"
    place.do("train", "-q", a, "--resume")
    assert place.result is not None
    assert place.result["test"] == place.alone["a"]
    _no_leftovers(place)


def _runs_in_one_memory(place: Place, draws: random.Random) -> None:
    place.bring_back("data")
    train = ("train", "-q", str(place.root / "log.yaml"), "--plan", str(place.root / "log.plan"))
    lines = [(*train, f"train.run={place.root / name}") for name in ("run", "run2")]
    outcomes = interleave(place.context, draws, *lines, place.root)
    _settled(place, outcomes)
    results = []
    for name in ("run", "run2"):
        place.do(*train, f"train.run={place.root / name}", "--resume")
        results.append(json.loads((place.root / name / "result.json").read_text())["test"])
    assert results[0] == results[1]
    assert place.alone.setdefault("log", results[0]) == results[0]
    _no_leftovers(place)


PAIRINGS: list[Pair] = [
    _train_beside_train, _prepare_beside_prepare, _read_beside_train, _train_beside_prepare, _runs_in_one_memory,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("pairing", PAIRINGS, ids=lambda pairing: pairing.__name__.strip("_"))
def test_two_processes_never_make_a_mixture_and_lose_nothing(place: Place, pairing: Pair) -> None:
    pairs = PAIRS // len(PAIRINGS)
    # The kernels of logs are compiled in every process.
    for number in range(-(-pairs // 8) if pairing is _runs_in_one_memory else pairs):
        draws = random.Random(f"{SEED} {pairing.__name__} {number}")
        try:
            pairing(place, draws)
        except AssertionError as error:
            raise AssertionError(f"pair {number}: {error}") from error
