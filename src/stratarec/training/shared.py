"""One run by several processes: tables over ranks, a part of every batch each, and all decisions taken together."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stratarec.batch.batch import Batch
from stratarec.distributed.gradients import average
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.wait_times import Waits
from stratarec.embedding import Handle
from stratarec.models.regularization import statistics
from stratarec.models.request import Request
from stratarec.training.pipeline import Stages, Trained, refuse_loss
from stratarec.training.settings import peak_rss_bytes


class SharedStages(Stages):
    """The stages of a step of one rank of a mesh: its samples count as much as those of the others."""

    def __init__(self, mesh: Mesh, *stages: Any, **others: Any) -> None:
        super().__init__(*stages, **others)
        self.mesh, self.waits = mesh, Waits(mesh)
        self._statistics = statistics(self.model.network)

    def forward(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """See `loss`."""
        if not batch.size:
            return self.model.nothing(batch, request, prepared).expand(len(self.model.network.labels))
        return super().forward(batch, request, prepared)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """``[T]`` weighted sums of the losses of this rank's samples, by label."""
        return self.objective.sums(logits, batch)

    def train(self, step: int, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Trained:
        """See `Stages.train`; loss and samples are those of all ranks."""
        with self.waits:
            self.draw(step, self.mesh.place)
            losses = self.forward(batch, request, prepared)
            found = self.mesh.rows.figures((*losses.tolist(), *self.objective.weights(batch), batch.size))
            *sums, samples = map(sum, zip(*(found[rank] for rank in self.mesh.order), strict=True))
            weights = sums[len(losses) :]
            value = self.objective.joined(torch.tensor(sums[: len(losses)], dtype=torch.float64), weights).item()
            if not math.isfinite(value):
                refuse_loss(value, step)
            self.backward(self.objective.joined(losses, weights))
            average(self.mesh.rows, self._statistics, batch.size / samples, self.mesh.order)
            self.update(step)
        return Trained(value, int(samples))

    def figures(self) -> list[dict[str, float]]:
        """`RankFigures` of all ranks."""
        mesh, waits, embeddings = self.mesh, self.waits, self.model.embeddings
        mine = {
            "exposed_seconds": waits.exposed_seconds,
            "hidden_seconds": waits.hidden_seconds,
            "step_seconds": waits.step_seconds,
            "sent_bytes": sum(channel.sent_bytes for channel in mesh.channels),
            "table_bytes": embeddings.nbytes,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        return [
            {name: value if name.endswith("seconds") else round(value) for name, value in zip(mine, found, strict=True)}
            for found in mesh.rows.figures(list(mine.values()))
        ]
