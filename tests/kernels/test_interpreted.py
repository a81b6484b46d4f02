"""Run kernels in the interpreter, which checks every index. Compiled code reads and writes out of
range silently.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
# These tests have no mark `interpreted`: helpers, teams and OpenMP (threads that only compiled code
# can start), blocks and bandwidth (system calls on addresses), distributions and full ranges (a
# thousand times slower, and no other indices than in small cases).
WHERE = ("kernels", "embedding/test_module.py")


@pytest.mark.slow
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 1 adds an int and a uint64 as floats"
)
def test_kernels_without_the_compiler_give_the_same_and_stay_in_range() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "interpreted",
    ]
    # NumPy warns of integer overflow, which hashes rely on.
    command += ["-W", "ignore::RuntimeWarning", *(str(TESTS / place) for place in WHERE)]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    passed = int(done.stdout.rpartition(" passed")[0].split()[-1])
    assert passed > 150, "the mark has been lost somewhere"
