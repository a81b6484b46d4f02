"""Test the assignment of features to towers: planted blocks are recovered, bounds are kept, and
errors name the obstacle.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import refuses
from recipes import log_config
from stratarec.batch.batch import Batch
from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.errors import ConfigError, TrainingError
from stratarec.models.tower_config import TowersConfig, check_plan
from stratarec.planning.interaction import InteractionProbe
from stratarec.planning.towers import (
    Item,
    Limits,
    TowerBounds,
    TowerPlan,
    assign,
    best_clusters,
    check_bounds,
    inside,
    partition,
)
from stratarec.recipe import Recipe
from stratarec.training.tower_partition import TowerRequest, make_towers

BLOCKS = 4


def planted(root: Path) -> Recipe:
    """Return features with few values in four blocks that interact, and a small model of them."""
    source = {
        "kind": "synthetic",
        "samples": 100_000,
        "scale": 0.001,
        "max_rows": 30,
        "signal": 2.5,
        "blocks": BLOCKS,
    }
    return Recipe.from_dict(
        {
            "name": "planted",
            "data": {
                "path": str(root / "data"),
                "source": source,
                "split": {"by": "fraction", "valid": 0, "test": 0.05},
            },
            "model": {"kind": "dcnv2", "embedding_dim": 8, "cross_layers": 1, "deep_mlp": [64]},
            "train": {
                "batch_size": 512,
                "dense": {"kind": "adam", "learning_rate": 0.003},
                "embedding": {"kind": "rowwise_adagrad", "learning_rate": 0.1},
            },
        }
    )


def same_pairs(plan: TowerPlan) -> set[frozenset[str]]:
    return {frozenset(tower) for tower in plan.plan}


def blocks_of(recipe: Recipe) -> set[frozenset[str]]:
    assert isinstance(recipe.data.source, SyntheticConfig)
    return {frozenset(f"C{i + 1}" for i in block) for block in recipe.data.source.feature_blocks()}


@pytest.mark.slow
def test_a_probe_finds_planted_blocks_and_no_structure_in_other_labels(tmp_path: Path) -> None:
    recipe = planted(tmp_path)
    dataset = prepare(recipe.data)
    plan = make_towers(recipe, dataset, TowerRequest(towers=BLOCKS))
    assert same_pairs(plan) == blocks_of(recipe)
    assert plan.structure
    inside_towers, between = plan.inside_and_between
    assert inside_towers > between + 0.02
    few = make_towers(recipe, dataset, TowerRequest(towers=BLOCKS, steps=4))
    assert not few.structure
    assert few.samples == 1024


def test_features_that_share_ids_share_a_tower_with_features_they_interact_with(tmp_path: Path) -> None:
    draws, samples = np.random.default_rng(0), 20_000
    values = draws.integers(0, 6, (samples, 6))
    signs = draws.choice([-1.0, 1.0], (6, 6))[np.arange(6), values]
    odds = sum(signs[:, i] * signs[:, j] for i, j in ((0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5)))
    columns = {name: values[:, place] for place, name in enumerate("abcdef")}
    # Feature d has lists of values, of which only the first counts, or none.
    columns["d"] = pl.Series([[value, 9] if value else [] for value in values[:, 3].tolist()])
    frame = pl.DataFrame(
        {"label": (draws.random(samples) < 1 / (1 + np.exp(-odds))).astype(np.uint8), **columns}
    )
    kinds: dict[str, Any] = {"b": {"vocabulary": "a"}, "d": {"kind": "multi"}}
    sparse = tuple(SparseFeature(name=name, **kinds.get(name, {})) for name in "abcdef")
    config = log_config(tmp_path, Schema(label="label", sparse=sparse), frame)
    recipe, dataset = replace(planted(tmp_path), data=config), prepare(config)
    plan = make_towers(recipe, dataset, TowerRequest(towers=2))
    assert same_pairs(plan) == {frozenset("abc"), frozenset("def")}
    assert plan.inside_and_between[0] > 0.2
    assert TowerRequest(towers=2, steps=3).on(recipe, dataset).steps == 3


@pytest.mark.parametrize("seed", range(2))
def test_towers_follow_only_interactions_in_both_halves_of_the_samples(seed: int) -> None:
    draws, count = np.random.default_rng(seed), 20
    items = [Item(features=(f"f{n}",), tables=(f"t{n}",), bytes=4, lookups=1.0) for n in range(count)]
    block = draws.permutation(np.arange(count) % 4)

    def half(strength: float) -> np.ndarray:
        noise = draws.normal(size=(count, count))
        matrix = noise + noise.T + strength * (block[:, None] == block)
        np.fill_diagonal(matrix, 0)
        return matrix

    noise, signal = (
        partition(items, (half(strength), half(strength)), TowerBounds(towers=4), batch_size=1, samples=10)
        for strength in (0.0, 6.0)
    )
    assert not noise.structure
    assert signal.structure
    assert same_pairs(signal) == {frozenset(f"f{n}" for n in np.flatnonzero(block == k)) for k in range(4)}
    assert max(tower.lookups for tower in noise.towers) <= 6


@pytest.mark.parametrize(
    ("groups", "towers", "words"),
    [
        ([["a"]], 2, "--towers 2 1"),
        ([["a"], ["b"], ["c"]], 4, "--towers 4 3"),
        ([["a", "b", "c"]], 2, "--towers 2 1 a, b, c table history"),
        ([["a"], ["b"]], 1, "--towers 1 2"),
    ],
)
def test_features_that_cannot_fill_the_towers_are_refused(
    groups: list[list[str]], towers: int, words: str
) -> None:
    items = [Item(features=tuple(names), tables=tuple(names), bytes=4, lookups=1.0) for names in groups]
    with refuses(ConfigError, words):
        check_bounds(items, TowerBounds(towers=towers))


@pytest.mark.parametrize(
    ("plan", "words"),
    [((("a",), ("b", "x")), "plan x a b"), ((("a",), ("a", "b")), "plan a 0 1"), ((("a",), ()), "plan 1")],
)
def test_a_plan_for_other_features_is_refused(plan: tuple[tuple[str, ...], ...], words: str) -> None:
    schema = Schema(sparse=(SparseFeature(name="a"), SparseFeature(name="b")))
    with refuses(ConfigError, words):
        check_plan(TowersConfig(plan=plan), schema)


def test_an_infinite_number_is_refused() -> None:
    probe = InteractionProbe(("a", "b"), 1)
    bags = {
        name: JaggedTensor(values=torch.zeros(2, dtype=torch.int64), offsets=torch.arange(3))
        for name in "ab"
    }
    batch = Batch(
        label=torch.ones(2), dense=torch.tensor([[1.0], [math.inf]]), sparse=KeyedJagged.from_features(bags)
    )
    with refuses(TrainingError, "loss probe dense finite"):
        probe.learn(batch)


def test_samples_without_a_label_or_a_value_are_accepted() -> None:
    probe = InteractionProbe(("a", "b"), 0)
    bags = {
        "b": JaggedTensor(values=torch.tensor([9, 500, 3, 1 << 40]), offsets=torch.tensor([0, 2, 2, 4])),
        "a": JaggedTensor(values=torch.tensor([1, 2, 3]), offsets=torch.arange(4)),
    }
    label = torch.tensor([[1.0, 0.0], [0.0, math.nan], [math.nan, 1.0]])
    batch = Batch(label=label, dense=torch.zeros(3, 0), sparse=KeyedJagged.from_features(bags))
    assert probe.learn(batch) == pytest.approx(math.log(2), abs=0.1)
    assert probe.samples == 2
    assert all(half.shape == (2, 2) for half in probe.halves())


@pytest.mark.parametrize("seed", range(4))
def test_clusters_have_the_affinities_of_an_exhaustive_search(seed: int) -> None:
    draws = np.random.default_rng(seed)
    count, clusters = 7, 2 + seed % 2
    noise, sizes = draws.normal(size=(count, count)), draws.integers(1, 3, count).astype(float)
    affinity = noise + noise.T
    np.fill_diagonal(affinity, 0)
    weights = np.stack([sizes, draws.integers(1, 10, count)], axis=1).astype(float)
    limits = Limits(weights=weights, least=np.array([1.0, 0.0]), most=weights.sum(0) / clusters * 1.5)
    every = (np.array(labels) for labels in itertools.product(range(clusters), repeat=count))
    best = max(inside(affinity, labels) for labels in every if limits.hold(labels, clusters))
    result = best_clusters(affinity, clusters, limits, seed=0)
    assert result is not None
    assert limits.hold(result, clusters)
    assert inside(affinity, result) == pytest.approx(best)


@given(st.data())
@settings(max_examples=15)
def test_an_assignment_keeps_its_bounds_or_does_not_exist(data: st.DataObject) -> None:
    count, clusters = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 3))
    weights = np.array(
        data.draw(
            st.lists(st.tuples(st.integers(1, 5), st.integers(0, 10**15)), min_size=count, max_size=count)
        ),
        dtype=float,
    )
    most = np.array([data.draw(st.integers(1, 12)), data.draw(st.integers(0, 3 * 10**15))], dtype=float)
    limits = Limits(weights=weights, least=np.array([data.draw(st.integers(0, 3)), 0.0]), most=most)
    costs = np.array(
        data.draw(
            st.lists(
                st.lists(st.floats(0, 9), min_size=clusters, max_size=clusters),
                min_size=count,
                max_size=count,
            )
        )
    )
    every = [np.array(labels) for labels in itertools.product(range(clusters), repeat=count)]
    fine = [costs[range(count), labels].sum() for labels in every if limits.hold(labels, clusters)]
    result = assign(costs, limits)
    assert (result is not None) == bool(fine)
    if result is not None:
        assert limits.hold(result, clusters)
        assert costs[range(count), result].sum() <= min(fine) + 1e-3


ITEMS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 100), st.floats(0.1, 50)), min_size=2, max_size=9
)


@given(ITEMS, st.integers(2, 4), st.floats(1, 3), st.integers(20, 400))
@settings(max_examples=15)
def test_towers_keep_their_bounds_or_name_the_obstacle(
    drawn: list[tuple[int, int, float]], towers: int, ratio: float, host: int
) -> None:
    items = [
        Item(
            features=tuple(f"f{n}_{k}" for k in range(size)), tables=(f"t{n}",), bytes=rows, lookups=lookups
        )
        for n, (size, rows, lookups) in enumerate(drawn)
    ]
    count = sum(size for size, _, _ in drawn)
    matrix = np.random.default_rng(0).uniform(size=(count, count))
    bounds = TowerBounds(towers=towers, ratio=ratio, dram=host)
    refusal = ""
    try:
        plan = partition(items, (matrix + matrix.T, matrix + matrix.T), bounds, batch_size=8)
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        assert re.search(r"\b[ft][0-9]|towers", refusal)
        return
    fewest, most = bounds.features(count)
    assert sorted(name for tower in plan.plan for name in tower) == sorted(
        n for item in items for n in item.features
    )
    for tower in plan.towers:
        assert fewest <= len(tower.features) <= most
        assert tower.bytes <= host
    tower_of = {name: number for number, names in enumerate(plan.plan) for name in names}
    assert all(len({tower_of[name] for name in item.features}) == 1 for item in items)
