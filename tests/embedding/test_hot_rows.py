"""Test hot rows, which never leave their slots.

With float32 homes the bits equal those of tables in memory, and fewer rows move.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from embedding.test_tiers import ROWS, Model, all_rows, assert_same, batches, cached_tables, tiers, train

from stratarec.embedding.config import CodecConfig
from stratarec.embedding.tiers import TierConfig

STEPS = 120
HOT = {"item": 340, "user": 500}


def with_hot_rows(config: TierConfig, rows: dict[str, int] = HOT) -> TierConfig:
    """Return the same tiers with hot rows."""
    tables = {name: replace(tier, hot_rows=rows[name]) for name, tier in config.tables.items()}
    return replace(config, tables=tables)


def moved_rows(model: Model) -> int:
    return sum(tables.traffic.rows_in for tables in cached_tables(model))


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad", "rowwise_adam"])
def test_weights_and_state_match_tables_in_memory(tmp_path: Path, kind: str) -> None:
    data = batches(STEPS)
    alone = Model(None, kind)
    train(alone, data, 0)
    for home, lookahead in (("dram", 0), ("log", 2)):
        caches = tiers(0.01, home=home, log_path=tmp_path / home)
        model = Model(with_hot_rows(caches), kind)
        train(model, data, lookahead)
        assert_same(all_rows(alone), all_rows(model))
        plain = Model(replace(caches, log_path=tmp_path / "plain"), kind)
        train(plain, data, lookahead)
        assert 0 < moved_rows(model) < 0.9 * moved_rows(plain)
        model.tables.close()
        plain.tables.close()


@pytest.mark.parametrize(
    ("before", "after"), [(HOT, HOT), (HOT, {}), ({}, HOT), (HOT, {"item": 9, "user": 701})]
)
def test_a_checkpoint_resumes_bit_for_bit_under_any_hot_rows(tmp_path: Path, before, after) -> None:
    data = batches(STEPS)

    def make_collection(rows: dict[str, int]) -> Model:
        return Model(with_hot_rows(tiers(0.01), rows) if rows else tiers(0.01), "rowwise_adam")

    uninterrupted = make_collection(before)
    train(uninterrupted, data[:60], 1)
    uninterrupted.tables.save(tmp_path / "first")
    train(uninterrupted, data[60:80], 1)
    manifest = uninterrupted.tables.save(tmp_path / "second", tmp_path / "first")
    resumed = make_collection(after)
    resumed.network.load_state_dict(uninterrupted.network.state_dict())
    difference = resumed.tables.load(tmp_path / "second", manifest)
    assert bool(difference) == (before != after)
    train(uninterrupted, data[80:], 1)
    train(resumed, data[80:], 1)
    assert_same(all_rows(uninterrupted), all_rows(resumed))


def test_hot_rows_are_read_and_written_in_place() -> None:
    model = Model(with_hot_rows(tiers(0.01, codec=CodecConfig(kind="int8"))), "adagrad")
    train(model, batches(30), 1)
    data = batches(1, seed=7)[0]
    before = all_rows(model)
    with torch.no_grad():
        read = model.tables.engine.read(data)
        assert torch.equal(read[0], model.tables(data).pooled)
    group = cached_tables(model)[0]
    rows = np.array([339, 340, ROWS["item"] - 1, ROWS["item"] + 499, ROWS["item"] + 500])
    slots = group.directory.locate_hot(rows)
    assert (slots >= 0).tolist() == [True, False, False, True, False]
    assert group.directory.rows_in(slots[[0, 3]]).tolist() == rows[[0, 3]].tolist()
    assert before["item.weight"].shape == (ROWS["item"], 8)
