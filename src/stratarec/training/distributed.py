"""Train one run with several processes. Each has a share of the tables and of every batch, and all
decide together.

StrataRec adds gradients itself, in float32 and in the order of ranks, whatever the wire format:
gloo's reductions add in another order, and DDP's buckets change after a resume. Losses are divided
by the number (or weight) of the samples of all ranks. A rank takes part in every exchange, even if
its share of a batch is empty.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.distributed.collectives import average, reduce_gradients
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.towers import DisaggregatedModel
from stratarec.distributed.wire_formats import WIRES, DenseWireKind
from stratarec.embedding import Handle
from stratarec.embedding.collection import LookedUp
from stratarec.errors import ConfigError
from stratarec.models.base import CTRModel, Network
from stratarec.models.layers import statistics
from stratarec.models.request import Request
from stratarec.models.towers import TowerNetwork
from stratarec.progress import timed, traced
from stratarec.training.steps.cadence import Observation
from stratarec.training.steps.step import StepResult, TrainPipeline, gradient_norm, refuse_loss
from stratarec.training.torch_setup import peak_rss_bytes


class WaitTimer:
    """Measures how long a rank waits for other ranks. Each step is a ``with`` block on the training
    thread.

    A wait is *exposed* if the training thread waits: inside a step for rows, gradients and
    decisions, or between two steps for the ids of the next batch. A wait is *hidden* if only the
    thread that exchanges ids waits.

    Parameters
    ----------
    mesh : Mesh
        The ranks of the run.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.exposed_seconds = self.step_seconds = 0.0
        """Seconds of exposed waits, and seconds of all steps including the exposed waits before
        them.
        """
        self._background = 0.0
        self._began = self._ended = time.perf_counter()
        self._start = self._ids = self._of_ids
        self._rows = 0.0

    @property
    def _of_ids(self) -> float:
        return sum(part.ids.wait_seconds for part in self._mesh.parts)

    @property
    def _of_rows(self) -> float:
        return sum(part.rows.wait_seconds for part in self._mesh.parts)

    @property
    def hidden_seconds(self) -> float:
        """Seconds that the thread which exchanges ids waited for other ranks while the training
        thread did not.
        """
        return max(self._of_ids - self._start - self._background, 0.0)

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        waited = min(self._of_ids - self._ids, self._began - self._ended)
        self.exposed_seconds += waited
        self._background += waited
        self.step_seconds += waited
        self._rows = self._of_rows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = time.perf_counter()
        self.exposed_seconds += self._of_rows - self._rows
        self.step_seconds += self._ended - self._began
        self._ids = self._of_ids


class RankPipeline(TrainPipeline):
    """Training step of one rank of a mesh. Loss and gradients include the samples of all ranks."""

    def __init__(self, mesh: Mesh, model: CTRModel, *arguments: Any, reduction: GradientReducer) -> None:
        super().__init__(model, *arguments)
        if model.on_device:
            raise ConfigError(
                "tables are sharded across ranks, so the network must be on the "
                "CPU: set train.device to cpu"
            )
        self.mesh = mesh
        self.waits = WaitTimer(mesh)
        self._reduction = reduction
        self._statistics = statistics(self.model.network)

    @traced("exchange")
    def exchange(self, request: Request, stopped: Callable[[], bool]) -> KeyedJagged:
        return (
            self.model.features(request, stopped)
            if isinstance(self.model, DisaggregatedModel)
            else request.features
        )

    def forward(self, batch: Batch, request: Request, rows: LookedUp[Any]) -> Tensor:
        if not batch.size:
            return self.model.lookup_zero(batch, request, rows).expand(len(self.model.network.labels))
        return super().forward(batch, request, rows)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return, for each label, the weighted sum of the losses of this rank's samples,
        ``[T]``.
        """
        return self.objective.sums(logits, batch)

    def train(
        self, step: int, batch: Batch, request: Request | None = None, handle: Handle | None = None
    ) -> StepResult:
        """Train one batch as `TrainPipeline.train` does. Loss and sample count are those of all
        ranks together.
        """
        with self.waits:
            self.draw(step, self.mesh.place)
            with timed(self.seconds, "forward"):
                rows, request = self.look_up(batch, request, handle)
                losses = self.forward(batch, request, rows)
            figures = self.mesh.rows.gather_floats(
                (*losses.tolist(), *self.objective.weights(batch), batch.size)
            )
            *sums, samples = map(sum, zip(*(figures[rank] for rank in self.mesh.order), strict=True))
            weights = sums[len(losses) :]
            value = self.objective.joined(
                torch.tensor(sums[: len(losses)], dtype=torch.float64), weights
            ).item()
            if not math.isfinite(value):
                refuse_loss(value, step)
            with timed(self.seconds, "backward"):
                gradients = self.backward(self.objective.joined(losses, weights), rows)
                with timed(self.seconds, "update rows"):
                    self.engine.update_rows(rows.handle, gradients)
            average(self.mesh.rows, self._statistics, batch.size / samples, self.mesh.order)
            with timed(self.seconds, "update network"):
                self._reduction.reduce(self._weights)
                self.clip(rows.handle, gradients)
                self.update_network(step)
        return StepResult(value, int(samples))

    def norm(self) -> Tensor:
        return self._reduction.norm(self._weights)

    def agree(self, observation: Observation) -> Observation:
        """Return an observation that is equal on all ranks: with rank 0's age of the checkpoint,
        and a stop if any rank was asked to stop.
        """
        figures = self.mesh.rows.gather_floats([observation.checkpoint_age_seconds, observation.stop])
        return Observation(checkpoint_age_seconds=figures[0][0], stop=any(stop for _, stop in figures))

    def figures(self) -> list[dict[str, float]]:
        """Return the `RankFigures` of all ranks."""
        mesh, waits, embeddings = self.mesh, self.waits, self.model.embeddings
        mine = {
            "exposed_seconds": waits.exposed_seconds,
            "hidden_seconds": waits.hidden_seconds,
            "step_seconds": waits.step_seconds,
            "sent_bytes": sum(channel.sent_bytes for channel in mesh.channels),
            "table_bytes": embeddings.engine.nbytes,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        return [
            {
                name: value if name.endswith("seconds") else round(value)
                for name, value in zip(mine, values, strict=True)
            }
            for values in mesh.rows.gather_floats(list(mine.values()))
        ]


class GradientReducer:
    """Adds the gradients of several processes, in the order of samples.

    Parameters
    ----------
    mesh : Mesh
        The ranks of the run.
    network : Network
        The network. If the mesh has a host for each tower, a tower's gradients are added only on
        the ranks of its host.
    wire : str
        Number format in which ranks send gradients.
    """

    def __init__(self, mesh: Mesh, network: Network, wire: DenseWireKind = "fp32") -> None:
        self._mesh = mesh
        self._type = getattr(torch, WIRES[wire].dense)
        self._mine: set[int] = set()
        self._of_towers: set[int] = set()
        if mesh.between is not None:
            assert isinstance(network, TowerNetwork)
            towers = [{id(weight) for weight in tower.parameters()} for tower in network.all_towers]
            self._mine, self._of_towers = towers[mesh.between.rank], set().union(*towers)

    def reduce(self, weights: Sequence[nn.Parameter]) -> None:
        reduce_gradients(self._mesh.rows, self._common_weights(weights), self._mesh.order, self._type)
        if self._mesh.inside is not None:
            reduce_gradients(self._mesh.inside.rows, self._tower_weights(weights), dtype=self._type)

    def norm(self, weights: Sequence[nn.Parameter]) -> Tensor:
        if self._mesh.between is None:
            return gradient_norm(weights)
        common, tower = (
            gradient_norm(part) for part in (self._common_weights(weights), self._tower_weights(weights))
        )
        # One rank of each host sends the norm of its tower.
        figures = self._mesh.between.rows.gather_floats([tower.item()])
        total: Tensor = torch.linalg.vector_norm(
            torch.tensor([common.item(), *(norm for (norm,) in figures)])
        )
        return total

    def _tower_weights(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [weight for weight in weights if id(weight) in self._mine]

    def _common_weights(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [weight for weight in weights if id(weight) not in self._of_towers]
