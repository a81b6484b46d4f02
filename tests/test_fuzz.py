"""Artefacts that were damaged or made up: what comes of each is what came of it before, or one clear error.

Never another exception, a crash, a hang, a GiB of memory, another result, or a change outside the artefact. Cases are
drawn by a seed; STRATAREC_FUZZ asks for more of them, STRATAREC_FUZZ_SEED for others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fuzzing.artefacts import make

import stratarec

CASES = int(os.environ.get("STRATAREC_FUZZ", "20"))
SEED = int(os.environ.get("STRATAREC_FUZZ_SEED", "11"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("fuzz")
    make(found)
    return found


def run_cases(root: Path, work: Path, first: int, last: int) -> list[dict[str, Any]]:
    """What came of each case; a process that ended in the middle of one is its fault, and another goes on."""
    found: list[dict[str, Any]] = []
    while first < last:
        command = [sys.executable, "-m", "fuzzing.worker", *map(str, (root, work, SEED, first, last))]
        paths = [str(Path(stratarec.__file__).parents[1]), str(Path(__file__).parent)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        lines = [json.loads(line) for line in ended.stdout.splitlines()]
        found += [line for line in lines if "fault" in line]
        if not ended.returncode:
            break
        assert lines, ended.stderr
        assert "fault" not in lines[-1], ended.stderr  # of the fuzzer itself
        found.append({**lines[-1], "kind": "crash", "fault": f"exit {ended.returncode}: {ended.stderr[-3000:]}"})
        first = lines[-1]["case"] + 1
    return found


@pytest.mark.slow
def test_whatever_is_damaged_is_the_same_or_one_clear_error(root: Path, tmp_path: Path) -> None:
    found = run_cases(root, tmp_path, 0, CASES)
    faults = [f"case {each['case']}, {each['what']}\n{each['fault']}" for each in found if each["fault"]]
    assert not faults, "\n\n".join(faults)
    assert [each["case"] for each in found] == list(range(CASES))
    kinds = Counter(each["kind"] for each in found)
    assert min(kinds["refused"], kinds["same"]) > CASES // 10, kinds
