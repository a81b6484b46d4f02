"""Write a made-up log: `clicks.csv`, five days of what a shop showed and what was clicked, and `tomorrow.csv`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import polars as pl


def make_log(folder: Path, rows: int = 12_000, seed: int = 1) -> None:
    """Users like some items, prices deter, and phones click less."""
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


if __name__ == "__main__":
    make_log(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
