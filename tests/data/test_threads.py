"""Test that threads of `prepare` keep the order of results and errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from stratarec.data import threads
from stratarec.data.dataset.row_group import first_appearances
from stratarec.data.threads import ahead, map_threads


@pytest.mark.parametrize("count", [1, 4])
def test_map_threads_keeps_the_order_and_raises_the_first_error(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(threads, "thread_count", lambda: count)
    assert map_threads(lambda item: item * item, range(100)) == [item * item for item in range(100)]
    assert map_threads(str, []) == []
    with pytest.raises(ZeroDivisionError):
        map_threads(lambda item: 1 // item if item < 5 else [][item], [3, 2, 1, 0, 9, 8])


def test_map_threads_runs_items_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "thread_count", lambda: 3)
    barrier = threading.Barrier(3, timeout=30)
    map_threads(lambda _: barrier.wait(), range(3))


def test_a_process_with_one_thread_of_polars_uses_one() -> None:
    program = "from stratarec.data.threads import thread_count; print(thread_count())"
    environment = os.environ | {"POLARS_MAX_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout == b"1\n"


def test_ahead_computes_exactly_one_item_in_advance() -> None:
    begun = [threading.Event() for _ in range(5)]

    def items() -> Iterator[int]:
        for number in range(5):
            begun[number].set()
            yield number

    for number in ahead(items()):
        if number < 4:
            assert begun[number + 1].wait(30)
        assert not any(event.is_set() for event in begun[number + 2 :])


def test_ahead_raises_an_error_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("at the fourth item")

    seen = list[int]()
    with pytest.raises(ValueError, match="fourth"):
        seen.extend(ahead(items()))
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 1, 2, 500])
def test_first_appearances_are_numbered_in_order(size: int) -> None:
    for most in (1, 3, 400):
        codes = np.random.default_rng(size).integers(0, most, size).repeat(np.arange(size) % 3)
        distinct = list(dict.fromkeys(codes.tolist()))
        values, places = first_appearances(codes)
        assert values.tolist() == distinct
        assert places.tolist() == [distinct.index(code) for code in codes.tolist()]
        assert places.dtype == np.int32
