"""Train one phase of a run from its current state to its end: steps, evaluations, checkpoints and
stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import NoReturn

from stratarec.batch.batch import Batch
from stratarec.embedding import Handle
from stratarec.errors import Interrupted
from stratarec.models.request import Request
from stratarec.reporting.curve_writers import CurveWriters
from stratarec.training.run.build_run import Run
from stratarec.training.steps.cadence import Decision
from stratarec.training.steps.state import Evaluation, rate_factor
from stratarec.training.steps.step import Item, Losses
from stratarec.training.steps.trace import Hook
from stratarec.training.steps.trees import TreeFit
from stratarec.training.steps.validation import Curves

EvaluationCallback = Callable[[Sequence[Evaluation]], None]

# If the first step takes longer than this, kernels are being compiled.
_LONG_SECONDS = 5.0


class Loop:
    """Trains one phase of a run from its current state to its end.

    Parameters
    ----------
    run : Run
        Parts and state of the phase. Weights and rows must be those of the state.
    writers : CurveWriters or None
        Writers of the curves; None if no curves are written.
    callback : callable
        Called after each evaluation with all evaluations of the run. If it raises an exception, the
        run ends.
    trees : TreeFit
        Trees of an ensemble that are being fitted. Evaluations and checkpoints wait for them.
    hooks : sequence of Hook
        Functions whose contexts surround every step, for example to trace it.
    """

    def __init__(
        self,
        run: Run,
        writers: CurveWriters | None = None,
        *,
        callback: EvaluationCallback | None = None,
        trees: TreeFit | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self._run = run
        self._callback = callback
        self._trees = trees
        self._hooks = hooks
        self._state = run.state
        self._pipeline = run.pipeline
        self._cadence = run.cadence
        self._progress = run.session.progress
        self._losses = Losses(run.state)
        self._curves = Curves(writers, run.model, run.optimizer, run.config.log_every, self._progress)
        self._seconds_before = run.state.stage_seconds
        self._samples_before = run.state.trained_samples
        self._is_warm = False
        message = "the first step takes long: kernels are compiled for this machine, once"
        self._compiling = Timer(_LONG_SECONDS, self._progress.say, (message,))

    def train(self) -> None:
        """Train to the end of the phase, and write a checkpoint there.

        Raises
        ------
        Interrupted
            If the user stops the run. A checkpoint is written before.
        """
        state, pipeline, cadence = self._state, self._pipeline, self._cadence
        self._set_rates()
        cadence.saved()
        if self._decide().evaluate:  # an earlier session was stopped during this evaluation
            self._evaluate()
            self._stop_if_asked()
        at_most = bool(self._run.config.early_stopping.patience)
        self._progress.start(state.phase, cadence.total_steps, "steps", state.step, at_most=at_most)
        self._compiling.start()
        try:
            while state.step < cadence.total_steps and not state.finished:
                self._train_epoch(pipeline.load(state.epoch, state.batch), state.step)
        finally:
            self._compiling.cancel()
        self._progress.finish()
        if not state.evaluated:
            self._evaluate(closing=True)
        self._stop_if_asked()
        state.finished = True
        self._save()

    def _train_epoch(self, items: Iterator[Item], first: int) -> None:
        """Train the rest of an epoch, whose first step has number `first`: stage batches ahead,
        train each of them, and evaluate, save or stop when the cadence says so.
        """
        state, cadence, began = self._state, self._cadence, time.perf_counter()
        with self._pipeline.stage_ahead(
            items, lambda place: cadence.is_barrier(first + place + 1)
        ) as ahead:
            for (batch, request), handle in ahead:
                waited = time.perf_counter() - began
                self._train_step(batch, request, handle)
                self._count_seconds(time.perf_counter() - began, waited)
                if self._curves.is_due(state):
                    self._losses.read()
                self._curves.add_step(state)
                decision = self._decide()
                if decision.evaluate:
                    self._evaluate()
                    decision = self._decide()
                if decision.drain:
                    ahead.drain()
                if decision.stop:
                    self._stop()
                if decision.save:
                    self._save()
                if state.finished or not state.batch or state.step >= cadence.total_steps:
                    break
                began = time.perf_counter()

    def _train_step(self, batch: Batch, request: Request, handle: Handle) -> None:
        """Train one batch, and move the position of the run behind it."""
        state = self._state
        with ExitStack() as stack:
            for hook in self._hooks:
                stack.enter_context(hook(state.step))
            self._losses.count(self._pipeline.train(state.step, batch, request, handle))
        state.batch += 1
        if state.batch == len(self._run.loader):
            state.epoch = state.epoch + 1
            state.batch = 0

    def _count_seconds(self, seconds: float, waited: float) -> None:
        """Add the time of a step. The first step of a session is not timed, because it may compile
        kernels.
        """
        state, timed_seconds = self._state, self._pipeline.seconds
        if self._is_warm:
            state.train_seconds += seconds
            timed_seconds["wait"] = timed_seconds.get("wait", 0.0) + waited
            self._run.session.threads.after_step(state.step)
        else:
            self._compiling.cancel()
            self._is_warm = True
            timed_seconds.clear()
            state.untimed_samples += state.trained_samples - self._samples_before
        # The items are copied first, because other threads add parts.
        times = [*timed_seconds.items()]
        state.stage_seconds = {name: value + self._seconds_before.get(name, 0.0) for name, value in times}

    def _decide(self) -> Decision:
        state = self._state
        return self._cadence.decide(state.step, epoch_ended=state.batch == 0, evaluated=state.evaluated)

    def _store_trees(self) -> None:
        """Wait for trees that are being fitted, so that evaluations and checkpoints have them."""
        if self._trees is not None:
            self._run.store_trees(self._trees)
            self._trees = None

    def _evaluate(self, *, closing: bool = False) -> None:
        self._losses.read()
        self._store_trees()
        state = self._state
        is_best = self._run.validation.run(state, self._curves, closing=closing)
        self._set_rates()
        if self._callback is not None and state.evaluated:
            self._callback(state.evaluations)
        # The end of the run writes its own checkpoint.
        if is_best and not state.finished and state.step < self._cadence.total_steps:
            self._save()

    def _set_rates(self) -> None:
        """Set the learning rates to the run's factor times that of `train.plateau` after the
        evaluations so far.
        """
        factor = self._run.rate_factor * rate_factor(self._state.regular, self._run.config.plateau)
        if factor != self._pipeline.rate_factor:
            self._progress.say(f"train.plateau multiplies all learning rates by {factor:g} from now on")
        self._pipeline.rate_factor = factor

    def _stop_if_asked(self) -> None:
        if self._decide().stop:
            self._stop()

    def _stop(self) -> NoReturn:
        path = self._save()
        self._progress.finish()
        raise Interrupted(f"stopped; the checkpoint is {path}; resume with the same command and --resume")

    def _save(self) -> Path:
        self._losses.read()
        self._store_trees()
        path = self._run.checkpoints.save(self._state)
        self._cadence.saved()
        return path
