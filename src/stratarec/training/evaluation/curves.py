"""What is told of a run while it trains: the line of its progress, its loss, TensorBoard's curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from stratarec.models import CTRModel
from stratarec.models.metrics import METRICS
from stratarec.progress import Progress
from stratarec.training.steps.position import Position

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Curves:
    """Curves of training and validation by step.

    Parameters
    ----------
    board : SummaryWriter or None
        None on ranks that only train.
    model, optimizer
        Whose learning rates are shown: those of the rows, and of the network.
    every : int
        Steps from one point of a training curve to the next.
    """

    def __init__(
        self, board: SummaryWriter | None, model: CTRModel, optimizer: torch.optim.Optimizer, every: int
    ) -> None:
        self._board, self._model, self._optimizer, self._every = board, model, optimizer, every

    def stepped(self, position: Position, progress: Progress) -> None:
        """A step was trained."""
        progress.advance(1, f"loss {position.smoothed_loss:.4f}  {position.speed:,.0f} samples/s")
        if position.step % self._every:
            return
        position.losses.append((position.step, position.smoothed_loss))
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
        for name, value in figures.items():
            self._add(f"train/{name}", value, position.step)

    def validation(self, entry: Mapping[str, Any]) -> None:
        """The metrics of an evaluation, as `Position.evaluations` has it."""
        for label, figures in entry.get("labels", {"": entry}).items():
            for name in METRICS:
                if figures[name] is not None:
                    self._add(f"valid/{label}/{name}" if label else f"valid/{name}", figures[name], entry["step"])

    def _add(self, name: str, value: float, step: int) -> None:
        if self._board is not None:
            self._board.add_scalar(name, value, step)
