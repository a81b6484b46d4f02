"""Test the clock of a run, and the parts of a step with other schedules, exchanges and
reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.loading.loader import LoaderConfig
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.models import CTRModel, DLRMConfig, build_model
from stratarec.models.request import Request
from stratarec.recipe.train_section import CheckpointConfig, TrainConfig
from stratarec.training.steps.cadence import Agree, Cadence, Decision, Observation, Stopped
from stratarec.training.steps.step import TrainPipeline
from stratarec.training.torch_setup import build_optimizer

SCHEMA = Schema(dense=(DenseFeature(name="d"),), sparse=(SparseFeature(name="f"),))


def cadence(
    eval_every: int = 0,
    total: int = 100,
    ahead: int = 0,
    stop: Callable[[], bool] = lambda: False,
    agree: Agree = lambda seen: seen,
    **checkpoint: Any,
) -> Cadence:
    config = TrainConfig(eval_every=eval_every, checkpoint=CheckpointConfig(**checkpoint))
    return Cadence(config, total, ahead=ahead, stop=stop, agree=agree)


def decide(clock: Cadence, step: int, *, epoch_ended: bool = False, evaluated: bool = False) -> Decision:
    return clock.decide(step, epoch_ended=epoch_ended, evaluated=evaluated)


def test_barriers_are_known_ahead() -> None:
    clock = cadence(eval_every=4, every_steps=6, total=14)
    assert [step for step in range(1, 15) if clock.is_barrier(step)] == [4, 6, 8, 12, 14]
    assert [step for step in range(1, 15) if cadence(total=14).is_barrier(step)] == [14]


@pytest.mark.parametrize("how", ["evaluation", "end", "epoch"])
def test_a_stop_does_not_wait_beyond_a_barrier(how: str) -> None:
    asked = [False]
    clock = cadence(ahead=5, eval_every=10 if how == "evaluation" else 0, stop=lambda: asked[0], total=20)
    step = {"evaluation": 10, "end": 20, "epoch": 14}[how]
    asked[0] = True
    assert decide(clock, step - 1) == Decision(drain=True)
    result = decide(clock, step, epoch_ended=how == "epoch", evaluated=True)
    assert result == Decision(save=True, stop=True)


class StopAfterThird:
    """An agreement with another process, which requests a stop after the third step."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, seen: Observation) -> Observation:
        self.asked += 1
        return replace(seen, stop=seen.stop or self.asked >= 3)


def test_processes_that_agree_stop_after_the_same_step() -> None:
    def stops_at(stop: Callable[[], bool]) -> int:
        clock = cadence(ahead=2, stop=stop, agree=StopAfterThird())
        return next(step for step in range(1, 9) if decide(clock, step).stop)

    assert stops_at(lambda: False) == 5
    clock = cadence(agree=StopAfterThird())
    clock.check()
    clock.check()
    with pytest.raises(Stopped):
        clock.check()


class ReversedSchedule:
    """A schedule that returns batches in reverse order."""

    config = LoaderConfig(batch_size=3)

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        return iter(self._batches[::-1][first:])


class DoublingPipeline(TrainPipeline):
    """Pipeline with an exchange that has a visible effect: it doubles ids."""

    def exchange(self, request: Request, stopped: Any) -> KeyedJagged:
        return KeyedJagged(keys=("f",), values=request.features.values * 2, offsets=None, batch_size=3)


def small_model(lookahead: int = 0) -> CTRModel:
    return build_model(
        DLRMConfig(embedding_dim=4, bottom_mlp=(4,), top_mlp=(4,)),
        SCHEMA,
        {"f": 1000},
        tiers=TierConfig(tables={"f": TableTier(cache_rows=64)}, ways=8, lookahead=lookahead),
    )


def some_batches(count: int) -> list[Batch]:
    return [
        Batch(
            label=torch.zeros(3),
            dense=torch.zeros(3, 1),
            sparse=KeyedJagged(
                keys=("f",), values=torch.arange(3) + 10 * number, offsets=None, batch_size=3
            ),
        )
        for number in range(count)
    ]


def pipeline_of(model: CTRModel, schedule: Any, kind: type[TrainPipeline] = TrainPipeline) -> TrainPipeline:
    config = TrainConfig()
    return kind(model, build_optimizer(config.dense, model.network), config, schedule)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_batches_are_staged_ahead_in_the_order_of_the_loader_after_their_exchange(lookahead: int) -> None:
    model = small_model(lookahead)
    seen = []
    pipeline = pipeline_of(model, ReversedSchedule(some_batches(20)), DoublingPipeline)
    with pipeline.stage_ahead(pipeline.load(0, 5), lambda place: place == 3) as source:
        for place, ((batch, request), handle) in enumerate(source):
            seen.append(int(batch.sparse.values[0]))
            assert handle.features.values.tolist() == (batch.sparse.values * 2).tolist()
            model(batch, request, handle).sum().backward()
            assert place != 3 or source.drained
    assert seen == [10 * number for number in range(14, -1, -1)]
    assert model.embeddings.step == 15


class HalvingPipeline(TrainPipeline):
    """Pipeline whose gradients change between `backward` and `update_network`."""

    def clip(self, handle: Any, gradients: Any, norm: Any = None) -> float:
        for weight in self.model.network.parameters():
            assert weight.grad is not None
            weight.grad *= 0.5
        return super().clip(handle, gradients, norm)


def test_gradients_are_clipped_between_backward_and_update() -> None:
    states = []
    for kind in (TrainPipeline, HalvingPipeline):
        model = small_model()
        pipeline = pipeline_of(model, ReversedSchedule(batches := some_batches(1)), kind)
        pipeline.train(0, batches[0])
        states.append(
            [pipeline.optimizer.state[weight]["exp_avg"] for weight in model.network.parameters()]
        )
    assert any(state.abs().max() > 0 for state in states[0])
    for plain, halved in zip(*states, strict=True):
        torch.testing.assert_close(plain / 2, halved)
