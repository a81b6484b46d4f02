"""Write the samples of one version of all file formats: `python tests/formats/make.py
tests/formats/1`.

Each later version must read them (`test_formats_last.py`). So samples are written once for a
version of the formats, and are never changed afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import polars as pl
import yaml

from stratarec import Scorer
from stratarec.cli import main

ROWS = 600


def rows(seed: int) -> pl.DataFrame:
    """Return rows of a log with a number, categories, a list and a date."""
    draws = np.random.default_rng(seed)
    item = draws.integers(0, 30, ROWS)
    start = 1_700_000_000 + seed * 86_400
    return pl.DataFrame(
        {
            "time": start + np.sort(draws.integers(0, 86_400, ROWS)),
            "user": [f"u{user}" for user in draws.integers(0, 200, ROWS)],
            "item": [f"i{number}" for number in item],
            "tags": [f"t{number % 3}|t{number % 5}" for number in item],
            "price": (item * 1.5 + draws.normal(0, 0.1, ROWS)).round(2),
            "click": (draws.random(ROWS) < 0.1 + 0.02 * item).astype(int),
        }
    )


RECIPE = {
    "name": "sample",
    "data": {
        "path": "data",
        "source": {
            "kind": "csv",
            "paths": ["log.csv"],
            "schema": {
                "label": "click",
                "time": "time",
                "user": "user",
                "dense": [{"name": "price"}],
                "sparse": [
                    {"name": "user"},
                    {"name": "item"},
                    {"name": "tags", "kind": "multi", "separator": "|"},
                ],
            },
        },
        "split": {"by": "time", "valid": "3h", "test": "3h"},
    },
    "model": {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
    "memory": {"precision": "int8", "cache": {"fraction": 0.5, "ways": 4}},
    "train": {"run": "run", "batch_size": 64, "epochs": 1, "report": False, "curves": [], "refit": True},
}


def call(*command: str) -> None:
    """Run a command of StrataRec; it must succeed."""
    assert main([*command, "-q"]) == 0, command


def write(folder: Path) -> None:
    """Write all samples into a new folder."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    rows(0).write_csv("log.csv")
    # A few rows: a delta is written if at most a quarter of the tables changed.
    rows(1).head(6).write_csv("later.csv")
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    call("prepare", "recipe.yaml")
    call("train", "recipe.yaml")
    call("export", "run", "-o", "export")
    call("continue", "run", "later.csv")
    call("export", "run", "-o", "later", "--since", "export")
    call("tune", "recipe.yaml", "--space", "train.batch_size=choice(32,64)", "--trials", "1", "-o", "study")
    scorer = Scorer.open("export", runtime="torch")
    log = pl.read_csv("later.csv")
    scores = {"export": scorer.score(log).tolist()}
    scorer.update("later.delta")
    scores["later"] = Scorer.open("later", runtime="torch").score(log).tolist()
    Path("scores.json").write_text(json.dumps(scores))


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
