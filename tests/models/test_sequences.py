"""Test that an event of a sequence is the sum of its columns."""

from __future__ import annotations

import pytest
import torch
from models.test_deduplicated import keyed
from torch import Tensor

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import InverseJagged
from stratarec.data.schema import Schema, SparseFeature
from stratarec.models import CTRModel, DLRMConfig, HistoryConfig, build_model

ROWS = {"item": 40, "kind": 6, "dwell": 4}
KEYS = ("item", "kind", "last", "last_kind", "last_dwell")
SEQUENCES = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [11, 12]] * 3


def schema(*, of: bool = True) -> Schema:
    def same(name: str) -> dict[str, str]:
        return {"of" if of else "vocabulary": name}

    return Schema(
        sparse=(
            SparseFeature(name="item"),
            SparseFeature(name="kind"),
            SparseFeature(name="last", kind="sequence", max_length=6, **same("item")),  # type: ignore[arg-type]
            SparseFeature(name="last_kind", kind="sequence", beside="last", **same("kind")),  # type: ignore[arg-type]
            SparseFeature(name="last_dwell", kind="sequence", beside="last", vocabulary="dwell"),
        )
    )


def model(pooling: str) -> CTRModel:
    history = HistoryConfig(pooling=pooling)  # type: ignore[arg-type]
    return build_model(
        DLRMConfig(embedding_dim=4, bottom_mlp=(4,), top_mlp=(8,), history=history), schema(), ROWS
    )


def draw_columns(sequences: list[list[int]]) -> list[list[int]]:
    """Return the columns item, kind and dwell."""
    return [[i % most for i in bag] for most in (40, 6, 4) for bag in sequences]


def batch() -> Batch:
    size = len(SEQUENCES)
    singles = [[i % 40] for i in range(size)] + [[i % 6] for i in range(size)]
    label = (torch.arange(size) % 2).float()
    return Batch(
        label=label, dense=torch.zeros(size, 0), sparse=keyed(KEYS, [*singles, *draw_columns(SEQUENCES)])
    )


def grouped(*, apart: bool) -> Batch:
    """Return the same samples with each distinct sequence stored once.

    With `apart`, only features that are not sequences are in groups, with more distinct values than
    samples.
    """
    plain, size = batch(), len(SEQUENCES)
    if apart:
        singles = InverseJagged(unique=plain.sparse.select(KEYS[:2]), inverse=torch.arange(size))
        spare = InverseJagged(
            unique=singles.unique.take(torch.arange(3 * size) % size), inverse=torch.arange(size)
        )
        return plain.replace(sparse=plain.sparse.select(KEYS[2:]), groups=(spare,))
    group = InverseJagged(
        unique=keyed(KEYS[2:], draw_columns(SEQUENCES[:5])), inverse=torch.arange(size) % 5
    )
    return plain.replace(sparse=plain.sparse.select(KEYS[:2]), groups=(group,))


def event_rows(ctr_model: CTRModel, bag: list[int]) -> Tensor:
    tables = {name: ctr_model.embeddings.table(name)["weight"] for name in ROWS}
    if not bag:
        return torch.zeros(0, 4)
    return torch.stack([tables["item"][i] + tables["kind"][i % 6] + tables["dwell"][i % 4] for i in bag])


@pytest.mark.parametrize("pooling", ["target_attention", "transformer"])
def test_an_event_is_the_sum_of_its_columns(pooling: str) -> None:
    ctr_model, given = model(pooling).eval(), batch()
    assert ctr_model.embeddings.pooled_keys == ("item", "kind")
    tables = {name: ctr_model.embeddings.table(name)["weight"] for name in ROWS}
    item, kind = (tables[name][given.sparse[name].values.long()] for name in ("item", "kind"))
    rows, mask = torch.zeros(len(SEQUENCES), 6, 4), torch.zeros(len(SEQUENCES), 6, dtype=torch.bool)
    for place, bag in enumerate(SEQUENCES):
        rows[place, : len(bag)], mask[place, : len(bag)] = event_rows(ctr_model, bag), True
    with torch.no_grad():
        pooled = ctr_model.network.poolings[0].padded(item + kind, rows, mask)  # type: ignore[operator]
        expected = ctr_model.network.score(given.dense, torch.stack([item, kind, pooled], 1))
        torch.testing.assert_close(ctr_model(given), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "target_attention", "transformer"])
def test_distinct_sequences_score_and_train_like_expanded_ones(pooling: str, apart: bool) -> None:
    pair = [model(pooling), model(pooling)]
    for ctr_model, given in zip(pair, (grouped(apart=apart), batch()), strict=True):
        for _ in range(3):
            ctr_model.zero_grad()
            scores = ctr_model(given)
            scores.square().sum().backward()
    for one, other in zip(*(ctr_model.network.parameters() for ctr_model in pair), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    for name in ROWS:
        one, other = (ctr_model.embeddings.table(name)["weight"] for ctr_model in pair)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert not torch.equal(one, model(pooling).embeddings.table(name)["weight"]), (
            "the table was not trained"
        )


@pytest.mark.parametrize("pooling", ["target_attention", "transformer"])
def test_padded_sequences_score_like_jagged_ones(pooling: str) -> None:
    ctr_model, given = model(pooling).eval(), batch()
    with torch.no_grad():
        dense, pooled, histories, _ = ctr_model.vectors(given, ctr_model.request(given))
        assert ctr_model.network.sequence_keys == KEYS[2:]
        padded = [part for history in histories for part in history.padded()]
        torch.testing.assert_close(
            ctr_model.network.padded(dense, pooled, *padded), ctr_model(given), rtol=1e-5, atol=1e-6
        )
