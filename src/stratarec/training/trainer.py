"""Trains a model: steps, evaluations, checkpoints, early stopping, one final test.

A run is a function of its recipe and data: resumed from any checkpoint it ends with the same bits as uninterrupted.
"""

from __future__ import annotations

import math
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter

from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader, LoaderConfig
from stratarec.embedding import Prefetcher, Prepared
from stratarec.errors import CheckpointError, Interrupted, TrainingError
from stratarec.files import make_directory, write_json
from stratarec.jagged import Batch
from stratarec.models.dedup import Lookup
from stratarec.planning.plan import Plan, compare_totals
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe
from stratarec.reporting.report import write_report
from stratarec.training import checkpoint
from stratarec.training.evaluation import autocast, evaluate_split
from stratarec.training.memory import peak_rss_bytes
from stratarec.training.pipeline import Cadence, InOrder, Item, Pipeline
from stratarec.training.run import identity, new_model, new_plan, save_plan, saved_plan

_SMOOTHING = 0.98


@dataclass
class Position:
    """How far a run has come; all of it is in every checkpoint."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    smoothed_loss: float = 0.0
    best: float = math.nan
    best_step: int = -1
    bad_evaluations: int = 0
    finished: bool = False
    losses: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    train_seconds: float = 0.0
    """Spent in steps, by all sessions of the run; the one field that differs from run to run."""
    trained_samples: int = 0


class Trainer:
    """One run of a recipe on its data set.

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
    """

    def __init__(
        self, recipe: Recipe, dataset: Dataset, progress: Progress | None = None, *, plan: Plan | None = None
    ) -> None:
        self.recipe, self.dataset, self.config = recipe, dataset, recipe.train
        self.progress: Progress = progress or SilentProgress()
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        torch.use_deterministic_algorithms(True)
        # Else every new tensor is filled first; nothing here reads memory that it has not written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.manual_seed(self.config.seed)
        self.position = Position()
        self.run = recipe.run
        self.checkpoints = self.run / "checkpoints"
        self.plan = plan or saved_plan(self.run, recipe, dataset) or new_plan(recipe, dataset)
        self.model = new_model(recipe, dataset, self.plan, recipe.name)
        self.optimizer = self.config.dense.build(self.model.network)
        self._saved: Path | None = None
        self._identity = identity(recipe, dataset)
        self._stop = False
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
            When the run has checkpoints and neither `resume` nor `overwrite` is set, or they do not fit.
        TrainingError
            When the loss is no longer a number.
        Interrupted
            After SIGINT or SIGTERM, once a checkpoint is written.
        """
        try:
            self._open(resume, overwrite)
            return self._train_and_test()
        finally:
            self.model.embeddings.close()

    def _train_and_test(self) -> dict[str, Any]:
        with SummaryWriter(str(self.run / "tensorboard"), purge_step=self.position.step) as board, self._signals():
            self._board = board
            if not self.position.finished:
                self._train()
            return self._finish()

    def _open(self, resume: bool, overwrite: bool) -> None:
        found = checkpoint.steps(self.checkpoints)
        if found and not (resume or overwrite):
            raise CheckpointError(
                f"{self.run} holds a run up to {found[-1].name}: pass --resume to go on, --overwrite to start anew, or "
                "another train.run"
            )
        if overwrite and self.run.exists():
            shutil.rmtree(self.run)
        if resume and found:
            self._restore(found[-1])
        make_directory(self.run)
        write_json(self.run / "recipe.json", self.recipe.to_dict())
        save_plan(self.run, self.recipe, self.plan)
        if self.plan is not None:
            self.progress.say(self.plan.summary)
            if self.plan.batch_size < self.config.batch_size:
                self.progress.say(
                    f"the plan is for batches of {self.plan.batch_size:,}; caches may be too small for batches of "
                    f"{self.config.batch_size:,}: plan again, or lower train.batch_size"
                )

    def _restore(self, path: Path) -> None:
        """Continue from a checkpoint."""
        loaded = checkpoint.load(path, identity=self._identity)
        difference = loaded.into(self.model)
        checkpoint.restore_optimizer(self.optimizer, loaded.optimizer)
        self.position = Position(**loaded.state["position"])
        self.progress.say(f"going on from {path}")
        self._saved = path
        if difference:
            self.progress.say(f"{difference}: from here on the bits may differ")

    def _train(self) -> None:
        position, config = self.position, self.config
        self.cadence.saved()
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
                    self._after_step(last, batches)
                    began = time.perf_counter()
                    if position.finished or last or position.step >= self.total_steps:
                        break
        self.progress.finish()
        position.finished = True
        if config.eval_every and position.evaluations and position.evaluations[-1]["step"] != position.step:
            self._evaluate()
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

    def step(self, batch: Batch, lookup: Lookup | None = None, prepared: Prepared | None = None) -> None:
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

    def _after_step(self, epoch_ended: bool, batches: Prefetcher[Item]) -> None:
        position, config = self.position, self.config
        speed = position.trained_samples / max(position.train_seconds, 1e-9)
        self.progress.advance(1, f"loss {position.smoothed_loss:.4f}  {speed:,.0f} samples/s")
        if position.step % config.log_every == 0:
            position.losses.append((position.step, position.smoothed_loss))
            self._board.add_scalar("train/loss", position.smoothed_loss, position.step)
            self._board.add_scalar("train/samples_per_second", speed, position.step)
            self._board.add_scalar("train/dense_learning_rate", self.optimizer.param_groups[0]["lr"], position.step)
            self._board.add_scalar("train/row_learning_rate", self.model.embeddings.learning_rate, position.step)
        if self.cadence.evaluates(position.step, epoch_ended=epoch_ended):
            self._evaluate()
        if not self.cadence.saves(position.step) and not self._stop:
            return
        # What is prepared already is trained first: a checkpoint holds no batch that is under way.
        batches.drain()
        if batches.drained:
            path = self.save()
            if self._stop:
                self.progress.finish()
                raise Interrupted(f"stopped; the checkpoint is {path}; go on with the same command and --resume")

    def _evaluate(self) -> None:
        """Validation metrics; decides on the best checkpoint and on stopping early."""
        position, config = self.position, self.config
        if not self.dataset.samples("valid"):
            return
        metrics, _, _ = evaluate_split(
            self.model, self.dataset, "valid", precision=config.precision, progress=SilentProgress()
        )
        position.evaluations.append({"step": position.step, **metrics.to_dict()})
        self.progress.say(f"step {position.step}: validation AUC {metrics.auc:.5f}, log loss {metrics.log_loss:.5f}")
        for name in ("auc", "log_loss", "normalized_entropy", "calibration", "grouped_auc"):
            self._board.add_scalar(f"valid/{name}", getattr(metrics, name), position.step)
        if not config.early_stopping.patience:
            return
        value = metrics.auc if config.early_stopping.metric == "auc" else -metrics.log_loss
        if math.isnan(position.best) or value > position.best:
            position.best, position.best_step, position.bad_evaluations = value, position.step, 0
            self.save()
        else:
            position.bad_evaluations += 1
            position.finished = position.bad_evaluations >= config.early_stopping.patience

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
        best = self.checkpoints / f"step-{position.best_step:08d}"
        checkpoint.prune(self.checkpoints, self.config.checkpoint.keep, {best})
        self.cadence.saved()
        return path

    def _finish(self) -> dict[str, Any]:
        """The one test evaluation, of the best checkpoint where validation chose one."""
        position = self.position
        chosen = position.best_step if position.best_step >= 0 else position.step
        path = self.checkpoints / f"step-{chosen:08d}"
        if chosen != position.step:
            checkpoint.load(path, identity=self._identity).into(self.model)
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
            metrics, label, score = evaluate_split(
                self.model, self.dataset, "test", precision=self.config.precision, progress=self.progress
            )
            result["test"] = metrics.to_dict()
            curve = (label, 1 / (1 + np.exp(-score.astype(np.float64))))
        result["peak_rss_bytes"] = peak_rss_bytes()
        write_json(self.run / "result.json", result)
        write_report(self.run / "report.html", self.recipe.to_dict(), self.dataset, asdict(position), result, curve)
        return result

    def _memory(self) -> list[dict[str, Any]]:
        """What was planned and what is used, for each memory; empty without a plan."""
        if self.plan is None:
            return []
        rows = compare_totals(self.plan, self.model.embeddings.bytes_by_memory())  # type: ignore[arg-type]
        return [{**asdict(row), "defect": row.defect} for row in rows]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the current step first."""

        def ask(number: int, frame: FrameType | None) -> None:
            self._stop = True

        # Only the main thread may set handlers; elsewhere the caller deals with signals.
        main = threading.current_thread() is threading.main_thread()
        kept = {name: signal.signal(name, ask) for name in (signal.SIGINT, signal.SIGTERM) if main}
        try:
            yield
        finally:
            for name, handler in kept.items():
                signal.signal(name, handler)
