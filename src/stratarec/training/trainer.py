"""Trains a model: steps, evaluations, checkpoints, early stopping, one final test.

A run is a function of its recipe and data: resumed from any checkpoint it ends with the same bits as uninterrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter

from stratarec.batch import Batch
from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader, LoaderConfig
from stratarec.data.matching import check_prepared
from stratarec.embedding import Handle, Prefetcher
from stratarec.errors import Interrupted, TrainingError
from stratarec.models.dedup import Lookup
from stratarec.models.outputs import autocast
from stratarec.ownership import named_directory, state
from stratarec.planning.plan import Plan, compare_totals
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe
from stratarec.reporting.metrics import LABELS, show
from stratarec.reporting.report import write_report
from stratarec.training import checkpoint
from stratarec.training.directory import RUN, RunDirectory
from stratarec.training.evaluation import evaluate_split
from stratarec.training.memory import peak_rss_bytes
from stratarec.training.metrics import Metrics
from stratarec.training.pipeline import Cadence, InOrder, Item, Pipeline
from stratarec.training.position import Position, best, is_over
from stratarec.training.records import Result, read_plan, read_result, write_plan, write_recipe, write_result
from stratarec.training.run import (
    check_identity,
    identity,
    new_model,
    new_plan,
)
from stratarec.training.settings import torch_settings
from stratarec.training.starting import check_validation, remarks, take_up
from stratarec.training.stopping import Stopped, StopRequest
from stratarec.training.warmup import warm_up

_SMOOTHING = 0.98


class Trainer:
    """One run of a recipe on its data set; it trains once.

    Parameters
    ----------
    recipe : Recipe
        What to do.
    dataset : Dataset
        Prepared data, opened and checked.
    progress : Progress
        Told of steps, evaluations and checkpoints.
    plan : Plan
        Where tables live; by default what the run was started with, or what the recipe's memory section asks for.

    Raises
    ------
    ConfigError
        When the data set was prepared by other settings than the recipe's, or cannot give what the recipe asks of its
        validation split.
    StorageError
        When the directory of the run holds anything but a run.
    """

    def __init__(
        self, recipe: Recipe, dataset: Dataset, progress: Progress | None = None, *, plan: Plan | None = None
    ) -> None:
        self.recipe, self.dataset, self.config = recipe, dataset, recipe.train
        self.progress: Progress = progress or SilentProgress()
        self._uncompared = check_prepared(recipe.data, dataset)
        check_validation(self.config, dataset)
        self.position = Position()
        self.run = named_directory(recipe.run)
        state(self.run, RUN)  # what it cannot be written into is refused before anything is built
        self.directory = RunDirectory(self.run)
        self.checkpoints = self.directory.checkpoints
        self.plan = plan or read_plan(self.run, recipe, dataset) or new_plan(recipe, dataset)
        self.model = new_model(recipe, dataset, self.plan, recipe.place)
        self.optimizer = self.config.dense.build(self.model.network)
        self._saved: Path | None = None
        self._identity = identity(recipe, dataset)
        self._stop = StopRequest(f"stopped at once; {self.run} is as of its last checkpoint; go on with --resume")
        self._began, self._tested = False, ""
        self.loader = Loader(
            dataset,
            "train",
            LoaderConfig(
                batch_size=self.config.batch_size,
                seed=self.config.seed,
                window_row_groups=self.config.window_row_groups,
                unit=self.config.shuffle,
                expand=not self.config.deduplicate,
            ),
        )
        self.pipeline = Pipeline(self.model, InOrder(self.loader), self.loader.config.prefetch_batches)
        self.cadence = Cadence(self.config, self.total_steps)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, unless it stops early."""
        steps = len(self.loader) * self.config.epochs
        return min(steps, self.config.max_steps) if self.config.max_steps else steps

    def train(self, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
        """Train to the end, test once, and write result and report.

        Returns
        -------
        dict
            What ``result.json`` holds.

        Raises
        ------
        CheckpointError
            When the run has checkpoints and neither `resume` nor `overwrite` is set, when they do not fit, or when a
            finished run is resumed with another length that asks for no more steps.
        StorageError
            When the directory of the run cannot be written, or somebody else trains in it.
        TrainingError
            When the loss is no longer a number.
        Interrupted
            After SIGINT or SIGTERM, once a checkpoint is written.
        """
        if self._began:
            raise TrainingError("this trainer has been used: make another one, its tables are not as they began")
        self._began = True
        try:
            with (
                torch_settings(threads=self.config.threads, seed=self.config.seed),
                self.dataset.held(),
                self.directory.opened(resume=resume, overwrite=overwrite) as found,
            ):
                if resume and found is None:
                    self.progress.say(f"{self.run} has no checkpoint to go on from; starting from the beginning")
                return self._train_and_test(found)
        finally:
            self.model.embeddings.close()

    def _train_and_test(self, found: Path | None) -> dict[str, Any]:
        earlier = read_result(self.run)
        ended = found is not None and self._take_up(found, earlier)
        self._tested = "" if earlier is None else earlier.checkpoint
        if ended and earlier is not None and earlier.steps == self.position.step:
            self.progress.say(f"{self.run} has ended; this is its result")
            return earlier.model_dump(mode="json", exclude_unset=True, exclude={"format"})
        if not ended:
            self._introduce()
            warm_up(self.recipe, self.loader, self.plan, self.progress)
        writer = SummaryWriter(str(self.run / "tensorboard"), purge_step=self.position.step)
        with writer as self._board, self._stop.listening():
            if not ended:
                self._train()
            return self._finish()

    def _introduce(self) -> None:
        """Write down and tell what is going to be trained."""
        write_recipe(self.run, self.recipe)
        write_plan(self.run, self.recipe, self.plan)
        if self._uncompared:
            self.progress.say(self._uncompared)
        for line in remarks(self.config, self.plan, self.dataset, self.total_steps):
            self.progress.say(line)

    def _take_up(self, path: Path, result: Result | None) -> bool:
        """Go on from a checkpoint of a run with that result; whether no step is left to train."""
        check_identity(path, self._identity, self.dataset)
        position = take_up(self.run, path, self.recipe, self.total_steps)
        if not (position.finished and result is not None and result.steps == position.step):
            self._restore(path)
        self.position = position
        return position.finished

    def _restore(self, path: Path) -> None:
        """Take everything from a checkpoint."""
        loaded = checkpoint.load(path)
        difference = loaded.into(self.model)
        checkpoint.restore_optimizer(path, self.optimizer, loaded.optimizer)
        self.position = Position(**loaded.state["position"])
        self.progress.say(f"going on from {path}")
        self._saved = path
        if difference:
            self.progress.say(f"{difference}: from here on the bits may differ")

    def _train(self) -> None:
        position = self.position
        self.cadence.saved()
        if self._evaluation_due():  # an earlier session was stopped while it evaluated
            self._evaluate()
            if self._stop.made:
                self._leave()
        self.progress.start("train", self.total_steps, "steps", position.step)
        while position.step < self.total_steps and not position.finished:
            began = time.perf_counter()
            with self._batches() as batches:
                for item, prepared in batches:
                    self.step(*item, prepared)
                    position.batch += 1
                    position.train_seconds += time.perf_counter() - began
                    last = position.batch == len(self.loader)
                    if last:
                        position.epoch, position.batch = position.epoch + 1, 0
                    self._after_step(batches)
                    began = time.perf_counter()
                    if position.finished or last or position.step >= self.total_steps:
                        break
        self.progress.finish()
        if not position.evaluated:
            self._evaluate(closing=True)
        if self._stop.made:
            self._leave()
        position.finished = True
        self.save()

    def _batches(self) -> Prefetcher[Item]:
        """The rest of the epoch, prepared ahead where tables have tiers, but not across a barrier."""
        position, first = self.position, self.position.step
        return self.pipeline.prepared(
            position.epoch, position.batch, lambda place: self.cadence.is_barrier(first + place + 1)
        )

    def items(self, epoch: int, start_batch: int = 0) -> Iterator[Item]:
        """The batches of an epoch and their lookups, made ahead on a thread: what `step` takes."""
        return self.pipeline.items(epoch, start_batch)

    def step(self, batch: Batch, lookup: Lookup | None = None, prepared: Handle | None = None) -> None:
        """One optimizer step; `lookup` and `prepared` are the batch's, where they were made ahead."""
        position, config = self.position, self.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.dense.learning_rate * config.dense.schedule.factor(position.step)
        with autocast(config.precision):
            logits = self.model(batch, lookup, prepared)
        loss = functional.binary_cross_entropy_with_logits(logits, batch.label)
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss is {value} at step {position.step}; lower train.dense.learning_rate or "
                "train.embedding.learning_rate. The last checkpoint is as it was."
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if config.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.network.parameters(), config.clip_norm)
        self.optimizer.step()
        kept = _SMOOTHING if position.step else 0.0
        position.smoothed_loss = kept * position.smoothed_loss + (1 - kept) * value
        position.step += 1
        position.trained_samples += batch.size

    def _evaluation_due(self) -> bool:
        """Whether there should be an evaluation of this step, and there was none."""
        position = self.position
        if not position.step or position.evaluated:
            return False
        return self.cadence.evaluates(position.step, epoch_ended=position.batch == 0)

    def _after_step(self, batches: Prefetcher[Item]) -> None:
        position, config = self.position, self.config
        speed = position.trained_samples / max(position.train_seconds, 1e-9)
        self.progress.advance(1, f"loss {position.smoothed_loss:.4f}  {speed:,.0f} samples/s")
        if position.step % config.log_every == 0:
            position.losses.append((position.step, position.smoothed_loss))
            self._board.add_scalar("train/loss", position.smoothed_loss, position.step)
            self._board.add_scalar("train/samples_per_second", speed, position.step)
            self._board.add_scalar("train/dense_learning_rate", self.optimizer.param_groups[0]["lr"], position.step)
            self._board.add_scalar("train/row_learning_rate", self.model.embeddings.learning_rate, position.step)
        if self._evaluation_due():
            self._evaluate()
        if not self.cadence.saves(position.step) and not self._stop.made:
            return
        # What is prepared already is trained first: a checkpoint holds no batch that is under way.
        batches.drain()
        if batches.drained:
            if self._stop.made:
                self._leave()
            self.save()

    def _leave(self) -> NoReturn:
        """Stop as the user asked, with a checkpoint of this moment."""
        path = self.save()
        self.progress.finish()
        raise Interrupted(f"stopped; the checkpoint is {path}; go on with the same command and --resume")

    def _evaluate(self, *, closing: bool = False) -> None:
        """Validation metrics; decides on the best checkpoint and on stopping early. Nothing where the user stops it."""
        position, config = self.position, self.config
        if not self.dataset.samples("valid"):
            return
        try:
            metrics, _, _ = evaluate_split(
                self.model,
                self.dataset,
                "valid",
                precision=config.precision,
                progress=SilentProgress(),
                check=self._stop.check,
            )
        except Stopped:
            return
        found = metrics.to_dict()
        entry = {"step": position.step, **found, **({"closing": True} if closing else {})}
        position.evaluations.append(entry)
        figures = (f"{LABELS[name]} {show(found[name], 5)}" for name in ("auc", "log_loss"))
        self.progress.say(f"step {position.step}: validation {', '.join(figures)}")
        for name in LABELS:
            if found[name] is not None:
                self._board.add_scalar(f"valid/{name}", found[name], position.step)
        if best(position.evaluations, config.early_stopping) is entry:
            self.save()
        position.finished = is_over(position.evaluations, config.early_stopping)

    def save(self) -> Path:
        """Write a checkpoint of this moment and remove the ones no longer wanted."""
        position = self.position
        path = checkpoint.save(
            self.checkpoints,
            model=self.model,
            optimizer=checkpoint.optimizer_tensors(self.optimizer),
            state={"step": position.step, "position": asdict(position), "identity": self._identity},
            previous=self._saved,
        )
        self._saved = path
        self.directory.settle()
        self._prune()
        self.cadence.saved()
        return path

    def _prune(self) -> None:
        kept = {
            checkpoint.of_step(self.checkpoints, step) for step in self.position.kept_steps(self.config.early_stopping)
        }
        if self._tested:  # of an earlier end of this run: needed until there is another result
            kept.add(self.checkpoints / self._tested)
        checkpoint.prune(self.checkpoints, self.config.checkpoint.keep, kept)

    def _finish(self) -> dict[str, Any]:
        """The one test evaluation, of the best checkpoint where validation chose one."""
        position = self.position
        found = best(position.evaluations, self.config.early_stopping)
        path = checkpoint.of_step(self.checkpoints, position.step if found is None else found["step"])
        if found is not None and found["step"] != position.step:
            checkpoint.load(path).into(self.model)
        result: dict[str, Any] = {
            "checkpoint": path.name,
            "steps": position.step,
            "samples_per_second": position.trained_samples / max(position.train_seconds, 1e-9),
            "table_bytes": self.model.embeddings.nbytes,
            "memory": self._memory(),
            "network_bytes": sum(weight.numel() * weight.element_size() for weight in self.model.network.parameters()),
            "peak_rss_bytes": peak_rss_bytes(),
        }
        curve: tuple[Any, Any] | None = None
        if self.dataset.samples("test"):
            metrics, label, score = self._test(path)
            result["test"] = metrics.to_dict()
            curve = (label, 1 / (1 + np.exp(-score.astype(np.float64))))
        result["peak_rss_bytes"] = peak_rss_bytes()
        write_result(self.run, result)
        write_report(self.run / "report.html", self.recipe.to_dict(), self.dataset, asdict(position), result, curve)
        self._tested = path.name
        self._prune()
        return result

    def _test(self, path: Path) -> tuple[Metrics, NDArray[np.float32], NDArray[np.float32]]:
        try:
            return evaluate_split(
                self.model,
                self.dataset,
                "test",
                precision=self.config.precision,
                progress=self.progress,
                check=self._stop.check,
            )
        except Stopped as error:
            raise Interrupted(
                f"stopped in the final test; the trained model is {path}; the same command and --resume only tests it"
            ) from error

    def _memory(self) -> list[dict[str, Any]]:
        """What was planned and what is used, for each memory; empty without a plan."""
        if self.plan is None:
            return []
        rows = compare_totals(self.plan, self.model.embeddings.bytes_by_memory())  # type: ignore[arg-type]
        return [{**asdict(row), "defect": row.defect} for row in rows]
