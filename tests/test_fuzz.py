"""Test artifacts that were damaged or changed by an attacker: each use is refused in one line that
names the file, or is valid.

A table damages every kind of file in every way. Then the content of files is changed at random and
sealed again: commands refuse it in one line, or give finite, valid results, and no kernel reads out
of range. STRATAREC_FUZZ sets the number of cases, STRATAREC_FUZZ_SEED draws others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import python
from fuzzing.artefacts import make, read, score
from fuzzing.commands import make_more

import stratarec
from stratarec.errors import StrataError
from stratarec.planning.plan import Plan
from stratarec.training.run.open_run import open_run

CASES_OF_CONTENT = int(os.environ.get("STRATAREC_FUZZ", "16"))
SEED = int(os.environ.get("STRATAREC_FUZZ_SEED", "11"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("fuzz")
    make(result)
    return result


FILES = {
    "data": ["dataset.json", "train/shard-*.parquet", "vocabulary/*.parquet"],
    "resident": ["recipe.json", "result.json", *(f"checkpoints/*/{name}" for name in (
        "state.json", "network.safetensors", "optimizer.safetensors", "tables/*/home/rows-*.safetensors"
    ))],
    "cached": ["plan.json", "checkpoints/*/tables/*/slots/rows-*.safetensors"],
    "log": ["checkpoints/*/tables/*/home/*.log"],
    "plan": ["plan.json"],
    "export": ["manifest.json", "network.safetensors", "tables.safetensors", "vocabulary/0000-*.parquet"],
}  # fmt: skip
"""Dictionary from the kind of artifact to patterns of its files; one file of each pattern is
damaged.
"""
USES: dict[str, Callable[[Path], object]] = {
    "data": lambda path: read(path, path),
    "plan": lambda path: Plan.load(path / "plan.json"),
    "export": lambda path: score(path, path),
}
HARMLESS = {
    ("resident", "result.json", "missing"),  # the run is tested again
    ("cached", "plan.json", "missing"),  # its tables are placed again
    ("plan", "plan.json", "link"),  # a user may name it
    ("log", "checkpoints/*/tables/*/home/*.log", "flipped"),  # blocks are checked when they are read
}


def opened(path: Path) -> None:
    with open_run(path):
        pass


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    # Flip a quotation mark if there is one, because a number with another last digit may mean the
    # same.
    middle = len(content) // 2
    content[max(content.find(b'"', middle), middle)] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "missing": lambda file, moved: None,
    "empty": lambda file, moved: file.touch(),
    "truncated": lambda file, moved: file.write_bytes(moved.read_bytes()[: moved.stat().st_size // 2]),
    "flipped": lambda file, moved: (shutil.copy(moved, file), flip(file)),
    "link": lambda file, moved: file.symlink_to(moved),
    "folder": lambda file, moved: file.mkdir(),
    "pipe": lambda file, moved: os.mkfifo(file),
}
"""Dictionary from the kind of damage to a function that damages a file."""


PATTERNS = [(kind, pattern) for kind in FILES for pattern in FILES[kind]]
# Distribute the kinds of damage over the kinds of files, so that each kind of file is damaged at
# least once.
CASES = sorted({(*PATTERNS[n % len(PATTERNS)], how) for n, how in enumerate([*DAMAGES] * 3)} - HARMLESS)


@pytest.mark.parametrize(("kind", "pattern", "how"), CASES)
def test_a_damaged_file_is_named(root: Path, tmp_path: Path, kind: str, pattern: str, how: str) -> None:
    copy = Path(shutil.copytree(root / kind, tmp_path / kind))
    file = min(copy.glob(pattern))
    DAMAGES[how](file, file.rename(tmp_path / "moved"))
    with pytest.raises(StrataError) as caught:
        USES.get(kind, opened)(copy)
    assert file.name in str(caught.value) or str(file.parent) in str(caught.value)
    assert "\n" not in str(caught.value)


def run_cases(root: Path, work: Path, last: int) -> list[dict[str, Any]]:
    """Return the outcome of each case.

    A process that ends in the middle of a case is a fault, and another one continues.
    """
    outcomes: list[dict[str, Any]] = []
    first = 0
    while first < last:
        command = [sys.executable, "-m", "fuzzing.worker", *map(str, (root, work, SEED, first, last))]
        paths = [str(Path(stratarec.__file__).parents[1]), str(Path(__file__).parent)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        lines = [json.loads(line) for line in ended.stdout.splitlines()]
        outcomes += [line for line in lines if "fault" in line]
        if not ended.returncode:
            break
        assert lines, ended.stderr
        assert "fault" not in lines[-1], ended.stderr  # an error of the fuzzer itself
        outcomes.append(
            {**lines[-1], "kind": "crash", "fault": f"exit {ended.returncode}: {ended.stderr[-3000:]}"}
        )
        first = lines[-1]["case"] + 1
    return outcomes


@pytest.mark.slow
def test_changed_and_sealed_files_are_valid_or_one_clear_error(root: Path, tmp_path: Path) -> None:
    make_more(root)
    outcomes = run_cases(root, tmp_path, CASES_OF_CONTENT)
    faults = [f"case {each['case']}, {each['what']}\n{each['fault']}" for each in outcomes if each["fault"]]
    assert not faults, "\n\n".join(faults)
    assert [each["case"] for each in outcomes] == list(range(CASES_OF_CONTENT))
    kinds = Counter(each["kind"] for each in outcomes)
    assert min(kinds["refused"], kinds["accepted"]) > CASES_OF_CONTENT // 10, kinds


BEYOND = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[3])
from fuzzing.guards import Guards
from stratarec.kernels.collate import spread_rows
guards = Guards()
guards.install()
guards.at_end, row = sys.argv[1] == "end", int(sys.argv[2])
words = np.arange(12, dtype=np.int32).reshape(3, 4)
found, _ = spread_rows(words, np.array([0, row], dtype=np.int32), paired=False, ids=1)
print(found.tolist())
"""


@pytest.mark.parametrize(
    ("side", "row", "status"), [("end", 2, 0), ("begin", 2, 0), ("end", 3, -11), ("begin", -1, -11)]
)
def test_a_kernel_that_reads_out_of_range_crashes(side: str, row: int, status: int) -> None:
    """Without the guards the kernel would read its content by chance."""
    ended = python(BEYOND, [side, str(row), str(Path(__file__).parent)])
    assert ended.returncode == status, ended.stderr
    assert (ended.stdout == "[0, 8, 1, 9, 2, 10, 3, 11]\n") == (status == 0)
