"""Train a run from its current state to its end: steps, and between steps evaluations, checkpoints and stops.

`Cadence` decides what happens after a step. An evaluation, a checkpoint by steps and the end must find the same state
whatever the lookahead is. They depend on the step alone, so each is known in advance and is a *barrier*: no batch
beyond it is prepared before it. A checkpoint by time and a stop by the user are not known in advance. They wait until
every batch that may have been prepared when they were requested is trained, `ahead` steps later. That, too, follows
from the step of the request, so all processes of a run act after the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Any, NoReturn

import torch

from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.embedding import Prefetcher
from stratarec.errors import Interrupted
from stratarec.models import CTRModel
from stratarec.models.metrics import HEADLINES, METRICS, figures
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe.train_section import TrainConfig
from stratarec.reporting.curve_writers import CurveWriters
from stratarec.reporting.metric_texts import by_label, show
from stratarec.training.checkpoint import CheckpointManager
from stratarec.training.evaluate import evaluate_split
from stratarec.training.steps.state import Evaluation, TrainingState, best, patience_exhausted
from stratarec.training.steps.step import Item, Pipeline, WeightAverage
from stratarec.training.steps.thread_tuner import ThreadTuner

_LONG_SECONDS = 5.0
"""What a first step takes where no kernel is compiled for it, and more."""


class Loop:
    """Trains one run.

    Parameters
    ----------
    step : callable
        Trains on an item and its prepared batch, and counts it.
    pipeline : Pipeline
    cadence : Cadence
    keeper : CheckpointManager
    validation : Validation
    curves : Curves
    progress : Progress
    position : TrainingState
        Where the run is; moved on.
    threads : ThreadTuner
        Receives the seconds of each step.
    """

    def __init__(
        self,
        step: Callable[..., None],
        pipeline: Pipeline,
        cadence: Cadence,
        keeper: CheckpointManager,
        validation: Validation,
        curves: Curves,
        progress: Progress,
        position: TrainingState,
        threads: ThreadTuner,
    ) -> None:
        self._step, self._pipeline, self._cadence, self._keeper = step, pipeline, cadence, keeper
        self._validation, self._curves, self._progress, self._position = validation, curves, progress, position
        self._threads = threads
        long = "the first step takes long: kernels are compiled for this machine, once"
        self._seconds, self._earlier = pipeline.seconds, position.stage_seconds
        self._slow, self._warm = Timer(_LONG_SECONDS, progress.say, (long,)), False

    def run(self) -> None:
        """Train to the end, with a checkpoint of it.

        Raises
        ------
        Interrupted
            Where the user stops it, once a checkpoint is written.
        """
        position = self._position
        self._cadence.saved()
        if self._decide().evaluate:  # an earlier session was stopped while it evaluated
            self._evaluate()
            if self._decide().stop:
                self._leave()
        self._progress.start("train", self._cadence.total_steps, "steps", position.step)
        self._slow.start()
        try:
            while position.step < self._cadence.total_steps and not position.finished:
                self._train_epoch()
        finally:
            self._slow.cancel()
        self._progress.finish()
        if not position.evaluated:
            self._evaluate(closing=True)
        if self._decide().stop:
            self._leave()
        position.finished = True
        self._save()

    def _train_epoch(self) -> None:
        """The rest of an epoch, prepared ahead where tables have tiers, but not across a barrier."""
        position, cadence = self._position, self._cadence
        first, samples, began = position.step, position.trained_samples, time.perf_counter()

        def barrier(place: int) -> bool:
            return cadence.is_barrier(first + place + 1)

        with self._pipeline.prepared(position.epoch, position.batch, barrier) as batches:
            for item, prepared in batches:
                waited = time.perf_counter() - began
                self._step(*item, prepared)
                position.batch += 1
                if self._warm:
                    taken = time.perf_counter() - began
                    position.train_seconds += taken
                    self._seconds["wait"] = self._seconds.get("wait", 0.0) + waited
                    self._threads.stepped(taken, position.step)
                else:
                    self._slow.cancel()
                    self._warm = True
                    self._seconds.clear()
                    position.untimed_samples += position.trained_samples - samples
                last = position.batch == self._pipeline.epoch_steps
                if last:
                    position.epoch, position.batch = position.epoch + 1, 0
                position.stage_seconds = {
                    name: seconds + self._earlier.get(name, 0.0) for name, seconds in [*self._seconds.items()]
                }
                self._curves.stepped(position)
                self._between_steps(batches)
                if position.finished or last or position.step >= cadence.total_steps:
                    break
                began = time.perf_counter()

    def _decide(self) -> Decision:
        position = self._position
        return self._cadence.decide(position.step, epoch_ended=position.batch == 0, evaluated=position.evaluated)

    def _between_steps(self, batches: Prefetcher[Item]) -> None:
        decision = self._decide()
        if decision.evaluate:
            self._evaluate()
            decision = self._decide()
        if decision.drain:
            batches.drain()
        if decision.stop:
            self._leave()
        if decision.save:
            self._save()

    def _evaluate(self, *, closing: bool = False) -> None:
        best, position = self._validation.run(self._position, self._curves, closing=closing), self._position
        # A run that ends here is saved by its end.
        if best and not position.finished and position.step < self._cadence.total_steps:
            self._save()

    def _leave(self) -> NoReturn:
        """Stop as the user asked, with a checkpoint of this moment."""
        path = self._save()
        self._progress.finish()
        raise Interrupted(f"stopped; the checkpoint is {path}; go on with the same command and --resume")

    def _save(self) -> Path:
        path = self._keeper.save(self._position)
        self._cadence.saved()
        return path


class Stopped(Exception):
    """Raised where work that keeps nothing, such as an evaluation, is to be left."""


class StopSignal:
    """Whether the user asked to stop.

    Parameters
    ----------
    at_once : str
        The message of the `Interrupted` that a second request raises, wherever the program is.
    """

    def __init__(self, at_once: str) -> None:
        self.made = False
        self._at_once, self._signal = at_once, int(signal.SIGINT)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM as requests."""
        # Only the main thread may set handlers; elsewhere the caller deals with signals.
        main = threading.current_thread() is threading.main_thread()
        kept = {
            name: signal.signal(name, self._ask)
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if main and (name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN)  # as `nohup` sets it
        }
        try:
            yield
        except Interrupted as error:
            error.signal = self._signal
            raise
        finally:
            for name, handler in kept.items():
                signal.signal(name, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self.made:
            raise Interrupted(self._at_once)
        self.made = True


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What each process of a run sees for itself, and may see otherwise than the others."""

    checkpoint_age_seconds: float
    """Since the last checkpoint, or the start."""
    stop: bool
    """Whether it was asked to stop."""


Agree = Callable[[Observation], Observation]
"""Makes one of what several processes see: all call it equally often, after the same steps, and go by what it gives."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to happen between two steps; the model must not be under way for any of the first three."""

    evaluate: bool = False
    """Before anything else; it takes time, so decide again afterwards."""
    save: bool = False
    stop: bool = False
    """With a checkpoint."""
    drain: bool = False
    """Something waits until what is prepared is trained: prepare no more than may be prepared by now."""


class Cadence:
    """Decides what happens after a step.

    Parameters
    ----------
    config : TrainConfig
    total_steps : int
        Steps of the whole run.
    ahead : int
        Batches that may be prepared beyond the one that was trained last.
    stop : callable
        Whether the user asked to stop.
    agree : Agree
        By default of one process, which goes by what it sees itself.
    """

    def __init__(
        self,
        config: TrainConfig,
        total_steps: int,
        *,
        ahead: int = 0,
        stop: Callable[[], bool] = lambda: False,
        agree: Agree = lambda seen: seen,
    ) -> None:
        self.total_steps = total_steps
        self._evaluate_every, self._checkpoint = config.eval_every, config.checkpoint
        self._ahead, self._stop, self._agree = ahead, stop, agree
        self._saved_at = time.monotonic()
        self._due: int | None = None

    def is_barrier(self, step: int) -> bool:
        """Whether an evaluation, a checkpoint or the end is known ahead to follow `step`."""
        every = (self._evaluate_every, self._checkpoint.every_steps)
        return step >= self.total_steps or any(_is_multiple(step, steps) for steps in every)

    def decide(self, step: int, *, epoch_ended: bool, evaluated: bool) -> Decision:
        """What follows `step`.

        Parameters
        ----------
        epoch_ended : bool
            Whether it was the last one of its epoch.
        evaluated : bool
            Whether the evaluation that may follow it was made.
        """
        seen = self._seen()
        evaluates = _is_multiple(step, self._evaluate_every) if self._evaluate_every else epoch_ended
        overdue = bool(self._checkpoint.every_minutes) and (
            seen.checkpoint_age_seconds >= 60 * self._checkpoint.every_minutes
        )
        asked = seen.stop or overdue
        if asked and self._due is None:
            self._due = step + self._ahead
        now = asked and (epoch_ended or self.is_barrier(step) or (self._due is not None and step >= self._due))
        return Decision(
            evaluate=step > 0 and evaluates and not evaluated,
            save=_is_multiple(step, self._checkpoint.every_steps) or now,
            stop=seen.stop and now,
            drain=asked and not now,
        )

    def check(self) -> None:
        """Raise `Stopped` on a request to stop: for work between steps that keeps nothing."""
        if self._seen().stop:
            raise Stopped

    def saved(self) -> None:
        """A checkpoint was written now."""
        self._saved_at, self._due = time.monotonic(), None

    def _seen(self) -> Observation:
        return self._agree(Observation(checkpoint_age_seconds=time.monotonic() - self._saved_at, stop=self._stop()))


def _is_multiple(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


class Curves:
    """Curves of training and validation by step.

    Parameters
    ----------
    writers : CurveWriters or None
        None on ranks that only train.
    model, optimizer
        Whose learning rates are shown: those of the rows, and of the network.
    every : int
        Steps from one point of a training curve to the next.
    progress : Progress
        Receives every step and point.
    """

    def __init__(
        self,
        writers: CurveWriters | None,
        model: CTRModel,
        optimizer: torch.optim.Optimizer,
        every: int,
        progress: Progress,
    ) -> None:
        self._writers, self._model, self._optimizer, self._every = writers, model, optimizer, every
        self._progress = progress

    def stepped(self, position: TrainingState) -> None:
        """A step was trained."""
        self._progress.advance(1, f"loss {position.smoothed_loss:.4f}  {position.speed:,.0f} samples/s")
        if position.step % self._every:
            return
        position.losses.append((position.step, position.smoothed_loss))
        timed_samples = position.trained_samples - position.untimed_samples
        position.paces.append((position.step, position.train_seconds, timed_samples))
        mixed, hot = position.smoothed_by_kind
        if mixed is not None or hot is not None:
            position.kind_losses.append((position.step, mixed, hot))
        figures = {
            "loss": position.smoothed_loss,
            "samples_per_second": position.speed,
            "dense_learning_rate": self._optimizer.param_groups[0]["lr"],
            "row_learning_rate": self._model.embeddings.learning_rate,
        }
        kinds = {"loss_of_mixed_batches": mixed, "loss_of_hot_batches": hot}
        figures |= {name: value for name, value in kinds.items() if value is not None}
        self._add(position.step, {f"train/{name}": value for name, value in figures.items()})

    def validation(self, entry: Mapping[str, Any]) -> None:
        """The metrics of an evaluation, as `TrainingState.evaluations` has it."""
        found = {
            f"valid/{label}/{name}" if label else f"valid/{name}": found[name]
            for label, found in entry.get("labels", {"": entry}).items()
            for name in METRICS
            if found[name] is not None
        }
        self._add(entry["step"], found)

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        self._progress.figures(step, values)
        if self._writers is not None:
            self._writers.add(step, values)


EvaluationCallback = Callable[[Sequence[Evaluation]], None]


def ignore_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Watches nothing."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What is evaluated."""

    model: CTRModel
    dataset: Dataset
    config: TrainConfig
    progress: Progress
    check: Callable[[], None]
    """Called between batches; raises `Stopped` where the user asks for it."""
    mesh: Mesh
    """Who evaluates it together."""
    average: WeightAverage
    """Of the model's network."""
    evaluated: Callable[[], None]
    """Called when an evaluation is noted."""
    watch: EvaluationCallback = ignore_evaluations
    """Receives all evaluations after each; what it raises ends the run."""

    def run(self, position: TrainingState, curves: Curves, *, closing: bool = False) -> bool:
        """Evaluate and note it in `position`, and whether training is over; whether it is the best one so far.

        Nothing happens where there is no such split, and where the user stops it.

        Parameters
        ----------
        closing : bool
            Whether only the end of the run asks for it.
        """
        stopping = self.config.early_stopping
        if not self.dataset.samples("valid"):
            return False
        try:
            with self.average.shown():
                metrics, _ = evaluate_split(
                    self.model,
                    self.dataset,
                    "valid",
                    precision=self.config.precision,
                    progress=SilentProgress(),
                    check=self.check,
                    mesh=self.mesh,
                )
        except Stopped:
            return False
        found = figures(metrics)
        entry = {"step": position.step, **found, **({"closing": True} if closing else {})}
        position.record(entry, stopping)
        for label, each in by_label("validation", found):
            told = dict.fromkeys((*HEADLINES, *((stopping.metric,) if stopping.patience else ())))
            shown = (f"{METRICS[name].label} {show(each[name], 5)}" for name in told)
            self.progress.say(f"step {position.step}: {label} {', '.join(shown)}")
        curves.validation(entry)
        self.evaluated()
        position.finished = patience_exhausted(position.evaluations, stopping)
        self.watch(position.evaluations)
        return best(position.evaluations, stopping) is position.evaluations[-1]
