"""Test that `prepare` and every report of a run name features that reveal the label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from recipes import log_config, tiny
from stratarec.cli import main
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.splits import SplitConfig

ROWS = 3000
KNOWS = {
    "paid": "filled only where click is 1: known only afterwards?",
    "dwell": "AUC 1.000 against click alone: determines the label",
    "row": "AUC 1.000 against click alone: determines the label",
    "rank": "against click alone: a leak, unless it is known before the event",
}


def frame() -> pl.DataFrame:
    """Return a log sorted by label, with row ids, a duration, a payment, and an item that does not
    reveal the label.
    """
    draws = np.random.default_rng(1)
    click = np.sort(draws.random(ROWS) < 0.1).astype(int)
    return pl.DataFrame(
        {
            "click": click,
            "like": draws.integers(0, 2, ROWS),
            "item": draws.integers(0, 40, ROWS),
            "price": draws.normal(size=ROWS),
            "tags": [list(range(row % 3)) for row in range(ROWS)],
            "paid": pl.Series(np.where(click & (draws.random(ROWS) < 0.6), 1.5, np.nan)).fill_nan(None),
            "dwell": click * 10 + draws.random(ROWS),
            "row": [f"r{row}" for row in range(ROWS)],
            "rank": draws.normal(click * 2.7),
        }
    )


def features(*left_out: str) -> dict[str, Any]:
    dense = [{"name": name} for name in ("price", "paid", "dwell", "rank") if name not in left_out]
    sparse = [{"name": "item"}, {"name": "tags", "kind": "multi"}, {"name": "row"}]
    return {"dense": dense, "sparse": [each for each in sparse if each["name"] not in left_out]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recipe of a log with leaks and the output of its commands."""
    root = tmp_path_factory.mktemp("leaks")
    frame().write_parquet(root / "log.parquet")
    config = tiny(root, max_steps=5, report=True)
    schema = {"label": "click", **features()}
    config["data"]["source"] = {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": schema}
    (root / "r.yaml").write_text(yaml.safe_dump(config))
    return root


def test_prepare_and_every_report_names_leaks(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(home / "run")
    for command in (
        ["prepare", str(home / "r.yaml")],
        ["train", str(home / "r.yaml")],
        ["evaluate", run],
        ["evaluate", run, str(home / "log.parquet")],
    ):
        assert main([*command, "-q"]) == 0
        output = " ".join(capsys.readouterr().out.split())
        assert output.count("a leak? ") == len(KNOWS), command
        assert all(f"a leak? {name}: " in output and text in output for name, text in KNOWS.items()), (
            command
        )
    page = (home / "run" / "report.html").read_text()
    assert page.count("a leak? ") == len(KNOWS)
    assert main(["check", str(home / "data")]) == 0


@pytest.mark.parametrize("shard_samples", [ROWS, 100])
def test_leaks_are_searched_in_all_parts_of_a_log_and_for_every_label(
    tmp_path: Path, shard_samples: int
) -> None:
    schema = Schema(
        labels=("like", "click"),
        dense=(DenseFeature(name="price"), DenseFeature(name="dwell")),
        sparse=(SparseFeature(name="item"),),
    )
    # Only the last tenth is positive, so no part of the log has both classes.
    config = log_config(
        tmp_path, schema, frame(), shard_samples=shard_samples, split=SplitConfig(valid=0.2, test=0.0)
    )
    assert [leak.feature for leak in prepare(config).about.leaks] == ["dwell"]
