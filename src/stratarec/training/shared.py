"""One run by several processes: tables over ranks, a part of every batch each, and all decisions taken together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from stratarec.batch import Batch
from stratarec.distributed.engine import SharedEngine
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.reduction import reduce_gradients
from stratarec.embedding import Handle
from stratarec.jagged import KeyedJagged
from stratarec.models import CTRModel
from stratarec.models.base import Network
from stratarec.models.request import Request
from stratarec.models.tower_network import TowerNetwork
from stratarec.training.cadence import Seen
from stratarec.training.disaggregated import DisaggregatedModel, PeerRequest
from stratarec.training.memory import peak_rss_bytes
from stratarec.training.pipeline import Stages, Trained, gradient_norm, refuse_loss
from stratarec.training.waits import Waits


class SharedStages(Stages):
    """The stages of a step of one rank of a mesh: its samples count as much as those of the others."""

    loss_of = "sum"

    def __init__(self, mesh: Mesh, *stages: Any, **others: Any) -> None:
        super().__init__(*stages, **others)
        self.mesh, self.waits = mesh, Waits(mesh)

    def forward(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """The sum of the losses of this rank's samples."""
        if not batch.size:
            return self.model.nothing(batch, request, prepared)
        return super().forward(batch, request, prepared)

    def train(self, step: int, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Trained:
        """See `Stages.train`; loss and samples are those of all ranks."""
        with self.waits:
            loss = self.forward(batch, request, prepared)
            found = self.mesh.rows.figures([loss.item(), batch.size])
            parts = [found[rank] for rank in self.mesh.order]
            samples = sum(int(size) for _, size in parts)
            value = sum(part for part, _ in parts) / samples
            if not math.isfinite(value):
                refuse_loss(value, step)
            self.backward(loss / samples)
            self.update(step)
        return Trained(value, samples)

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
    """The `Reduction` and the `Agreement` of several processes: sums in the order of samples, one stops all.

    Parameters
    ----------
    mesh : Mesh
    network : Network
        Towers of it are reduced inside their hosts where the mesh is by towers.
    wire : str
        Format of gradients between ranks.
    """

    def __init__(self, mesh: Mesh, network: Network, wire: str = "fp32") -> None:
        self._mesh, self._type = mesh, torch.bfloat16 if wire == "bf16" else torch.float32
        self._mine: set[int] = set()
        self._of_towers: set[int] = set()
        if mesh.between is not None:
            assert isinstance(network, TowerNetwork)
            towers = [{id(weight) for weight in tower.parameters()} for tower in network.each]
            self._mine, self._of_towers = towers[mesh.between.rank], set().union(*towers)

    def reduce(self, weights: Sequence[nn.Parameter]) -> None:
        """See `Reduction.reduce`."""
        reduce_gradients(self._mesh.rows, self._common(weights), self._mesh.order, self._type)
        if self._mesh.inside is not None:
            reduce_gradients(self._mesh.inside.rows, self._own(weights), dtype=self._type)

    def norm(self, weights: Sequence[nn.Parameter]) -> Tensor:
        """See `Reduction.norm`."""
        if self._mesh.between is None:
            return gradient_norm(weights)
        common, tower = (gradient_norm(part) for part in (self._common(weights), self._own(weights)))
        # One rank of each host says the norm of its tower.
        found = self._mesh.between.rows.figures([tower.item()])
        whole: Tensor = torch.linalg.vector_norm(torch.tensor([common.item(), *(norm for (norm,) in found)]))
        return whole

    def _own(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [weight for weight in weights if id(weight) in self._mine]

    def _common(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [weight for weight in weights if id(weight) not in self._of_towers]

    def agree(self, seen: Seen) -> Seen:
        """Rank 0 has the clock; whoever was asked to stop stops all."""
        found = self._mesh.rows.figures([seen.checkpoint_age_seconds, seen.stop])
        return Seen(checkpoint_age_seconds=found[0][0], stop=any(stop for _, stop in found))


class Peers:
    """The `Exchange` of a model whose towers are on hosts of their own."""

    def __init__(self, model: DisaggregatedModel) -> None:
        self._model = model

    def features(self, request: Request, stopped: Callable[[], bool]) -> KeyedJagged:
        """See `Exchange.features`."""
        assert isinstance(request, PeerRequest)
        return self._model.exchange(request, stopped)


def gather_towers(model: CTRModel, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Give every rank weights and optimizer state of all towers, which their own hosts alone train; a collective."""
    if mesh.inside is None or mesh.between is None:
        return
    assert isinstance(model.network, TowerNetwork)
    mine: dict[str, Tensor] = {}
    if not mesh.inside.rank:
        for name, weight in model.network.towers[mesh.between.rank].named_parameters():
            mine[f"weight/{name}"] = weight.detach()
            mine |= {f"{key}/{name}": value for key, value in optimizer.state[weight].items()}
    contents = mesh.files.gather(safetensors.torch.save(mine) if mine else b"")
    others = [content for rank, content in enumerate(contents) if not rank % mesh.inside.ranks]
    for host, (tower, content) in enumerate(zip(model.network.each, others, strict=True)):
        if host != mesh.between.rank:
            _take(tower, optimizer, safetensors.torch.load(content) if content else {})


def _take(tower: nn.Module, optimizer: torch.optim.Optimizer, found: Mapping[str, Tensor]) -> None:
    weights = dict(tower.named_parameters())
    for key, value in found.items():
        part, name = key.split("/", 1)
        if part == "weight":
            weights[name].data.copy_(value)
        else:
            optimizer.state[weights[name]][part] = value
