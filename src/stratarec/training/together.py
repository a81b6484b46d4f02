"""What several processes of a run do between the stages of a step: sums, agreement, and requests to peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stratarec.batch.jagged import KeyedJagged
from stratarec.distributed.gradients import reduce_gradients
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import SharedEngine
from stratarec.distributed.towers.tower_model import DisaggregatedModel, PeerRequest
from stratarec.distributed.wire import WIRES, DenseWireKind
from stratarec.models.base import Network
from stratarec.models.request import Request
from stratarec.models.towers.network import TowerNetwork
from stratarec.training.cadence import Seen
from stratarec.training.pipeline import gradient_norm


class Together:
    """The `Reduction` of several processes, and what they agree on: sums in the order of samples, one stops all.

    Parameters
    ----------
    mesh : Mesh
    network : Network
        Towers of it are reduced inside their hosts where the mesh is by towers.
    wire : str
        Format of gradients between ranks.
    engine : SharedEngine or None
        Whose hot rows are trained by sums made with those of the network.
    """

    def __init__(
        self, mesh: Mesh, network: Network, wire: DenseWireKind = "fp32", engine: SharedEngine | None = None
    ) -> None:
        self._mesh, self._type = mesh, WIRES[wire].dense or torch.float32
        self._engine = engine
        self._mine: set[int] = set()
        self._of_towers: set[int] = set()
        if mesh.between is not None:
            assert isinstance(network, TowerNetwork)
            towers = [{id(weight) for weight in tower.parameters()} for tower in network.each]
            self._mine, self._of_towers = towers[mesh.between.rank], set().union(*towers)

    def reduce(self, weights: Sequence[nn.Parameter]) -> None:
        """See `Reduction.reduce`."""
        hot = None if self._engine is None else self._engine.hot_gradients
        more = [] if hot is None else [hot]
        sums = reduce_gradients(self._mesh.rows, self._common(weights), self._mesh.order, self._type, more)
        for each in sums:
            assert self._engine is not None
            self._engine.train_hot_rows(each)
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
