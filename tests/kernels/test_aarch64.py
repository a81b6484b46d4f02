"""Test that every intrinsic compiles for 64-bit ARM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "compile_aarch64.py"


def compile_intrinsics(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *options], check=False, capture_output=True, text=True)


@pytest.mark.slow
def test_every_intrinsic_compiles_for_arm() -> None:
    done = compile_intrinsics()
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]


@pytest.mark.slow
def test_an_instruction_that_only_x86_has_is_noticed() -> None:
    """Seen as x86, `pause` is such an instruction."""
    done = compile_intrinsics("--only", "atomics.pause", "--machine", "x86_64")
    assert done.returncode != 0
    assert "llvm.x86" in done.stderr
