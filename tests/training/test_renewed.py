"""Test values that a run forgets and rows that are renumbered: what is removed, and that nothing
else changes.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import forked
import numpy as np
import polars as pl
import pytest
import torch
from training import test_continual
from training.test_continual import DAYS, begin, continue_run, files_of
from training.test_eviction import EVICT

from errors import missing
from stratarec import Scorer
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.embedding.tables.cached import CachedTables
from stratarec.io.atomic import is_leftover, temporary_name
from stratarec.training.continual import rebase
from stratarec.training.export import write_delta
from stratarec.training.run import periods
from stratarec.training.run.open_run import open_run

SLOW = pytest.mark.slow


def begin_and_continue(root: Path, **changes: Any) -> Path:
    """Train a run on a day and continue it with another day."""
    run = begin(root, **changes)
    continue_run(run, root / "day-1.parquet")
    return run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("renewed")
    # With other seeds, training amplifies another order of sums more: scores differ by 1e-4 with 0,
    # by 1e-2 with 5.
    begin_and_continue(root, vocabulary=EVICT, train={"seed": 3})
    return root


def run_of(home: Path, folder: Path) -> Path:
    return Path(shutil.copytree(home / "run", folder / "run"))


def rows(home: Path, day: int = 2) -> pl.DataFrame:
    log = pl.read_parquet(home / f"day-{day}.parquet")
    return log.with_columns(pl.concat_list("item", pl.col("item") + 1).alias("seen"))


def export_run(run: Path, folder: Path, since: Path | None = None) -> Scorer:
    assert (
        main(["export", "-q", str(run), "-o", str(folder), *(["--since", str(since)] if since else [])])
        == 0
    )
    return Scorer.open(folder)


def last_data(run: Path) -> Dataset:
    return Dataset.open(periods.paths(run)[-1] / "data")


ENCODED = {
    "memory": {"precision": "int8", "lookahead": 1, "cache": {"fraction": 0.05, "ways": 16}},
    "vocabulary": {"min_count": 1, "overrides": {"place": {"kind": "hash", "buckets": 2000}}},
    "train": {"batch_size": 16},
}  # fmt: skip


@pytest.mark.parametrize("encoded", [False, pytest.param(True, marks=SLOW)])
def test_a_forgotten_value_is_removed_everywhere_and_other_rows_keep_their_bits(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    encoded: bool,
) -> None:
    monkeypatch.setattr(write_delta, "_MOST", 1.0)
    if encoded:
        home = tmp_path
        run = begin_and_continue(tmp_path, **ENCODED)
    else:
        run = run_of(home, tmp_path)
    before, old = export_run(run, tmp_path / "0"), last_data(run)
    vocabulary, counted = old.vocabulary("user"), old.carried_counts("user")
    known = vocabulary.values.drop_nulls()[3]
    rare = next(v for v in counted["value"] if v not in set(vocabulary.values)) if not encoded else "u1"
    theirs = old.events()
    assert theirs is not None
    item = theirs["item"][0]
    pl.DataFrame({"user": [known, rare, "nobody"], "item": [str(item), None, None]}).write_csv(
        tmp_path / "file.csv"
    )
    capsys.readouterr()
    assert main(["forget", "-q", str(run), str(tmp_path / "file.csv")]) == 0
    assert "user: forgot 2 of 3 values; unknown: nobody" in (output := capsys.readouterr().out)
    assert not missing(f"{home / 'data'}", output)
    if not encoded:
        assert main(["explain", "-q", str(run), str(home / "day-2.parquet"), "--row", "3"]) == 0
    newest = last_data(run)
    # Values, counts and events are removed, and the data of earlier periods is deleted.
    assert not {known, rare} & set(newest.vocabulary("user").values)
    assert not {known, rare} & set(newest.carried_counts("user")["value"])
    events = newest.events()
    assert events is not None
    expected = theirs.filter(~pl.col("user").is_in([known, rare]) & (pl.col("item") != item))
    assert events.sort(events.columns).equals(expected.sort(events.columns))
    assert item not in set(newest.vocabulary("item").values)
    assert [path.name for path in (run / "periods").glob("*/data")] == ["data"]
    assert known.encode() not in b"".join(
        path.read_bytes() for path in (run / "periods").rglob("*.parquet")
    )
    # The row is zero, and other rows keep their bits.
    place = vocabulary.values.to_list().index(known) + 5
    with open_run(run) as trained:
        weights = trained.model.embeddings.rows("user", place, place + 1)
        assert not any(part.any() for part in weights.values())
    # A scorer that applies the delta matches the full export. Users that were not forgotten keep
    # their scores.
    after = export_run(run, tmp_path / "1", tmp_path / "0")
    log = rows(home)
    scorer = Scorer.open(tmp_path / "0")
    scorer.update(tmp_path / "1.delta")
    assert np.array_equal(scorer.score(log), after.score(log))
    others = ~(log["user"].is_in([known, rare]) | log["seen"].list.contains(item))
    same = before.score(log) == after.score(log)
    assert same[others.to_numpy()].all()
    assert not same[log["user"].to_numpy() == known].any()
    assert main(["check", "-q", str(run)]) == 0
    assert "not read" not in capsys.readouterr().out
    assert main(["evaluate", "-q", str(run)]) == 2
    assert (
        "no samples in its split test; nor in another: name a log after the run" in capsys.readouterr().err
    )
    # The run continues, and a forgotten user who returns gets a row after all others.
    frame = pl.read_parquet(home / "day-2.parquet").with_columns(
        user=pl.when(pl.int_range(pl.len()) < 30).then(pl.lit(known)).otherwise("user")
    )
    frame.write_parquet(tmp_path / "next.parquet")
    continue_run(run, tmp_path / "next.parquet")
    values = last_data(run).vocabulary("user").values.to_list()
    assert values.index(known) >= len(vocabulary.values)


def test_rows_are_numbered_by_recent_counts_with_the_same_scores_and_the_run_continues(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, log = run_of(home, tmp_path), rows(home)
    before, old = export_run(run, tmp_path / "0"), last_data(run)
    assert old.vocabularies["item"].holes
    capsys.readouterr()
    assert main(["rebase", "-q", str(run)]) == 0
    output, newest = capsys.readouterr().out, last_data(run)
    assert not missing(f"{newest.table_rows()['item']:,} rows {old.vocabularies['item'].holes:,}", output)
    for name in ("user", "item"):
        recent = dict(old.carried_counts(name).select("value", "recent").iter_rows())
        values = newest.vocabulary(name).values.to_list()
        assert values == sorted(old.vocabulary(name).values.drop_nulls(), key=lambda v: (-recent[v], v))
        assert newest.carried_counts(name).equals(old.carried_counts(name))
    assert export_run(run, tmp_path / "1").score(log).tobytes() == before.score(log).tobytes()
    # It continues like a run without renumbering, up to the order of sums.
    other = Path(shutil.copytree(home / "run", tmp_path / "other"))
    for each in (run, other):
        continue_run(each, home / "day-2.parquet")
    mine, theirs = (periods.read(periods.paths(each)[-1]) for each in (run, other))
    assert mine.scores == theirs.scores
    assert mine.lookups["item"].known == theirs.lookups["item"].known
    actual, expected = (
        export_run(each, tmp_path / f"last-{place}").score(rows(home, 3))
        for place, each in enumerate((run, other))
    )
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert main(["check", "-q", str(run)]) == 0
    # No delta crosses a rebase.
    command = ["export", "-q", str(run), "-o", str(tmp_path / "late"), "--since", str(tmp_path / "0")]
    capsys.readouterr()
    assert main(command) == 2
    assert "use the full export" in capsys.readouterr().err


def test_a_rebase_that_would_change_scores_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(home, tmp_path)
    take = rebase._take
    monkeypatch.setattr(rebase, "_take", lambda group, ids, rows: take(group, ids, rows[::-1].copy()))
    before = files_of(run)
    assert main(["rebase", "-q", str(run)]) == 2
    assert "renumbering would change scores" in capsys.readouterr().err
    assert files_of(run) == before


STAGES = [
    "rebase.checkpoint.load",
    "rebase.checkpoint.save",
    "rebase.write_sealed",
    "chain.rename_directory",
]


def test_a_wrong_value_to_forget_is_named_by_its_line(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(home, tmp_path)
    (tmp_path / "file.csv").write_text("item\n3\nmany\n")
    assert main(["forget", "-q", str(run), str(tmp_path / "file.csv")]) == 2
    assert not missing("file.csv row 3 many", capsys.readouterr().err)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("command", ["forget", "rebase"])
def test_an_interrupted_rebase_leaves_the_run_unchanged(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, command: str
) -> None:
    run = run_of(home, tmp_path)
    pl.DataFrame({"user": last_data(run).vocabulary("user").values[:1]}).write_csv(tmp_path / "file.csv")
    before = files_of(run)

    def stop(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"stratarec.training.continual.{stage}", stop)
    assert (
        main([command, "-q", str(run), *([str(tmp_path / "file.csv")] if command == "forget" else [])]) == 2
    )
    assert files_of(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.csv", "run"]


KILLED = """
import os, sys
replace = os.replace
def stop(source, target, **options):
    if str(target).endswith(sys.argv[1]):
        os.kill(os.getpid(), 9)
    replace(source, target, **options)
os.replace = stop
from stratarec.cli import main
main(["continue", "-q", *sys.argv[2:]])
"""


@pytest.mark.parametrize("file", ["data/dataset.json", "recipe.json"])
def test_leftovers_of_a_killed_continue_are_removed_by_forget(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    run = run_of(home, tmp_path)
    arguments = [file.replace("data/", ""), str(run), str(home / "day-2.parquet")]
    assert forked.python(KILLED, arguments).returncode == -9
    assert list(tmp_path.glob(".run.continuing.*"))
    user = last_data(run).vocabulary("user").values.drop_nulls()[3]
    # As if earlier processes had been killed while they deleted data and a checkpoint.
    period = periods.paths(run)[-1]
    for name in (period / "data", periods.only_checkpoint(period)):
        left = temporary_name(name)
        left.mkdir()
        (left / "users.parquet").write_text(user)
    pl.DataFrame({"user": [user]}).write_csv(tmp_path / "file.csv")
    assert main(["forget", "-q", str(run), str(tmp_path / "file.csv")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.csv", "run"]
    assert not [path for path in run.rglob("*") if is_leftover(path.name)]
    files = (path for path in (run / "periods").rglob("*") if path.is_file())
    assert user.encode() not in b"".join(path.read_bytes() for path in files)


def with_many_places(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write logs of 1,500 places, some of them frequent."""
    for day in range(DAYS):
        path, draws = test_continual.write_log(root, day), np.random.default_rng(day)
        places = [f"p{place}" for place in (1500 * draws.random(900) ** 2).astype(int)]
        pl.read_parquet(path).with_columns(place=pl.Series(places)).write_parquet(path)
    monkeypatch.setattr(test_continual, "write_log", lambda root, day: root / f"day-{day}.parquet")


ROWS: dict[str, Any] = {"kind": "rowwise_adam", "rows": "all", "weight_decay": 0.1}


@pytest.mark.slow
def test_rows_with_missed_steps_are_renumbered_exactly(tmp_path: Path) -> None:
    run = begin_and_continue(tmp_path, train={"embedding": ROWS})
    log, before = rows(tmp_path), export_run(run, tmp_path / "0")
    assert main(["rebase", "-q", str(run)]) == 0
    assert export_run(run, tmp_path / "1").score(log).tobytes() == before.score(log).tobytes()
    continue_run(run, tmp_path / "day-2.parquet")


CODECS = ["fp16", "int4"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CODECS)
def test_encoded_rows_are_renumbered_without_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Some values lost their rows. Rows that were float32 in a cache are rounded, and no others
    change.
    """

    with_many_places(tmp_path, monkeypatch)
    memory = {**ENCODED["memory"], "precision": kind}
    vocabulary = {"min_count": 1, "overrides": {}, "evict": {"place": {"keep": 600}}}
    run = begin_and_continue(tmp_path, memory=memory, vocabulary=vocabulary, train=ENCODED["train"])
    log, old = rows(tmp_path), last_data(run)
    before = export_run(run, tmp_path / "0").score(log)
    assert (holes := old.vocabularies["place"].holes) > 100
    with open_run(run) as trained:
        group = trained.model.embeddings.engine.tables_of("place")
        assert isinstance(group, CachedTables)
        floats = set(group.rows_in_slots("place", 0, old.table_rows()["place"]).tolist())
        weights = trained.model.embeddings.rows("place", 0, old.table_rows()["place"])["weight"]
    capsys.readouterr()
    assert main(["rebase", "-q", str(run)]) == 0
    output, newest = capsys.readouterr().out, last_data(run)
    assert not missing(f"{newest.table_rows()['place']:,} rows {holes:,}", output)
    there, now = old.vocabulary("place"), newest.vocabulary("place")
    ids = there.encode(now.values)
    assert not np.array_equal(ids, np.sort(ids))
    with open_run(run) as trained:
        mine = trained.model.embeddings.rows("place", 0, newest.table_rows()["place"])["weight"]
    exact = np.array([number not in floats for number in ids])
    assert 0 < (~exact).sum() < exact.sum()
    tail = sum(number in floats for number in range(now.tail_buckets))
    assert not missing(f"{(~exact).sum() + tail}", output)
    assert torch.equal(mine[now.tail_buckets :][exact], weights[ids[exact]])
    np.testing.assert_allclose(mine[now.tail_buckets :], weights[ids], atol=0.02)
    # Samples without such a place keep their scores bit for bit.
    after = export_run(run, tmp_path / "1").score(log)
    rounded = [*now.values.filter(pl.Series(~exact))]
    same = (~log["place"].is_in(rounded) & (log["place"].is_in([*now.values]) | (tail == 0))).to_numpy()
    assert same.any()
    assert np.array_equal(after[same], before[same])
    # No row is in a slot now, so another rebase changes no bit.
    assert main(["rebase", "-q", str(run)]) == 0
    assert "scores are identical to the bit" in capsys.readouterr().out
    assert export_run(run, tmp_path / "2").score(log).tobytes() == after.tobytes()
    continue_run(run, tmp_path / "day-2.parquet")
    assert main(["check", "-q", str(run)]) == 0


@pytest.mark.slow
def test_encoded_rows_with_missed_steps_prevent_a_rebase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin_and_continue(tmp_path, **(ENCODED | {"train": {"batch_size": 16, "embedding": ROWS}}))
    files = files_of(run)
    capsys.readouterr()
    assert main(["rebase", "-q", str(run)]) == 2
    assert not missing("memory.precision", capsys.readouterr().err)
    assert files_of(run) == files
    assert [path.name for path in tmp_path.glob(".run*")] == []
    continue_run(run, tmp_path / "day-2.parquet")
