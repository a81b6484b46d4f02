"""Write synthetic logs of a shop: `clicks.csv` with five days of shown items and clicks, and
`tomorrow.csv`.

With --news, also write `news.parquet`, a log of clicks alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import polars as pl


def make_log(folder: Path, rows: int = 12_000, seed: int = 1) -> None:
    """Write a log in which users prefer some items, click less at high prices, and click less on
    phones.
    """
    random = np.random.default_rng(seed)
    user, item = random.zipf(1.3, rows) % 800, random.zipf(1.2, rows) % 400
    country = np.array(["de", "fr", "it", "pl"])[user % 4]
    device = random.choice(["phone", "desktop", "tablet"], rows, p=[0.6, 0.3, 0.1])
    price = np.round(np.exp(random.normal(3, 1, rows)), 2)
    taste = np.random.default_rng(7).normal(0, 1, (800, 8)), np.random.default_rng(8).normal(0, 1, (400, 8))
    logit = 0.6 * (taste[0][user] * taste[1][item]).sum(1) - 0.4 * np.log(price) - 0.5 * (device == "phone")
    clicked = random.random(rows) < 1 / (1 + np.exp(-logit))
    seconds = np.sort(random.integers(0, 6 * 86_400, rows))
    log = pl.DataFrame(
        {
            "time": (np.datetime64("2026-05-01", "s") + seconds).astype("datetime64[us]"),
            "user": [f"u{number}" for number in user],
            "item": [f"i{number}" for number in item],
            "country": country,
            "device": device,
            "price": price,
            "clicked": clicked.astype(np.int8),
        }
    )
    log.filter(seconds < 5 * 86_400).write_csv(folder / "clicks.csv")
    log.filter(seconds >= 5 * 86_400).write_csv(folder / "tomorrow.csv")


def make_clicks(path: Path, clicks: int = 6_000) -> None:
    """Write clicks of users who stay with one topic for a session; a topic has articles 0 to 39."""
    random = np.random.default_rng(1)
    session = np.sort(random.integers(0, clicks // 4, clicks))
    user = np.random.default_rng(2).integers(0, 500, clicks // 4 + 1)[session]
    topic = np.where(random.random(clicks) < 0.85, user % 10, random.integers(0, 10, clicks))
    article = 40 * topic + random.zipf(1.4, clicks) % 40
    start = np.datetime64("2026-05-01", "ms").astype(np.int64)
    time = start + session * 240_000 + np.arange(clicks) % 60 * 1_000
    pl.DataFrame({"user": user, "session": session, "article": article, "time": time}).sort(
        "time"
    ).write_parquet(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        help="write to this folder (default: the current one)",
    )
    parser.add_argument("--news", action="store_true", help="also write a log of clicks alone")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"{arguments.folder} is not a folder")
    make_log(arguments.folder)
    if arguments.news:
        make_clicks(arguments.folder / "news.parquet")
