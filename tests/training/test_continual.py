"""Test runs that continue with later files: training, metrics of each period, and refused files."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from errors import missing
from recipes import assert_same_model
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import FILE_BITS
from stratarec.data.prepare.prepare import prepare
from stratarec.data.splits import SplitConfig
from stratarec.models.metrics import figures
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.build import new_model
from stratarec.training.raw_logs import RawLogs, evaluate_logs
from stratarec.training.run import periods
from stratarec.training.run.open_run import open_run
from stratarec.training.run.run_directory import read_plan, read_recipe
from stratarec.training.trainer import Trainer

DAYS = 4
DAY = 86_400


def write_log(root: Path, day: int, rows: int = 900) -> Path:
    """Write a log whose items change over time. A user clicks items near those of earlier
    clicks.
    """
    random = np.random.default_rng(day)
    user = random.integers(0, 150, rows)
    item = day * 12 + random.geometric(0.05, rows)
    path = root / f"day-{day}.parquet"
    pl.DataFrame(
        {
            "label": (random.random(rows) < np.where((item + user) % 3 == 0, 0.7, 0.2)).astype(np.int64),
            "time": np.sort(random.integers(day * DAY, (day + 1) * DAY - 1, rows)),
            "user": [f"u{who}" for who in user],
            "item": item,
            "place": [f"p{place}" for place in random.integers(0, 40, rows)],
            "age": random.gamma(2.0, 10.0 + day, rows),
        }
    ).write_parquet(path)
    return path


def content(root: Path, **train: Any) -> dict[str, Any]:
    sparse = [
        {"name": "user"}, {"name": "item"}, {"name": "place"},
        {"name": "seen", "kind": "history", "of": "item", "max_length": 5, "within": "36h"},
    ]  # fmt: skip
    return {
        "name": "days",
        "data": {
            "path": str(root / "data"),
            "source": {
                "kind": "parquet",
                "paths": [str(root / "day-0.parquet")],
                "schema": {"sparse": sparse, "dense": [{"name": "age"}], "time": "time", "user": "user"},
            },
            "split": {"valid": 0.1, "test": 0.1},
            "vocabulary": {
                "min_count": 9,
                "tail_buckets": 5,
                "overrides": {"place": {"kind": "hash", "buckets": 30}},
            },
        },
        "model": {"kind": "dlrm", "embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [8], "dropout": 0.1},
        "train": {
            "run": str(root / "run"),
            "batch_size": 64,
            "report": False,
            "calibration": "platt",
            "average": {"decay": 0.9},
            "dense": {"schedule": {"kind": "cosine", "final_factor": 0.1}},
            "embedding": {"kind": "rowwise_adam"},
            **train,
        },
    }


def begin(root: Path, **changes: Any) -> Path:
    """Train a run on the first day."""
    for day in range(DAYS):
        write_log(root, day)
    config = content(root) | {key: value for key, value in changes.items() if key == "memory"}
    config["train"] |= changes.get("train", {})
    config["data"]["vocabulary"] |= changes.get("vocabulary", {})
    recipe = Recipe.from_dict(config)
    Trainer(recipe, prepare(recipe.data)).train()
    return Path(recipe.run)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the logs, a run of the first day, and a copy of the run that continued with all other
    days in one command.
    """
    root = tmp_path_factory.mktemp("continual")
    run = begin(root)
    shutil.copytree(run, root / "whole")
    assert (
        main(
            [
                "continue",
                "-q",
                str(root / "whole"),
                *(str(root / f"day-{day}.parquet") for day in (1, 2, 3)),
            ]
        )
        == 0
    )
    return root


def continue_run(run: Path, *logs: Path, code: int = 0) -> None:
    assert main(["continue", "-q", str(run), *map(str, logs)]) == code


def assert_same_period(one: Path, other: Path) -> None:
    """Check that everything later steps depend on is equal bit for bit."""
    assert_same_model(periods.only_checkpoint(one), periods.only_checkpoint(other))
    left, right = (Dataset.open(each / "data").manifest for each in (one, other))
    assert left.fingerprint == right.fingerprint
    contents = [periods.read(each).to_dict() for each in (one, other)]
    for each in contents:
        # Files of tables have random tokens, and a checkpoint contains times.
        for name in ("parent", "state", "dataset"):
            del each[name]
    assert contents[0] == contents[1]


def test_periods_in_one_command_and_in_several_have_the_same_bits(home: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    for day in (1, 2, 3):
        continue_run(run, home / f"day-{day}.parquet")
    assert [path.name for path in periods.paths(run)] == [f"period-{number:05d}" for number in (1, 2, 3)]
    for number in (2, 3):
        assert_same_period(periods.of_number(run, number), periods.of_number(home / "whole", number))
    assert not list(tmp_path.glob(".run*"))


def scores(run: Path, log: Path, earlier: list[str]) -> dict[str, Any]:
    """Return the metrics that `evaluate` reports for a log with the current model of the run."""
    with open_run(run) as trained:
        logs = RawLogs(trained, [str(log)], earlier=earlier, labelled=True)
        return figures(evaluate_logs(logs, SilentProgress()).overall)


def test_metrics_of_a_period_use_the_previous_checkpoint_and_all_histories(
    home: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    for day in (1, 2):
        # First with the full log that the run was trained on, then with the histories that the
        # period stores.
        actual = scores(run, home / f"day-{day}.parquet", [str(home / "day-0.parquet")] if day == 1 else [])
        continue_run(run, home / f"day-{day}.parquet")
        known = periods.read(periods.of_number(run, day)).to_dict()["scores"]
        assert known["all"] == json.loads(json.dumps(actual))
        assert {"known", "tail", "new"} <= known.keys()
        assert (
            sum(known[kind]["samples"] for kind in ("known", "tail", "new"))
            == known["all"]["samples"]
            == 900
        )
    all_logs = [str(home / f"day-{day}.parquet") for day in (0, 1, 2)]
    assert scores(run, home / "day-3.parquet", []) == scores(run, home / "day-3.parquet", all_logs)
    # No stored history is as early as this older log.
    assert scores(run, home / "day-0.parquet", []) == scores(run, home / "day-0.parquet", all_logs[2:])


def test_values_get_rows_by_the_counts_of_all_periods_and_no_row_moves(home: Path) -> None:
    """Counts match a loop over the logs. Histories match `prepare` on all logs at once."""
    before = Dataset.open(home / "data")
    counts: Counter[Any] = Counter()
    numbers = np.concatenate([*before.row_numbers("train")])
    frames = [pl.read_parquet(home / "day-0.parquet")[numbers - 1]]
    frames += [pl.read_parquet(home / f"day-{day}.parquet") for day in (1, 2, 3)]
    known = before.vocabulary("user").values.to_list()
    for number, frame in enumerate(frames):
        counts.update(frame["user"].to_list())
        if not number:
            assert known == sorted(known, key=lambda value: (-counts[value], value))
            continue
        new = [value for value in counts if value not in known and counts[value] >= 9]
        known += sorted(new, key=lambda value: (-counts[value], value))
        if number == 1:  # its data is removed
            continue
        dataset = Dataset.open(periods.of_number(home / "whole", number) / "data")
        vocabulary = dataset.vocabulary("user")
        assert vocabulary.values.to_list() == known
        assert vocabulary.encode(pl.Series(known)).tolist() == list(range(5, 5 + len(known)))
        assert vocabulary.counts[5:].tolist() == [counts[value] for value in known]
        assert dict(dataset.carried_counts("user").select("value", "count").iter_rows()) == counts
    # Some of them are not frequent enough in any single period.
    each = [Counter(frame["user"].to_list()) for frame in frames]
    assert any(max(day[value] for day in each) < 9 for value in known)


def test_a_grown_table_starts_like_a_table_of_that_size_and_keeps_the_bound_of_its_first_rows(
    home: Path,
) -> None:
    first, last = Dataset.open(home / "data"), Dataset.open(periods.of_number(home / "whole", 3) / "data")
    assert last.first_rows() == first.first_rows() == first.table_rows()
    models = [new_model(Recipe.from_dict(content(home)), each, None, "none") for each in (first, last)]
    for name, rows in first.table_rows().items():
        # `place` is a hash vocabulary and does not grow.
        assert (last.table_rows()[name] > rows) == (name != "place")
        few, many = (
            model.embeddings.rows(name, 0, each.table_rows()[name])["weight"]
            for model, each in zip(models, (first, last), strict=True)
        )
        assert torch.equal(few, many[:rows])
        assert 0.9 * rows**-0.5 < many[rows - 40 :].abs().max() <= rows**-0.5


def test_histories_continue_where_the_last_period_ended(home: Path, tmp_path: Path) -> None:
    recipe = Recipe.from_dict(content(home))
    paths = tuple(str(home / f"day-{day}.parquet") for day in range(DAYS))
    source = replace(recipe.data.source, paths=paths)  # type: ignore[call-arg]
    data = replace(
        recipe.data, path=str(tmp_path / "all"), source=source, split=SplitConfig(valid=0.0, test=0.0)
    )
    all_data, last = prepare(data), Dataset.open(periods.of_number(home / "whole", 3) / "data")

    def histories(dataset: Dataset) -> dict[int, list[Any]]:
        vocabulary, results = dataset.vocabulary("item"), {}
        names = dict(enumerate(vocabulary.values.to_list(), start=vocabulary.tail_buckets))
        for number, shard in enumerate(dataset.shards("train")):
            for group in range(len(shard.row_groups)):
                table = dataset.read_row_group("train", number, group)
                for row, ids in zip(table["@row"].to_pylist(), table["seen"].to_pylist(), strict=True):
                    results[row] = [names.get(each) for each in ids]
        return results

    mine, theirs = histories(last), histories(all_data)
    theirs = {row - (3 << FILE_BITS): ids for row, ids in theirs.items() if row >> FILE_BITS == 3}
    assert mine.keys() == theirs.keys()
    for row, ids in mine.items():
        assert len(ids) == len(theirs[row])
        # A value may have a row in only one of them.
        assert all(None in pair or pair[0] == pair[1] for pair in zip(ids, theirs[row], strict=True))
    # Some histories end at their length, and others at the limit of age.
    assert sum(len(ids) == 5 for ids in mine.values()) > len(mine) / 9
    assert sum(len(ids) < 5 for ids in mine.values()) > len(mine) / 9


def files_of(run: Path) -> dict[str, tuple[int, int]]:
    results = {str(path.relative_to(run)): path.stat() for path in run.rglob("*") if path.is_file()}
    return {name: (status.st_mtime_ns, status.st_size) for name, status in results.items()}


STAGES = [
    "continual.continual_run.prepare",
    "continual.continual_run.RawLogs.scored",
    "continual.continual_run.fit",
    "continual.train_period.temporary_model",
    "steps.step.TrainPipeline.stage_ahead",
    "continual.train_period.checkpoint.save",
    "continual.continual_run.write_recipe",
    "continual.continual_run.write_sealed",
    "continual.chain.rename_directory",
]


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_period_leaves_the_run_unchanged_and_can_be_repeated(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A full disk or an interrupt occurs at each step of the period."""
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    before = files_of(run)
    for error, code in ((KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 2)):

        def stop(*args: Any, error: BaseException = error, **options: Any) -> Any:
            raise error

        with monkeypatch.context() as context:
            context.setattr(f"stratarec.training.{stage}", stop)
            continue_run(run, home / "day-1.parquet", code=code)
        assert files_of(run) == before
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def changed(change: Callable[[pl.DataFrame], pl.DataFrame]) -> Callable[[Path, Path], Path]:
    def make(home: Path, folder: Path) -> Path:
        change(pl.read_parquet(home / "day-2.parquet")).write_parquet(folder / "log.parquet")
        return folder / "log.parquet"

    return make


def copied(name: str) -> Callable[[Path, Path], Path]:
    return lambda home, folder: Path(shutil.copy(home / name, folder / "copy.parquet"))


def with_time(shift: int) -> Callable[[Path, Path], Path]:
    return changed(lambda log: log.with_columns(pl.col("time") + shift))


def with_one_time(shift: int) -> Callable[[Path, Path], Path]:
    """Change the time of one row to far after all others."""
    return changed(
        lambda log: log.with_columns(pl.col("time") + shift * (pl.int_range(pl.len()) == 5).cast(pl.Int64))
    )


REFUSED: list[tuple[Callable[[Path, Path], Path], str]] = [
    (copied("day-0.parquet"), "copy.parquet"),
    (with_time(-DAY), "log.parquet row 1 time"),
    (with_time(-3 * DAY), "log.parquet row 1 time"),
    (with_one_time(100 * 365 * DAY), "log.parquet row 6 time 900"),
    (with_one_time(30 * DAY), "log.parquet row 6 time 900"),
    (changed(lambda log: log.drop("time")), "log.parquet"),
    (changed(lambda log: log.drop("place")), "log.parquet"),
    (changed(lambda log: log.drop("label")), "log.parquet"),
    (changed(lambda log: log.with_columns(item="i" + pl.col("item").cast(pl.String))), "item"),
    (changed(lambda log: log.head(0)), "log.parquet"),
    (changed(lambda log: log.with_columns(label=pl.lit(0))), "log.parquet 0"),
    (changed(lambda log: log.with_columns(label=pl.lit(1))), "log.parquet 900"),
    (lambda home, folder: home / "day-*.parquet", "files 4"),
    (lambda home, folder: home / "none.parquet", "none.parquet"),
    (lambda home, folder: home, "files"),
]


@pytest.mark.parametrize(
    ("log", "message"), REFUSED, ids=[f"{number}-{words}" for number, (_, words) in enumerate(REFUSED)]
)
def test_a_file_that_is_not_the_next_period_is_refused_in_one_line(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    log: Callable[[Path, Path], Path],
    message: str,
) -> None:
    run = Path(shutil.copytree(one_period(home), tmp_path / "run"))
    before = files_of(run)
    continue_run(run, log(home, tmp_path), code=2)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert not missing(message, errors), errors
    assert files_of(run) == before


def test_files_that_were_already_trained_on_are_skipped(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of an interrupted session can be repeated."""
    run = Path(shutil.copytree(one_period(home), tmp_path / "run"))
    copy = copied("day-1.parquet")(home, tmp_path)
    capsys.readouterr()
    continue_run(run, copy, home / "day-2.parquet", home / "day-2.parquet")
    output = capsys.readouterr().out
    assert not missing("period 1 day-1.parquet", output)
    assert not missing("period 2 day-2.parquet", output)
    assert len(periods.paths(run)) == 2
    assert_same_period(periods.paths(run)[-1], periods.paths(home / "whole")[1])
    before = files_of(run)
    assert main(["continue", "-q", "--json", str(run), str(copy), str(home / "day-2.parquet")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["number"], line["skipped"]) for line in lines] == [(1, True), (2, True)]
    assert files_of(run) == before


def test_the_last_period_is_reverted_and_repeated_with_the_same_bits(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(one_period(home), tmp_path / "run"))
    before = files_of(run)
    continue_run(run, home / "day-2.parquet")
    copy = Path(shutil.copytree(periods.paths(run)[-1], tmp_path / "period-00002"))
    with Dataset.open(periods.paths(run)[-1] / "data").locked():
        assert main(["revert", "-q", str(run)]) == 2
    assert len(periods.paths(run)) == 2
    assert main(["revert", "-q", str(run)]) == 0
    assert files_of(run) == before
    continue_run(run, home / "day-2.parquet")
    assert_same_period(periods.paths(run)[-1], copy)
    continue_run(run, home / "day-3.parquet")
    for number in (3, 2):
        capsys.readouterr()
        assert main(["revert", "-q", str(run)]) == (0 if number == 3 else 2)
    assert not missing("period-00001/data", capsys.readouterr().err)
    assert main(["check", "-q", str(run)]) == 0


def test_the_first_period_is_reverted_if_the_run_before_it_can_be_opened(
    home: Path, tmp_path: Path
) -> None:
    run, data = Path(shutil.copytree(one_period(home), tmp_path / "run")), home / "data"
    before = files_of(run)
    data.rename(home / "moved")
    try:
        assert main(["revert", "-q", str(run)]) == 2
        assert files_of(run) == before
    finally:
        (home / "moved").rename(data)
    assert main(["revert", "-q", str(run)]) == 0
    with open_run(run) as trained:
        assert trained.period == 0
    recipe = read_recipe(run)
    recipe = replace(recipe, train=replace(recipe.train, run=str(run)))
    Trainer(recipe, Dataset.open(data)).train(resume=True)


def one_period(home: Path) -> Path:
    """Return the run after its first period."""
    run = home / "one"
    if not run.exists():
        shutil.copytree(home / "run", run)
        continue_run(run, home / "day-1.parquet")
    return run


@pytest.mark.parametrize(("kind", "policy"), [("count", "rank"), ("hash", "lru")])
def test_caches_keep_the_first_ids_of_a_run_and_the_recent_rows_of_a_period(
    tmp_path: Path, kind: str, policy: str
) -> None:
    run = begin(tmp_path, memory={"precision": "int8"}, vocabulary={"overrides": {"place": {"kind": kind}}})
    continue_run(run, tmp_path / "day-1.parquet")
    for folder, resolved in ((run, policy), (periods.of_number(run, 1), "lru")):
        recipe = read_recipe(folder)
        # A run that is resumed keeps its plan.
        plan = read_plan(folder, recipe, Dataset.open(recipe.data.path))
        assert plan is not None
        assert (recipe.memory.cache.policy, plan.policy) == ("auto", resolved)


def test_encoded_rows_under_caches_continue_deterministically(home: Path, tmp_path: Path) -> None:
    """In float32 this follows from `test_growth`, which also compares with rows in memory."""
    for day in range(DAYS):
        (tmp_path / f"day-{day}.parquet").symlink_to(home / f"day-{day}.parquet")
    raw = content(tmp_path) | {
        "memory": {"precision": "int8", "lookahead": 1, "cache": {"fraction": 0.2, "ways": 4}}
    }
    raw["data"]["vocabulary"] |= {"min_count": 1, "overrides": {"place": {"kind": "hash", "buckets": 2000}}}
    raw["train"]["batch_size"] = 16
    recipe = Recipe.from_dict(raw)
    trainer = Trainer(recipe, prepare(recipe.data))
    trainer.train()
    assert any(not tables.resident for tables in trainer.parts.model.embeddings.engine.tables)
    run = Path(recipe.run)
    shutil.copytree(run, tmp_path / "again")
    continue_run(run, tmp_path / "day-1.parquet", tmp_path / "day-2.parquet")
    for day in (1, 2):
        continue_run(tmp_path / "again", tmp_path / f"day-{day}.parquet")
    assert_same_period(periods.of_number(run, 2), periods.of_number(tmp_path / "again", 2))
