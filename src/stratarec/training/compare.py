"""Runs side by side: what each trained, how long it took, what evaluations gave, and where their recipes differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratarec.errors import CheckpointError, ConfigError
from stratarec.models.metrics import HEADLINES, METRICS
from stratarec.recipe import leaves
from stratarec.training import checkpoint
from stratarec.training.run.open_run import require_run
from stratarec.training.run.run_directory import read_recipe, read_result
from stratarec.training.steps.state import TrainingState, best

# Fields of a recipe that say nothing of how a run went.
_NAMES = ("name", "train.run")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run says of itself."""

    name: str
    recipe: dict[str, Any]
    """Field, such as ``train.batch_size``, -> value."""
    dataset: str
    """Fingerprint of the data that it was trained on."""
    steps: int
    seconds: float
    """Spent in steps, by all sessions of the run."""
    samples_per_second: float
    chosen: int
    """Step of the checkpoint whose metrics are told."""
    validation: dict[str, Any] | None
    """Metrics of that checkpoint; None where it was not validated."""
    result: dict[str, Any] | None
    """What ``result.json`` holds; None while the run has not ended."""
    losses: tuple[tuple[int, float], ...]
    evaluations: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, path: Path, name: str) -> RunSummary:
        """Of the run in `path`.

        Raises
        ------
        CheckpointError
            Where it is no run, is damaged, or has no checkpoint yet.
        """
        require_run(path)
        recipe, result = read_recipe(path), read_result(path)
        found = checkpoint.list_checkpoints(path / "checkpoints")
        if not found:
            raise CheckpointError(f"{path} has no checkpoint yet: there is nothing of it to compare")
        state = checkpoint.read_state(found[-1])
        position, evaluations = state["training"], tuple(state["training"]["evaluations"])
        best_one = best(evaluations, recipe.train.early_stopping)
        chosen = state["step"] if best_one is None else best_one["step"]
        chosen = chosen if result is None else int(result.checkpoint.removeprefix("step-"))
        told = None if result is None else result.model_dump(mode="json", exclude_unset=True, exclude={"format"})
        return cls(
            name=name,
            recipe={key: value for key, value in leaves(recipe.to_dict()).items() if key not in _NAMES},
            dataset=state["identity"]["dataset"],
            steps=state["step"],
            seconds=position["train_seconds"],
            samples_per_second=TrainingState(**position).speed,
            chosen=chosen,
            validation=next((entry for entry in evaluations if entry["step"] == chosen), None),
            result=told,
            losses=tuple(map(tuple, position["losses"])),
            evaluations=evaluations,
        )


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Some runs."""

    runs: tuple[RunSummary, ...]

    @classmethod
    def read(cls, paths: Sequence[str]) -> RunComparison:
        """Of the directories of runs, which must be different ones."""
        places = [Path(path) for path in paths]
        resolved = [place.resolve() for place in places]
        for number, place in enumerate(resolved):
            if place in resolved[:number]:
                raise ConfigError(f"{places[number]} is named twice: name each run once")
        short = [place.name for place in resolved]
        names = short if len({*short}) == len(short) else [str(place) for place in places]
        return cls(runs=tuple(RunSummary.read(*each) for each in zip(places, names, strict=True)))

    @property
    def other_data(self) -> tuple[bool, ...]:
        """Of each run, whether its data set is another than that of the first, so that their metrics say little."""
        return tuple(run.dataset != self.runs[0].dataset for run in self.runs)

    @property
    def differences(self) -> dict[str, tuple[Any, ...]]:
        """Field of the recipe -> its value in each run, of the fields that are not the same in all; ``None`` for one
        that a run's recipe has not."""
        names = dict.fromkeys(name for run in self.runs for name in run.recipe)
        found = {name: tuple(run.recipe.get(name) for run in self.runs) for name in names}
        return {name: values for name, values in found.items() if len({json.dumps(value) for value in values}) > 1}

    @property
    def courses(self) -> dict[str, dict[str, Sequence[tuple[float, float]]]]:
        """What changed over the steps of runs -> run -> step and value."""
        found: dict[str, dict[str, Sequence[tuple[float, float]]]] = {
            "Training loss, smoothed": {run.name: run.losses for run in self.runs}
        }
        for metric in HEADLINES[:2]:
            found[f"Validation {METRICS[metric].label}"] = {
                run.name: [(each["step"], each[metric]) for each in run.evaluations if each[metric] is not None]
                for run in self.runs
            }
        return found

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
