"""How long a hot profile lasts on a news portal's log: inputs of later days that the first day's hot rows serve.

Samples of a quarter of the users are made day by day as in `continual`. Every day is prepared by the vocabularies of
the day before, so ids of the first day go on meaning the same values, and once anew. Of each day's training samples
three shares are counted: inputs that need no rows but the first day's hot ones; the same with a profile made anew by
that day's counts where ids are inherited, so that popular rows stand behind rows that no longer are; and with ids
ranked anew. All three have the bytes of the first profile; tables of a few rows (weekdays, say) are
hot whole on every day at no cost, as a plan has them in DRAM.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.continual_days import Days, cut, make_logs
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


def parts(made: Recipe, dataset: Dataset) -> tuple[dict[str, int], list[RowRange]]:
    """Bytes of a row of each table, and the parts."""
    (width,) = {made.model.table_width(name) for name in dataset.vocabularies}
    row_bytes = row_bytes_of(dataset, width, made.train.embedding)
    row_bytes = {name: size * (dataset.table_rows()[name] >= SMALL) for name, size in row_bytes.items()}
    return row_bytes, parts_of(dataset, row_bytes)


def share_of(dataset: Dataset, made: Recipe, profile: HotProfile) -> float:
    """Training inputs that need none but the hot rows of a profile, of this data set or of one that it goes on from."""
    _, found = parts(made, dataset)
    hot = [
        min(int(rows), part.rows) if part.row_bytes else part.rows
        for part, rows in zip(found, profile.hot(found), strict=True)
    ]
    return sum(map(sum, classify(dataset, found, np.array(hot), "train").values())) / dataset.samples("train")


def day_of(number: int, way: Days, first: list[HotProfile]) -> list[dict[str, Any]]:
    """A line for each budget; the profiles of the first day are put into `first`."""
    chained = way.recipe(f"day-{number:02d}", number, first=number, base=f"day-{number - 1:02d}" if number else "")
    anew = way.recipe(f"anew-{number:02d}", number, first=number)
    inherited, ranked = prepare(chained.data), prepare(anew.data)
    lines = []
    for place, share in enumerate(SHARES):
        if not number:
            row_bytes, found = parts(chained, inherited)
            budget = int(share * sum(part.nbytes for part in found))
            first.append(calibrate(inherited, row_bytes, budget))
        budget = first[place].chosen.budget_bytes
        again = [calibrate(data, parts(anew, data)[0], budget) for data in (inherited, ranked)]
        shares = [
            share_of(data, anew, profile)
            for data, profile in ((inherited, first[place]), (inherited, again[0]), (ranked, again[1]))
        ]
        names = ("first_day", "anew_inherited", "anew_ranked")
        lines.append({"day": number + 1, "bytes_share": share, **dict(zip(names, shares, strict=True))})
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def run(quick: bool) -> dict[str, Any]:
    """The first days of the log; `quick` takes fewer."""
    days = QUICK_DAYS if quick else DAYS
    whole = shipped("globo", "auto")
    assert isinstance(whole.data.source, ClicksConfig)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config = cut(whole.data.source, root, days, users=USERS)
        make_logs(config, root / "logs")
        way, first = Days(whole, root / "logs", root / "days"), list[HotProfile]()
        rows = [line for number in range(days - 1) for line in day_of(number, way, first)]
    kept = {row["day"]: row["first_day"] / row["anew_ranked"] for row in rows if row["bytes_share"] == SHARES[1]}
    return {
        "config": {"recipe": "globo", "days": days, "users": f"one in {USERS}", "bytes_shares": SHARES},
        "metrics": {f"share_kept_day_{day}": share for day, share in kept.items()},
        "samples": {"rows": rows},
    }
