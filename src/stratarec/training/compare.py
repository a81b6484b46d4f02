"""Compare runs by their steps, training time and metrics, and list the fields in which their
recipes differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratarec.errors import CheckpointError, ConfigError
from stratarec.io.names import step_of
from stratarec.recipe import leaves
from stratarec.training import checkpoint
from stratarec.training.run.open_run import require_run
from stratarec.training.run.run_directory import plan_notes, read_recipe, read_result
from stratarec.training.steps.state import TrainingState, best

# Fields of a recipe that do not influence training.
_NAMES = ("name", "train.run")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Recipe, speed and result of one run, for a comparison."""

    name: str
    recipe: dict[str, Any]
    """Field (such as ``train.batch_size``) -> value."""
    dataset: str
    """Fingerprint of the run's data set."""
    steps: int
    seconds: float
    """Seconds of training steps in all sessions of the run."""
    samples_per_second: float
    chosen: int
    """Step of the checkpoint that the metrics are of."""
    validation: dict[str, Any] | None
    """Validation metrics at step `chosen`; None if that step was not evaluated."""
    result: dict[str, Any] | None
    """Content of ``result.json``; None until the run has ended."""
    notes: tuple[str, ...]
    """Remarks of the run's plan, such as tables that stayed float32 whatever ``memory.precision``
    says.
    """

    @classmethod
    def read(cls, path: Path, name: str) -> RunSummary:
        """Read the run in `path`.

        Raises
        ------
        CheckpointError
            If `path` is not a run, or the run is damaged or has no checkpoint yet.
        """
        require_run(path)
        recipe, result = read_recipe(path), read_result(path)
        checkpoints = checkpoint.list_checkpoints(path / "checkpoints")
        if not checkpoints:
            raise CheckpointError(f"{path} has no checkpoint yet and cannot be compared")
        state = checkpoint.read_state(checkpoints[-1])
        training, evaluations = state["training"], state["training"]["evaluations"]
        best_one = best(evaluations, recipe.train.early_stopping)
        chosen = state["step"] if best_one is None else best_one["step"]
        chosen = chosen if result is None else step_of(result.checkpoint)
        content = (
            None
            if result is None
            else result.model_dump(mode="json", exclude_unset=True, exclude={"format"})
        )
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
            notes=plan_notes(path),
        )


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Several runs and their differences."""

    runs: tuple[RunSummary, ...]

    @classmethod
    def read(cls, paths: Sequence[str]) -> RunComparison:
        """Read the runs in these directories; `ConfigError` if a directory is named twice."""
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
        """For each run, whether its data set differs from the first run's, so that metrics cannot
        be compared.
        """
        return tuple(run.dataset != self.runs[0].dataset for run in self.runs)

    @property
    def differences(self) -> dict[str, tuple[Any, ...]]:
        """Field -> value in each run, for fields that differ. The value is None if a run's recipe
        has no such field.
        """
        names = dict.fromkeys(name for run in self.runs for name in run.recipe)
        by_field = {name: tuple(run.recipe.get(name) for run in self.runs) for name in names}
        return {
            name: values
            for name, values in by_field.items()
            if len({json.dumps(value) for value in values}) > 1
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        runs = [
            {
                "run": run.name,
                "steps": run.steps,
                "seconds": run.seconds,
                "samples_per_second": run.samples_per_second,
                "checkpoint": run.chosen,
                "validation": run.validation,
                "result": run.result,
                "notes": list(run.notes),
                "other_data": other,
            }
            for run, other in zip(self.runs, self.other_data, strict=True)
        ]
        return {
            "runs": runs,
            "differences": {name: list(values) for name, values in self.differences.items()},
        }
