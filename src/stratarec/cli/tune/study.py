"""A study: trials one after another, each suggested by those before, until there are enough of them.

OUT/
    study/          study.json: what is tuned, and every trial so far
    trial-0000/     a run each, without a test; checkpoints of the best one alone
    best.yaml       the recipe with the best values so far
    report.html     its trials for people, as of the end of the last call

Values are suggested by tree-structured Parzen estimators (Bergstra et al. 2011), trials are ended early by the median
rule (Golovin et al. 2017), both Optuna's. The first trial has the recipe's own values. What a trial is depends on the
seed and on what was tried before it, so a study that was stopped goes on as if it had not been.

`study.json` is written when a trial begins and when it has ended; evaluations of one that is under way are in its
run's checkpoint. Optuna keeps nothing: what a trial needs of it is made anew from that file. A folder may come from
somebody else, so names of runs follow from the numbers of trials, values must lie in the space that was asked for, and
nothing is followed through a link.

The data set is opened without the files of its test split, so that no mistake further up can read them. Trials are
compared by ``train.early_stopping.metric`` at the checkpoint that a run would test; while they train, at their n-th
evaluation, and where batches differ in size ``eval_every`` counts as many samples.
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
import yaml
from optuna.trial import TrialState

from stratarec.cli.tune.space import Dimension, Range, Space, Values
from stratarec.cli.tune.study_record import ADVICE, FILE, STUDY, StudyRecord, TrialRecord, read_study, run_name
from stratarec.config.validate import first_difference
from stratarec.data.dataset.compatibility import check_prepared
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import ConfigError, DatasetError, Interrupted, StorageError, TrainingError
from stratarec.io.atomic import make_directory, remove_leftovers, remove_tree, write_text
from stratarec.io.owned_directory import claim, directory_lock, named_directory
from stratarec.io.sealed import write_sealed
from stratarec.models.metrics import METRICS, goodness
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe, with_values
from stratarec.training.resolve import sized
from stratarec.training.steps.state import Evaluation, best
from stratarec.training.trainer import Trainer

# Trials that are drawn evenly before any is suggested, and that end before any is ended early.
_DRAWN, _BEFORE_PRUNING = 10, 5
_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


@dataclass(frozen=True, kw_only=True)
class Best:
    """What a study found."""

    values: Values
    metric: str
    value: float
    run: Path
    recipe: Path
    """``best.yaml``."""


class Study:
    """Trials of one recipe on one data set; use `tune`."""

    def __init__(self, content: Mapping[str, Any], space: Space, dataset: Dataset, folder: Path) -> None:
        self._content, self._space, self._dataset, self._folder = content, space, dataset, folder
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
        """Hold the study's directory, and take up what is in it.

        Raises
        ------
        StorageError
            When another process tunes there, or it is something else.
        ConfigError
            When it is a study of another recipe, space or data set.
        """
        inner = self._folder / "study"
        make_directory(self._folder)
        if inner.is_symlink():
            raise StorageError(f"{inner} is a link, which may lead anywhere, expected a directory; {ADVICE}")
        claim(inner, STUDY)
        with directory_lock(inner):
            remove_leftovers(inner)
            if (inner / FILE).exists():
                self._take_up(inner)
            else:
                self._write()
            yield

    def _take_up(self, inner: Path) -> None:
        there = read_study(inner)
        found = first_difference(self._about.to_dict(), {**there.to_dict(), "trials": []})
        if found is not None:
            raise ConfigError(
                f"{inner} is a study with {found.field} {str(found.have)[:80]}, which is {str(found.want)[:80]} "
                f"now: {ADVICE}"
            )
        dimensions = self._space.dimensions
        for number, each in enumerate(there.trials):
            if each.params.keys() != dimensions.keys():
                raise ConfigError(f"{inner / FILE}: trial {number} has values of other fields than --space; {ADVICE}")
            for field, value in each.params.items():
                if not dimensions[field].holds(value):
                    said = f"{field} {str(value)[:80]}"
                    raise ConfigError(f"{inner / FILE}: trial {number} has {said}, which is not in --space; {ADVICE}")
        self._trials = list(there.trials)
        self._keep_best()

    def _write(self) -> None:
        """Write down every trial; the last thing that is done for one that begins or has ended."""
        record = self._about.model_copy(update={"trials": tuple(self._trials)})
        write_sealed(self._folder / "study" / FILE, record.to_dict())

    def ended(self) -> list[TrialRecord]:
        """Trials that came to an end, those that failed too."""
        return [each for each in self._trials if each.state != "running"]

    def report(self, name: str) -> None:
        """Write the page of the trials that have ended."""
        # The drawing library is loaded for a page alone.
        from stratarec.reporting.study_page import write_study

        trials = [{**vars(each), "run": run_name(number)} for number, each in enumerate(self.ended())]
        if trials:
            write_study(self._folder / "report.html", name, self._metric, self._space.text, trials)

    def run_one(self) -> str:
        """One more trial, or the one that was stopped; returns what it gave, in words."""
        asked = self._ask()
        number = len(self._trials) - 1
        trial, told = self._trial(number), list[float]()

        def watch(step: int, value: float) -> None:
            told.append(value)
            asked.report(value, step)
            if asked.should_prune():
                raise Pruned

        value: float | None = None
        state, reason = "complete", ""
        try:
            value = trial.train(self._dataset, watch)
            said = f"{METRICS[self._metric].label} {value:.5f}"
        except Pruned:
            state, said = "pruned", "ended early"
        # What is wrong with a disk or the data is no fault of the values: that ends the study for now.
        except (ConfigError, TrainingError, MemoryError) as error:
            state, reason = "failed", str(error)
            said = f"failed: {reason}"
        ended = {"state": state, "evaluations": tuple(told), "value": value, "reason": reason}
        self._trials[number] = self._trials[number].model_copy(update=ended)
        self._write()
        self._keep_best()
        values = ", ".join(f"{field} {_said(one)}" for field, one in trial.values.items())
        return f"trial {number}: {values}: {said}"

    def _ask(self) -> optuna.Trial:
        """A new trial of the values that Optuna suggests after those that have ended, or one that goes on."""
        ended = self.ended()
        # A seed for each trial: one for all would suggest the same again after every start.
        seed = int(np.random.SeedSequence([self._seed, len(ended)]).generate_state(1)[0])
        study = optuna.create_study(
            direction="maximize" if METRICS[self._metric].better == "higher" else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=_DRAWN),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=_BEFORE_PRUNING),
        )
        distributions = {field: _distribution(each) for field, each in self._space.dimensions.items()}
        for each in ended:
            study.add_trial(
                optuna.trial.create_trial(
                    state=_STATES[each.state],
                    value=each.value,
                    params=dict(each.params),
                    distributions=distributions,
                    intermediate_values=dict(enumerate(each.evaluations, 1)),
                )
            )
        going_on = len(ended) < len(self._trials)
        if going_on or not ended:
            study.enqueue_trial(dict(self._trials[-1].params) if going_on else self._space.own(self._content))
        asked = study.ask(distributions)
        run = self._run(len(ended))
        if run.is_symlink() or (run.exists() and not going_on):
            raise StorageError(f"{run} is there already, and is no trial of this study; move it away, or {ADVICE}")
        if not going_on:
            self._trials.append(TrialRecord(params=asked.params))
            self._write()
        return asked

    def _run(self, number: int) -> Path:
        return self._folder / run_name(number)

    def _trial(self, number: int) -> Trial:
        values = self._space.values(self._trials[number].params)
        return Trial(content=self._content, values=values, run=self._run(number))

    def _keep_best(self) -> None:
        """Only the best trial keeps its checkpoints; write down its recipe."""
        found = self.best()
        for number, each in enumerate(self._trials):
            if each.state != "running" and (found is None or self._run(number) != found.run):
                self._trial(number).remove_checkpoints()
        if found is not None:
            overrides = Trial(content=self._content, values=found.values, run=found.run).overrides
            head = f"# `stratarec tune`: validation {METRICS[self._metric].label} {found.value:.5f}, {found.run.name}\n"
            write_text(found.recipe, head + yaml.safe_dump(with_values(self._content, overrides), sort_keys=False))

    def best(self) -> Best | None:
        """The best trial that was trained to its end; of equal ones the first."""
        whole = [(each.value, -number) for number, each in enumerate(self._trials) if each.value is not None]
        if not whole:
            return None
        value, place = max(whole, key=lambda each: (goodness(self._metric, each[0]), each[1]))
        trial, recipe = self._trial(-place), self._folder / "best.yaml"
        return Best(values=trial.values, metric=self._metric, value=value, run=trial.run, recipe=recipe)


def tune(
    content: Mapping[str, Any], space: Space, folder: Path, trials: int, progress: Progress, origin: str
) -> Best:  # fmt: skip
    """Trials of a recipe until there are `trials` in all, those of earlier calls counted; the best one.

    The test split is never read.

    Parameters
    ----------
    content : mapping
        Of the recipe, which was read from `origin`.
    folder : Path
        Of the study; another call of the same recipe, space and data goes on there.

    Raises
    ------
    ConfigError
        When the data have no validation split that tells better from worse.
    TrainingError
        When no trial was trained to its end.
    Interrupted
        When the user stops it; the same call goes on.
    """
    recipe = Recipe.from_dict(dict(content), origin)
    dataset = Dataset.open(recipe.data.path, verify="used", untouched=("test",))
    check_prepared(recipe.data, dataset)
    _check_validation(dataset)
    content, said = sized(content, dataset)
    if said:
        progress.say(said)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = Study(content, space, dataset, named_directory(folder))
    with study.opened():
        progress.start("tune", trials, "trials", min(len(study.ended()), trials))
        try:
            while len(study.ended()) < trials:
                said = study.run_one()
                progress.say(said)
                progress.advance(1)
        except Interrupted as error:
            raise Interrupted(
                f"stopped; finished trials are in {folder}; run the same command again to resume", error.signal
            ) from error
        finally:
            progress.finish()
            study.report(recipe.name)
        found = study.best()
        if found is None:
            reasons = [each.reason for each in study.ended() if each.reason]
            why = f"; the last: {reasons[-1]}" if reasons else ""
            raise TrainingError(f"none of {trials} trials was trained to its end{why}: change --space, or the recipe")
        return found


def _check_validation(dataset: Dataset) -> None:
    first = dataset.label_counts("valid")[dataset.schema.label_column]
    if not 0 < first.positives < first.known:
        raise DatasetError(
            f"{dataset.path} has {'samples of one class alone in its' if first.known else 'no'} validation split, by "
            "which trials are compared: set data.split.valid and prepare again"
        )


def _distribution(dimension: Dimension) -> optuna.distributions.BaseDistribution:
    if not isinstance(dimension, Range):
        return optuna.distributions.CategoricalDistribution(dimension.values)
    if dimension.whole:
        return optuna.distributions.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return optuna.distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


class Pruned(Exception):
    """A trial that its watcher ended because others were better by then."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is trained."""

    content: Mapping[str, Any]
    """The recipe that is tuned."""
    values: Values
    """Its fields that are others here."""
    run: Path
    """Directory of the trial's run."""

    @property
    def overrides(self) -> dict[str, Any]:
        """All fields in which it differs from the recipe: with batches of another size, evaluations that count steps
        come after as many samples as before, so that trials can be compared while they train."""
        found = dict(self.values)
        own = Recipe.from_dict(dict(self.content)).train
        if own.eval_every and "train.batch_size" in found and "train.eval_every" not in found:
            found["train.eval_every"] = max(round(own.eval_every * own.batch_size / found["train.batch_size"]), 1)
        return found

    def train(self, dataset: Dataset, watch: Callable[[int, float], None]) -> float:
        """Train, and give what validation says of the checkpoint that a run would test.

        Parameters
        ----------
        watch : callable
            Told of each evaluation by its number and its metric; may raise `Pruned`.

        Raises
        ------
        Exception
            What `Trainer.fit` raises; `TrainingError` where validation gives no number.
        """
        recipe = Recipe.from_dict(with_values(self.content, {**self.overrides, "train.run": str(self.run)}))
        stopping, seen = recipe.train.early_stopping, 0

        def watched(evaluations: Sequence[Evaluation]) -> None:
            nonlocal seen
            for entry in evaluations[seen:]:
                seen += 1
                watch(seen, _metric(entry, stopping.metric))

        position = Trainer(recipe, dataset, SilentProgress()).fit(watched, resume=True)
        found = best(position.evaluations, stopping) or position.evaluations[-1]
        return _metric(found, stopping.metric)

    def remove_checkpoints(self) -> None:
        """Leave what the run says of itself, and none of its weights."""
        if not self.run.is_symlink():
            remove_tree(self.run / "checkpoints")


def _metric(entry: Evaluation, name: str) -> float:
    value = entry[name]
    if value is None or not math.isfinite(value):
        raise TrainingError(f"validation at step {entry['step']} gives no {name}")
    return float(value)
