"""Train a run from its current state to its end: steps, and between steps evaluations, checkpoints and stops.

`Cadence` decides what happens after a step. Evaluations, checkpoints every N steps and the end of the run must see the
same state for every lookahead. Their steps are known in advance, so each is a *barrier*: no batch beyond it is prepared
before it is reached. Checkpoints every N minutes and stops by the user are not known in advance. They are delayed until
all batches that may already have been prepared are trained: `ahead` steps after the request, or earlier at a barrier or
the end of an epoch. The delay depends only on the step of the request, so all processes of a run act after the same
step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Any, NoReturn

import torch

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.embedding import Handle, Prefetcher
from stratarec.errors import Interrupted
from stratarec.models import CTRModel
from stratarec.models.metrics import METRICS, figures, headlines
from stratarec.models.request import Request
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe.train_section import TrainConfig
from stratarec.reporting.curve_writers import CurveWriters
from stratarec.reporting.metric_texts import by_label, show_with_interval
from stratarec.training.checkpoint import CheckpointManager
from stratarec.training.evaluate import ScoredSamples, corrected_by, fit, measured, score_split
from stratarec.training.steps.members import BestMembers
from stratarec.training.steps.state import (
    Evaluation,
    TrainingState,
    best,
    networks_are_unused,
    patience_exhausted,
    rate_factor,
)
from stratarec.training.steps.step import Item, Losses, Pipeline, WeightAverage
from stratarec.training.steps.thread_tuner import ThreadTuner

Hook = Callable[[int], AbstractContextManager[object]]
"""Function that is called with the number of each step. It returns a context in which the step runs."""
EvaluationCallback = Callable[[Sequence[Evaluation]], None]

# If the first step takes longer than this, kernels are being compiled.
_LONG_SECONDS = 5.0


class Loop:
    """Trains one run from its current state to its end.

    Parameters
    ----------
    pipeline : Pipeline
    cadence : Cadence
    checkpoints : CheckpointManager
    validation : Validation
    state : TrainingState
        State that every step and evaluation updates.
    threads : ThreadTuner
        Tuner that receives the number of each step.
    progress : Progress
    """

    def __init__(
        self,
        pipeline: Pipeline,
        cadence: Cadence,
        checkpoints: CheckpointManager,
        validation: Validation,
        state: TrainingState,
        threads: ThreadTuner,
        progress: Progress,
    ) -> None:
        self._pipeline, self._cadence, self._checkpoints = pipeline, cadence, checkpoints
        self._validation, self.state, self._threads, self._progress = validation, state, threads, progress
        self._stages = pipeline.stages
        self._seconds, self._is_warm = self._stages.seconds, False
        self._losses: Losses | None = None
        self.hooks: list[Hook] = []
        """Functions whose contexts surround every step, for example to trace it."""
        self.wait_for_kernels: Callable[[], None] = lambda: None
        """Function that returns when the kernels which another process compiles are ready."""
        self.finish_trees: Callable[[], None] | None = None
        """Function that waits for the trees of an ensemble, which another process fits; None if there is no wait."""
        self.rate_factor = 1.0
        """Factor on all learning rates, in addition to that of `train.plateau`."""

    def step(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> None:
        """Train one batch and count it. If `request` and `prepared` are None, they are computed in this step."""
        state = self.state
        if not self._is_warm:
            self.wait_for_kernels()
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook(state.step))
            result = self._stages.train(state.step, batch, request, prepared)
            if self._losses is None or self._losses.state is not state:
                self._losses = Losses(state)
            self._losses.count(result)

    def run(self, curves: Curves, callback: EvaluationCallback | None = None) -> None:
        """Train to the end of the run, and write a checkpoint there.

        Parameters
        ----------
        callback : callable
            Called after each evaluation with all evaluations of the run. If it raises an exception, the run ends.

        Raises
        ------
        Interrupted
            If the user stops the run. A checkpoint is written before.
        """
        state, total_steps = self.state, self._cadence.total_steps
        self._curves, self._callback, self._earlier_seconds = curves, callback, state.stage_seconds
        self._cadence.saved()
        if self._decide().evaluate:  # an earlier session was stopped during this evaluation
            self._evaluate()
            if self._decide().stop:
                self._stop()
        at_most = bool(self._validation.config.early_stopping.patience)
        self._progress.start(state.phase, total_steps, "steps", state.step, at_most=at_most)
        message = "the first step takes long: kernels are compiled for this machine, once"
        self._compiling = Timer(_LONG_SECONDS, self._progress.say, (message,))
        self._compiling.start()
        try:
            while state.step < total_steps and not state.finished:
                self._train_epoch()
        finally:
            self._compiling.cancel()
        self._progress.finish()
        if not state.evaluated:
            self._evaluate(closing=True)
        if self._decide().stop:
            self._stop()
        state.finished = True
        self._save()

    def _train_epoch(self) -> None:
        """Train the rest of an epoch. If tables have tiers, batches are prepared ahead, but never beyond a barrier."""
        state, cadence = self.state, self._cadence
        first, samples, began = state.step, state.trained_samples, time.perf_counter()

        def is_barrier(place: int) -> bool:
            return cadence.is_barrier(first + place + 1)

        with self._pipeline.prepared(state.epoch, state.batch, is_barrier) as batches:
            for item, prepared in batches:
                waited = time.perf_counter() - began
                self.step(*item, prepared)
                state.batch += 1
                self._count_seconds(time.perf_counter() - began, waited, state.trained_samples - samples)
                epoch_ended = state.batch == self._pipeline.epoch_steps
                if epoch_ended:
                    state.epoch, state.batch = state.epoch + 1, 0
                if self._curves.is_due(state):
                    self._read_losses()
                self._curves.add_step(state)
                self._between_steps(batches)
                if state.finished or epoch_ended or state.step >= cadence.total_steps:
                    break
                began = time.perf_counter()

    def _read_losses(self) -> None:
        """Wait for the losses of all steps, so that the state is complete."""
        if self._losses is not None:
            self._losses.read()

    def _count_seconds(self, seconds: float, waited: float, samples: int) -> None:
        """Add the time of a step. The first step of a session is not timed, because it may compile kernels."""
        state = self.state
        if self._is_warm:
            state.train_seconds += seconds
            self._seconds["wait"] = self._seconds.get("wait", 0.0) + waited
            self._threads.after_step(state.step)
        else:
            self._compiling.cancel()
            self._is_warm = True
            self._seconds.clear()
            state.untimed_samples += samples
        # The items are copied first, because other threads add stages.
        stages = [*self._seconds.items()]
        state.stage_seconds = {name: value + self._earlier_seconds.get(name, 0.0) for name, value in stages}

    def _decide(self) -> Decision:
        state = self.state
        return self._cadence.decide(state.step, epoch_ended=state.batch == 0, evaluated=state.evaluated)

    def _between_steps(self, batches: Prefetcher[Item]) -> None:
        decision = self._decide()
        if decision.evaluate:
            self._evaluate()
            decision = self._decide()
        if decision.drain:
            batches.drain()
        if decision.stop:
            self._stop()
        if decision.save:
            self._save()

    def with_trees(self) -> None:
        """Wait for trees that are being fitted, so that evaluations and checkpoints have them."""
        if self.finish_trees is not None:
            self.finish_trees()
            self.finish_trees = None

    def _evaluate(self, *, closing: bool = False) -> None:
        self._read_losses()
        self.with_trees()
        state = self.state
        is_best = self._validation.run(state, self._curves, closing=closing)
        self.set_rates()
        if self._callback is not None and state.evaluated:
            self._callback(state.evaluations)
        # The end of the run writes its own checkpoint.
        if is_best and not state.finished and state.step < self._cadence.total_steps:
            self._save()

    def set_rates(self) -> None:
        """Set the learning rates to `rate_factor` times the factor of `train.plateau` after the evaluations so far."""
        factor = self.rate_factor * rate_factor(self.state.regular, self._validation.config.plateau)
        if factor != self._stages.rate_factor:
            self._progress.say(f"train.plateau multiplies all learning rates by {factor:g} from now on")
        self._stages.rate_factor = factor

    def _stop(self) -> NoReturn:
        path = self._save()
        self._progress.finish()
        raise Interrupted(f"stopped; the checkpoint is {path}; resume with the same command and --resume")

    def _save(self) -> Path:
        self._read_losses()
        self.with_trees()
        path = self._checkpoints.save(self.state)
        self._cadence.saved()
        return path


class Stopped(Exception):
    """Raised to abort work that has no partial results, such as an evaluation, because the user asked to stop."""


class StopSignal:
    """Remembers whether a signal (SIGINT, SIGTERM or SIGHUP) asked the run to stop.

    Parameters
    ----------
    at_once : str
        Error message of a second signal, which raises `Interrupted` immediately.
    """

    def __init__(self, at_once: str) -> None:
        self.received = False
        self._at_once, self._signal = at_once, int(signal.SIGINT)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside the context."""
        # Only the main thread may set handlers. In another thread, the caller must handle signals.
        main = threading.current_thread() is threading.main_thread()
        handlers = {
            name: signal.signal(name, self._receive)
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if main and (name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN)  # as `nohup` sets it
        }
        try:
            yield
        except Interrupted as error:
            error.signal = self._signal
            raise
        finally:
            for name, handler in handlers.items():
                signal.signal(name, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self.received:
            raise Interrupted(self._at_once)
        self.received = True


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Clock and stop signal as one process sees them. The processes of a run may have different observations."""

    checkpoint_age_seconds: float
    """Seconds since the last checkpoint, or since the start if there is none."""
    stop: bool
    """Whether the process was asked to stop."""


Agree = Callable[[Observation], Observation]
"""Combines the observations of all processes into one. Every process calls it after the same steps."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Actions between two steps. While batches are in flight, only `drain` is possible."""

    evaluate: bool = False
    """Evaluate before all other actions, and then decide again, because an evaluation takes time."""
    save: bool = False
    stop: bool = False
    """Write a checkpoint and stop."""
    drain: bool = False
    """Prepare no further batches, because an action must wait until the prepared batches are trained."""


class Cadence:
    """Decides what happens after a step.

    Parameters
    ----------
    config : TrainConfig
    total_steps : int
        Number of steps of the whole run.
    ahead : int
        Maximum number of batches that are prepared but not trained yet.
    stop : callable
        Returns whether the user asked to stop.
    agree : Agree
        Combines the observations of several processes. By default there is one process.
    """

    def __init__(
        self,
        config: TrainConfig,
        total_steps: int,
        *,
        ahead: int = 0,
        stop: Callable[[], bool] = lambda: False,
        agree: Agree = lambda observation: observation,
    ) -> None:
        self.total_steps = total_steps
        self._evaluate_every, self._checkpoint = config.eval_every, config.checkpoint
        self._ahead, self._stop, self._agree = ahead, stop, agree
        self._saved_at = time.monotonic()
        self._due: int | None = None

    def is_barrier(self, step: int) -> bool:
        """Return whether an evaluation, a checkpoint or the end of the run follows `step`, as is known in advance."""
        every = (self._evaluate_every, self._checkpoint.every_steps)
        return step >= self.total_steps or any(_is_multiple(step, steps) for steps in every)

    def decide(self, step: int, *, epoch_ended: bool, evaluated: bool) -> Decision:
        """Return the actions after `step`.

        Parameters
        ----------
        epoch_ended : bool
            Whether `step` was the last step of its epoch.
        evaluated : bool
            Whether the evaluation after `step` is already done.
        """
        observation = self._observe()
        evaluates = _is_multiple(step, self._evaluate_every) if self._evaluate_every else epoch_ended
        overdue = bool(self._checkpoint.every_minutes) and (
            observation.checkpoint_age_seconds >= 60 * self._checkpoint.every_minutes
        )
        requested = observation.stop or overdue
        if requested and self._due is None:
            self._due = step + self._ahead
        now = requested and (epoch_ended or self.is_barrier(step) or (self._due is not None and step >= self._due))
        return Decision(
            evaluate=step > 0 and evaluates and not evaluated,
            save=_is_multiple(step, self._checkpoint.every_steps) or now,
            stop=observation.stop and now,
            drain=requested and not now,
        )

    def check(self) -> None:
        """Raise `Stopped` if the user asked to stop."""
        if self._observe().stop:
            raise Stopped

    def saved(self) -> None:
        """Measure the time until the next checkpoint from now on, because one was just written."""
        self._saved_at, self._due = time.monotonic(), None

    def _observe(self) -> Observation:
        age = time.monotonic() - self._saved_at
        return self._agree(Observation(checkpoint_age_seconds=age, stop=self._stop()))


def _is_multiple(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Records the curves of training and validation."""

    writers: CurveWriters | None
    """Writers of the curves; None on ranks that do not write."""
    model: CTRModel
    """Model from which the learning rate of the rows is read."""
    optimizer: torch.optim.Optimizer
    """Optimizer from which the learning rate of the network is read."""
    every: int
    """Number of steps between two points of a training curve."""
    progress: Progress

    def is_due(self, state: TrainingState) -> bool:
        """Whether `add_step` adds a point to the curves."""
        return state.step % self.every == 0

    def add_step(self, state: TrainingState) -> None:
        """Show the progress of a trained step, and add a point to the curves at every multiple of `every` steps."""
        speed = f"  {state.speed:,.0f} samples/s" if state.speed else ""  # the first steps are not timed
        self.progress.advance(1, f"loss {state.smoothed_loss:.4f}{speed}")
        if not self.is_due(state):
            return
        state.losses.append((state.step, state.smoothed_loss))
        timed_samples = state.trained_samples - state.untimed_samples
        state.paces.append((state.step, state.train_seconds, timed_samples))
        values = {
            "loss": state.smoothed_loss,
            "samples_per_second": state.speed,
            "dense_learning_rate": self.optimizer.param_groups[0]["lr"],
            "row_learning_rate": self.model.embeddings.learning_rate,
        }
        self._add(state.step, {f"train/{name}": value for name, value in values.items()})

    def add_evaluation(self, entry: Mapping[str, Any]) -> None:
        """Add the metrics of an evaluation, an entry of `TrainingState.evaluations`, to the curves."""
        values = {
            f"valid/{label}/{name}" if label else f"valid/{name}": metrics[name]
            for label, metrics in entry.get("labels", {"": entry}).items()
            for name, metric in METRICS.items()
            if metric.label and metrics[name] is not None
        }
        self._add(entry["step"], values)

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        self.progress.figures(step, values)
        if self.writers is not None:
            self.writers.add(step, values)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Evaluates the model of a run on the validation split."""

    model: CTRModel
    dataset: Dataset
    config: TrainConfig
    progress: Progress
    check: Callable[[], None]
    """Function that is called before each batch. It raises `Stopped` if the user asked to stop."""
    mesh: Mesh
    average: WeightAverage
    members: BestMembers | None

    def run(self, state: TrainingState, curves: Curves, *, closing: bool = False) -> bool:
        """Evaluate the model, record the metrics in `state`, and return whether they are the best so far.

        Also marks `state` as finished if early stopping ends the run. Nothing is recorded without a validation split,
        or if the user stops the evaluation.

        Parameters
        ----------
        closing : bool
            Whether this evaluation takes place only because the run ends.
        """
        stopping = self.config.early_stopping
        if not self.dataset.samples("valid"):
            return False
        try:
            samples, members = self._scored(state.step, closing)
        except Stopped:
            return False
        if not self.config.has_log_odds:
            samples = corrected_by(fit(("platt",), samples), samples)
        values = figures(measured(self.dataset.schema.label_columns, samples))
        entry = {"step": state.step, **values, **members, **({"closing": True} if closing else {})}
        state.record(entry, stopping)
        names = dict.fromkeys((*headlines(), *((stopping.metric,) if stopping.patience else ())))
        for label, of_label in by_label("validation", values):
            shown = (f"{METRICS[name].label} {show_with_interval(of_label, name, 5)}" for name in names)
            self.progress.say(f"step {state.step}: {label} {', '.join(shown)}")
        curves.add_evaluation(entry)
        state.finished = patience_exhausted(state.evaluations, stopping)
        if state.finished and networks_are_unused(state.evaluations, stopping):
            self.progress.say(
                f"step {state.step}: the trees have had all of the weight in {stopping.patience} evaluations, so "
                "training of the networks ends"
            )
        return best(state.evaluations, stopping) is state.evaluations[-1]

    def _scored(self, step: int, closing: bool) -> tuple[ScoredSamples, dict[str, Any]]:
        """Return the scored validation split, and for an ensemble the figures of its members, under ``members``."""
        score = partial(
            score_split, self.model, self.dataset, "valid", precision=self.config.precision, progress=SilentProgress(),
            check=self.check, mesh=self.mesh,
        )  # fmt: skip
        with self.average.shown():
            if self.members is None:
                return score(), {}
            with self.members.separate():
                if self.members.is_unscored:
                    with self.members.shown():
                        self.members.rescore(score())
                samples, table = self.members.combine(score(), step, closing=closing)
                steps = sorted(int(member["step"]) for member in table if member["step"])
                # The last step at which half of the networks were better than before; trees have step 0.
                return samples, {
                    "members": table,
                    "networks_improved": steps[len(steps) // 2] if steps else 0,
                    "networks_weight": sum(member["weight"] for member in table if member["step"]),
                }
