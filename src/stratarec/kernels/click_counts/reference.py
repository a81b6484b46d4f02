"""The features of one click and one item, by looking at every click."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Click:
    """One line of a log."""

    time: int
    user: int
    session: int
    item: int
    contexts: tuple[int, ...]
    """0 where one is missing."""


def features(
    log: Sequence[Click], at: Click, item: int, *, recent: int, window: int, memory: int, second: int
) -> list[float]:
    """What `Lookback` gives for `item` at the moment, user and contexts of `at`; `log` is in order of time."""
    past = [click for click in log if click.time < at.time]
    fresh = [click for click in past if click.time >= at.time - recent]
    born = next((click.time for click in past if click.item == item), None)
    near = [click for click in past if click.time >= at.time - window]
    far = [click for click in past if click.time >= at.time - memory]
    moves = [
        (before.item, click.item)
        for click in far
        if (before := _previous(log, click)) is not None and click.time - before.time <= window
    ]
    last = next((click for click in reversed(far) if click.user == at.user), None)
    session = sum(click.session == at.session for click in far)
    return [
        sum(click.item == item for click in near),
        sum(click.item == item for click in fresh),
        math.nan if born is None else (at.time - born) / second,
        sum(click.item == item for click in far),
        sum(click.item == item and click.user == at.user for click in far),
        0 if last is None else moves.count((last.item, item)),
        0 if last is None else moves.count((item, last.item)),
        0 if last is None else sum(click.item == last.item for click in far),
        session,
        math.nan if last is None else (at.time - last.time) / second,
        sum(click.item == item and _step(log, click, memory) == min(session, 2) for click in near),
        *(
            sum(click.item == item and click.contexts[c] == value for click in near) if value else math.nan
            for c, value in enumerate(at.contexts)
        ),
    ]


def _previous(log: Sequence[Click], click: Click) -> Click | None:
    """The user's click before this one in the log."""
    place = next(place for place, other in enumerate(log) if other is click)
    return next((other for other in reversed(log[:place]) if other.user == click.user), None)


def _step(log: Sequence[Click], click: Click, memory: int) -> int:
    """How many clicks of its session the log holds before this one, up to 2."""
    place = next(place for place, other in enumerate(log) if other is click)
    earlier = [other for other in log[:place] if other.session == click.session]
    return min(sum(other.time >= click.time - memory for other in earlier), 2)
