"""Write, compact and checkpoint an SSD store in a process that is killed again and again; run by
test_stores.py.

The killed processes are forks of this one, which never starts a thread. Importing everything again
would take seconds for each.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np

from store_conformance import new_directory, random_records
from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.embedding.stores.ssd_layout import SsdConfig
from stratarec.io.atomic import replace_directory, write_json

ROWS, RECORD_BYTES = 4000, 110


def open_store(root: Path, depth: int) -> SsdRecords:
    config = SsdConfig(segment_bytes=1 << 16, buffer_bytes=1 << 14, depth=depth)
    return SsdRecords(root / "store", rows=ROWS, record_bytes=RECORD_BYTES, config=config)


def newest(root: Path) -> Path | None:
    return max(root.glob("step-*"), default=None)


def rows_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).permutation(ROWS)[:300]


def restore(store: SsdRecords, path: Path | None) -> int:
    """Restore the checkpoint at `path` into `store` and return its step."""
    if path is None:
        return 0
    state = json.loads((path / "state.json").read_text())
    store.restore(path / "rows", state["manifest"])
    return int(state["step"])


def work(root: Path) -> None:
    """Continue from the newest checkpoint until killed."""
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover)
    store, previous = open_store(root, depth=4), newest(root)
    step = restore(store, previous)
    out = np.empty((300, RECORD_BYTES), np.uint8)
    while True:
        step += 1
        store.write(rows_of(step), random_records(rows_of(step), RECORD_BYTES, step))
        store.read(rows_of(step), out)
        if step % 3 == 0:
            temporary = new_directory(root / f".step-{step:06d}.tmp")
            manifest = store.checkpoint(new_directory(temporary / "rows"), previous and previous / "rows")
            write_json(temporary / "state.json", {"step": step, "manifest": manifest})
            final = root / f"step-{step:06d}"
            replace_directory(temporary, final)
            if previous is not None:
                shutil.rmtree(previous)
            previous = final


def verify(root: Path) -> int:
    """Check that the newest checkpoint has exactly the rows written until its step, and return the
    step.
    """
    store = open_store(root, depth=1)
    step = restore(store, newest(root))
    expected = np.zeros((ROWS, RECORD_BYTES), np.uint8)
    for number in range(1, step + 1):
        expected[rows_of(number)] = random_records(rows_of(number), RECORD_BYTES, number)
    out = np.zeros_like(expected)
    written = store.read(np.arange(ROWS), out)
    assert (written == (expected != 0).any(axis=1)).all(), f"rows are missing at step {step}"
    assert (out == expected).all(), f"records differ at step {step}"
    store.check()
    store.close()
    return step


def main(root: Path, kills: int) -> None:
    generator = random.Random(kills)
    verify(root)
    steps = [0]
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            work(root)
        time.sleep(generator.uniform(0.05, 1.0))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the victim died by itself"
        steps.append(verify(root))
    assert steps == sorted(steps), f"a newer checkpoint was lost: {steps}"
    print(json.dumps(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
