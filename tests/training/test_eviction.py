"""Values that lose their rows: which, what is left of them, and that who serves by deltas has the same scores."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from training.test_continual import DAY, assert_same_period, begin, continue_run

from stratarec import Scorer
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.serving.exported_model import ExportedModel
from stratarec.training.export import write_delta
from stratarec.training.run import periods

EVICT = {"evict": {"item": {"idle": "1d"}, "user": {"keep": 40}}, "min_count": 4, "half_life": "1d"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days that values come and go in, an export after each and the deltas between them; all in one go, too."""
    root = tmp_path_factory.mktemp("evicted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_delta, "_MOST", 1.0)
        run = begin(root, vocabulary=EVICT)
        shutil.copytree(run, root / "whole")
        assert main(["export", "-q", str(run), "-o", str(root / "0")]) == 0
        for day in (1, 2, 3):
            continue_run(run, root / f"day-{day}.parquet")
            since = ["--since", str(root / str(day - 1))]
            assert main(["export", "-q", str(run), "-o", str(root / str(day)), *since]) == 0
        continue_run(root / "whole", *(root / f"day-{day}.parquet" for day in (1, 2, 3)))
    return root


def expected(home: Path) -> tuple[list[list[Any]], list[list[Any]]]:
    """Values of items and of users by place after each day, by a loop over the logs."""
    first = Dataset.open(home / "data")
    numbers = np.concatenate([*first.row_numbers("train")])
    logs = [pl.read_parquet(home / "day-0.parquet")[numbers - 1]]
    logs += [pl.read_parquet(home / f"day-{day}.parquet") for day in (1, 2, 3)]
    items, users = ([first.vocabulary(name).values.to_list()] for name in ("item", "user"))
    counts = {
        name: Counter(dict(first.carried_counts(name).select("value", "count").iter_rows()))
        for name in ("item", "user")
    }
    recent: dict[str, float] = {value: float(count) for value, count in counts["user"].items()}
    last = dict(logs[0].group_by("item").agg(pl.col("time").max()).iter_rows())
    ended = logs[0]["time"].max()
    for number, log in enumerate(logs[1:], start=1):
        data = periods.of_number(home / "whole", number) / "data"
        last |= dict(log.group_by("item").agg(pl.col("time").max()).iter_rows())
        now = log["time"].max()
        faded, ended = 2.0 ** ((ended - now) / DAY), now  # type: ignore[operator]
        user = Counter(log["user"].to_list())
        recent = {value: recent.get(value, 0.0) * faded + user[value] for value in {*recent, *user}}
        counts["user"].update(user)
        if data.exists():  # its counts of items are of histories, too
            counts["item"] = Counter(
                dict(Dataset.open(data).carried_counts("item").select("value", "count").iter_rows())
            )
        for name, known in (("item", items), ("user", users)):
            eligible = {v for v, n in counts[name].items() if n >= 4} | {v for v in known[-1] if v is not None}
            if name == "item":
                alive = {value for value in eligible if last.get(value, -DAY) >= now - DAY}  # type: ignore[operator]
            else:
                alive = set(sorted(eligible, key=lambda v: (-recent[v], v))[:40])
            new = sorted(alive - set(known[-1]), key=lambda v: (-counts[name][v], v))
            known.append([value if value in alive else None for value in known[-1]] + new)
    return items, users


def test_values_that_are_idle_or_worth_least_lose_their_rows_and_come_back_at_new_ones(home: Path) -> None:
    items, users = expected(home)
    for number in (2, 3):
        dataset = Dataset.open(periods.of_number(home / "whole", number) / "data")
        assert dataset.vocabulary("user").values.to_list() == users[number]
    assert sum(value is not None for value in users[3]) == 40
    # Of items the first day's counts are gone, so that only what stays of them can be told.
    last_data = Dataset.open(periods.of_number(home / "whole", 3) / "data")
    values = last_data.vocabulary("item").values.to_list()
    assert set(items[3]) - {None} == set(values) - {None}
    assert last_data.vocabularies["item"].holes == values.count(None) > 10
    before = Dataset.open(home / "data").vocabulary("user").values.to_list()
    again = [v for v in before if v in users[3] and users[3].index(v) != before.index(v)]
    assert again, "expected a user who lost his row and got another"
    actual = periods.read(periods.of_number(home / "whole", 3)).lookups["user"]
    assert actual.evicted == users[3].count(None) - users[2].count(None)
    assert actual.admitted == len(users[3]) - len(users[2])
    vocabulary = last_data.vocabulary("user")
    gone = next(value for value in before if value not in users[3])
    assert vocabulary.encode(pl.Series([gone])).tolist() == vocabulary.tail_ids(pl.Series([gone])).tolist()
    assert vocabulary.counts[5:][[value is None for value in users[3]]].sum() == 0


def test_periods_that_evict_have_the_same_bits_in_one_command_and_in_several(home: Path) -> None:
    for number in (2, 3):
        assert_same_period(periods.of_number(home / "run", number), periods.of_number(home / "whole", number))
    assert main(["check", "-q", str(home / "run")]) == 0


def test_deltas_carry_removed_values_so_that_scores_are_those_of_the_full_export(home: Path) -> None:
    scorer, users = Scorer.open(home / "0"), Dataset.open(home / "data").vocabulary("user").values.to_list()
    log = pl.concat([pl.read_parquet(home / f"day-{day}.parquet") for day in (0, 3)])
    rows = log.with_columns(pl.concat_list("item", pl.col("item") + 1).alias("seen"))
    assert rows["user"].is_in(users).any()
    for day in (1, 2, 3):
        scorer.update(home / f"{day}.delta")
        whole = Scorer.open(home / str(day))
        assert scorer.manifest == whole.manifest
        assert np.array_equal(scorer.score(rows), whole.score(rows))
        one = rows[:1].to_dict(as_series=False)
        assert scorer.score(one) == whole.score(one)
    # Over all days at once: values that came and went in between are holes from the start.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_delta, "_MOST", 1.0)
        assert write_delta.write_delta(ExportedModel.open(home / "0"), home / "3", home / "leap") is not None
    leap = Scorer.open(home / "0")
    leap.update(home / "leap")
    assert np.array_equal(leap.score(rows), whole.score(rows))
