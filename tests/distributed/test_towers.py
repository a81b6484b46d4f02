"""Test runs by towers: two hosts with two ranks each train the model of one process, bit for bit
without tower modules.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed.ranks import Ranks
from distributed.test_runs import TIERED, assert_near, make_config, model, train
from models import test_deduplicated as dedup
from torch.nn import functional

from errors import refuses
from recipes import prepared
from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed import sharding as placement
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.measure import emulated_mesh
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import ShardedCollection
from stratarec.distributed.sharding import Place, Sharding
from stratarec.distributed.towers import DisaggregatedModel
from stratarec.embedding import RowOptimizerConfig
from stratarec.errors import ConfigError
from stratarec.models import DLRMConfig, HistoryConfig, TowersConfig, build_model
from stratarec.models.base import build_tables
from stratarec.recipe import Recipe
from stratarec.training import forecast
from stratarec.training.build import sharding_plan
from stratarec.training.distributed import GradientReducer
from stratarec.training.resolve import resolve, with_exchange
from stratarec.training.run.run_directory import write_recipe


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared data set whose features repeat in sessions."""
    root = tmp_path_factory.mktemp("towers")
    prepared(Recipe.from_dict(make_config(root)).data)
    return root


def make_recipe(
    home: Path,
    run: Path,
    compression: float = 2.0,
    memory: Any = None,
    kind: str = "dlrm",
    pooling: str = "mean",
    distributed: Any = None,
    network: Any = None,
    **train: Any,
) -> Recipe:
    config = make_config(home, run=str(run), **{"max_steps": 16, "eval_every": 10, **train})
    names = [feature.name for feature in Dataset.open(config["data"]["path"]).schema.sparse]
    ends = [name for name in names if name.startswith(("item", "history"))]
    others = [name for name in names if name not in ends]
    towers = {"plan": [[*ends, *others[::2]], others[1::2]], "compression": compression}
    section = {"embedding_dim": 8, "towers": towers, "history": {"pooling": pooling}, **(network or {})}
    given = (
        {**config["model"], **section} if kind == "dlrm" else {"kind": kind, "deep_mlp": [16], **section}
    )
    return Recipe.from_dict(
        {
            **config,
            "memory": memory or {},
            "model": given,
            "distributed": {"exchange": "sptt", **(distributed or {})},
        }
    )


REGULARIZED = {"dropout": 0.2, "batch_norm": True}
CASES: list[dict[str, Any]] = [
    {"pooling": "target_attention", "dense": {"kind": "adam", "learning_rate": 0.003}, "clip_norm": 0.05},
    {"kind": "dcnv2", "deduplicate": False, "compression": 4.0},
]


@pytest.mark.parametrize("case", CASES)
def test_towers_on_several_hosts_train_the_model_of_one_process(
    ranks: Ranks, home: Path, case: dict[str, Any], tmp_path: Path
) -> None:
    expected = train(Mesh.alone(), make_recipe(home, tmp_path / "one", **case))
    results = ranks.run(4, train, make_recipe(home, tmp_path / "many", **case), local=2, towers=2)
    assert results[1:] == results[:1] * 3
    np.testing.assert_allclose(results[0]["losses"], expected["losses"], rtol=1e-4)
    assert_near(model(tmp_path / "many"), model(tmp_path / "one"), 1e-4)


def train_pooled(mesh: Mesh, recipe: Recipe) -> Any:
    """Train with every table pooled by one rank."""
    given, placement.place_whole = placement.place_whole, lambda load, ranks: Place(first=0)
    try:
        return train(mesh, recipe)
    finally:
        placement.place_whole = given


@pytest.mark.slow
@pytest.mark.parametrize("network", [{}, REGULARIZED], ids=["plain", "regularized"])
def test_without_modules_the_tower_exchange_matches_the_flat_exchange_bit_for_bit(
    ranks: Ranks, home: Path, network: dict[str, Any], tmp_path: Path
) -> None:
    results = []
    for name, towers in (("flat", 0), ("sptt", 2)):
        recipe = make_recipe(home, tmp_path / name, 1.0, deduplicate=False, batch_size=118, network=network)
        every = ranks.run(4, train_pooled, recipe, local=2, towers=towers)
        assert all(one == every[0] for one in every), name
        results.append(every[0])
    flat, sptt = results
    assert sptt["losses"] == flat["losses"]
    assert_near(model(tmp_path / "sptt"), model(tmp_path / "flat"), 0)
    for mine, theirs in zip(
        [*sptt["evaluations"], sptt["test"]], [*flat["evaluations"], flat["test"]], strict=True
    ):
        for figure in ("auc", "log_loss", "calibration_error"):
            assert mine[figure] == pytest.approx(theirs[figure], abs=1e-9), figure


@pytest.mark.slow
def test_a_run_by_towers_resumes_bit_for_bit(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    """The data is deduplicated, int8 rows are stored in logs, and the wire formats round."""
    wires, runs = {"wire": "int8", "gradient_wire": "fp16", "dense_wire": "bf16"}, []
    for name, parts in (("whole", (16,)), ("cut", (7, 16))):
        memory = {"block": {"path": str(tmp_path / f"rows-{name}"), "budget": "64MiB"}, **TIERED}
        for steps in parts:
            recipe = make_recipe(
                home,
                tmp_path / name,
                memory=memory,
                distributed=wires,
                max_steps=steps,
                network=REGULARIZED,
            )
            results = ranks.run(4, train, recipe, steps == 16 and name == "cut", local=2, towers=2)
        runs.append(results[0])
    assert runs[0]["cached"] > 0
    assert [tuple(point) for point in runs[1]["losses"]] == runs[0]["losses"]
    assert_near(model(tmp_path / "cut"), model(tmp_path / "whole"), 0)
    # One process resumes from the checkpoint of two hosts.
    train(Mesh.alone(), make_recipe(home, tmp_path / "cut", max_steps=18, network=REGULARIZED), True)


def is_by_towers(mesh: Mesh, recipe: Recipe) -> bool:
    return resolve(recipe, Dataset.open(recipe.data.path), mesh).mesh.between is not None


def test_auto_chooses_the_exchange_with_the_shorter_predicted_step(
    ranks: Ranks, home: Path, tmp_path: Path
) -> None:
    for compression, network, exchange, expected in (
        (1.0, "1Mbit", "auto", False),
        (8.0, "1Mbit", "auto", True),
        (8.0, "1Mbit", "flat", False),
    ):
        recipe = make_recipe(
            home, tmp_path, compression, distributed={"exchange": exchange, "network": network}
        )
        assert ranks.run(4, is_by_towers, recipe, local=2, towers=2) == [expected] * 4, (
            compression,
            network,
            exchange,
        )


@pytest.mark.parametrize(
    ("seconds", "compression", "network", "expected"),
    [
        ((1.0, 2.0), 1.0, "100Gbit", "flat"),
        ((2.0, 1.0), 1.0, "100Gbit", "sptt"),
        ((9.0, inf), 1.0, "100Gbit", "flat"),
        ((1.0, inf), 8.0, "1Mbit", "sptt"),
    ],
)
def test_auto_compares_measured_ranks_and_a_run_keeps_its_choice(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: tuple[float, float],
    compression: float,
    network: str,
    expected: str,
) -> None:
    """If one exchange cannot be measured, only the bytes and collectives of both are compared."""
    measured = dict(zip(("flat", "sptt"), seconds, strict=True))
    monkeypatch.setattr(forecast, "rank_seconds", lambda option, *_: measured[option.distributed.exchange])
    recipe = make_recipe(home, tmp_path, compression, distributed={"exchange": "auto", "network": network})
    mesh, dataset = emulated_mesh(0, 2, 2, by_towers=True), Dataset.open(recipe.data.path)
    assert with_exchange(recipe, dataset, mesh).distributed.exchange == expected
    assert with_exchange(recipe, dataset, replace(mesh, between=None)) == recipe
    other = {"flat": "sptt", "sptt": "flat"}[expected]
    write_recipe(tmp_path, recipe.with_fields({"distributed.exchange": other}))
    assert with_exchange(recipe, dataset, mesh).distributed.exchange == other
    # Another rate, model or batch is predicted again.
    for field, value in (
        ("distributed.network", f"1{network}"),
        ("model.top_mlp", [8]),
        ("train.batch_size", 60),
    ):
        assert (
            with_exchange(recipe.with_fields({field: value}), dataset, mesh).distributed.exchange
            == expected
        )


def test_a_rank_measures_both_exchanges_in_alternation_and_the_shorter_time_counts(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [("flat", 2.0), ("sptt", 9.0), ("flat", 2.0), ("sptt", 1.0)]

    def seconds_of(option: Recipe, *_: object) -> float:
        exchange, seconds = measured.pop(0)
        assert option.distributed.exchange == exchange
        return seconds

    monkeypatch.setattr(forecast, "rank_seconds", seconds_of)
    recipe = make_recipe(home, tmp_path, distributed={"exchange": "auto", "network": "100Gbit"})
    mesh, dataset = emulated_mesh(0, 2, 2, by_towers=True), Dataset.open(recipe.data.path)
    assert with_exchange(recipe, dataset, mesh).distributed.exchange == "sptt"
    assert not measured


def test_invalid_recipes_for_the_tower_exchange_are_refused() -> None:
    with refuses(ConfigError, "distributed.network"):
        DistributedConfig(network="fast")
    sptt = DistributedConfig(exchange="sptt")
    assert sptt.by_towers(2, 2)
    assert not DistributedConfig().by_towers(3, 2)
    assert DistributedConfig().by_towers(2, 2)
    assert not DistributedConfig(exchange="flat").by_towers(2, 2)
    for towers, hosts, message in ((3, 2, "3 towers 2"), (0, 1, "towers 1")):
        with refuses(ConfigError, message):
            sptt.by_towers(towers, hosts)


def test_the_tables_of_a_tower_are_on_its_host(home: Path, tmp_path: Path) -> None:
    recipe = make_recipe(home, tmp_path / "run")
    dataset = Dataset.open(recipe.data.path)
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    plan = sharding_plan(recipe, dataset, tables, None, 4, by_towers=True)
    assert recipe.model.towers is not None
    for host, features in enumerate(recipe.model.towers.plan):
        for name in features:
            place = plan.places[name]
            assert {rank // 2 for rank in range(place.first, place.first + place.ranks)} == {host}
    small = make_recipe(home, tmp_path / "run", memory={"dram": "40KiB"})
    with refuses(ConfigError, "tables tower"):
        sharding_plan(small, dataset, tables, None, 4, by_towers=True)
    with refuses(ConfigError, "ranks 5 2"):
        sharding_plan(recipe, dataset, tables, None, 5, by_towers=True)


TABLES = {"item": 0, "os": 1, "tags": 1}
FORMS: list[dict[str, Any]] = [{"spare": 0}, {"spare": 50}, {"scattered": True}, {}]


def train_one_step(mesh: Mesh, config: DLRMConfig, sharding: str) -> dict[str, Any]:
    """Train one step on a batch of a different form on each rank; the last rank has no samples."""

    def collection(tables: Any) -> ShardedCollection:
        split = {"first": 0, "ranks": 2, "travel": "rows"} if sharding == "row" else {"first": 0}
        places = {name: Place(**{**split, "first": 2 * TABLES[name]}) for name in TABLES}  # type: ignore[arg-type]
        return ShardedCollection(
            Sharding(tables, places, 4), mesh, optimizer=RowOptimizerConfig(kind="sgd"), seed=3
        )

    model = DisaggregatedModel(
        build_model(config, dedup.schema(), dedup.ROWS, seed=3, collection=collection),
        mesh,
        DistributedConfig(),
        3,
    )
    size = 0 if mesh.rank == 3 else 40
    mine = dedup.batch(size, seed=mesh.rank, **FORMS[mesh.rank])
    mine = (
        mine
        if size
        else mine.replace(
            sparse=KeyedJagged(keys=("item",), values=torch.empty(0).long(), offsets=None, batch_size=0)
        )
    )
    loss = model.lookup_zero(mine) if not size else loss_of(model(mine), mine)
    loss.backward()
    reduce = GradientReducer(mesh, model.network)
    reduce.reduce(list(model.network.parameters()))
    weights = model.network.named_parameters()
    gradients = {name: weight.grad.numpy().copy() for name, weight in weights if weight.grad is not None}
    rows = {name: model.embeddings.table(name)["weight"].numpy().copy() for name in TABLES}
    with torch.no_grad():
        read = model.eval()(mine).numpy().copy() if size else model.lookup_zero(mine).numpy()
    return {"loss": loss.item(), "gradients": gradients, "rows": rows, "read": read}


def loss_of(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")


@pytest.mark.slow
@pytest.mark.parametrize(("pooling", "sharding"), [("target_attention", "table"), ("transformer", "row")])
def test_histories_groups_and_empty_batches_are_exchanged_between_peers(
    ranks: Ranks, pooling: Any, sharding: str
) -> None:
    towers = TowersConfig(plan=(("item", "history"), ("os", "tags")), compression=2.0)
    config = DLRMConfig(
        embedding_dim=8,
        bottom_mlp=(8,),
        top_mlp=(16,),
        history=HistoryConfig(pooling=pooling),
        towers=towers,
    )
    reference = build_model(
        config, dedup.schema(), dedup.ROWS, seed=3, optimizer=RowOptimizerConfig(kind="sgd")
    )
    parts = [dedup.batch(seed=rank, **form).expanded(dedup.KEYS) for rank, form in enumerate(FORMS[:3])]
    loss = loss_of(reference(Batch.concatenate(parts)), Batch.concatenate(parts))
    loss.backward()
    with torch.no_grad():
        reads = [reference.eval()(part).numpy() for part in parts]
    results = ranks.run(4, train_one_step, config, sharding, local=2, towers=2)
    assert sum(each["loss"] for each in results) == pytest.approx(loss.item(), rel=1e-5)
    for rank, each in enumerate(results):
        for name, weight in reference.network.named_parameters():
            # another host's tower has no gradient on this rank
            mine = not name.startswith(f"towers.{1 - rank // 2}")
            assert (name in each["gradients"]) == mine
            if mine:
                np.testing.assert_allclose(
                    each["gradients"][name], weight.grad, rtol=1e-4, atol=1e-5, err_msg=name
                )
        for name, rows in each["rows"].items():
            np.testing.assert_allclose(
                rows, reference.embeddings.table(name)["weight"], rtol=1e-5, atol=1e-6
            )
        if rank < 3:
            np.testing.assert_allclose(each["read"], reads[rank], rtol=1e-4, atol=1e-5)
