"""Whenever the process is killed, the newest whole checkpoint restores exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import KILLS


def killed(tmp_path: Path, kills: int) -> list[int]:
    script = Path(__file__).with_name("killed.py")
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, script, tmp_path, str(kills)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    assert found.returncode == 0, found.stderr
    steps: list[int] = json.loads(found.stdout)
    return steps


@pytest.mark.slow
def test_the_newest_checkpoint_survives_kills(tmp_path: Path) -> None:
    steps = killed(tmp_path, KILLS)
    assert len(set(steps)) > KILLS // 5, f"the victims hardly got to write anything: {steps}"
