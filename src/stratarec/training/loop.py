"""From where a run is to the end of its training: steps, and between them what its cadence decides."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import NoReturn

from stratarec.embedding import Prefetcher
from stratarec.errors import Interrupted
from stratarec.progress import Progress
from stratarec.training.evaluation.validation import Curves, Validation
from stratarec.training.run.keeper import Keeper
from stratarec.training.steps.cadence import Cadence, Decision
from stratarec.training.steps.position import Position
from stratarec.training.steps.step import Item, Pipeline
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
    keeper : Keeper
    validation : Validation
    curves : Curves
    progress : Progress
    position : Position
        Where the run is; moved on.
    threads : ThreadTuner
        Receives the seconds of each step.
    """

    def __init__(
        self,
        step: Callable[..., None],
        pipeline: Pipeline,
        cadence: Cadence,
        keeper: Keeper,
        validation: Validation,
        curves: Curves,
        progress: Progress,
        position: Position,
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
