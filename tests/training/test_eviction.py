"""Test values that lose their rows: which they are, what remains of them, and that a server that
applies deltas has the same scores.
"""

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
    """Train three days with changing values.

    Write an export after each day and the deltas between them. Also train all days in one command.
    """
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


def expected_values(home: Path) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return the values of items and of users by row after each day, computed by a loop over the
    logs.
    """
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
        if data.exists():  # counts of items include those in histories
            counts["item"] = Counter(
                dict(Dataset.open(data).carried_counts("item").select("value", "count").iter_rows())
            )
        for name, known in (("item", items), ("user", users)):
            eligible = {v for v, n in counts[name].items() if n >= 4} | {
                v for v in known[-1] if v is not None
            }
            if name == "item":
                alive = {value for value in eligible if last.get(value, -DAY) >= now - DAY}  # type: ignore[operator]
            else:
                alive = set(sorted(eligible, key=lambda v: (-recent[v], v))[:40])
            new = sorted(alive - set(known[-1]), key=lambda v: (-counts[name][v], v))
            known.append([value if value in alive else None for value in known[-1]] + new)
    return items, users


def test_idle_and_least_used_values_lose_their_rows_and_return_at_new_ones(home: Path) -> None:
    items, users = expected_values(home)
    for number in (2, 3):
        dataset = Dataset.open(periods.of_number(home / "whole", number) / "data")
        assert dataset.vocabulary("user").values.to_list() == users[number]
    assert sum(value is not None for value in users[3]) == 40
    # The first day's counts of items are removed, so only the remaining ones can be compared.
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
    removed_value = next(value for value in before if value not in users[3])
    assert (
        vocabulary.encode(pl.Series([removed_value])).tolist()
        == vocabulary.tail_ids(pl.Series([removed_value])).tolist()
    )
    assert vocabulary.counts[5:][[value is None for value in users[3]]].sum() == 0


def test_periods_that_evict_have_the_same_bits_in_one_command_and_in_several(home: Path) -> None:
    for number in (2, 3):
        assert_same_period(
            periods.of_number(home / "run", number), periods.of_number(home / "whole", number)
        )
    assert main(["check", "-q", str(home / "run")]) == 0


def test_deltas_carry_removed_values_so_that_scores_match_the_full_export(home: Path) -> None:
    scorer, users = Scorer.open(home / "0"), Dataset.open(home / "data").vocabulary("user").values.to_list()
    log = pl.concat([pl.read_parquet(home / f"day-{day}.parquet") for day in (0, 3)])
    rows = log.with_columns(pl.concat_list("item", pl.col("item") + 1).alias("seen"))
    assert rows["user"].is_in(users).any()
    for day in (1, 2, 3):
        scorer.update(home / f"{day}.delta")
        full = Scorer.open(home / str(day))
        assert scorer.manifest == full.manifest
        assert np.array_equal(scorer.score(rows), full.score(rows))
        one = rows[:1].to_dict(as_series=False)
        assert scorer.score(one) == full.score(one)
    # Over all days at once: values that came and were removed in between leave holes from the
    # start.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_delta, "_MOST", 1.0)
        assert (
            write_delta.write_delta(ExportedModel.open(home / "0"), home / "3", home / "leap") is not None
        )
    leap = Scorer.open(home / "0")
    leap.update(home / "leap")
    assert np.array_equal(leap.score(rows), full.score(rows))
