"""The directory of a run: recipe.json, checkpoints/, tensorboard/, result.json, report.html."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratarec.data.dataset import Dataset
from stratarec.errors import CheckpointError, DatasetError
from stratarec.files import read_json
from stratarec.models import CTRModel, build_model
from stratarec.recipe import Recipe
from stratarec.training import checkpoint


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


def new_model(recipe: Recipe, dataset: Dataset) -> CTRModel:
    """The untrained model of a recipe."""
    return build_model(
        recipe.model,
        dataset.schema,
        dataset.table_rows(),
        optimizer=recipe.train.embedding,
        seed=recipe.train.seed,
        click_rate=dataset.positives["train"] / dataset.samples("train"),
    )


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with the weights of a checkpoint, and what it was trained on."""

    recipe: Recipe
    dataset: Dataset
    model: CTRModel
    checkpoint: Path


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
    model = new_model(recipe, own)
    loaded = checkpoint.load(found)
    model.load_state_dict(loaded.model)
    return TrainedModel(recipe=recipe, dataset=own, model=model, checkpoint=found)


def chosen_checkpoint(path: Path) -> Path:
    """The checkpoint that the final test used, else the last one."""
    if (path / "result.json").is_file():
        return path / "checkpoints" / str(read_json(path / "result.json")["checkpoint"])
    found = checkpoint.steps(path / "checkpoints")
    if not found:
        raise CheckpointError(f"{path} has no checkpoint yet")
    return found[-1]
