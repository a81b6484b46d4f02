"""Test that this version reads the files of every earlier version of the formats, which `make.py`
wrote.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from stratarec import Dataset, Scorer
from stratarec.cli import main

VERSIONS = sorted(path for path in Path(__file__).parent.iterdir() if path.name.isdecimal())
LARGEST = 2 << 20
"""Maximum size of the samples of a version in bytes."""


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def samples(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the samples of one version, which is the working directory."""
    folder = Path(shutil.copytree(request.param, tmp_path / "samples"))
    monkeypatch.chdir(folder)
    return folder


def test_samples_are_small() -> None:
    assert VERSIONS
    for version in VERSIONS:
        assert sum(path.stat().st_size for path in version.rglob("*") if path.is_file()) < LARGEST


def test_every_format_is_read(samples: Path) -> None:
    for name in ("data", "run", "export", "later", "study"):
        assert main(["check", "-q", name]) == 0, name
    assert Dataset.open("data").samples("train") > 0
    # The network is computed by another processor, so its last bits may differ.
    scores, log = json.loads(Path("scores.json").read_text()), pl.read_csv("later.csv")
    for name in ("export", "later"):
        scorer = Scorer.open(name, runtime="torch")
        np.testing.assert_allclose(scorer.score(log), scores[name], rtol=0, atol=1e-6)
    assert main(["predict", "-q", "run", "later.csv", "-o", "scores.parquet"]) == 0
    predicted = pl.read_parquet("scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(predicted, scores["later"], rtol=0, atol=1e-6)


def test_a_delta_is_applied_and_a_continued_run_continues(samples: Path) -> None:
    log = pl.read_csv("later.csv")
    scorer = Scorer.open("export", runtime="torch")
    scorer.update("later.delta")
    np.testing.assert_array_equal(scorer.score(log), Scorer.open("later", runtime="torch").score(log))
    log.with_columns(pl.col("time") + 86_400).write_csv("next.csv")
    assert main(["continue", "-q", "run", "next.csv"]) == 0
    assert main(["export", "-q", "run", "-o", "next"]) == 0


def test_a_file_of_a_newer_version_is_refused(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The advice is never to write it again."""
    sealed = [
        path
        for path in sorted(Path().rglob("*.json"))
        if path.name not in ("scores.json", "stratarec.json")
    ]
    for path in sealed:
        if path.parts[:2] == ("run", "periods"):  # the hash of the period is wrong before the file is read
            continue
        text = path.read_text()
        content = json.loads(text)
        path.write_text(json.dumps({**content, "format": content["format"] + 1}))
        assert main(["check", "-q", path.parts[0]]) == 2, path
        line = capsys.readouterr().err
        expected = f"{path}: format {content['format'] + 1}, which a newer version of StrataRec writes"
        assert expected in line
        assert line.endswith("; upgrade StrataRec\n")
        path.write_text(text)
