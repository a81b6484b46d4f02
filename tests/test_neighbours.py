"""Test pairs of commands on one directory, at random times. One of the two may be stopped for a
while or killed.

Each command has a result that it could have alone, or one line of error. No output is incomplete,
no finished result is lost, and the next start removes the leftovers of a killed process.
STRATAREC_NEIGHBOURS sets the number of pairs, and STRATAREC_NEIGHBOURS_SEED draws others.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import polars as pl
import pytest
import yaml
from fuzzing.artefacts import make_log, make_recipe

from errors import check_refusal
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.training import checkpoint

PAIRS = int(os.environ.get("STRATAREC_NEIGHBOURS", "6"))
SEED = int(os.environ.get("STRATAREC_NEIGHBOURS_SEED", "11"))

COMMANDS = {
    "prepare": "prepare a.yaml --overwrite",
    "prepare other values": "prepare a.yaml --overwrite data.vocabulary.min_count=2",
    "train": "train a.yaml --overwrite",
    "resume": "train a.yaml --resume train.max_steps=14",
    "continue": "continue work/run later.parquet --publish work/serve",
    "evaluate": "evaluate work/run",
    "predict": "predict work/run later.parquet -o work/scores.parquet",
    "export": "export work/run -o work/export",
}
READERS = {"evaluate", "predict", "export"}
ALL_PAIRS = [
    pair for pair in itertools.combinations_with_replacement(COMMANDS, 2) if not READERS.issuperset(pair)
]

DISTURB = """
import os, time
command = os.getpid()
if not os.fork():
    for seconds, signal in {signals}:
        time.sleep(seconds)
        if os.getppid() == command:
            os.kill(command, signal)
    os._exit(0)
"""
KILL, STOP, CONTINUE = 9, 19, 18
LEFTOVER = re.compile(r"\.tmp$|\.replaced$|\.old$|\.preparing$|-reading-|^\.making-|^\.publishing-")


def arguments(command: str) -> list[str]:
    name, *rest = COMMANDS.get(command, command).split()
    return [name, "-q", *rest]


class Place:
    """A directory with a data set and a finished run of 8 steps, and the results of commands that
    run alone.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / "work"
        self._kept = root / "kept"
        log = pl.read_parquet(make_log(root))
        log.with_columns(pl.col("time") + log.height).write_parquet(root / "later.parquet")
        self.work.mkdir()
        content = make_recipe(root, self.work / "run", steps=8).to_dict()
        content["data"]["path"] = str(self.work / "data")
        (root / "a.yaml").write_text(yaml.safe_dump(content))
        self.fingerprints = [
            self.do(command).fingerprint() for command in ("prepare other values", "prepare")
        ]
        self.do("train")
        shutil.copytree(self.work, self._kept)
        self.finished = {self.do("continue").scores()}
        self.restore()
        self.finished |= {self.do("resume", "train.checkpoint.keep=100").scores()}
        checkpoints = checkpoint.list_checkpoints(self.work / "run" / "checkpoints")
        self.models = {self.scores_at(path) for path in checkpoints}
        self.finished |= {self.do("continue").scores()}
        self.models |= self.finished

    def restore(self) -> None:
        shutil.rmtree(self.work)
        shutil.copytree(self._kept, self.work)

    def do(self, command: str, *options: str) -> Place:
        """Run a command in this process. It must succeed."""
        assert self.run(command, *options) == 0, command
        return self

    def run(self, command: str, *options: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.root)
            return main([*arguments(command), *options])

    def fingerprint(self) -> str:
        """Read the whole data set, or the one that was moved aside when the writer of its successor
        was killed.
        """
        path = self.work / "data"
        return Dataset.open(
            path if path.exists() else self.work / ".data.replaced", verify="full"
        ).fingerprint

    def scores(self) -> bytes:
        return self.do("predict").read_scores()

    def read_scores(self) -> bytes:
        return pl.read_parquet(self.work / "scores.parquet")["score"].to_numpy().tobytes()

    def scores_at(self, path: Path) -> bytes:
        """Predict as if training had been killed after a checkpoint."""
        run = self.work / "early"
        shutil.copytree(self.work / "run", run, ignore=shutil.ignore_patterns("result.json", "step-*"))
        shutil.copytree(path, run / "checkpoints" / path.name)
        self.do("predict work/early later.parquet -o work/scores.parquet")
        shutil.rmtree(run)
        return self.read_scores()

    def run_both(self, draws: random.Random, pair: list[str]) -> list[subprocess.CompletedProcess[str]]:
        signals = draws.choice(
            ([], [(draws.random(), STOP), (draws.random(), CONTINUE)], [(draws.random() * 1.5, KILL)])
        )
        disturbed, disturb = draws.randrange(2), DISTURB.format(signals=signals)
        with ThreadPoolExecutor(2) as threads:
            running = []
            for number, command in enumerate(pair):
                before = disturb if number == disturbed else ""
                running.append(threads.submit(forked.run, arguments(command), before=before, cwd=self.root))
                time.sleep(draws.random() ** 2 * 0.8)
            return [each.result() for each in running]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("neighbours"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(PAIRS))
def test_two_commands_on_one_directory_have_the_results_of_each_alone_or_one_error(
    place: Place, number: int
) -> None:
    draws = random.Random(f"{SEED} {number}")
    pair = draws.sample(draws.choice(ALL_PAIRS), 2)
    place.restore()
    outcomes = place.run_both(draws, pair)
    print(pair, [(done.returncode, done.stderr) for done in outcomes])  # shown if the test fails
    for command, done in zip(pair, outcomes, strict=True):
        assert done.returncode in (0, 2, -KILL), done.stderr
        if done.returncode == 2:
            check_refusal("", done.stderr)
        if done.returncode == 0 and command == "predict":
            assert place.read_scores() in place.models
        if done.returncode == 0 and command == "export":
            place.do("check work/export")
    assert any(done.returncode <= 0 for done in outcomes), "both were refused"
    assert place.fingerprint() in place.fingerprints
    # Run the same commands again, alone: a run with periods is continued, every other one resumed.
    assert place.do("prepare").fingerprint() == place.fingerprints[1]
    if place.run("resume"):
        place.do("continue")
    assert place.scores() in place.finished
    place.do("check work/run")
    if "export" in pair:
        shutil.rmtree(place.work / "export", ignore_errors=True)
        place.do("export")
    if "continue" in pair:
        place.do("continue")
        for path in (place.work / "serve").iterdir():
            place.do(f"check {path}")
    left = [path for path in place.work.rglob("*") if LEFTOVER.search(path.name)]
    assert not left, left
