"""A model whose towers are on hosts of their own: what travels between the hosts is what towers tell (SPTT).

    batch          which ids are asked of tower s                    to the peer on host s
    inside host t  lookups of tower t, for the samples of all peers  an exchange as any other, among the host's ranks
    tower t        histories, module                                 every rank of the host, for its peers' samples
    told           columns of every tower                            back to the peer whose samples they are of

A rank has its tower's samples as one batch, with what is deduplicated in it: peers send runs and windows with the ids.

Shapes: B_s samples of the peer on host s, W_t columns that tower t tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.distributed.collectives import never
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.exchange.input_dist import Requests
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharding import Place, Sharding
from stratarec.distributed.towers.peer_exchange import Hop, Told, send_requests
from stratarec.distributed.towers.peer_requests import TowerRequest, join, messages
from stratarec.distributed.wire import Wire
from stratarec.embedding import EmbeddingBagConfig, Handle
from stratarec.embedding.engine import Validator
from stratarec.errors import StrataError
from stratarec.models import CTRModel
from stratarec.models.request import Request
from stratarec.models.towers.network import TowerNetwork


@dataclass(frozen=True)
class Arrived:
    """What peers ask of this host's tower."""

    request: Request
    sizes: list[int]
    """B_s."""


@dataclass(frozen=True, kw_only=True)
class PeerRequest(Request):
    """A rank's own request, and what it got for it from its peers, once they exchanged."""

    samples: int
    arrived: list[Arrived] = field(default_factory=list)
    """At most one."""


class DisaggregatedModel(CTRModel):
    """A model with towers, of which this rank looks up and computes one, for the samples of its peers.

    Parameters
    ----------
    model : CTRModel
        With a `TowerNetwork`, and a collection whose engine holds the tables of this host's tower among its ranks.
    mesh : Mesh
        By towers.
    config : DistributedConfig
    seed : int
        Of the wires' noise.
    """

    def __init__(self, model: CTRModel, mesh: Mesh, config: DistributedConfig, seed: int) -> None:
        super().__init__(model.embeddings, model.network)
        assert isinstance(model.network, TowerNetwork)
        assert mesh.between is not None
        self._mesh, self._peers = mesh, mesh.between
        self.towers = model.network.each
        self.tower = self.towers[self._peers.rank]
        self._wires = (Wire(config.wire, seed, mesh.rank), Wire(config.gradient_wire, seed, mesh.rank))
        tables = model.embeddings.tables
        places = {table.name: Place(first=_tower_of(table, self.towers)) for table in tables}
        self._requests = Requests(Sharding(tables, places, self._peers.ranks))
        keys = tuple(key for table in tables for key in (*table.feature_names, *table.sequence_features))
        self._validator = Validator(keys)
        self._ranks = mesh.devices.mesh[:, mesh.place // self._peers.ranks].tolist() if mesh.devices else []

    def request(self, batch: Batch) -> PeerRequest:
        """See `CTRModel.request`."""
        found = super().request(batch)
        return PeerRequest(
            features=found.features, starts=found.starts, shared=found.shared, windows=found.windows, samples=batch.size
        )

    def features(self, request: Request, stopped: Callable[[], bool] = never, *, ahead: bool = True) -> KeyedJagged:
        """What peers ask of this host's tower, the `Exchange` of a step's stages; a collective of all ranks.

        Parameters
        ----------
        ahead : bool
            Whether the thread that prepares batches asks, which has connections of its own.

        Raises
        ------
        RankError
            On all ranks, where one of them has a batch that cannot be looked up.
        """
        assert isinstance(request, PeerRequest)
        # A bad batch of one rank is told with the sizes, so that no other waits for its ids.
        failed: StrataError | None = None
        mine = [torch.empty(0, dtype=torch.uint8)] * self._peers.ranks
        try:
            self._validator.check(request.features)
            mine = messages(request, request.samples, self._requests)
        except StrataError as error:
            failed = error
        channels = (self._peers.ids, self._mesh.ids) if ahead else (self._peers.rows, self._mesh.rows)
        parts = [TowerRequest.of(part) for part in send_requests(mine, failed, *channels, self._ranks, stopped)]
        found = join(parts, self._requests.streams[self._peers.rank])
        # In the request, which travels with the batch: the thread that trains finds it there.
        request.arrived.append(Arrived(found, [part.samples for part in parts]))
        return found.features

    def forward(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """See `CTRModel.forward`."""
        told = self._told(batch, request, prepared)
        return self.network.combined(batch.dense, told)  # type: ignore[operator, no-any-return]

    def nothing(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """See `CTRModel.nothing`."""
        return torch.cat(self._told(batch, request, prepared), dim=1).sum()

    def _told(self, batch: Batch, request: Request | None, prepared: Handle | None) -> list[Tensor]:
        """``[B, W_s]`` of every tower s."""
        mine = request or self.request(batch)
        assert isinstance(mine, PeerRequest)
        if not mine.arrived:
            self.features(mine, ahead=False)
        arrived, step = mine.arrived[0], self.embeddings.step
        size = sum(arrived.sizes)
        pooled, histories, runs = self.looked_up(arrived.request, size, self.tower.sequence_keys, prepared)
        if size:
            columns = self.tower(pooled.new_empty(size, 0), pooled, histories, runs)
        else:  # rows of this rank are asked for all the same
            columns = (
                pooled.sum() + sum(history.rows.sum() for history in histories) + torch.zeros(0, self.tower.columns)
            )
        widths = [tower.columns for tower in self.towers]
        hop = Hop(self._peers.rows, self._wires, widths, batch.size, arrived.sizes, step)
        return list(Told.apply(columns, hop))  # type: ignore[no-untyped-call]


def _tower_of(table: EmbeddingBagConfig, towers: Sequence[Any]) -> int:
    keys = {*table.feature_names, *table.sequence_features}
    return next(n for n, tower in enumerate(towers) if keys & {*tower.pooled_keys, *tower.sequence_keys})


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
    # Ranks of a host have the same tower, so the first of each speaks.
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
