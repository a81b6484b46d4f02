"""A tiny recipe that tests prepare and train, and what they ask of its runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stratarec.embedding.checkpoint.transfer import saved_rows
from stratarec.io.tensors import read_tensors
from stratarec.training import checkpoint

KILLS = int(os.environ.get("STRATAREC_KILLS", "1"))
"""How often the tests that kill a run do so."""

DISK_BYTES = 4 << 20
"""Of the fixture `small_disk`."""


def fill_disk(path: Path, free: int) -> None:
    """Leave `free` bytes on a small disk, by a file at its top."""
    used = sum(file.stat().st_blocks * 512 for file in path.parent.rglob("*"))
    with path.open("wb") as file:
        file.write(bytes(DISK_BYTES - used - free))


def tiny(root: Path, **train: Any) -> dict[str, Any]:
    """A recipe of a few thousand samples under `root`; `train` changes its training section.

    Without a report, whose drawing takes as long as the training.
    """
    return {
        "name": "tiny",
        "data": {
            "path": str(root / "data"),
            "source": {"kind": "synthetic", "samples": 6000, "scale": 0.0005, "seed": 3},
            "split": {"by": "fraction", "valid": 0.1, "test": 0.2},
            "shard_samples": 2000,
        },
        "model": {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
        "train": {
            "run": str(root / "run"),
            "batch_size": 128,
            "epochs": 2,
            "eval_every": 20,
            "log_every": 5,
            "report": False,
            "shuffle_row_groups": 2,
            "checkpoint": {"every_steps": 7, "keep": 2},
            **train,
        },
    }


def last(target: Path) -> Path:
    return checkpoint.steps(target / "checkpoints")[-1]


def assert_same_model(one: Path, other: Path) -> None:
    for name in ("network.safetensors", "optimizer.safetensors"):
        left, right = read_tensors(one / name), read_tensors(other / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    tables, others = table_values(one), table_values(other)
    assert tables.keys() == others.keys()
    for name, values in tables.items():
        np.testing.assert_array_equal(values, others[name], err_msg=name)


def table_values(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Weights and state of every row of a checkpoint; NaN for rows that were never written."""
    found = {}
    for manifest in checkpoint.read_state(path)["tables"]["groups"]:
        total = sum(rows for _, rows, *_ in manifest["tables"])
        for rows, found_rows in saved_rows(path / "tables" / manifest["name"], manifest):
            for part in ("weights", "row_state", "full_state", "clock"):
                values = getattr(found_rows, part)
                if len(values):
                    name = f"{manifest['name']}.{part}"
                    share = len(values) // len(rows)
                    target = found.setdefault(name, np.full((total, share), np.nan, np.float32))
                    target[rows] = values.reshape(-1, share)
    return found


def start(path: Path, *options: str) -> subprocess.Popen[bytes]:
    """`stratarec train --resume` of a recipe, in a process of its own."""
    command = [sys.executable, "-m", "stratarec", "train", "-q", "--resume", str(path), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
