"""Compare runs: steps, time, metrics, and the fields in which their recipes differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratarec.errors import CheckpointError, ConfigError
from stratarec.io.names import step_of
from stratarec.models.metrics import HEADLINES, METRICS
from stratarec.recipe import leaves
from stratarec.training import checkpoint
from stratarec.training.run.open_run import require_run
from stratarec.training.run.run_directory import read_recipe, read_result
from stratarec.training.steps.state import TrainingState, best

# Fields of a recipe that do not influence training.
_NAMES = ("name", "train.run")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Recipe, speed, curves and result of one run."""

    name: str
    recipe: dict[str, Any]
    """Field, such as ``train.batch_size``, -> value."""
    dataset: str
    """Fingerprint of its data set."""
    steps: int
    seconds: float
    """Seconds of training steps in all sessions of the run."""
    samples_per_second: float
    chosen: int
    """Step of the checkpoint that the metrics belong to."""
    validation: dict[str, Any] | None
    """Validation metrics of that checkpoint; None if it was not validated."""
    result: dict[str, Any] | None
    """Content of ``result.json``; None until the run has ended."""
    losses: tuple[tuple[int, float], ...]
    evaluations: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, path: Path, name: str) -> RunSummary:
        """Read the run in `path`.

        Raises
        ------
        CheckpointError
            If it is not a run, is damaged, or has no checkpoint yet.
        """
        require_run(path)
        recipe, result = read_recipe(path), read_result(path)
        checkpoints = checkpoint.list_checkpoints(path / "checkpoints")
        if not checkpoints:
            raise CheckpointError(f"{path} has no checkpoint yet and cannot be compared")
        state = checkpoint.read_state(checkpoints[-1])
        training, evaluations = state["training"], tuple(state["training"]["evaluations"])
        best_one = best(evaluations, recipe.train.early_stopping)
        chosen = state["step"] if best_one is None else best_one["step"]
        chosen = chosen if result is None else step_of(result.checkpoint)
        content = None if result is None else result.model_dump(mode="json", exclude_unset=True, exclude={"format"})
        return cls(
            name=name,
            recipe={key: value for key, value in leaves(recipe.to_dict()).items() if key not in _NAMES},
            dataset=state["identity"]["dataset"],
            steps=state["step"],
            seconds=training["train_seconds"],
            samples_per_second=TrainingState(**training).speed,
            chosen=chosen,
            validation=next((entry for entry in evaluations if entry["step"] == chosen), None),
            result=content,
            losses=tuple(map(tuple, training["losses"])),
            evaluations=evaluations,
        )


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Several runs and their differences."""

    runs: tuple[RunSummary, ...]

    @classmethod
    def read(cls, paths: Sequence[str]) -> RunComparison:
        """Read the runs in these directories, which must all be different."""
        places = [Path(path) for path in paths]
        resolved = [place.resolve() for place in places]
        for number, place in enumerate(resolved):
            if place in resolved[:number]:
                raise ConfigError(f"{places[number]} is named twice: name each run once")
        short = [place.name for place in resolved]
        names = short if len({*short}) == len(short) else [str(place) for place in places]
        return cls(runs=tuple(RunSummary.read(*run) for run in zip(places, names, strict=True)))

    @property
    def other_data(self) -> tuple[bool, ...]:
        """Whether each run has another data set than the first run, so that their metrics are not comparable."""
        return tuple(run.dataset != self.runs[0].dataset for run in self.runs)

    @property
    def differences(self) -> dict[str, tuple[Any, ...]]:
        """Field -> its value in each run, for fields that differ; ``None`` if the recipe of a run lacks the field."""
        names = dict.fromkeys(name for run in self.runs for name in run.recipe)
        by_field = {name: tuple(run.recipe.get(name) for run in self.runs) for name in names}
        return {name: values for name, values in by_field.items() if len({json.dumps(value) for value in values}) > 1}

    @property
    def courses(self) -> dict[str, dict[str, Sequence[tuple[float, float]]]]:
        """Curve -> run -> steps and values."""
        curves: dict[str, dict[str, Sequence[tuple[float, float]]]] = {
            "Training loss, smoothed": {run.name: run.losses for run in self.runs}
        }
        for metric in HEADLINES[:2]:
            curves[f"Validation {METRICS[metric].label}"] = {
                run.name: [(entry["step"], entry[metric]) for entry in run.evaluations if entry[metric] is not None]
                for run in self.runs
            }
        return curves

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        runs = [
            {
                "run": run.name,
                "steps": run.steps,
                "seconds": run.seconds,
                "samples_per_second": run.samples_per_second,
                "checkpoint": run.chosen,
                "validation": run.validation,
                "result": run.result,
                "other_data": other,
            }
            for run, other in zip(self.runs, self.other_data, strict=True)
        ]
        return {"runs": runs, "differences": {name: list(values) for name, values in self.differences.items()}}
