"""File of a study: the recipe, the search space and all trials."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic

from stratarec.errors import ConfigError
from stratarec.io.owned_directory import DirectoryKind
from stratarec.io.sealed import Model, read_sealed

FORMAT: Literal[2] = 2
FILE = "study.json"
STUDY = DirectoryKind(name="study", field="--output", content=(FILE,))
ADVICE = "name another --output"


class TrialRecord(Model):
    """Values of the fields in one trial of a study, and the metrics of its run."""

    params: dict[str, int | float | str]
    """Values of the fields in the form that Optuna stores; `Space.values` decodes them."""
    state: Literal["running", "complete", "pruned", "failed"] = "running"
    evaluations: tuple[float, ...] = ()
    """Validation metrics during training, once the trial has ended."""
    value: float | None = None
    """Validation metric of the checkpoint that a run would test."""
    reason: str = ""
    """Error of a failed trial."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> TrialRecord:
        if (self.value is None) == (self.state == "complete"):
            raise ValueError(f"a trial that is {self.state} has the value {self.value}")
        return self


class StudyRecord(Model):
    """Content of ``study.json`` without its seal: the search space, and all trials so far."""

    format: Literal[2] = FORMAT
    space: dict[str, str]
    """Field -> text of its dimension in ``--space``."""
    recipe: dict[str, pydantic.JsonValue]
    """Recipe whose fields are varied."""
    dataset: str
    """Fingerprint of the data set."""
    trials: tuple[TrialRecord, ...] = ()
    """Trials in order. A trial's index names its run. Only the last trial may be running."""

    @pydantic.field_validator("trials")
    @classmethod
    def _check_trials(cls, value: tuple[TrialRecord, ...]) -> tuple[TrialRecord, ...]:
        if any(trial.state == "running" for trial in value[:-1]):
            raise ValueError("a trial is running, but is not the last")
        return value


def run_name(number: int) -> str:
    """Return the name of the directory of a trial's run."""
    return f"trial-{number:04d}"


def read_study(folder: Path) -> StudyRecord:
    """Read the file of the study in `folder`. Raises `ConfigError` if it is damaged."""
    return read_sealed(folder / FILE, StudyRecord, ADVICE, ConfigError)
