"""Compare hashes of texts with those of the library xxhash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from stratarec.kernels.raw_values.text_hash import hash_texts

# The algorithm treats lengths up to 3, 8, 16, 128 and 240 and longer texts differently; these in
# blocks of 1,024.
LENGTHS = [
    *range(260),
    *range(1000, 1100, 3),
    *range(2040, 2060),
    3 * 1024,
    3 * 1024 + 1,
    3 * 1024 + 64,
    5000,
]


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_hashes_match_the_library() -> None:
    draws = np.random.default_rng(1)
    texts = [draws.bytes(length) for length in LENGTHS] + [bytes(length) for length in LENGTHS[::7]]
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    hashes = hash_texts(np.frombuffer(b"".join(texts), dtype=np.uint8), offsets)
    assert hashes.tolist() == [xxhash.xxh3_64_intdigest(text) for text in texts]


def test_no_text_has_no_hash() -> None:
    assert hash_texts(np.frombuffer(b"\0", dtype=np.uint8), np.zeros(1, dtype=np.int64)).shape == (0,)


CALLED_BY_A_BODY = """
import numpy as np
from numba import njit
from stratarec.kernels.raw_values.text_hash import hash_text
from stratarec.kernels.runtime.outline import BODY

@njit(**{**BODY, "cache": False})
def body(content, hashes):
    hashes[0] = hash_text(content, 0, len(content))

@njit
def kernel(content, hashes):
    body(content, hashes)

hashes = np.empty(1, np.uint64)
kernel(np.zeros(300, np.uint8), hashes)
print(hashes[0])
"""


@pytest.mark.slow
def test_hashes_are_compiled_first_for_a_caller_that_counts_no_references(tmp_path: Path) -> None:
    """So does a service whose columns are integers, on a machine where no kernel was compiled."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", CALLED_BY_A_BODY],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout) == xxhash.xxh3_64_intdigest(bytes(300))
