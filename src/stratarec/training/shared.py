"""One run by several processes: tables over ranks, a part of every batch each, and all decisions taken together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stratarec.batch import Batch
from stratarec.distributed.engine import SharedEngine
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.reduction import reduce_gradients
from stratarec.embedding import Handle
from stratarec.models.request import Request
from stratarec.training.cadence import Seen
from stratarec.training.memory import peak_rss_bytes
from stratarec.training.pipeline import Stages, Trained, refuse_loss
from stratarec.training.waits import Waits


class SharedStages(Stages):
    """The stages of a step of one rank of a mesh: its samples count as much as those of the others."""

    def __init__(self, mesh: Mesh, *stages: Any, **others: Any) -> None:
        super().__init__(*stages, **others)
        self.mesh, self.waits = mesh, Waits(mesh)

    def forward(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """See `loss`."""
        if not batch.size:
            return self._nothing(batch, request, prepared)
        return super().forward(batch, request, prepared)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """``[T]`` weighted sums of the losses of this rank's samples, by label."""
        return self.objective.sums(logits, batch)

    def _nothing(self, batch: Batch, request: Request | None, prepared: Handle | None) -> Tensor:
        """Losses of zero that depend on what was looked up: this rank's rows are asked for all the same."""
        found = self.model.embeddings(prepared or (request or self.request(batch)).features)
        total: Tensor = found.pooled.sum() + sum(bags.values.sum() for bags in found.sequences.values())
        return total.expand(len(self.model.network.labels))

    def train(self, step: int, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Trained:
        """See `Stages.train`; loss and samples are those of all ranks."""
        with self.waits:
            losses = self.forward(batch, request, prepared)
            mine = (*losses.tolist(), *self.objective.weights(batch), batch.size)
            *sums, samples = map(sum, zip(*self.mesh.rows.figures(mine), strict=True))
            weights = sums[len(losses) :]
            value = self.objective.joined(torch.tensor(sums[: len(losses)], dtype=torch.float64), weights).item()
            if not math.isfinite(value):
                refuse_loss(value, step)
            self.backward(self.objective.joined(losses, weights))
            self.update(step)
        return Trained(value, int(samples))

    def figures(self) -> list[dict[str, float]]:
        """`RankFigures` of all ranks."""
        mesh, waits, embeddings = self.mesh, self.waits, self.model.embeddings
        assert isinstance(embeddings.engine, SharedEngine)
        mine = {
            "exposed_seconds": waits.exposed_seconds,
            "hidden_seconds": waits.hidden_seconds,
            "step_seconds": waits.step_seconds,
            "sent_bytes": sum(channel.sent_bytes for channel in mesh.channels),
            "early_bytes": mesh.early.sent_bytes,
            "late_bytes": embeddings.engine.late_bytes,
            "table_bytes": embeddings.nbytes,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        return [
            {name: value if name.endswith("seconds") else round(value) for name, value in zip(mine, found, strict=True)}
            for found in mesh.rows.figures(list(mine.values()))
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
