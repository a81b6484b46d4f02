"""The checkpoints of a run: written, gone on from, and removed when nobody wants them any more."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stratarec.distributed.mesh import Mesh
from stratarec.distributed.towers.tower_model import gather_towers
from stratarec.models import CTRModel
from stratarec.recipe.train_section import TrainConfig
from stratarec.training import checkpoint
from stratarec.training.checkpoint import OPTIMIZER
from stratarec.training.run.run_directory import RunDirectory
from stratarec.training.steps.position import Position
from stratarec.training.steps.weight_average import Averaging

SETTLED = "settled"
"""Noted once a run has a checkpoint of its own: what starts again goes on from there, and overwrites nothing more."""


class Keeper:
    """Keeps the checkpoints of one run.

    Parameters
    ----------
    directory : RunDirectory
        Of the run; it is settled by its first checkpoint.
    model : CTRModel
    optimizer : torch.optim.Optimizer
        Of the model's network.
    config : TrainConfig
    identity : dict
        What every checkpoint says it is of.
    mesh : Mesh
        Whose ranks each have a keeper; the first one settles and removes.
    averaging : Averaging
        Of the model's network.
    """

    def __init__(
        self,
        directory: RunDirectory,
        model: CTRModel,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        identity: dict[str, Any],
        mesh: Mesh,
        averaging: Averaging,
    ) -> None:
        self._directory, self._model, self._optimizer = directory, model, optimizer
        self._config, self._identity, self._mesh = config, identity, mesh
        self._averaging = averaging
        self._last: Path | None = None
        # Name of the checkpoint of an earlier end of this run: needed until there is another result.
        self.tested = ""

    def save(self, position: Position) -> Path:
        """Write a checkpoint of this moment and remove the ones no longer wanted."""
        gather_towers(self._model, self._optimizer, self._mesh)
        with self._averaging.shown():
            path = checkpoint.save(
                self._directory.checkpoints,
                model=self._model,
                optimizer={**checkpoint.optimizer_tensors(self._optimizer), **self._averaging.tensors()},
                state={"step": position.step, "position": asdict(position), "identity": self._identity},
                previous=self._last,
                mesh=self._mesh,
            )
        self._last = path
        if self._mesh.is_first:
            self._directory.settle()
            self._mesh.note(SETTLED)
        self.prune(position)
        return path

    def restore(self, path: Path) -> str:
        """Take everything but the position from a checkpoint; why the bits may differ from here on, or nothing."""
        loaded = checkpoint.load(path)
        difference = loaded.into(self._model)
        checkpoint.restore_optimizer(path, self._optimizer, loaded.optimizer)
        checkpoint.restore_random(loaded.optimizer)
        if loaded.state["step"]:
            self._averaging.restore(path / OPTIMIZER, loaded.optimizer)
        self._last = path
        return difference

    def best(self, step: int, *, current: int) -> Path:
        """The checkpoint of `step`, which the model now is; before, it was trained to the step `current`."""
        path = checkpoint.of_step(self._directory.checkpoints, step)
        if step == current:
            self._averaging.swap()
        else:
            checkpoint.load(path).into(self._model)
        return path

    def prune(self, position: Position) -> None:
        """Remove the checkpoints that neither the run nor its result needs."""
        if not self._mesh.is_first:
            return
        folder, config = self._directory.checkpoints, self._config
        kept = {checkpoint.of_step(folder, step) for step in position.kept_steps(config.early_stopping)}
        if self.tested:
            kept.add(folder / self.tested)
        checkpoint.prune(folder, config.checkpoint.keep, kept)
