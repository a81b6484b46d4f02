"""Compare sliding counts of a click log with a reference that looks at every click."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from stratarec.kernels.click_counts import FEATURES, Click, Clicks, Lookback, reference_features
from stratarec.kernels.random import mix_array

RECENT, WINDOW, MEMORY = 15, 40, 150


def random_log(seed: int, clicks: int = 250) -> list[Click]:
    """Return a log with few users and items, and many clicks at the same time."""
    draws = np.random.default_rng(seed)
    moments = np.sort(draws.integers(0, 2 * clicks, clicks)) // 3 * 3
    user, item, session = (draws.integers(1, n, clicks) for n in (6, 9, 12))
    contexts = draws.integers(0, 4, (clicks, 2))  # 0 is missing
    return [
        Click(time=int(t), user=int(u), session=int(s), item=int(i), contexts=tuple(int(v) for v in c))
        for t, u, s, i, c in zip(moments, user, session, item, contexts, strict=True)
    ]


def as_clicks(log: list[Click]) -> Clicks:
    def hashes(values: Any) -> np.ndarray:
        return mix_array(np.array(values, dtype=np.uint64))

    return Clicks(
        times=np.array([click.time for click in log]),
        users=hashes([click.user for click in log]),
        sessions=hashes([click.session for click in log]),
        items=hashes([click.item for click in log]),
        contexts=hashes([click.contexts for click in log]).reshape(len(log), 2),  # the hash of 0 is 0
    )


def count_in_pieces(log: list[Click], shown: np.ndarray, cuts: list[int]) -> np.ndarray:
    lookback = Lookback(recent=RECENT, window=WINDOW, memory=MEMORY, second=2, contexts=2)
    hashes = mix_array(shown.astype(np.uint64))  # the hash of 0 is 0
    edges = [0, *cuts, len(log)]
    parts = [
        lookback.features(as_clicks(log[first:last]), hashes[first:last]) for first, last in pairwise(edges)
    ]
    return np.concatenate(parts)


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [0, 1])
def test_counts_match_looking_at_every_earlier_click(seed: int) -> None:
    log = random_log(seed)
    shown = np.random.default_rng(seed).integers(0, 9, (len(log), 3))
    # Pieces must not separate clicks at the same time.
    cuts = [n for n in range(1, len(log)) if log[n].time != log[n - 1].time][::17]
    actual = count_in_pieces(log, shown, cuts)
    assert actual.shape == (len(log), 3, len(FEATURES) + 2)
    for n, click in enumerate(log):
        for k, item in enumerate(shown[n]):
            if item:
                spans = {"recent": RECENT, "window": WINDOW, "memory": MEMORY, "second": 2}
                expected = reference_features(log, click, int(item), **spans)
                np.testing.assert_array_equal(actual[n, k], np.array(expected, dtype=np.float32))
            else:
                assert not actual[n, k].any()


@pytest.mark.interpreted
def test_later_clicks_change_nothing() -> None:
    log = random_log(3)
    shown = np.random.default_rng(3).integers(1, 9, (len(log), 2))
    cut = next(n for n in range(100, len(log)) if log[n].time != log[n - 1].time)
    all_counts, part = count_in_pieces(log, shown, []), count_in_pieces(log[:cut], shown[:cut], [])
    np.testing.assert_array_equal(all_counts[:cut], part)


def test_memory_is_bounded_by_the_window() -> None:
    lookback = Lookback(recent=RECENT, window=WINDOW, memory=MEMORY, second=1, contexts=2)
    sizes = []
    for piece in range(30):
        log = [
            Click(
                time=1000 * piece + click.time,
                user=10 * piece + click.user,
                session=click.session,
                item=10 * piece + click.item,
                contexts=click.contexts,
            )
            for click in random_log(piece)
        ]
        lookback.features(as_clicks(log), np.zeros((len(log), 0), dtype=np.uint64))
        sizes.append(len(lookback._keys) + len(lookback._last[0]) + len(lookback._long.times))
    assert max(sizes[5:]) <= 1.2 * max(sizes[:5])
