"""Test sequence features, from lists in the log to scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from errors import missing, refuses
from recipes import agreeing_scores, tiny
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import RowGroup
from stratarec.data.dataset.row_group_reader import ShardLayout
from stratarec.data.prepare.prepare import prepare
from stratarec.data.vocabulary import read_vocabulary
from stratarec.errors import DataError
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer

ROWS, LONGEST = 1200, 4


def write_log(root: Path) -> pl.DataFrame:
    draws = np.random.default_rng(4)
    user = np.arange(ROWS) // 4
    lengths = draws.integers(0, 8, ROWS // 4)[user]
    of_user = [np.random.default_rng(int(number)).integers(0, 30, 8) for number in user]
    last = [items[:length].tolist() for items, length in zip(of_user, lengths, strict=True)]
    item = draws.integers(0, 30, ROWS)
    seen = np.array([i in items for i, items in zip(item, last, strict=True)])
    frame = pl.DataFrame(
        {
            "click": (draws.random(ROWS) < 0.2 + 0.6 * seen).astype(int),
            "who": user,
            "item": item,
            "kind": [f"k{i % 5}" for i in item],
            # As text, a list with only one missing value is an empty list.
            "last": [[None if i == 7 and len(items) > 1 else i for i in items] for items in last],
            "last_kind": [
                [None if i == 8 and len(items) > 1 else f"k{i % 5}" for i in items] for items in last
            ],
        },
        schema_overrides={"last": pl.List(pl.Int64), "last_kind": pl.List(pl.String)},
    )
    frame.write_parquet(root / "log.parquet")
    texts = (
        pl.col(name).list.eval(pl.element().cast(pl.String).fill_null("")).list.join("|")
        for name in ("last", "last_kind")
    )
    frame.with_columns(texts).write_csv(root / "log.csv")
    frame.write_ndjson(root / "log.jsonl")
    return frame


def make_recipe(root: Path, log: str = "log.parquet", groups: str = "auto") -> Recipe:
    content = tiny(root / "made", epochs=1, max_steps=8)
    separator = {"separator": "|"} if log.endswith("csv") else {}
    sparse: list[dict[str, Any]] = [
        {"name": "item", "type": "integer"},
        {"name": "kind"},
        {"name": "last", "kind": "sequence", "of": "item", "max_length": LONGEST, **separator},
        {"name": "last_kind", "kind": "sequence", "beside": "last", "of": "kind", **separator},
    ]
    schema = {"label": "click", "user": "who", "sparse": sparse}
    kind = "parquet" if log.endswith("parquet") else "csv"
    content["data"] |= {
        "source": {"kind": kind, "paths": [str(root / log)], "schema": schema},
        "split": {"by": "fraction", "valid": 0, "test": 0.5},
        "groups": groups,
    }
    content["model"] |= {"history": {"pooling": "target_attention"}}
    return Recipe.from_dict(content)


def expected(row: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the last events of a row that have both columns."""
    pairs = zip(row["last"], row["last_kind"], strict=True)
    return [pair for pair in pairs if None not in pair][-LONGEST:]


def stored(dataset: Dataset) -> dict[int, list[tuple[Any, Any]]]:
    """Return the events of each row of the log, as values."""
    vocabularies = (
        read_vocabulary(dataset.path / each.path, each, "") for each in dataset.vocabularies.values()
    )
    values = {
        name: [None] * results.tail_buckets + results.values.to_list()
        for name, results in zip(dataset.vocabularies, vocabularies, strict=True)
    }
    results = {}
    for split in ("train", "test"):
        for shard, info in enumerate(dataset.shards(split)):
            for group in range(len(info.row_groups)):
                table = dataset.read_row_group(split, shard, group).to_pydict()
                for row, last, kinds in zip(table["@row"], table["last"], table["last_kind"], strict=True):
                    results[row] = [
                        (values["item"][i], values["kind"][k]) for i, k in zip(last, kinds, strict=True)
                    ]
    return results


@pytest.mark.parametrize(
    ("log", "groups"), [("log.parquet", "auto"), ("log.csv", "auto"), ("log.jsonl", "none")]
)
def test_a_data_set_has_the_last_complete_events_of_each_row(tmp_path: Path, log: str, groups: str) -> None:
    frame = write_log(tmp_path)
    recipe = make_recipe(tmp_path, log, groups)
    dataset = prepare(recipe.data)
    if groups == "auto":
        assert any({"last", "last_kind"} <= set(names) for names in dataset.groups.values()), dataset.groups
    # Sequences share the tables of their single features, and all of their values are frequent
    # enough for rows.
    assert set(dataset.vocabularies) == {"item", "kind"}
    stored_rows = stored(dataset)
    header = log.endswith("csv")
    for place, row in enumerate(frame.iter_rows(named=True)):
        assert stored_rows[place + 1 + header] == expected(row), place


@pytest.mark.parametrize("groups", ["auto", "none"])
def test_raw_logs_and_exports_score_like_the_data_set(tmp_path: Path, groups: str) -> None:
    frame = write_log(tmp_path)
    recipe = make_recipe(tmp_path, groups=groups)
    Trainer(recipe, prepare(recipe.data)).train()
    scorer, exported = agreeing_scores(recipe.run, tmp_path / "log.parquet", tmp_path)
    changed = frame.with_columns(last_kind=pl.col("last_kind").list.reverse())
    assert not np.allclose(scorer.score(changed), exported, rtol=1e-4)
    pair = {"item": [1, 2], "kind": ["k1", "k2"], "last": [[3], [4, 5]], "last_kind": [["k3"], ["k4"]]}
    with refuses(DataError, "row 2 last_kind 1"):
        scorer.score(pair)


def test_lists_of_unequal_lengths_are_bad_rows(tmp_path: Path) -> None:
    frame = write_log(tmp_path)
    kinds = frame["last_kind"].to_list()
    kinds[10], kinds[20] = [*kinds[10], "k1"], None if kinds[20] else ["k0"]
    frame.with_columns(pl.Series("last_kind", kinds)).write_parquet(tmp_path / "log.parquet")
    recipe = make_recipe(tmp_path)
    length = len(frame["last"][10])
    with pytest.raises(DataError) as error:
        prepare(recipe.data)
    assert not missing(f"row 11 last_kind {length + 1} {length} last", str(error.value))
    skipping = Recipe.from_dict(
        recipe.to_dict() | {"data": recipe.to_dict()["data"] | {"on_bad_row": "skip"}}
    )
    stored_rows = stored(dataset := prepare(skipping.data))
    assert dataset.about.bad_rows == 2
    for place, row in enumerate(frame.iter_rows(named=True)):
        assert stored_rows.get(place + 1) == (None if place in (10, 20) else expected(row))


def test_a_stored_sequence_with_lists_of_unequal_lengths_is_damage(tmp_path: Path) -> None:
    write_log(tmp_path)
    dataset = prepare(make_recipe(tmp_path, groups="none").data)
    group = dataset.row_group("train", 0, 0)
    layout = ShardLayout.of(dataset.manifest)
    assert not list(layout.faults(group))
    place = group.samples.column_names.index("last")
    wrong = group.samples.set_column(
        place, "last", pa.array([[0]] * group.samples.num_rows, pa.list_(pa.int32()))
    )
    (fault,) = layout.faults(RowGroup(samples=wrong, tables=group.tables))
    assert fault == "columns 'last' and 'last_kind' have lists of different lengths"


def test_a_manifest_with_an_incomplete_sequence_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path)
    manifest = prepare(make_recipe(tmp_path).data).manifest
    content = manifest.to_dict()
    content["groups"] = {
        name: [n for n in names if n != "last_kind"] for name, names in content["groups"].items()
    }
    with refuses(ValueError, "last"):
        type(manifest).model_validate_json(json.dumps(content))
