"""The clock of a run, and the stages of a step whose order and exchange can be others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stratarec.batch import Batch
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.jagged import KeyedJagged
from stratarec.models import DLRMConfig, build_model
from stratarec.models.dedup import Lookup
from stratarec.training.checkpoint import CheckpointConfig
from stratarec.training.config import TrainConfig
from stratarec.training.pipeline import Cadence, Pipeline

SCHEMA = Schema(dense=(DenseFeature(name="d"),), sparse=(SparseFeature(name="f"),))


def cadence(eval_every: int = 0, total: int = 100, **checkpoint: Any) -> Cadence:
    return Cadence(TrainConfig(eval_every=eval_every, checkpoint=CheckpointConfig(**checkpoint)), total)


def test_barriers_are_what_is_known_ahead() -> None:
    clock = cadence(eval_every=4, every_steps=6, total=14)
    assert [step for step in range(1, 15) if clock.is_barrier(step)] == [4, 6, 8, 12, 14]
    assert [step for step in range(1, 15) if cadence(total=14).is_barrier(step)] == [14]


def test_evaluations_follow_steps_or_else_epochs() -> None:
    assert [step for step in range(1, 9) if cadence(4).evaluates(step, epoch_ended=True)] == [4, 8]
    assert not cadence().evaluates(4, epoch_ended=False)
    assert cadence().evaluates(4, epoch_ended=True)


def test_checkpoints_follow_steps_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("stratarec.training.pipeline.time.monotonic", lambda: now[0])
    clock = cadence(every_steps=5, every_minutes=2)
    assert [step for step in range(1, 11) if clock.saves(step)] == [5, 10]
    now[0] += 121
    assert clock.saves(3)
    clock.saved()
    assert not clock.saves(3)
    assert not cadence(every_minutes=0).saves(3)


class Backwards:
    """A schedule of its own."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        return iter(self._batches[::-1][first:])


class Doubling:
    """An exchange that shows: the ids that it hands on are others."""

    def features(self, lookup: Lookup) -> KeyedJagged:
        return KeyedJagged(keys=("f",), values=lookup.features.values * 2, offsets=None, batch_size=3)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_pipeline_prepares_what_its_schedule_and_exchange_say(lookahead: int) -> None:
    model = build_model(
        DLRMConfig(embedding_dim=4, bottom_mlp=(4,), top_mlp=(4,)), SCHEMA, {"f": 1000},
        tiers=TierConfig(tables={"f": TableTier(cache_rows=64)}, ways=8, lookahead=lookahead),
    )  # fmt: skip
    batches = [
        Batch(
            label=torch.zeros(3),
            dense=torch.zeros(3, 1),
            sparse=KeyedJagged(keys=("f",), values=torch.arange(3) + 10 * number, offsets=None, batch_size=3),
        )
        for number in range(20)
    ]
    seen = []
    pipeline = Pipeline(model, Backwards(batches), 2, Doubling())
    with pipeline.prepared(0, 5, lambda place: place == 3) as source:
        for place, ((batch, lookup), prepared) in enumerate(source):
            seen.append(int(batch.sparse.values[0]))
            assert prepared.features.values.tolist() == (batch.sparse.values * 2).tolist()
            model(batch, lookup, prepared).sum().backward()
            assert place != 3 or source.drained
    assert seen == [10 * number for number in range(14, -1, -1)]
    assert model.embeddings.step == 15
