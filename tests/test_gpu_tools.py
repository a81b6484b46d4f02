"""The checks for a machine with a GPU, at tiny sizes on the CPU, with kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools" / "gpu"

if not TOOLS.is_dir():
    pytest.skip("an installed package has no tools", allow_module_level=True)
pytest.importorskip("triton")


def run(*command: str, **variables: str) -> str:
    """Return the output of a command, whose ``python3`` is the one of the tests."""
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(str(each) for each in (ROOT / "src", ROOT / "tests", TOOLS, ROOT)), **variables,
    }  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_kernels_compile_for_a_gpu_without_spilling_and_with_exact_division() -> None:
    # The interpreter accepts Python that the compiler refuses.
    lines = run(sys.executable, str(TOOLS / "compile.py"), TRITON_INTERPRET="0").splitlines()
    assert len(lines) == 13, lines


@pytest.mark.slow
def test_slots_of_the_prototype_agree_with_those_of_the_cpu() -> None:
    lines = run(sys.executable, str(TOOLS / "slots.py")).splitlines()
    # Interpreted kernels have the CPU's bits; torch sums the gradients of per-sample weights, of workload 0 alone.
    assert [line.split(": ")[1].split()[0] for line in lines] == ["12", "0", "0"], lines
