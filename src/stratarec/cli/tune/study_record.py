"""What a study's file says: what is tuned, and every trial so far."""

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
    """A trial that began, and how it ended."""

    params: dict[str, int | float | str]
    """As Optuna has them: see `Space.values`."""
    state: Literal["running", "complete", "pruned", "failed"] = "running"
    evaluations: tuple[float, ...] = ()
    """What validation said by the way, of one that has ended."""
    value: float | None = None
    """What it said of the checkpoint that a run would test."""
    reason: str = ""
    """Why it failed."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> TrialRecord:
        if (self.value is None) == (self.state == "complete"):
            raise ValueError(f"a trial that is {self.state} has the value {self.value}")
        return self


class StudyRecord(Model):
    """``study.json``."""

    format: Literal[2] = FORMAT
    space: dict[str, str]
    recipe: dict[str, pydantic.JsonValue]
    dataset: str
    trials: tuple[TrialRecord, ...] = ()
    """The run of each is named by its place here; the last alone may be running."""

    @pydantic.field_validator("trials")
    @classmethod
    def _check_trials(cls, value: tuple[TrialRecord, ...]) -> tuple[TrialRecord, ...]:
        if any(each.state == "running" for each in value[:-1]):
            raise ValueError("a trial that is not the last is running")
        return value


def run_name(number: int) -> str:
    """Of the directory of a trial's run."""
    return f"trial-{number:04d}"


def read_study(folder: Path) -> StudyRecord:
    """What the study that has its file in `folder` is of; `ConfigError` where that is damaged."""
    return read_sealed(folder / FILE, StudyRecord, ADVICE, ConfigError)
