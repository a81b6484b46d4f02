"""Train one pass over the data of a period, from the previous checkpoint to a new one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader
from stratarec.embedding import RowOptimizerConfig
from stratarec.kernels.runtime.accelerator import device_errors
from stratarec.planning.plan import Plan
from stratarec.progress import Progress
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.build import identity, new_plan, temporary_model
from stratarec.training.raw_logs import typed_schema
from stratarec.training.resolve import run_steps
from stratarec.training.steps.graph_step import build_pipeline
from stratarec.training.steps.state import TrainingState
from stratarec.training.steps.step import Losses, loader_config
from stratarec.training.steps.thread_tuner import ThreadTuner
from stratarec.training.torch_setup import build_optimizer, largest_fitting_batch, torch_settings


@dataclass(frozen=True, kw_only=True)
class Before:
    """State from which a period starts."""

    number: int
    """Number of the new period."""
    checkpoint: Path
    rows: RowOptimizerConfig
    """Row optimizer with which missed steps are applied to the rows of the checkpoint."""
    steps: int
    """Number of training steps of the run and of all its periods so far."""
    rate_factor: float


def period_recipe(recipe: Recipe, file: str, data: Path, base: Dataset) -> Recipe:
    """Return the recipe of a period: the recipe of the run or of the previous period, with one log
    and one epoch.
    """
    source: Any = recipe.data.source.of_file(file)
    if hasattr(source, "schema"):
        source = replace(source, schema=typed_schema(base))
    split = replace(recipe.data.split, by="fraction", column="", valid=0.0, test=0.0)
    vocabulary = replace(recipe.data.vocabulary, base=str(base.path))
    return replace(
        recipe,
        data=replace(recipe.data, source=source, split=split, vocabulary=vocabulary, path=str(data)),
        train=replace(recipe.train, epochs=1, max_steps=0, refit=False),
        hot=replace(recipe.hot, batches="none"),
    )


def train_period(
    recipe: Recipe, dataset: Dataset, before: Before, folder: Path, progress: Progress, device: torch.device
) -> tuple[Recipe, Plan | None, TrainingState]:
    """Train one pass over `dataset`, and write the checkpoint at its end into `folder`.

    Returns
    -------
    Recipe
        Recipe with the schedules of this pass.
    Plan or None
        Plan of the tables, if there is one.
    TrainingState
        State at the end of the pass.
    """
    recipe = replace(recipe, train=recipe.train.for_pass(run_steps(recipe.train, dataset)))
    train, position = recipe.train, TrainingState()
    tuner = ThreadTuner(train.threads, 1)
    with torch_settings(threads=tuner.threads, seed=train.seed), dataset.locked(), tuner:
        plan = new_plan(recipe, dataset, device=device)
        with ExitStack() as stack:
            model = stack.enter_context(temporary_model(recipe, dataset, plan, device=device))
            optimizer = build_optimizer(train.dense, model.network)
            loader = Loader(dataset, "train", loader_config(train))
            fitting = partial(largest_fitting_batch, model, dataset, loader.config, train.precision)
            stack.enter_context(device_errors(device, train.batch_size, fitting))
            pipeline = build_pipeline(model, optimizer, train, loader)
            pipeline.say = progress.say
            checkpoint.continue_from(before.checkpoint, model, optimizer, pipeline.average, before.rows)
            pipeline.earlier = before.steps
            if before.rate_factor != 1:
                pipeline.rate_factor = before.rate_factor
            progress.start("train", len(loader), "steps")
            losses = Losses(position)
            with pipeline.stage_ahead(pipeline.load(before.number)) as ahead:
                for item, handle in ahead:
                    losses.count(pipeline.train(position.step, *item, handle))
                    tuner.after_step(position.step)
                    progress.advance(1, f"loss {position.smoothed_loss:.4f}")
            losses.read()
            progress.finish()
            position.finished = True
            with pipeline.average.shown():
                checkpoint.save(
                    folder,
                    model=model,
                    optimizer={
                        **checkpoint.optimizer_tensors(optimizer),
                        **checkpoint.average_tensors(pipeline.average),
                    },
                    state={
                        "step": position.step,
                        "training": asdict(position),
                        "identity": identity(recipe, dataset),
                    },
                    previous=before.checkpoint,
                )
    return recipe, plan, position
