"""Kernels run by the interpreter, which checks every index; compiled code reads and writes beyond arrays silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# What the mark `interpreted` leaves out in these directories, and why:
#   helpers, teams of several, OpenMP     threads that only compiled code can start
#   blocks, bandwidth                     system calls on addresses
#   distributions and whole ranges        a thousand times as slow, and no other index than the small cases
WHERE = ("kernels", "embedding/test_module.py")


@pytest.mark.slow
def test_kernels_give_the_same_without_the_compiler_and_index_nothing_that_is_not_there() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "interpreted"]
    # NumPy warns of integers that wrap around, as hashes do.
    command += ["-W", "ignore::RuntimeWarning", *(str(TESTS / place) for place in WHERE)]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    passed = int(done.stdout.rpartition(" passed")[0].split()[-1])
    assert passed > 150, "the mark has been lost somewhere"
