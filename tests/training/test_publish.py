"""Test what a continued run publishes for serving and monitoring: deltas, a page, and an exit
code.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from training.test_continual import assert_same_period, begin, files_of
from training.test_eviction import EVICT

from errors import missing, refuses
from recipes import KILLS
from stratarec import Scorer
from stratarec.cli import main
from stratarec.errors import ExportError
from stratarec.training.export import publish as publishing
from stratarec.training.export import write_delta
from stratarec.training.run import periods
from stratarec.training.run.run_directory import read_recipe


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    begin(root)
    return root


def open_published(folder: Path) -> Scorer:
    """Open the last full export and apply the deltas after it, as a server does."""
    names = sorted(path.name for path in folder.iterdir())
    full = max(name for name in names if not name.endswith(".delta"))
    scorer = Scorer.open(folder / full)
    for name in names:
        if name.endswith(".delta") and name > full:
            scorer.update(folder / name)
    return scorer


def rows(home: Path) -> pl.DataFrame:
    log = pl.read_parquet(home / "day-3.parquet")
    return log.with_columns(pl.concat_list("item", pl.col("item") + 1).alias("seen"))


def test_each_period_publishes_a_delta_or_a_full_export_if_much_changed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder, log = Path(shutil.copytree(home / "run", tmp_path / "run")), tmp_path / "serve", rows(home)

    def continue_day(day: int, *options: str) -> str:
        capsys.readouterr()
        command = [
            "continue",
            "-q",
            str(run),
            str(home / f"day-{day}.parquet"),
            "--publish",
            str(folder),
            *options,
        ]
        assert main(command) == 0
        export = tmp_path / f"export-{day}"
        output = capsys.readouterr().out
        assert main(["export", "-q", str(run), "-o", str(export)]) == 0
        full, result = Scorer.open(export), open_published(folder)
        assert result.manifest == full.manifest
        assert np.array_equal(result.score(log), full.score(log))
        return output

    assert not missing("00001", continue_day(1))
    # In a log this small nearly all rows change in a day.
    assert not missing("00002", continue_day(2))
    monkeypatch.setattr(write_delta, "_MOST", 1.0)
    assert not missing("00003.delta", continue_day(3))
    assert sorted(path.name for path in folder.iterdir()) == ["00001", "00002", "00003.delta"]
    assert publishing.publish(run, folder) == f"{folder / '00003.delta'} is up to date"
    # No delta crosses a rebase.
    assert main(["rebase", "-q", str(run)]) == 0
    assert not missing("00004", publishing.publish(run, folder))
    # Numbers of exports do not repeat after a period was removed.
    assert main(["revert", "-q", str(run)]) == 0
    assert not missing("00005", publishing.publish(run, folder))
    assert not missing("00005 up to date", publishing.publish(run, folder))
    # Another run with fewer periods.
    assert not missing("00006 full", publishing.publish(home / "run", folder))
    assert main(["export", "-q", str(home / "run"), "-o", str(tmp_path / "other")]) == 0
    assert open_published(folder).manifest == Scorer.open(tmp_path / "other").manifest
    # A folder without a full export.
    for name in ("00001", "00002", "00004", "00005", "00006"):
        shutil.rmtree(folder / name)
    with refuses(ExportError, "export"):
        publishing.publish(run, folder)


def test_rows_of_the_batch_give_deltas_where_all_rows_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decayed = {"kind": "rowwise_adagrad", "rows": "all", "weight_decay": 0.1}
    run = begin(tmp_path, train={"embedding": decayed}, vocabulary={"min_count": 1})
    folder = tmp_path / "serve"
    publishing.publish(run, folder)
    for day, words in (
        (1, "00001 full train.embedding.rows=batch"),
        (2, "00002.delta"),
        (3, "00003.delta"),
    ):
        short = tmp_path / f"short-{day}.parquet"
        pl.read_parquet(tmp_path / f"day-{day}.parquet").head(8).write_parquet(short)
        # Later periods have the fields of the second one.
        fields = ["train.embedding.rows=batch", "train.batch_size=16"] if day == 2 else []
        assert main(["continue", "-q", str(run), str(short), *fields, "--publish", str(folder)]) == 0
        assert not missing(words, capsys.readouterr().out)
    assert read_recipe(periods.of_number(run, 3)).train.batch_size == 16
    assert main(["export", "-q", str(run), "-o", str(tmp_path / "export")]) == 0
    full, log = Scorer.open(tmp_path / "export"), rows(tmp_path)
    assert np.array_equal(open_published(folder).score(log), full.score(log))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.dropout=0.5", "{}/day-1.parquet"], "model.dropout=0.5 new run train.batch_size"),
        (["train.epochs=2", "{}/day-1.parquet"], "train.epochs=2 new run memory"),
        (["train.embedding.row=batch", "{}/day-1.parquet"], "train.embedding.row unknown rows"),
        (["train.batch_size=64"], "no log train.batch_size=64"),
        (["train.batch_size=many", "{}/day-1.parquet"], "train.batch_size many"),
    ],
)
def test_fields_that_a_period_cannot_change_are_refused(
    words: list[str], expected: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(home / "run")
    assert main(["continue", "-q", str(home / "run"), *(word.format(home) for word in words)]) == 2
    assert not missing(expected, capsys.readouterr().err)
    assert files_of(home / "run") == before


def test_a_failed_publication_changes_nothing_and_the_next_delta_has_both_periods(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(write_delta, "_MOST", 1.0)
    run, folder = Path(shutil.copytree(home / "run", tmp_path / "run")), tmp_path / "serve"
    command = ["continue", "-q", str(run), "--publish", str(folder)]
    publishing.publish(run, folder)
    before = files_of(folder)
    with monkeypatch.context() as context:

        def stop(*args: object) -> None:
            raise OSError(28, "No space left on device")

        context.setattr(publishing, "write_delta", stop)
        assert main([*command, str(home / "day-1.parquet")]) == 2
    assert files_of(folder) == before
    assert len(periods.paths(run)) == 1
    assert main([*command, str(home / "day-2.parquet")]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["00000", "00002.delta"]
    assert main(["export", "-q", str(run), "-o", str(tmp_path / "export")]) == 0
    assert np.array_equal(
        open_published(folder).score(rows(home)), Scorer.open(tmp_path / "export").score(rows(home))
    )


EVERY_ROW = "import sys; from stratarec.training.export import write_delta; write_delta._MOST = 1.0; "


@pytest.mark.slow
def test_killed_periods_are_repeated_and_serve_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values lose their rows, and each period has a delta."""
    monkeypatch.setattr(write_delta, "_MOST", 1.0)
    run, place = begin(tmp_path, vocabulary=EVICT), tmp_path / "killed"
    uninterrupted = Path(shutil.copytree(run, tmp_path / "whole"))
    logs = [str(tmp_path / f"day-{day}.parquet") for day in (1, 2, 3)]
    for folder in (tmp_path / "serve", place / "serve"):
        publishing.publish(uninterrupted, folder)
    assert main(["continue", "-q", str(uninterrupted), *logs, "--publish", str(tmp_path / "serve")]) == 0
    shutil.copytree(run, place / "run")
    code = EVERY_ROW + "from stratarec.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        "continue",
        "-q",
        str(place / "run"),
        "--publish",
        str(place / "serve"),
    ]
    draws, kills = np.random.default_rng(int(time.time())), 0
    while len(done := periods.paths(place / "run")) < 3:
        process = subprocess.Popen([*command, *logs[len(done) :]], stdout=subprocess.DEVNULL)
        try:
            assert process.wait(draws.uniform(1.0, 9.0) if kills < KILLS else None) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
    assert_same_period(periods.of_number(place / "run", 3), periods.of_number(uninterrupted, 3))
    publishing.publish(place / "run", place / "serve")  # in case a process was killed before it published
    mine, theirs = open_published(place / "serve"), open_published(tmp_path / "serve")
    assert mine.manifest == theirs.manifest
    log = rows(tmp_path)
    assert mine.score(log).tobytes() == theirs.score(log).tobytes()
    assert sorted(path.name for path in place.iterdir()) == ["run", "serve"]
    assert not list((place / "serve").glob(".publishing-*"))
