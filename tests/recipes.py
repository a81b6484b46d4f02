"""A tiny recipe that tests prepare and train."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny(root: Path, **train: Any) -> dict[str, Any]:
    """A recipe of a few thousand samples under `root`; `train` changes its training section."""
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
            "window_row_groups": 2,
            "checkpoint": {"every_steps": 7, "keep": 2},
            **train,
        },
    }
