"""In which order the hot and the other batches of an epoch are trained.

Inputs come by one shuffle buffer after another, and what is left of a kind when no batch can be filled is kept for the
next: so no more than one batch of each kind is ever held beside a buffer, every input is trained once an epoch, and the
last batch of each kind may be smaller. Where these two fit into one they are one, the last of the epoch. Within a
buffer the two kinds alternate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Kinds = NDArray[np.bool_]
"""``[batches]`` which of them are hot."""

LEAST, MOST, FIRST = 1.0, 100.0, 50.0
"""Of the rate: per cent of a kind's batches that are trained before the other's turn."""
_FALLS = 4


def kinds_of(hot: Sequence[int], mixed: Sequence[int], size: int, rate: float | None) -> Kinds:
    """The batches of an epoch whose buffers have so many samples of each kind; what is of both counts as mixed.

    Parameters
    ----------
    rate : float or None
        See `in_turns`; None for `evenly`.
    """
    numbers = [batches_of(samples, size) for samples in (hot, mixed)]
    left = [sum(samples) % size for samples in (hot, mixed)]
    together = min(left) > 0 and sum(left) <= size
    if together:
        for each in numbers:
            each[-1] -= 1
    pairs = zip(*(each.tolist() for each in numbers), strict=True)
    found = [evenly(one, other) if rate is None else in_turns(one, other, rate) for one, other in pairs]
    return np.concatenate([*found, np.zeros(int(together), dtype=bool)])


def batches_of(samples: Sequence[int], size: int) -> NDArray[np.int64]:
    """``[buffers]`` batches of one kind that are filled with each buffer, which has so many samples of it."""
    ends = np.cumsum(samples, dtype=np.int64)
    filled = ends // size
    if len(filled):
        filled[-1] = -(-ends[-1] // size)
    return np.diff(filled, prepend=0)


def evenly(hot: int, mixed: int) -> Kinds:
    """Two kinds of batches, each at equal distances."""
    places = np.concatenate([(np.arange(number) + 0.5) / max(number, 1) for number in (hot, mixed)])
    # Of two at one place the mixed one goes first.
    order = np.lexsort((np.repeat([1, 0], [hot, mixed]), places))
    found: Kinds = (np.arange(hot + mixed) < hot)[order]
    return found


def in_turns(hot: int, mixed: int, rate: float) -> Kinds:
    """`rate` per cent of the hot batches, as many per cent of the mixed ones, and so on."""
    parts: list[Kinds] = []
    done = [0, 0]
    while done != [hot, mixed]:
        for kind, number in enumerate((hot, mixed)):
            turn = min(max(round(number * rate / 100), 1), number - done[kind])
            parts.append(np.full(turn, kind == 0))
            done[kind] += turn
    return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)


def rate_after(losses: Sequence[float]) -> float:
    """The published rule: half after a loss that rose, double after four in a row that fell."""
    rate, falls = FIRST, 0
    for before, now in pairwise(losses):
        falls = falls + 1 if now < before else 0
        if now > before:
            rate = max(rate / 2, LEAST)
        elif falls == _FALLS:
            rate, falls = min(2 * rate, MOST), 0
    return rate


def validation_losses(evaluations: Sequence[Mapping[str, Any]], until: int) -> list[float]:
    """Of the evaluations up to step `until`."""
    made = [entry for entry in evaluations if entry["step"] <= until and not entry.get("closing")]
    return [float(entry["log_loss"]) for entry in made if entry["log_loss"] is not None]
