"""One run by several processes: tables over ranks, a part of every batch each, and all decisions taken together."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stratarec.batch import Batch
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.reduction import reduce_gradients
from stratarec.embedding import Handle
from stratarec.models.request import Request
from stratarec.training.cadence import Seen
from stratarec.training.memory import peak_rss_bytes
from stratarec.training.pipeline import Stages, Trained, refuse_loss


class SharedStages(Stages):
    """The stages of a step of one rank of a mesh: its samples count as much as those of the others."""

    loss_of = "sum"

    def __init__(self, mesh: Mesh, *stages: Any, **others: Any) -> None:
        super().__init__(*stages, **others)
        self.mesh = mesh
        self.exposed_seconds = self.step_seconds = 0.0

    def forward(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """The sum of the losses of this rank's samples."""
        if not batch.size:
            return self._nothing(batch, request, prepared)
        return super().forward(batch, request, prepared)

    def _nothing(self, batch: Batch, request: Request | None, prepared: Handle | None) -> Tensor:
        """A loss of zero that depends on what was looked up: this rank's rows are asked for all the same."""
        found = self.model.embeddings(prepared or (request or self.request(batch)).features)
        total: Tensor = found.pooled.sum() + sum(bags.values.sum() for bags in found.sequences.values())
        return total

    def train(self, step: int, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Trained:
        """See `Stages.train`; loss and samples are those of all ranks."""
        waited, began = self.mesh.rows.wait_seconds, time.perf_counter()
        loss = self.forward(batch, request, prepared)
        parts = self.mesh.rows.figures([loss.item(), batch.size])
        samples = sum(int(size) for _, size in parts)
        value = sum(part for part, _ in parts) / samples
        if not math.isfinite(value):
            refuse_loss(value, step)
        self.backward(loss / samples)
        self.update(step)
        self.exposed_seconds += self.mesh.rows.wait_seconds - waited
        self.step_seconds += time.perf_counter() - began
        return Trained(value, samples)

    def figures(self) -> list[dict[str, float]]:
        """`RankFigures` of all ranks."""
        mesh = self.mesh
        sent = sum(channel.sent_bytes for channel in (mesh.ids, mesh.rows, mesh.files))
        mine = (self.exposed_seconds, self.step_seconds, sent, self.model.embeddings.nbytes, peak_rss_bytes())
        names = ("exposed_seconds", "step_seconds", "sent_bytes", "table_bytes", "peak_rss_bytes")
        return [
            {
                name: value if name.endswith("seconds") else round(value)
                for name, value in zip(names, found, strict=True)
            }
            for found in mesh.rows.figures(mine)
        ]


class Together:
    """The `Reduction` and the `Agreement` of several processes: sums in the order of ranks, one stops all."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def reduce(self, weights: Iterable[torch.nn.Parameter]) -> None:
        """See `Reduction.reduce`."""
        reduce_gradients(self._mesh.rows, list(weights))

    def agree(self, seen: Seen) -> Seen:
        """Rank 0 has the clock; whoever was asked to stop stops all."""
        found = self._mesh.rows.figures([seen.checkpoint_age_seconds, seen.stop])
        return Seen(checkpoint_age_seconds=found[0][0], stop=any(stop for _, stop in found))
