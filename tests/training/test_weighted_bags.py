"""Test values with weights, from lists in the log to scores."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
import torch
from torch.nn import functional

from errors import refuses
from recipes import agreeing_scores, tiny
from stratarec.batch.batch import Batch
from stratarec.batch.jagged import InverseJagged, JaggedTensor, KeyedJagged, offsets_of
from stratarec.data.column_names import weights_of
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, TieredEmbeddingBagCollection
from stratarec.errors import DataError
from stratarec.models.request import Request
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.evaluate import evaluate_split
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

ROWS, LONGEST = 1000, 4
Lists = list[list[Any]]
Pooling = Literal["mean", "sum"]


def write_log(root: Path, *, ones: bool = False) -> pl.DataFrame:
    draws = np.random.default_rng(4)
    user = np.arange(ROWS) // 4
    tags: Lists = [draws.integers(0, 30, n).tolist() for n in draws.integers(0, 7, ROWS)]
    share: Lists = [
        (np.ones(len(t)) if ones else draws.choice([0, 0.25, 1, 7.5], len(t))).tolist() for t in tags
    ]
    # A missing value may have a weight or none.
    for row in range(0, ROWS, 9):
        if len(tags[row]) > 1:
            tags[row][1], share[row][1] = None, None if row % 2 else 3.0
    seen = np.array(
        [
            sum(w for t, w in zip(*pair, strict=True) if t in range(9))
            for pair in zip(tags, share, strict=True)
        ]
    )
    frame = pl.DataFrame(
        {
            "click": (draws.random(ROWS) < 0.2 + 0.5 * (seen > 1)).astype(int),
            "who": user,
            "city": [f"c{i % 7}" for i in user],
            "words": [[f"w{i % 3}", f"w{i % 5}"][: i % 3] for i in user],
            "item": draws.integers(0, 30, ROWS),
            "tags": tags,
            "share": share,
        },
        schema_overrides={
            "tags": pl.List(pl.Int64),
            "share": pl.List(pl.Float64),
            "words": pl.List(pl.String),
        },
    )
    frame.write_parquet(root / "log.parquet")
    texts = (
        pl.col(name).list.eval(pl.element().cast(pl.String).fill_null("")).list.join("|")
        for name in ("tags", "share", "words")
    )
    frame.with_columns(texts).write_csv(root / "log.csv")
    frame.write_ndjson(root / "log.jsonl")
    return frame


def make_recipe(
    root: Path,
    log: str = "log.parquet",
    groups: str = "auto",
    pooling: Pooling = "mean",
    weights: str = "share",
    name: str = "made",
) -> Recipe:
    content = tiny(root / name, epochs=1, max_steps=6)
    separator = {"separator": "|"} if log.endswith("csv") else {}
    sparse: list[dict[str, Any]] = [
        {"name": "item", "type": "integer"},
        {
            "name": "tags",
            "kind": "multi",
            "vocabulary": "item",
            "max_length": LONGEST,
            "weights": weights,
            **separator,
        },
        {"name": "words", "kind": "multi", **separator},
        {"name": "city"},
    ]
    sparse[1]["type"] = "integer"
    content["data"] |= {
        "source": {
            "kind": "parquet" if log.endswith("parquet") else "csv",
            "paths": [str(root / log)],
            "schema": {"label": "click", "user": "who", "sparse": sparse},
        },
        "split": {"by": "fraction", "valid": 0, "test": 0.5},
        "groups": groups,
    }
    content["model"] |= {"pooling": pooling}
    return Recipe.from_dict(content)


def expected(row: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the first values of a row with their weights."""
    return [pair for pair in zip(row["tags"], row["share"], strict=True) if pair[0] is not None][:LONGEST]


def values_of(dataset: Dataset) -> list[Any]:
    """Return the values by id; ids of the tail have none."""
    result = dataset.vocabulary("item")
    return [None] * result.tail_buckets + result.values.to_list()


def stored(dataset: Dataset) -> dict[int, list[tuple[Any, Any]]]:
    """Return the values and weights of each row of the log."""
    values, results = values_of(dataset), {}
    for split in ("train", "test"):
        for shard, info in enumerate(dataset.shards(split)):
            for group in range(len(info.row_groups)):
                table = dataset.read_row_group(split, shard, group).to_pydict()
                for row, ids, weights in zip(
                    table["@row"], table["tags"], table[weights_of("tags")], strict=True
                ):
                    results[row] = [(values[i], w) for i, w in zip(ids, weights, strict=True)]
    return results


@pytest.mark.parametrize(
    ("log", "groups"), [("log.parquet", "auto"), ("log.csv", "none"), ("log.jsonl", "auto")]
)
def test_a_data_set_and_its_batches_have_the_weights_of_the_log(
    tmp_path: Path, log: str, groups: str
) -> None:
    frame = write_log(tmp_path)
    dataset = prepare(make_recipe(tmp_path, log, groups).data)
    if groups == "auto":
        assert any({"words", "city"} <= set(names) for names in dataset.groups.values()), dataset.groups
    assert not any("tags" in names for names in dataset.groups.values())
    stored_rows, header = stored(dataset), log.endswith("csv")
    for place, row in enumerate(frame.iter_rows(named=True)):
        assert stored_rows[place + 1 + header] == expected(row), place
    values, bags = values_of(dataset), []
    for expand in (False, True):
        batches = list(
            Loader(dataset, "train", LoaderConfig(batch_size=100, expand=expand, seed=2)).epoch(0)
        )
        for batch in batches:
            assert batch.sparse.weights is not None
            assert all(
                (batch.sparse[key].weights == 1).all()
                for key in batch.sparse.keys
                if key != "tags"  # type: ignore[union-attr]
            )
        bags.append([pair for batch in batches for pair in _pairs(batch.sparse["tags"], values)])
    assert bags[0] == bags[1]
    test = Loader(dataset, "test", LoaderConfig(batch_size=100, shuffle=False)).epoch(0)
    bags[0] += [pair for batch in test for pair in _pairs(batch.sparse["tags"], values)]
    assert sorted(bags[0]) == sorted(map(expected, frame.iter_rows(named=True)))


def _pairs(bags: JaggedTensor, values: list[Any]) -> list[list[tuple[Any, float]]]:
    assert bags.weights is not None
    ids, weights = ([values[i] for i in bags.values.tolist()], bags.weights.tolist())
    pairs, ends = list(zip(ids, weights, strict=True)), bags.offsets.tolist()
    return [pairs[first:end] for first, end in pairwise(ends)]


def bags_of(lists: Lists, weights: Lists | None = None) -> JaggedTensor:
    flat = None if weights is None else torch.tensor([w for each in weights for w in each])
    ids = torch.tensor([i for each in lists for i in each], dtype=torch.int32)
    return JaggedTensor(
        values=ids, offsets=offsets_of(torch.tensor([len(each) for each in lists])), weights=flat
    )


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("grouped", [False, True])
def test_pooling_and_gradients_match_torch(pooling: Pooling, grouped: bool) -> None:
    draws = np.random.default_rng(3)
    lists: Lists = [draws.integers(0, 9, n).tolist() for n in (0, 1, 5, 3, 2, 1, 4, 2, 2, 2)]
    weights: Lists = [draws.choice([0.0, 0.1, 1.0, 3e4], len(each)).tolist() for each in lists]
    weights[3], weights[5], weights[6] = [0.0] * 3, [2e-30], [3e38] * 4 if pooling == "mean" else [1.0] * 4
    others = bags_of(draws.integers(0, 9, (len(lists), 2)).tolist())
    size, weighted = len(lists), bags_of(lists, weights)
    own = {"tags": weighted}
    groups: tuple[Any, ...] = ()
    if grouped:
        groups = (
            InverseJagged(
                unique=KeyedJagged.from_features({"words": bags_of([[1, 2], [3]])}),
                inverse=torch.tensor([0] * 5 + [1] * 5, dtype=torch.int32),
            ),
        )
    else:
        own["words"] = JaggedTensor(
            values=others.values, offsets=others.offsets, weights=torch.ones(others.values.numel())
        )
    batch = Batch(
        label=torch.zeros(size),
        dense=torch.zeros(size, 0),
        sparse=KeyedJagged.from_features(own),
        groups=groups,
    )
    request = Request.of(batch, (), ("tags",) if pooling == "mean" else ())
    tables = TieredEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="t",
                num_embeddings=9,
                embedding_dim=4,
                feature_names=("tags", "words"),
                pooling=pooling,
            )
        ],
        optimizer=RowOptimizerConfig(kind="sgd", learning_rate=1.0),
        seed=1,
    )
    before = tables.table("t")["weight"].clone()
    pooled = tables(request.features).pooled[:size, :4]
    assert weighted.weights is not None
    rows = before.clone().requires_grad_()
    scale = weighted.weights.double()
    if pooling == "mean":
        sums = torch.tensor([sum(each) for each in weights], dtype=torch.float64)
        scale = scale / torch.where(sums > 0, sums, 1.0).repeat_interleave(weighted.lengths())
    theirs = functional.embedding_bag(
        weighted.values.long(), rows, weighted.offsets[:-1], mode="sum", per_sample_weights=scale.float()
    )
    torch.testing.assert_close(pooled, theirs, rtol=1e-5, atol=1e-7)
    assert not pooled[0].any()
    assert not pooled[3].any()
    given = torch.rand(size, 4, generator=torch.Generator().manual_seed(2))
    (pooled * given).sum().backward()  # type: ignore[no-untyped-call]
    (theirs * given).sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    torch.testing.assert_close(before - tables.table("t")["weight"], rows.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("groups", "pooling"), [("auto", "mean"), ("none", "sum")])
def test_raw_logs_and_exports_score_like_the_data_set(
    tmp_path: Path, groups: str, pooling: Pooling
) -> None:
    frame = write_log(tmp_path)
    recipe = make_recipe(tmp_path, groups=groups, pooling=pooling)
    dataset = prepare(recipe.data)
    Trainer(recipe, dataset).train()
    with open_run(recipe.run) as trained:
        _, scored = evaluate_split(
            trained.model, dataset, "test", precision="float32", progress=SilentProgress()
        )
    scorer, exported = agreeing_scores(recipe.run, tmp_path / "log.parquet", tmp_path)
    scores = np.sort(pl.read_parquet(tmp_path / "test.parquet")["score"])
    np.testing.assert_allclose(
        np.sort(1 / (1 + np.exp(-scored.logit.astype(np.float64)))), scores, rtol=1e-4
    )
    np.testing.assert_allclose(scorer.score(frame[:3].to_dict(as_series=False)), exported[:3], rtol=1e-5)
    doubled = frame.with_columns(share=pl.col("share").list.eval(pl.element() * 2))
    assert np.allclose(scorer.score(doubled), exported, rtol=1e-5) == (pooling == "mean")
    share = pl.col("share").list.eval(pl.element().fill_null(2.0)).list.reverse()
    assert not np.allclose(scorer.score(frame.with_columns(share=share)), exported, rtol=1e-5)
    pair = {
        "item": [1, 2],
        "city": ["c1", "c2"],
        "words": [[], []],
        "tags": [[3], [4, 5]],
        "share": [[1], [2]],
    }
    with refuses(DataError, "row 2 share 1 tags"):
        scorer.score(pair)
    with refuses(DataError, "share"):
        scorer.score({name: pair[name] for name in pair if name != "share"})


@pytest.mark.parametrize(
    ("log", "wrong", "message"),
    [
        ("parquet", [1.0, 2.0, 3.0], "3 2 tags"),
        ("parquet", [1.0, -2.0], "-2.0"),
        ("parquet", [float("nan"), 1.0], "nan"),
        ("parquet", None, "0 2 tags"),
        ("csv", "1|x", "number"),
        ("csv", "1|inf", "inf"),
    ],
)
def test_values_without_a_usable_weight_are_bad_rows(
    tmp_path: Path, log: str, wrong: Any, message: str
) -> None:
    frame = write_log(tmp_path)
    place = next(
        row for row in range(20, ROWS) if len(frame["tags"][row]) == 2 and None not in frame["tags"][row]
    )
    path = tmp_path / f"log.{log}"
    raw = pl.read_parquet(path) if log == "parquet" else pl.read_csv(path, infer_schema=False)
    share = raw["share"].to_list()
    share[place] = wrong
    raw = raw.with_columns(pl.Series("share", share, raw["share"].dtype))
    raw.write_parquet(path) if log == "parquet" else raw.write_csv(path)
    recipe = make_recipe(tmp_path, path.name)
    where = f"row {place + 1}" if log == "parquet" else f"line {place + 2}"
    with refuses(DataError, f"{path} {where} share {message}"):
        prepare(recipe.data)
    skipping = Recipe.from_dict(
        recipe.to_dict() | {"data": recipe.to_dict()["data"] | {"on_bad_row": "skip"}}
    )
    stored_rows = stored(dataset := prepare(skipping.data))
    assert dataset.about.bad_rows == 1
    assert len(stored_rows) == ROWS - 1
    assert stored_rows[place + 2 + (log == "csv")] == expected(frame.row(place + 1, named=True))
