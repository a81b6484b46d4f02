"""What ``state.json`` of a checkpoint says: of what it is, how far the run had come, and the hashes of its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import pydantic

from stratarec.embedding.checkpoint.tables_manifest import TablesManifest
from stratarec.io.sealed import Count, Hash, Model
from stratarec.models.metrics import WATCHED

FORMAT: Literal[6] = 6
NETWORK, OPTIMIZER = "network.safetensors", "optimizer.safetensors"

Json = dict[str, pydantic.JsonValue]


class ReliabilityBin(Model):
    """See `reliability.Bin`."""

    samples: Count
    share: float
    predicted: float
    observed: float
    low: float
    high: float


Bins = tuple[ReliabilityBin, ...]
Figures = dict[str, int | float | Bins | None]
Evaluation = dict[str, bool | int | float | Bins | dict[str, Figures] | None]


class VocabularyInput(Model):
    """What ids of a vocabulary mean."""

    values: Count
    tail_buckets: Count
    digest: Hash


class Inputs(Model):
    """See `Dataset.inputs`."""

    sparse: tuple[Json, ...]
    dense: tuple[Json, ...]
    vocabularies: dict[str, VocabularyInput]
    labels: tuple[str, ...] = ()
    """Where there are several."""

    @pydantic.field_validator("dense")
    @classmethod
    def _check_dense(cls, value: tuple[Json, ...]) -> tuple[Json, ...]:
        for feature in value:
            for name in ("mean", "deviation"):
                if not isinstance(feature.get(name, 0.0), int | float):
                    raise ValueError(f"{name} is {feature[name]!r}, expected a number")
        return value


class Identity(Model):
    """What model a checkpoint is of, and what data; see `run.identity`."""

    model: Json
    train: Json
    inputs: Inputs
    dataset: Hash


class PositionState(Model):
    """See `position.Position`."""

    step: Count
    epoch: Count
    batch: Count
    smoothed_loss: float
    finished: bool
    losses: tuple[tuple[Count, float], ...]
    kind_losses: tuple[tuple[Count, float | None, float | None], ...]
    smoothed_by_kind: tuple[float | None, float | None]
    evaluations: tuple[Evaluation, ...]
    train_seconds: Annotated[float, pydantic.Field(ge=0)]
    trained_samples: Count
    untimed_samples: Count

    @pydantic.field_validator("evaluations")
    @classmethod
    def _check_evaluations(cls, value: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
        for entry in value:
            step = entry.get("step")
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"an evaluation is of step {step!r}, expected a number of steps")
            labels = entry.get("labels", {})
            each: tuple[Mapping[str, object], ...] = tuple(labels.values()) if isinstance(labels, dict) else ({},)
            for figures in (entry, *each):
                lost = [name for name in WATCHED if isinstance(figures.get(name, True), bool | dict | tuple)]
                if lost:
                    raise ValueError(f"the evaluation of step {step} lacks {lost[0]}")
        return value


class TrainingState(Model):
    """All of ``state.json`` but its seal."""

    format: Literal[6]
    step: Count
    hashes: dict[str, Hash]
    tables: TablesManifest
    position: PositionState
    identity: Identity

    @pydantic.model_validator(mode="after")
    def _check(self) -> TrainingState:
        if set(self.hashes) != {NETWORK, OPTIMIZER}:
            raise ValueError(f"hashes of {sorted(self.hashes)}, expected of {NETWORK} and {OPTIMIZER}")
        if self.position.step != self.step:
            raise ValueError(f"a position at step {self.position.step} in a checkpoint of step {self.step}")
        return self
