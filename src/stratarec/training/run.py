"""The directory of a run: recipe.json, plan.json, checkpoints/, tensorboard/, result.json, report.html."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratarec.data.dataset import Dataset
from stratarec.errors import CheckpointError, ConfigError, DatasetError
from stratarec.files import read_json, write_json
from stratarec.models import CTRModel, build_model
from stratarec.models.base import build_tables
from stratarec.planning.apply import tier_config
from stratarec.planning.plan import Plan
from stratarec.planning.planner import make_plan
from stratarec.recipe import Recipe
from stratarec.training import checkpoint

_PLAN = "plan.json"


def identity(recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    """What a checkpoint must be of: the model, its optimizers, and the data."""
    content = recipe.to_dict()
    free = ("run", "epochs", "max_steps", "threads", "checkpoint", "log_every", "eval_every", "early_stopping")
    return {
        "model": content["model"],
        "train": {key: value for key, value in content["train"].items() if key not in free},
        "tables": dataset.table_rows(),
        "dataset": dataset.fingerprint,
    }


def new_plan(recipe: Recipe, dataset: Dataset) -> Plan | None:
    """Where a recipe's tables live on this machine; None when all are float32 in DRAM with nothing to plan."""
    if recipe.memory.is_identity:
        return None
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    return make_plan(tables, dataset, recipe.train.embedding, recipe.memory, batch_size=recipe.train.batch_size)


def saved_plan(run: Path, recipe: Recipe, dataset: Dataset) -> Plan | None:
    """The plan that a run was started with, if it still is what `recipe` asks for and of the tables of `dataset`."""
    path = run / _PLAN
    if not path.is_file():
        return None
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("plan"), dict):
        raise DatasetError(f"{path} is no plan of a run; restore it, or start anew with --overwrite")
    if content.get("memory") != recipe.to_dict()["memory"]:
        return None
    plan = Plan.from_dict(content["plan"], str(path))
    return plan if {placed.table: placed.rows for placed in plan.tables} == dataset.table_rows() else None


def save_plan(run: Path, recipe: Recipe, plan: Plan | None) -> None:
    """Write the plan into the run, beside what it was made for."""
    if plan is not None:
        write_json(run / _PLAN, {"memory": recipe.to_dict()["memory"], "plan": plan.to_dict()})


def new_model(recipe: Recipe, dataset: Dataset, plan: Plan | None, workspace: str) -> CTRModel:
    """The untrained model of a recipe; stores with files make the directory `workspace` in their memories' paths.

    Raises
    ------
    ConfigError
        When `plan` is of other tables.
    """
    if plan is not None:
        _check_plan(plan, recipe, dataset)
    return build_model(
        recipe.model,
        dataset.schema,
        dataset.table_rows(),
        optimizer=recipe.train.embedding,
        seed=recipe.train.seed,
        click_rate=dataset.positives["train"] / dataset.samples("train"),
        tiers=None if plan is None else tier_config(plan, recipe.memory, workspace),
    )


def _check_plan(plan: Plan, recipe: Recipe, dataset: Dataset) -> None:
    width = recipe.model.embedding_dim
    planned = {placed.table: f"{placed.rows:,} rows of {placed.width}" for placed in plan.tables}
    actual = {name: f"{rows:,} rows of {width}" for name, rows in dataset.table_rows().items()}
    for table in sorted({*planned, *actual}):
        if planned.get(table) != actual.get(table):
            raise ConfigError(
                f"the plan is of other tables: {table!r} has {planned.get(table, 'no place')} in it and "
                f"{actual.get(table, 'no place')} in this recipe's data; plan again"
            )


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with the weights of a checkpoint, and what it was trained on; a context manager that closes it."""

    recipe: Recipe
    dataset: Dataset
    model: CTRModel
    checkpoint: Path

    def close(self) -> None:
        """Give back what the tables take, files too; the model is of no use afterwards."""
        tiers = self.model.embeddings.tiers
        self.model.embeddings.close()
        for path in (tiers.mapped_path, tiers.log_path):
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> TrainedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_run(path: str | Path, data: str | Path | None = None) -> TrainedModel:
    """The model that a run ended with, or its last checkpoint while it has not ended.

    Parameters
    ----------
    data : path
        Another prepared data set with the same vocabularies; the run's own by default.

    Raises
    ------
    CheckpointError, DatasetError
        Where the run, its checkpoint or the data are missing, damaged or do not belong together.
    """
    path = Path(path)
    if not (path / "recipe.json").is_file():
        raise CheckpointError(f"{path} is no run: it has no recipe.json; name the directory that `train` wrote")
    recipe = Recipe.from_dict(read_json(path / "recipe.json"), str(path / "recipe.json"))
    own = Dataset.open(data or recipe.data.path)
    found = chosen_checkpoint(path)
    state = checkpoint.read_state(found)
    if own.table_rows() != state["identity"]["tables"]:
        difference = checkpoint.first_difference(own.table_rows(), state["identity"]["tables"], "rows")
        raise DatasetError(f"{own.path} does not fit {found}: {difference}")
    plan = saved_plan(path, recipe, own) or new_plan(recipe, own)
    # Stores with files are read in a directory of this process alone: the run itself may still be training.
    model = new_model(recipe, own, plan, f"{recipe.name}-reading-{uuid.uuid4().hex[:12]}")
    trained = TrainedModel(recipe=recipe, dataset=own, model=model, checkpoint=found)
    try:
        checkpoint.load(found).into(model)
    except BaseException:
        trained.close()
        raise
    return trained


def chosen_checkpoint(path: Path) -> Path:
    """The checkpoint that the final test used, else the last one."""
    if (path / "result.json").is_file():
        return path / "checkpoints" / str(read_json(path / "result.json")["checkpoint"])
    found = checkpoint.steps(path / "checkpoints")
    if not found:
        raise CheckpointError(f"{path} has no checkpoint yet")
    return found[-1]
