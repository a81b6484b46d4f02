"""Features to towers: bounds hold, lookups are spread evenly, and what cannot be is refused by name."""

from __future__ import annotations

import itertools
import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stratarec.errors import ConfigError
from stratarec.planning.towers import Item, TowerBounds, assign, partition


def holds(items: list[Item], labels: tuple[int, ...], bounds: TowerBounds) -> bool:
    fewest, most = bounds.features(sum(len(item.features) for item in items))
    members = [[item for item, label in zip(items, labels, strict=True) if label == k] for k in range(bounds.towers)]
    return all(
        fewest <= sum(len(item.features) for item in each) <= most
        and (bounds.bytes is None or sum(item.bytes for item in each) <= bounds.bytes)
        for each in members
    )


def heaviest(items: list[Item], labels: tuple[int, ...], towers: int) -> float:
    return max(np.bincount(labels, [item.lookups for item in items], towers))


@given(st.data())
@settings(max_examples=15)
def test_lookups_are_spread_as_an_exhaustive_search_spreads_them(data: st.DataObject) -> None:
    count, towers = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 3))
    items = [
        Item(
            features=tuple(f"f{n}_{k}" for k in range(data.draw(st.integers(1, 3)))), tables=(f"t{n}",),
            bytes=data.draw(st.integers(1, 10**15)), lookups=data.draw(st.floats(0.1, 50)),
        )
        for n in range(count)
    ]  # fmt: skip
    bounds = TowerBounds(towers=towers, ratio=data.draw(st.floats(1, 3)), dram=data.draw(st.integers(1, 3 * 10**15)))
    fine = [
        heaviest(items, labels, towers)
        for labels in itertools.product(range(towers), repeat=count)
        if holds(items, labels, bounds)
    ]
    found = assign(items, bounds)
    assert (found is not None) == bool(fine)
    if found is not None:
        assert holds(items, tuple(found), bounds)
        assert heaviest(items, tuple(found), towers) <= min(fine) * 1.011


ITEMS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 100), st.floats(0.1, 50)), min_size=2, max_size=9)


@given(ITEMS, st.integers(2, 4), st.floats(1, 3), st.integers(20, 400))
@settings(max_examples=15)
def test_towers_keep_their_bounds_or_say_what_stands_in_the_way(
    drawn: list[tuple[int, int, float]], towers: int, ratio: float, host: int
) -> None:
    items = [
        Item(features=tuple(f"f{n}_{k}" for k in range(size)), tables=(f"t{n}",), bytes=rows, lookups=lookups)
        for n, (size, rows, lookups) in enumerate(drawn)
    ]
    count = sum(size for size, _, _ in drawn)
    bounds = TowerBounds(towers=towers, ratio=ratio, dram=host)
    refusal = ""
    try:
        plan = partition(items, bounds)
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        assert re.search(r"\b[ft][0-9]|towers", refusal)
        return
    fewest, most = bounds.features(count)
    assert sorted(name for tower in plan.plan for name in tower) == sorted(n for item in items for n in item.features)
    for tower in plan.towers:
        assert fewest <= len(tower.features) <= most
        assert tower.bytes <= host
    tower_of = {name: number for number, names in enumerate(plan.plan) for name in names}
    assert all(len({tower_of[name] for name in item.features}) == 1 for item in items)
