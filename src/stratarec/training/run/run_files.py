"""What a run writes down of itself: its recipe, the plan of its tables, and the result of its test.

Each is sealed, and read through a model of its fields: a run may come from somebody else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import CheckpointError
from stratarec.io.sealed import Count, Model, read_sealed, write_sealed
from stratarec.models.calibration import LogitMap
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.training.checkpoint.state_schema import Bins, Figures
from stratarec.training.run.run_directory import PLAN, RECIPE, RESULT

FORMAT: Literal[1] = 1

Json = dict[str, pydantic.JsonValue]
Test = dict[str, int | float | Bins | dict[str, Figures] | None]
Seconds = Annotated[float, pydantic.Field(ge=0)]


class RunRecipe(Model):
    """``recipe.json``."""

    format: Literal[1] = FORMAT
    recipe: Json


class RunPlan(Model):
    """``plan.json``: where tables live, and the memory section that this was made for."""

    format: Literal[1] = FORMAT
    memory: Json
    plan: Json


class RankFigures(Model):
    """What one of several processes did in a run's last session."""

    exposed_seconds: Seconds
    """Time in which training waited for others: for rows, gradients, what is decided together, and ids."""
    hidden_seconds: Seconds
    """Time in which only its other thread waited for others: for ids."""
    step_seconds: Seconds
    """Time of steps in all, with exposed waits before them."""
    sent_bytes: Count
    """To other ranks."""
    table_bytes: Count
    peak_rss_bytes: Count


class Result(Model):
    """``result.json``: what the final test gave."""

    format: Literal[1] = FORMAT
    checkpoint: Annotated[str, pydantic.Field(pattern=r"^step-\d{8,12}$")]
    """Which was tested."""
    steps: Count
    """Of the run when it ended."""
    samples_per_second: Seconds
    table_bytes: Count
    output_bytes: Count
    memory: tuple[dict[str, str | int | float | bool | None], ...]
    """What was planned and what is used, for each memory."""
    network_bytes: Count
    peak_rss_bytes: Count
    test: Test | None = None
    """Metrics, where there is a test split; of several labels also those of each, as ``labels``."""
    valid: Test | None = None
    """Likewise, where a correction was fitted to that split."""
    uncalibrated: dict[str, Test] | None = None
    """Split -> its metrics without the correction."""
    calibration: tuple[LogitMap, ...] = ()
    """The correction of each label; none by default."""
    ranks: tuple[RankFigures, ...] = ()
    """Of each process, where there were several."""


def write_recipe(run: Path, recipe: Recipe) -> None:
    """Write down what is trained."""
    write_sealed(run / RECIPE, {"format": FORMAT, "recipe": recipe.to_dict()})


def read_recipe(run: Path) -> Recipe:
    """What a run trains; `DatasetError` or `ConfigError` where that is damaged."""
    found = read_sealed(run / RECIPE, RunRecipe, "name another run, or train it anew", CheckpointError)
    return Recipe.from_dict(found.recipe, str(run / RECIPE))


def write_result(run: Path, result: dict[str, Any]) -> None:
    """Write down the result of a run."""
    write_sealed(run / RESULT, {"format": FORMAT, **result})


def read_result(run: Path) -> Result | None:
    """The result of a run; None where it has none yet."""
    if not (run / RESULT).exists():
        return None
    return read_sealed(run / RESULT, Result, "remove it: `stratarec train --resume` makes it anew", CheckpointError)


def write_plan(run: Path, recipe: Recipe, plan: Plan | None) -> None:
    """Write the plan into the run, beside what it was made for."""
    if plan is not None:
        write_sealed(run / PLAN, {"format": FORMAT, "memory": _asked(recipe), "plan": plan.to_dict()})


def _asked(recipe: Recipe) -> Json:
    """What a plan is made for."""
    content = recipe.to_dict()
    hot = recipe.hot
    asked = {"hot": hot.budget, "copies": hot.copies}
    return {**content["memory"], **{name: size for name, size in asked.items() if size is not None}}


def read_plan(run: Path, recipe: Recipe, dataset: Dataset) -> Plan | None:
    """The plan that a run was started with, if it still is what `recipe` asks for and of the tables of `dataset`."""
    path = run / PLAN
    if not path.exists():
        return None
    found = read_sealed(path, RunPlan, "restore it, or start anew with --overwrite")
    if found.memory != _asked(recipe):
        return None
    plan = Plan.from_dict(found.plan, str(path))
    return plan if {placed.table: placed.rows for placed in plan.tables} == dataset.table_rows() else None
