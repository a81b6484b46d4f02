"""Second phase of a run (`train.refit`): train the tested model on the samples of validation and
test, too.

The test is over, so nothing is left for which these samples would have to be unseen. The phase has
the loop and the checkpoints of the first one, in a folder of its own:

refit/
    recipe.json     recipe of the run with the schedules of this phase
    plan.json       placement of the tables, if there is one
    checkpoints/    checkpoints of this phase; the last one is the model that is used

Networks continue from the tested checkpoint for one pass. If that had seen the training samples
more than once, the pass has all samples, with a tenth of the learning rates, because it repeats
them once more than validation has judged; otherwise it has those of validation and test, which are
then seen once, as the others were.

Values that are frequent enough only in all splits together get rows, with initial weights
(`Dataset.complete`). Boosted trees are fitted again, to all samples: as many as validation chose,
times the growth of the number of samples. The weights of an ensemble's members are chosen again by
the samples of validation and test, as scored by the tested model. If the tested model needs a
calibration, the weights stay, and the calibration is fitted to these samples.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.splits import SPLITS
from stratarec.distributed.mesh import Mesh
from stratarec.errors import ConfigError
from stratarec.io.atomic import file_hash, remove_tree
from stratarec.planning.plan import Plan
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import EarlyStoppingConfig, PlateauConfig
from stratarec.training import checkpoint
from stratarec.training.evaluate import ScoredSamples, score_split
from stratarec.training.loop import Loop
from stratarec.training.resolve import ResolvedRun, run_steps
from stratarec.training.run.build_run import Run, Session, build_run, find_plan
from stratarec.training.run.run_directory import REFIT, write_plan, write_recipe
from stratarec.training.steps.members import best_members
from stratarec.training.steps.state import TrainingState, rate_factor
from stratarec.training.torch_setup import torch_settings

# Factor on learning rates for samples that the tested model has seen. With 1, a log of a million
# rows lost 0.01 AUC.
_REPEATED = 0.1


def _recipe(recipe: Recipe, dataset: Dataset, factor: float) -> Recipe:
    """Return the recipe of one pass over the training split of `dataset`.

    `factor` is the factor on learning rates that `train.plateau` had reached.
    """
    train = replace(
        recipe.train,
        epochs=1,
        max_steps=0,
        eval_every=0,
        early_stopping=EarlyStoppingConfig(),
        plateau=PlateauConfig(),
        dense=replace(recipe.train.dense, learning_rate=factor * recipe.train.dense.learning_rate),
        embedding=replace(
            recipe.train.embedding, learning_rate=factor * recipe.train.embedding.learning_rate
        ),
    )
    return replace(
        recipe, train=train.for_pass(run_steps(train, dataset)), hot=replace(recipe.hot, batches="none")
    )


def refit_plan(recipe: Recipe, dataset: Dataset, find: Callable[[Dataset], Plan | None]) -> Plan | None:
    """Return the largest placement of the tables of a refit, found by `find` for its data set.

    None if there is no refit, or none that adds rows. `ConfigError` if the tables do not fit.
    """
    if not recipe.train.refit:
        return None
    plans = []
    # A refit uses one of these two: which one depends on the validation of the first phase.
    for splits in (SPLITS, SPLITS[1:]):
        joined = dataset.joined(splits)
        if joined.samples("train") and joined.table_rows() != dataset.table_rows():
            try:
                plans.append(find(joined))
            except ConfigError as error:
                raise ConfigError(
                    f"{error}, or set train.refit to false, because a refit has more rows"
                ) from error
    return max(filter(None, plans), key=lambda plan: plan.used(plan.level0), default=None)


def refit(
    first: ResolvedRun,
    session: Session,
    run: Path,
    tested: Path,
    plan: Plan | None,
    *,
    epoch_steps: int,
    is_calibrated: bool,
) -> dict[str, Any]:
    """Train the second phase of a run to its end; return the checkpoint and the numbers of steps
    and samples.

    Parameters
    ----------
    first : ResolvedRun
        The first phase, whose parts must be released.
    session : Session
        Parts that both phases of a run share.
    run : Path
        Directory of the run.
    tested : Path
        Checkpoint from which this phase starts.
    plan : Plan or None
        Placement of the tables in the first phase.
    epoch_steps : int
        Number of steps in an epoch of the first phase.
    is_calibrated : bool
        Whether a calibration for this phase was fitted to the scores of the tested model, with its
        weights.
    """
    content, everything = checkpoint.read_state(tested), first.dataset.joined(SPLITS)
    is_repeated = content["step"] > epoch_steps
    dataset = everything if is_repeated else first.dataset.joined(SPLITS[1:])
    evaluations = TrainingState(**content["training"]).regular
    recipe = _recipe(first.recipe, dataset, rate_factor(evaluations, first.recipe.train.plateau))
    config, mesh, folder = recipe.train, first.mesh, run / REFIT / "checkpoints"
    base, samples = file_hash(tested / checkpoint.STATE), dataset.samples("train")
    last = _last_checkpoint(folder, mesh, base)
    state = TrainingState(phase="refit", base=base)
    if last is not None:
        state = TrainingState(**checkpoint.read_state(last)["training"])
    if dataset.table_rows() != first.dataset.table_rows():  # new values are frequent enough
        plan = find_plan(run / REFIT, first.recipe, dataset, mesh, first.device)
    with ExitStack() as stack:
        parts = build_run(
            replace(first, recipe=recipe, dataset=dataset),
            session,
            folder,
            plan,
            state,
            # All samples are trained, so none can choose the best step of a member.
            chooses_members=False,
            earlier=content["tables"]["earlier"] + content["tables"]["step"],
            # Not in the recipe, because `continue` takes over its rates.
            rate_factor=_REPEATED if is_repeated else 1.0,
        )
        stack.callback(parts.close)
        stack.enter_context(torch_settings(threads=session.threads.threads, seed=config.seed))
        fit = None
        if last is None:
            parts.checkpoints.continue_from(tested, first.recipe.train.embedding)
            if not is_calibrated:
                _choose_weights(parts, first.dataset, mesh.ranks)
            state.threads = session.threads.threads
            mesh.first(lambda: write_recipe(folder.parent, recipe))
            mesh.first(lambda: write_plan(folder.parent, recipe, plan))
            if (trees := parts.model.network.trees) is not None and trees.counts.any():
                growth = everything.samples("train") / first.dataset.samples("train")
                fit = parts.fit_trees(stack, everything, growth=growth)
            session.progress.say(f"refit: one pass over {samples:,} samples, from {tested}")
        else:
            parts.restore(last)
        with session.stop.handled(), session.threads, parts.guarded():
            if not state.finished:
                Loop(parts, trees=fit).train()
        path = checkpoint.step_path(folder, state.step)
        mesh.first(lambda: checkpoint.prune(folder, 1, {path}))
    return {"checkpoint": path.name, "steps": state.step, "samples": samples}


def _last_checkpoint(folder: Path, mesh: Mesh, base: str) -> Path | None:
    """Return the last checkpoint in `folder`. Checkpoints of a refit of another tested model are
    removed.

    `base` is the hash of the tested model's ``state.json``.
    """

    def find() -> str | None:
        checkpoint.recover(folder)
        paths = checkpoint.list_checkpoints(folder)
        if paths and checkpoint.read_state(paths[-1])["training"].get("base") == base:
            return str(paths[-1])
        remove_tree(folder.parent)
        return None

    last = mesh.first(find)
    return None if last is None else Path(last)


def _choose_weights(parts: Run, first: Dataset, ranks: int) -> None:
    """Choose the weights of an ensemble's members by the samples of validation and test in `first`.

    `first` is the data set of the first phase: rows of values that are new in this one are not
    trained yet.
    """
    members = best_members(parts.model, parts.config, ranks)
    if members is None:
        return
    average = parts.pipeline.average
    with average.shown(), members.separate():
        samples = ScoredSamples.joined(
            score_split(
                parts.model, first, split, precision=parts.config.precision, progress=SilentProgress()
            )
            for split in SPLITS[1:]
            if first.samples(split)
        )
    members.reweight(samples)
    if average.enabled:  # the average has weights of its own
        with average.shown():
            members.reweight(samples)
