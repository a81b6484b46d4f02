"""Study of `stratarec tune`: trials one after another, each with values suggested by the earlier
ones.

OUT/
    study/          study.json: recipe, search space and trials
    trial-0000/     one run per trial, without a test; only the best one keeps its checkpoints
    best.yaml       the recipe with the best values so far
    trials.csv      the trials, written at the end of each call

Optuna suggests values by tree-structured Parzen estimators (Bergstra et al. 2011), and ends trials
early by the median rule (Golovin et al. 2017). The first trial has the recipe's own values. A trial
depends only on the seed and on earlier trials, so a study that was stopped and resumed gives the
same trials.

`study.json` is written when a trial begins and when it ends; evaluations of a running trial are in
the checkpoint of its run. Optuna stores nothing: its study is rebuilt from that file for each
trial. The folder may come from another user, so runs are named by the numbers of trials, values
must be in the search space, and links are refused.

The data set is opened without the files of its test split, so that no code can read them by
mistake. Trials are compared by ``train.early_stopping.metric`` at the checkpoint that a run would
test. While they train, they are compared at their n-th evaluation. If batch sizes differ,
``eval_every`` is scaled to the same number of samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import polars as pl
import yaml
from optuna.trial import TrialState

from stratarec.cli.tune.space import Dimension, Range, Space, Values
from stratarec.cli.tune.study_record import (
    ADVICE,
    FILE,
    STUDY,
    StudyRecord,
    TrialRecord,
    read_study,
    run_name,
)
from stratarec.config.validate import first_difference
from stratarec.data.dataset.compatibility import check_prepared
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import ConfigError, DatasetError, Interrupted, StorageError, TrainingError
from stratarec.io.atomic import make_directory, remove_leftovers, remove_tree, write_atomic, write_text
from stratarec.io.owned_directory import claim, directory_lock, named_directory
from stratarec.io.sealed import write_sealed
from stratarec.models.metrics import METRICS, goodness
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe, leaves, with_values
from stratarec.training.resolve import choose_defaults, describe_defaults
from stratarec.training.steps.state import Evaluation, best
from stratarec.training.trainer import Trainer

# Number of random trials before values are suggested, and of finished trials before trials may be
# ended early.
_DRAWN, _BEFORE_PRUNING = 10, 5
_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


@dataclass(frozen=True, kw_only=True)
class Best:
    """Result of a study."""

    values: Values
    metric: str
    value: float
    run: Path
    recipe: Path
    """``best.yaml``."""


class Study:
    """Trials of one recipe on one data set, used by `tune`."""

    def __init__(self, content: Mapping[str, Any], space: Space, dataset: Dataset, folder: Path) -> None:
        self._content = content
        self._space = space
        self._dataset = dataset
        self._folder = folder
        recipe = Recipe.from_dict(dict(content))
        self._metric: str = recipe.train.early_stopping.metric
        self._seed = recipe.train.seed
        about = json.loads(json.dumps(recipe.to_dict()))
        for name in ("run", "threads"):
            about["train"].pop(name)
        self._about = StudyRecord(space=dict(space.text), recipe=about, dataset=dataset.fingerprint)
        self._trials: list[TrialRecord] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the directory of the study, and load its trials.

        Raises
        ------
        StorageError
            If another process uses the directory, or it is not a study.
        ConfigError
            If it is a study of another recipe, space or data set.
        """
        inner = self._folder / "study"
        make_directory(self._folder)
        if inner.is_symlink():
            raise StorageError(f"{inner} is a symbolic link, expected a directory; {ADVICE}")
        claim(inner, STUDY)
        with directory_lock(inner):
            remove_leftovers(inner)
            if (inner / FILE).exists():
                self._load(inner)
            else:
                self._write()
            yield

    def _load(self, inner: Path) -> None:
        record = read_study(inner)
        difference = first_difference(self._about.to_dict(), {**record.to_dict(), "trials": []})
        if difference is not None:
            raise ConfigError(
                f"{inner} is a study with {difference.field} {str(difference.have)[:80]}, which is now "
                f"{str(difference.want)[:80]}: {ADVICE}"
            )
        dimensions = self._space.dimensions
        for number, trial_record in enumerate(record.trials):
            if trial_record.params.keys() != dimensions.keys():
                raise ConfigError(
                    f"{inner / FILE}: fields of trial {number} are not those of --space; {ADVICE}"
                )
            for field, value in trial_record.params.items():
                if not dimensions[field].holds(value):
                    summary = f"{field} {str(value)[:80]}"
                    raise ConfigError(
                        f"{inner / FILE}: trial {number} has {summary}, which is not in --space; {ADVICE}"
                    )
        self._trials = list(record.trials)
        self._keep_best()

    def _write(self) -> None:
        """Write the file of the study. This is the last step when a trial begins or ends."""
        record = self._about.model_copy(update={"trials": tuple(self._trials)})
        write_sealed(self._folder / "study" / FILE, record.to_dict())

    def ended(self) -> list[TrialRecord]:
        """Return the trials that have ended, including failed ones."""
        return [trial_record for trial_record in self._trials if trial_record.state != "running"]

    def report(self) -> None:
        """Write the trials that have ended as a table."""
        rows = [
            {"trial": run_name(number), "state": trial.state, METRICS[self._metric].label: trial.value}
            | {field: str(value) for field, value in trial.params.items()}
            | {"reason": trial.reason}
            for number, trial in enumerate(self.ended())
        ]
        if rows:
            write_atomic(
                self._folder / "trials.csv", pl.DataFrame(rows, infer_schema_length=None).write_csv
            )

    def run_one(self) -> str:
        """Run a new trial, or resume the one that was stopped; return a line with its result."""
        asked = self._ask()
        number = len(self._trials) - 1
        trial, evaluations = self._trial(number), list[float]()

        def watch(step: int, value: float) -> None:
            evaluations.append(value)
            asked.report(value, step)
            if asked.should_prune():
                raise Pruned

        value: float | None = None
        state, reason = "complete", ""
        try:
            value = trial.train(self._dataset, watch)
            summary = f"{METRICS[self._metric].label} {value:.5f}"
        except Pruned:
            state, summary = "pruned", "ended early"
        # Other errors, such as of the disk or the data, are not caused by the trial's values, and
        # end the command.
        except (ConfigError, TrainingError, MemoryError) as error:
            state, reason = "failed", str(error)
            summary = f"failed: {reason}"
        ended = {"state": state, "evaluations": tuple(evaluations), "value": value, "reason": reason}
        self._trials[number] = self._trials[number].model_copy(update=ended)
        self._write()
        self._keep_best()
        values = ", ".join(f"{field} {_format_value(one)}" for field, one in trial.values.items())
        return f"trial {number}: {values}: {summary}"

    def _ask(self) -> optuna.Trial:
        """Return the trial that was stopped, or a new one with the values that Optuna suggests."""
        ended = self.ended()
        # Each trial has its own seed, because the sampler is new in each trial: with equal seeds,
        # it would suggest the same values again.
        seed = int(np.random.SeedSequence([self._seed, len(ended)]).generate_state(1)[0])
        study = optuna.create_study(
            direction="maximize" if METRICS[self._metric].better == "higher" else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=_DRAWN),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=_BEFORE_PRUNING),
        )
        distributions = {
            field: _distribution(trial_record) for field, trial_record in self._space.dimensions.items()
        }
        for trial_record in ended:
            study.add_trial(
                optuna.trial.create_trial(
                    state=_STATES[trial_record.state],
                    value=trial_record.value,
                    params=dict(trial_record.params),
                    distributions=distributions,
                    intermediate_values=dict(enumerate(trial_record.evaluations, 1)),
                )
            )
        is_resumed = len(ended) < len(self._trials)
        if is_resumed or not ended:
            first = (
                self._space.recipe_values(self._content)
                if not is_resumed
                else dict(self._trials[-1].params)
            )
            study.enqueue_trial(first)
        asked = study.ask(distributions)
        run = self._run(len(ended))
        if run.is_symlink() or (run.exists() and not is_resumed):
            raise StorageError(
                f"{run} exists, and is not a trial of this study; move it elsewhere, or {ADVICE}"
            )
        if not is_resumed:
            self._trials.append(TrialRecord(params=asked.params))
            self._write()
        return asked

    def _run(self, number: int) -> Path:
        return self._folder / run_name(number)

    def _trial(self, number: int) -> Trial:
        values = self._space.values(self._trials[number].params)
        return Trial(content=self._content, values=values, run=self._run(number))

    def _keep_best(self) -> None:
        """Delete the checkpoints of all trials but the best, and write the best recipe."""
        best = self.best()
        for number, trial_record in enumerate(self._trials):
            if trial_record.state != "running" and (best is None or self._run(number) != best.run):
                self._trial(number).remove_checkpoints()
        if best is not None:
            overrides = Trial(content=self._content, values=best.values, run=best.run).overrides
            head = f"# `stratarec tune`: validation {METRICS[self._metric].label} {best.value:.5f}, {best.run.name}\n"
            write_text(
                best.recipe, head + yaml.safe_dump(with_values(self._content, overrides), sort_keys=False)
            )

    def best(self) -> Best | None:
        """Return the best completed trial, or None. If several are equally good, the first one is
        returned.
        """
        ended = [
            (trial_record.value, -number)
            for number, trial_record in enumerate(self._trials)
            if trial_record.value is not None
        ]
        if not ended:
            return None
        value, place = max(
            ended, key=lambda trial_record: (goodness(self._metric, trial_record[0]), trial_record[1])
        )
        trial, recipe = self._trial(-place), self._folder / "best.yaml"
        return Best(values=trial.values, metric=self._metric, value=value, run=trial.run, recipe=recipe)


def tune(
    content: Mapping[str, Any], space: Space, folder: Path, trials: int, progress: Progress, origin: str
) -> Best:
    """Run trials until the study has `trials` trials, including trials of earlier calls, and return
    the best one.

    The test split is never read.

    Parameters
    ----------
    content : mapping
        Recipe, which was read from `origin`.
    folder : Path
        Directory of the study; a later call with the same recipe, space and data resumes it.

    Raises
    ------
    DatasetError
        If the validation split does not have both classes.
    TrainingError
        If no trial was completed.
    Interrupted
        If the user stops it; the same call resumes.
    """
    recipe = Recipe.from_dict(dict(content), origin)
    dataset = Dataset.open(recipe.data.path, verify="used", untouched=("test",))
    check_prepared(recipe.data, dataset)
    _check_validation(dataset)
    defaults = choose_defaults(recipe, leaves(content), dataset)
    content = with_values(content, defaults)
    for line in describe_defaults(defaults, dataset):
        progress.say(line)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = Study(content, space, dataset, named_directory(folder))
    with study.opened():
        progress.start("tune", trials, "trials", min(len(study.ended()), trials))
        try:
            while len(study.ended()) < trials:
                summary = study.run_one()
                progress.say(summary)
                progress.advance(1)
        except Interrupted as error:
            raise Interrupted(
                f"stopped; finished trials are in {folder}; run the same command again to resume",
                error.signal,
            ) from error
        finally:
            progress.finish()
            study.report()
        best = study.best()
        if best is None:
            reasons = [trial_record.reason for trial_record in study.ended() if trial_record.reason]
            why = f"; the last: {reasons[-1]}" if reasons else ""
            raise TrainingError(
                f"none of {trials} trials was completed{why}: change --space, or the recipe"
            )
        return best


def _check_validation(dataset: Dataset) -> None:
    first = dataset.label_counts("valid")[dataset.schema.label_column]
    if not 0 < first.positives < first.known:
        raise DatasetError(
            f"{dataset.path} has {'a single class in its' if first.known else 'no'} validation split, but "
            "trials are compared by it: set data.split.valid and prepare again"
        )


def _distribution(dimension: Dimension) -> optuna.distributions.BaseDistribution:
    if not isinstance(dimension, Range):
        return optuna.distributions.CategoricalDistribution(dimension.values)
    if dimension.is_integer:
        return optuna.distributions.IntDistribution(
            int(dimension.low), int(dimension.high), log=dimension.log
        )
    return optuna.distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


class Pruned(Exception):
    """Raised to stop a trial early, because earlier trials were better at the same point."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial: a training with other values, which is never tested."""

    content: Mapping[str, Any]
    """Recipe that is tuned."""
    values: Values
    """Field -> value in this trial."""
    run: Path
    """Directory of the trial's run."""

    @property
    def overrides(self) -> dict[str, Any]:
        """Return all fields that differ from the recipe.

        With another batch size, `eval_every` is scaled to the same number of samples, so that
        running trials can be compared.
        """
        values = dict(self.values)
        base = Recipe.from_dict(dict(self.content)).train
        if base.eval_every and "train.batch_size" in values and "train.eval_every" not in values:
            values["train.eval_every"] = max(
                round(base.eval_every * base.batch_size / values["train.batch_size"]), 1
            )
        return values

    def train(self, dataset: Dataset, watch: Callable[[int, float], None]) -> float:
        """Train, and return the validation metric of the checkpoint that a run would test.

        Parameters
        ----------
        watch : callable
            Called with the number and the metric of each evaluation; may raise `Pruned`.

        Raises
        ------
        Exception
            The same errors as `Trainer.fit`, and `TrainingError` if the metric is not defined.
        """
        recipe = Recipe.from_dict(with_values(self.content, {**self.overrides, "train.run": str(self.run)}))
        stopping, seen = recipe.train.early_stopping, 0

        def watched(evaluations: Sequence[Evaluation]) -> None:
            nonlocal seen
            for entry in evaluations[seen:]:
                seen += 1
                watch(seen, _metric(entry, stopping.metric))

        position = Trainer(recipe, dataset, SilentProgress()).fit(watched, resume=True)
        evaluation = best(position.evaluations, stopping) or position.evaluations[-1]
        return _metric(evaluation, stopping.metric)

    def remove_checkpoints(self) -> None:
        """Delete the weights of the run, and keep its records."""
        if not self.run.is_symlink():
            remove_tree(self.run / "checkpoints")


def _metric(entry: Evaluation, name: str) -> float:
    value = entry[name]
    if value is None or not math.isfinite(value):
        raise TrainingError(f"validation at step {entry['step']} gives no finite {name}")
    return float(value)
