"""A study: trials one after another, each suggested by those before, until there are enough of them.

OUT/
    study/          study.json says what is tuned, study.db (SQLite, by Optuna) what was tried
    trial-0000/     a run each, without a test; checkpoints of the best one alone
    best.yaml       the recipe with the best values so far

Values are suggested by tree-structured Parzen estimators (Bergstra et al. 2011), trials are ended early by the median
rule (Golovin et al. 2017), both Optuna's. The first trial has the recipe's own values. What a trial is depends on the
seed and on what was tried before it, so a study that was stopped goes on as if it had not been.

The data set is opened without the files of its test split, so that no mistake further up can read them. Trials are
compared by ``train.early_stopping.metric`` at the checkpoint that a run would test; while they train, at their n-th
evaluation, and where batches differ in size ``eval_every`` counts as many samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from stratarec.cli.tune.space import Dimension, Range, Space, Values
from stratarec.cli.tune.trial import Pruned, Trial
from stratarec.config.difference import first_difference
from stratarec.data.dataset.compatibility import check_prepared
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import ConfigError, DatasetError, Interrupted, StrataError, TrainingError
from stratarec.io.atomic import make_directory, write_text
from stratarec.io.lock import held
from stratarec.io.owned_directory import Kind, claim, named_directory
from stratarec.io.sealed import Model, read_sealed, write_sealed
from stratarec.models.metrics import METRICS, goodness
from stratarec.progress import Progress
from stratarec.recipe import Recipe, with_values
from stratarec.training.auto_config import sized

FORMAT: Literal[1] = 1
STUDY = Kind(name="study", field="--output", content=("study.json", "study.db", "study.db-journal"))
_RUN, _INTERRUPTED, _REASON = "run", "interrupted", "reason"
# Trials that are drawn evenly before any is suggested, and that end before any is ended early.
_DRAWN, _BEFORE_PRUNING = 10, 5
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class StudyRecord(Model):
    """``study.json``."""

    format: Literal[1] = FORMAT
    space: dict[str, str]
    recipe: dict[str, Any]
    dataset: str


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
        self._recipe = recipe.to_dict()
        self._study: optuna.Study

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
        claim(inner, STUDY)
        with held(inner):
            self._check_about(inner / "study.json")
            storage = optuna.storages.RDBStorage(f"sqlite:///{(inner / 'study.db').resolve()}")
            try:
                self._study = optuna.create_study(
                    storage=storage,
                    study_name="study",
                    direction="maximize" if METRICS[self._metric].better == "higher" else "minimize",
                    pruner=optuna.pruners.MedianPruner(n_startup_trials=_BEFORE_PRUNING),
                    load_if_exists=True,
                )
                self._take_up()
                yield
            finally:
                storage.remove_session()
                storage.engine.dispose()

    def _check_about(self, path: Path) -> None:
        """Write down what is tuned, or refuse another study's directory."""
        recipe = json.loads(json.dumps(self._recipe))
        for name in ("run", "threads"):
            recipe["train"].pop(name)
        mine = StudyRecord(space=dict(self._space.text), recipe=recipe, dataset=self._dataset.fingerprint)
        if not path.exists():
            write_sealed(path, mine.to_dict())
            return
        there = read_sealed(path, StudyRecord, "name another --output", ConfigError)
        found = first_difference(mine.to_dict(), there.to_dict())
        if found is not None:
            raise ConfigError(
                f"{path.parent} is a study with {found.field} {str(found.have)[:80]}, which is {str(found.want)[:80]} "
                "now: name another --output"
            )

    def _take_up(self) -> None:
        """Begin with the recipe's own values; a trial that was interrupted is put up again, to go on in its run."""
        if not self._study.get_trials(deepcopy=False):
            self._study.enqueue_trial(self._encoded(self._space.own(self._content)))
        for frozen in self._study.get_trials(states=(TrialState.RUNNING,)):
            self._study.enqueue_trial(frozen.params, user_attrs={_RUN: _name(frozen)})
            # No one else has the study: whoever ran it has ended.
            optuna.Trial(self._study, frozen._trial_id).set_user_attr(_INTERRUPTED, True)
            self._study.tell(frozen.number, state=TrialState.FAIL)

    def _encoded(self, values: Values) -> dict[str, Any]:
        return {
            field: value if isinstance(self._space.dimensions[field], Range) else json.dumps(value)
            for field, value in values.items()
        }

    def ended(self) -> list[FrozenTrial]:
        """Trials that came to an end, those that failed too; ones that were interrupted do not count."""
        return [each for each in self._study.get_trials(states=_ENDED) if _INTERRUPTED not in each.user_attrs]

    def run_one(self) -> str:
        """One more trial; returns what it gave, in words."""
        # A seed for each trial: one for all would suggest the same again after every start.
        seed = int(np.random.SeedSequence([self._seed, len(self.ended())]).generate_state(1)[0])
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_DRAWN)
        asked = self._study.ask({field: _distribution(each) for field, each in self._space.dimensions.items()})
        frozen = self._study.get_trials()[asked.number]
        asked.set_user_attr(_RUN, _name(frozen))
        trial = self._trial(frozen)

        def watch(step: int, value: float) -> None:
            asked.report(value, step)
            if asked.should_prune():
                raise Pruned

        earlier = self.best()
        try:
            value = trial.train(self._dataset, watch)
        except Pruned:
            said = "ended early"
            self._study.tell(asked, state=TrialState.PRUNED)
        except (StrataError, MemoryError) as error:
            said = f"failed: {error}"
            asked.set_user_attr(_REASON, str(error))
            self._study.tell(asked, state=TrialState.FAIL)
        else:
            said = f"{METRICS[self._metric].label} {value:.5f}"
            self._study.tell(asked, value)
        self._keep_best(trial, earlier)
        told = ", ".join(f"{field} {_said(value)}" for field, value in trial.values.items())
        return f"trial {frozen.number}: {told}: {said}"

    def _keep_best(self, trial: Trial, earlier: Best | None) -> None:
        """Only the best trial keeps its checkpoints; write down its recipe."""
        found = self.best()
        if found is None or found.run != trial.run:
            trial.remove_checkpoints()
            return
        if earlier is not None and earlier.run != trial.run:
            Trial(content=self._content, values={}, run=earlier.run).remove_checkpoints()
        head = f"# `stratarec tune`: validation {METRICS[self._metric].label} {found.value:.5f}, {trial.run.name}\n"
        write_text(found.recipe, head + yaml.safe_dump(with_values(self._content, trial.overrides), sort_keys=False))

    def _trial(self, frozen: FrozenTrial) -> Trial:
        values = {field: self._decoded(field, value) for field, value in frozen.params.items()}
        return Trial(content=self._content, values=values, run=self._folder / _name(frozen))

    def _decoded(self, field: str, value: Any) -> Any:
        return value if isinstance(self._space.dimensions[field], Range) else json.loads(value)

    def best(self) -> Best | None:
        """The best trial that was trained to its end; of equal ones the first."""
        whole = [(each.values[0], each) for each in self._study.get_trials(states=(TrialState.COMPLETE,))]
        if not whole:
            return None
        value, found = max(whole, key=lambda each: (goodness(self._metric, each[0]), -each[1].number))
        trial, recipe = self._trial(found), self._folder / "best.yaml"
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
            raise Interrupted(f"stopped; the same command goes on with what {folder} holds") from error
        finally:
            progress.finish()
        found = study.best()
        if found is None:
            reasons = [str(each.user_attrs[_REASON]) for each in study.ended() if _REASON in each.user_attrs]
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


def _name(trial: FrozenTrial) -> str:
    """Of its run."""
    return str(trial.user_attrs.get(_RUN, f"trial-{trial.number:04d}"))


def _said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
