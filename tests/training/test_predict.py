"""Test that scores can be joined to the log, for a run in which every feature is in a group or a
history.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from errors import missing
from recipes import tiny
from stratarec.cli import main
from stratarec.data.dataset import writer as storage
from stratarec.progress import SilentProgress
from stratarec.training.evaluate import ScoredSamples, logits
from stratarec.training.run.open_run import open_run


def write_logs(root: Path) -> dict[str, pl.DataFrame]:
    """Write two files with a bad row each. The samples of a session are scattered over both."""
    draws, logs = np.random.default_rng(0), {}
    for name in ("a", "b"):
        visit = draws.integers(0, 60, 900)
        logs[name] = pl.DataFrame(
            {
                "label": [7, *draws.integers(0, 2, 899)],
                "visit": visit,
                "who": visit % 13,
                "time": draws.integers(0, 10_000, 900),
                "os": visit % 4,
                "city": [f"c{number % 7}" for number in visit],
            }
        )
        logs[name].write_parquet(root / f"{name}.parquet", row_group_size=250)
    return logs


def make_config(root: Path, **data: Any) -> dict[str, Any]:
    content = tiny(root, max_steps=12, epochs=1)
    schema = {
        "label": "label",
        "session": "visit",
        "user": "who",
        "time": "time",
        "sparse": [
            {"name": "os", "group": "visit_", "vocabulary": "systems"},
            {"name": "city", "group": "visit_"},
            {"name": "history", "kind": "history", "of": "os", "max_length": 5},
        ],
    }
    content["data"] |= {
        "source": {
            "kind": "parquet",
            "paths": [str(root / "a.parquet"), str(root / "b.parquet")],
            "schema": schema,
        },
        "on_bad_row": "skip",
        "shard_samples": 500,
        **data,
    }
    return content


@pytest.fixture
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "ROW_GROUP", 60)


@pytest.mark.usefixtures("small_row_groups")
def test_scores_join_to_their_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = write_logs(tmp_path)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(make_config(tmp_path)))
    assert main(["prepare", "-q", str(tmp_path / "r.yaml")]) == 0
    # There are more row groups than a window holds, and no feature outside groups and histories.
    assert main(["train", "-q", str(tmp_path / "r.yaml")]) == 0
    assert main(["profile", str(tmp_path / "data"), "--batch-size", "100"]) == 0
    actual = []
    for split in ("train", "valid", "test"):
        assert (
            main(
                [
                    "predict",
                    "-q",
                    str(tmp_path / "run"),
                    "--split",
                    split,
                    "-o",
                    str(tmp_path / "s.parquet"),
                ]
            )
            == 0
        )
        actual.append(pl.read_parquet(tmp_path / "s.parquet"))
        with open_run(tmp_path / "run") as trained:
            assert sum(len(shard.row_groups) for shard in trained.dataset.shards("train")) > 8
            parts = logits(
                trained.model, trained.dataset, split, precision="float32", progress=SilentProgress()
            )
            scores = np.concatenate(
                [
                    1 / (1 + np.exp(-part.logit.astype(np.float64)))
                    for part in map(ScoredSamples.joined, parts)
                ]
            )
        np.testing.assert_array_equal(actual[-1]["score"], scores.astype(np.float32))
    whole = pl.concat(actual)
    assert whole.columns == ["file", "row", "label", "score"]
    rows = [
        log.with_columns(pl.lit(str(tmp_path / f"{name}.parquet")).alias("file")).with_row_index("row", 1)
        for name, log in logs.items()
    ]
    joined = whole.join(
        pl.concat(rows).cast({"row": pl.Int64}), on=["file", "row"], how="full", suffix="_log"
    )
    # Every row except the two bad ones has one score, and its label from the log.
    assert joined.filter(pl.col("score").is_null())["label_log"].to_list() == [7, 7]
    assert len(joined) == 1800
    assert whole.select("file", "row").is_unique().all()
    good = joined.drop_nulls("score")
    assert good["label"].cast(int).to_list() == good["label_log"].to_list()
    # One user, session and time mean one history and one group, so equal rows of the log have equal
    # scores.
    alike = good.group_by("who", "visit", "time").agg(pl.col("score").n_unique())
    assert alike["score"].to_list() == [1] * len(alike)
    capsys.readouterr()
    # By user and by session, whose numbers are read from the data set.
    keys, run = pl.concat(rows).cast({"row": pl.Int64}), str(tmp_path / "run")
    split = actual[0].join(keys, on=["file", "row"])
    top = tmp_path / "top.parquet"
    for by, column in (("user", ["who"]), ("session", ["visit"])):
        assert (
            main(["predict", "-q", run, "--split", "train", "--top", "2", "--by", by, "-o", str(top)]) == 0
        )
        best = pl.read_parquet(top).join(keys, on=["file", "row"], maintain_order="left")
        expected = (
            split.sort("score", descending=True).group_by(column).agg(pl.col("score").head(2)).sort(column)
        )
        assert best.group_by(column, maintain_order=True).agg("score").sort(column).equals(expected)
        assert (best["rank"] == 1).sum() == len(expected)
        assert main(["evaluate", "-q", run, "--split", "train", "--rank-by", by]) == 0
        assert not missing(f"train {by} {len(expected)}", capsys.readouterr().out)
