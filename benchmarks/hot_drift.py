"""How long a hot profile lasts on a news portal's log: share of later days' inputs that the first
day's hot rows serve.

Samples of a quarter of the users are prepared day by day as in `continual`: once with the
vocabularies of the previous day, so that ids keep their meaning, and once with new vocabularies.
Three shares of each day's training samples are counted: inputs that need only hot rows of the first
day; inputs that need only hot rows chosen by the counts of that day with inherited ids, where newly
popular rows follow rows that are no longer popular; and the same with ids ranked again. All three
use the bytes of the first profile. Tables of a few rows (weekdays, say) are always hot as a whole,
as a plan keeps them in DRAM.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.continual_days import Days, write_daily_clicks, write_samples
from benchmarks.sessions import recipe as shipped
from benchmarks.sessions import row_bytes_of
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.clicks import ClicksConfig
from stratarec.hot.calibrator import HotProfile, calibrate
from stratarec.hot.hot_loader import classify
from stratarec.hot.selection import RowRange, parts_of
from stratarec.recipe import Recipe

DAYS, QUICK_DAYS = 6, 3
USERS = 4
SMALL = 1000
SHARES = (0.02, 0.068, 0.124)


def hot_ranges(recipe: Recipe, dataset: Dataset) -> tuple[dict[str, int], list[RowRange]]:
    """Return the row bytes of each table, and the ranges of rows that can be hot."""
    (width,) = {recipe.model.table_width(name) for name in dataset.vocabularies}
    row_bytes = row_bytes_of(dataset, width, recipe.train.embedding)
    row_bytes = {name: size * (dataset.table_rows()[name] >= SMALL) for name, size in row_bytes.items()}
    return row_bytes, parts_of(dataset, row_bytes)


def share_of(dataset: Dataset, recipe: Recipe, profile: HotProfile) -> float:
    """Return the share of training inputs that need only the hot rows of a profile."""
    _, ranges = hot_ranges(recipe, dataset)
    hot = [
        min(int(rows), part.rows) if part.row_bytes else part.rows
        for part, rows in zip(ranges, profile.hot(ranges), strict=True)
    ]
    return sum(map(sum, classify(dataset, ranges, np.array(hot), "train").values())) / dataset.samples(
        "train"
    )


def measure_day(number: int, runs: Days, first: list[HotProfile]) -> list[dict[str, Any]]:
    """Return a row for each budget of one day; on day 0, append the profiles to `first`."""
    chained = runs.recipe(
        f"day-{number:02d}", number, first=number, base=f"day-{number - 1:02d}" if number else ""
    )
    fresh = runs.recipe(f"fresh-{number:02d}", number, first=number)
    inherited, ranked = prepare(chained.data), prepare(fresh.data)
    lines = []
    for position, share in enumerate(SHARES):
        if not number:
            row_bytes, ranges = hot_ranges(chained, inherited)
            budget = int(share * sum(part.nbytes for part in ranges))
            first.append(calibrate(inherited, row_bytes, budget))
        budget = first[position].chosen.budget_bytes
        again = [calibrate(data, hot_ranges(fresh, data)[0], budget) for data in (inherited, ranked)]
        shares = [
            share_of(data, fresh, profile)
            for data, profile in ((inherited, first[position]), (inherited, again[0]), (ranked, again[1]))
        ]
        names = ("first_day", "anew_inherited", "anew_ranked")
        lines.append({"day": number + 1, "bytes_share": share, **dict(zip(names, shares, strict=True))})
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def run(quick: bool) -> dict[str, Any]:
    """Measure the first days of the log; `quick` takes fewer."""
    days = QUICK_DAYS if quick else DAYS
    whole = shipped("globo", "auto")
    assert isinstance(whole.data.source, ClicksConfig)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config = write_daily_clicks(whole.data.source, root, days, users=USERS)
        write_samples(config, root / "logs")
        runs, first = Days(whole, root / "logs", root / "days"), list[HotProfile]()
        rows = [line for number in range(days - 1) for line in measure_day(number, runs, first)]
    remaining = {
        row["day"]: row["first_day"] / row["anew_ranked"] for row in rows if row["bytes_share"] == SHARES[1]
    }
    return {
        "config": {"recipe": "globo", "days": days, "users": f"one in {USERS}", "bytes_shares": SHARES},
        "metrics": {f"share_kept_day_{day}": share for day, share in remaining.items()},
        "samples": {"rows": rows},
    }
