"""Timing of several contenders in alternation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median


def alternate(
    runs: dict[str, Callable[[int], object]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Return the seconds of each call of contenders that alternate; a call gets the number of its
    round.

    The order of the contenders is reversed every other round, so that none always follows the same
    one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(-warmup, rounds):
        names = list(runs) if round_ % 2 else list(reversed(runs))
        for name in names:
            began = time.perf_counter()
            runs[name](round_ + warmup)
            if round_ >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles in milliseconds."""
    ordered = sorted(seconds)
    return {
        "median_ms": 1e3 * median(ordered),
        "low_ms": 1e3 * ordered[len(ordered) // 4],
        "high_ms": 1e3 * ordered[(3 * len(ordered)) // 4],
    }
