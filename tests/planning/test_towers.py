"""Features to towers: planted blocks are recovered, bounds are kept, and what cannot be is refused by name."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.errors import ConfigError
from stratarec.models import build_model
from stratarec.models.zoo.config import DCNv2Config
from stratarec.planning.interaction import _inputs, _mixed, feature_keys, measure
from stratarec.planning.towers import Item, Limits, TowerBounds, TowerPlan, assign, balanced_clusters, partition, spread
from stratarec.recipe import Recipe
from stratarec.training.tower_partition import TowerRequest, make_towers

BLOCKS = 4


def planted(root: Path) -> Recipe:
    """Features of few values in four blocks that interact, and a small model of them."""
    source = {"kind": "synthetic", "samples": 100_000, "scale": 0.001, "max_rows": 30, "signal": 2.5, "blocks": BLOCKS}
    return Recipe.from_dict({
        "name": "planted",
        "data": {"path": str(root / "data"), "source": source, "split": {"by": "fraction", "valid": 0, "test": 0.05}},
        "model": {"kind": "dcnv2", "embedding_dim": 8, "cross_layers": 1, "deep_mlp": [64]},
        "train": {"batch_size": 512, "dense": {"kind": "adam", "learning_rate": 0.003},
                  "embedding": {"kind": "rowwise_adagrad", "learning_rate": 0.1}},
    })  # fmt: skip


def same_pairs(plan: TowerPlan) -> set[frozenset[str]]:
    return {frozenset(tower) for tower in plan.plan}


@pytest.mark.slow
def test_a_probe_finds_planted_blocks_and_chance_does_not(tmp_path: Path) -> None:
    recipe = planted(tmp_path)
    dataset = prepare(recipe.data)
    assert isinstance(recipe.data.source, SyntheticConfig)
    blocks = {frozenset(f"C{i + 1}" for i in block) for block in recipe.data.source.feature_blocks()}
    found = make_towers(recipe, dataset, TowerRequest(towers=BLOCKS, steps=350))
    assert same_pairs(found) == blocks
    inside, between = found.inside_and_between
    assert inside > 1.2 * between
    items = [Item(features=(name,), tables=(name,), bytes=4, lookups=1.0) for name in found.features]
    matrix, bounds = np.array(found.interaction), TowerBounds(towers=BLOCKS)
    for seed in range(5):
        strange = np.random.default_rng(seed).permutation(len(items))
        chance = partition(items, matrix[np.ix_(strange, strange)], bounds, batch_size=1, seed=seed)
        assert same_pairs(chance) != blocks


def test_mixed_differences_are_those_of_the_logit(tmp_path: Path) -> None:
    """Against the definition: four logits a pair of features, of a model that is bilinear in every pair."""
    schema = Schema(sparse=tuple(SparseFeature(name=name) for name in "abcd"))
    config = DCNv2Config(embedding_dim=3, cross_layers=1, deep_mlp=(), structure="parallel")
    model = build_model(config, schema, dict.fromkeys("abcd", 7), seed=1)
    draws = torch.Generator().manual_seed(0)
    ids = {name: torch.randint(0, 7, (6,), generator=draws) for name in "abcd"}
    sparse = KeyedJagged.from_features({
        name: JaggedTensor(values=values, offsets=torch.arange(7)) for name, values in ids.items()
    })  # fmt: skip
    batch = Batch(label=torch.zeros(6), dense=torch.zeros(6, 0), sparse=sparse)
    keys = feature_keys(model)
    found = _mixed(model, *_inputs(model, batch))[0] / 6
    dense, vectors = _inputs(model, batch)

    def logits(*moved: int) -> torch.Tensor:
        changed = vectors.clone()
        for place in moved:
            changed[:, place] = vectors.roll(3, 0)[:, place]
        with torch.no_grad():
            return model.network.score(dense, changed, None)

    for i, j in itertools.combinations(range(len(keys)), 2):
        wanted = (logits(i, j) - logits(i) - logits(j) + logits()).square().mean().item()
        assert found[i, j] == pytest.approx(wanted, rel=1e-3, abs=1e-9)
        assert found[j, i] == pytest.approx(wanted, rel=1e-3, abs=1e-9)
    assert (np.diag(measure(model, [batch])) == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_clusters_are_as_tight_as_an_exhaustive_search_finds(seed: int) -> None:
    draws = np.random.default_rng(seed)
    count, clusters = 7, 2 + seed % 2
    points, sizes = draws.normal(size=(count, 2)), draws.integers(1, 3, count).astype(float)
    weights = np.stack([sizes, draws.integers(1, 10, count)], axis=1).astype(float)
    limits = Limits(weights=weights, least=np.array([1.0, 0.0]), most=weights.sum(0) / clusters * 1.5)
    every = (np.array(labels) for labels in itertools.product(range(clusters), repeat=count))
    best = min(spread(points, sizes, labels, clusters) for labels in every if limits.hold(labels, clusters))
    found = balanced_clusters(points, sizes, clusters, limits, seed=0)
    assert found is not None
    assert limits.hold(found, clusters)
    assert spread(points, sizes, found, clusters) <= best * (1 + 1e-6)


@given(st.data())
@settings(max_examples=15)
def test_an_assignment_keeps_its_bounds_or_there_is_none(data: st.DataObject) -> None:
    count, clusters = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 3))
    weights = np.array(data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 10**15)), min_size=count,
                                          max_size=count)), dtype=float)  # fmt: skip
    most = np.array([data.draw(st.integers(1, 12)), data.draw(st.integers(0, 3 * 10**15))], dtype=float)
    limits = Limits(weights=weights, least=np.array([data.draw(st.integers(0, 3)), 0.0]), most=most)
    costs = np.array(data.draw(st.lists(st.lists(st.floats(0, 9), min_size=clusters, max_size=clusters),
                                        min_size=count, max_size=count)))  # fmt: skip
    every = [np.array(labels) for labels in itertools.product(range(clusters), repeat=count)]
    fine = [costs[range(count), labels].sum() for labels in every if limits.hold(labels, clusters)]
    found = assign(costs, limits)
    assert (found is not None) == bool(fine)
    if found is not None:
        assert limits.hold(found, clusters)
        assert costs[range(count), found].sum() <= min(fine) + 1e-3


ITEMS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 100), st.floats(0.1, 50)), min_size=2, max_size=9)


@given(ITEMS, st.integers(2, 4), st.floats(1, 3), st.integers(20, 400))
@settings(max_examples=15)
def test_towers_keep_their_bounds_or_name_the_obstacle(
    drawn: list[tuple[int, int, float]], towers: int, ratio: float, host: int
) -> None:
    items = [
        Item(features=tuple(f"f{n}_{k}" for k in range(size)), tables=(f"t{n}",), bytes=rows, lookups=lookups)
        for n, (size, rows, lookups) in enumerate(drawn)
    ]
    count = sum(size for size, _, _ in drawn)
    matrix = np.random.default_rng(0).uniform(size=(count, count))
    bounds = TowerBounds(towers=towers, ratio=ratio, dram=host)
    refusal = ""
    try:
        plan = partition(items, (matrix + matrix.T) / 2, bounds, batch_size=8)
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
