"""A model whose towers are on hosts of their own: what travels between the hosts is what towers tell (SPTT).

    batch          which ids are asked of tower s                    to the peer on host s
    inside host t  lookups of tower t, for the samples of all peers  an exchange as any other, among the host's ranks
    tower t        histories, module                                 every rank of the host, for its peers' samples
    told           columns of every tower                            back to the peer whose samples they are of

A rank has its tower's samples as one batch, with what is deduplicated in it: peers send runs and windows with the ids.

Shapes: B_s samples of the peer on host s, R_s runs of its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratarec.batch import Batch
from stratarec.distributed.asked import Asked, read
from stratarec.distributed.collectives import never
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.peers import Hop, Told, packed, send_requests, unpacked
from stratarec.distributed.requests import Requests, bags_of, joined
from stratarec.distributed.sharding import Place, Sharding, Stream
from stratarec.distributed.wire import Wire
from stratarec.embedding import EmbeddingBagConfig, Handle
from stratarec.embedding.validation import Validator
from stratarec.errors import StrataError
from stratarec.jagged import KeyedJagged, offsets_of, slice_places
from stratarec.models import CTRModel
from stratarec.models.history import Windows
from stratarec.models.request import Request
from stratarec.models.tower_network import TowerNetwork


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one peer asks of one tower.

    Parameters
    ----------
    asked : sequence of Asked
        Stream by stream.
    samples : int
        B_s.
    runs : Tensor or None
        ``[R_s]`` samples of each run; None where every sample is one.
    shared : frozenset of str
        Features that are asked for by run.
    windows : mapping of str to Windows
        Of every feature that is not pooled.
    """

    asked: Sequence[Asked]
    samples: int
    runs: Tensor | None
    shared: frozenset[str]
    windows: Mapping[str, Windows]

    def message(self, ids: Tensor) -> Tensor:
        """As it travels; `ids` are the lengths and ids of `asked`."""
        note = {
            "announced": [number for each in self.asked for number in each.announced],
            "samples": self.samples,
            "shared": sorted(self.shared),
            "runs": self.runs is not None,
            "windows": {key: window.inverse is not None for key, window in self.windows.items()},
        }
        arrays = [ids] if self.runs is None else [ids, self.runs.int()]
        for window in self.windows.values():
            parts = (window.start, window.length, window.inverse)
            arrays += [part.int() for part in parts if part is not None]
        return packed(note, arrays)

    @classmethod
    def of(cls, message: Tensor) -> Part:
        """What a message says."""
        note, (ids, *arrays) = unpacked(message)
        found = iter(arrays)
        runs = next(found).long() if note["runs"] else None
        windows = {
            key: Windows(start=next(found).long(), length=next(found).long(), inverse=next(found) if inverse else None)
            for key, inverse in note["windows"].items()
        }
        asked = read(ids, note["announced"])
        return cls(
            asked=asked, samples=note["samples"], runs=runs, shared=frozenset(note["shared"]), windows=windows
        )  # fmt: skip

    def by_sample(self, streams: Sequence[Stream]) -> Part:
        """The same, asked for sample by sample."""
        if self.runs is None:
            return self
        asked = [
            _repeated(each, self.runs) if stream.key in self.shared else each
            for stream, each in zip(streams, self.asked, strict=True)
        ]
        return replace(self, asked=asked, runs=None, shared=frozenset())


def _repeated(asked: Asked, times: Tensor) -> Asked:
    """Each bag so many times."""
    if asked.lengths is None:
        return Asked(bags=int(times.sum()), ids=asked.ids.repeat_interleave(times))
    lengths = asked.lengths.long()
    start = (offsets_of(lengths)[:-1]).repeat_interleave(times)
    lengths = lengths.repeat_interleave(times)
    return Asked(bags=len(lengths), ids=asked.ids[slice_places(start, lengths)[0]], lengths=lengths)


def join(parts: Sequence[Part], streams: Sequence[Stream]) -> Request:
    """One request of the samples of all parts, one after another."""
    shared = frozenset[str]().union(*(part.shared for part in parts))
    if any(part.runs is not None and part.shared != shared for part in parts):
        parts, shared = [part.by_sample(streams) for part in parts], frozenset()
    features = joined(streams, [part.asked for part in parts], least=sum(part.samples for part in parts))
    starts = None
    if shared:
        sizes = [torch.ones(part.samples, dtype=torch.int64) if part.runs is None else part.runs for part in parts]
        starts = offsets_of(torch.cat(sizes))
    windows = {}
    for place, stream in enumerate(streams):
        if stream.kind == "sequence":
            events = [part.asked[place].ids.numel() for part in parts]
            windows[stream.key] = _joined_windows([part.windows[stream.key] for part in parts], events)
    return Request(features=features, starts=starts, shared=shared, windows=windows)


def _joined_windows(parts: Sequence[Windows], events: Sequence[int]) -> Windows:
    firsts, histories = np.cumsum([0, *events]).tolist(), np.cumsum([0, *(len(part.start) for part in parts)]).tolist()
    start = torch.cat([part.start + first for part, first in zip(parts, firsts, strict=False)])
    inverse = None
    if any(part.inverse is not None for part in parts):
        own = [torch.arange(len(part.start)) if part.inverse is None else part.inverse for part in parts]
        inverse = torch.cat([part + first for part, first in zip(own, histories, strict=False)])
    return Windows(start=start, length=torch.cat([part.length for part in parts]), inverse=inverse)


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

    def exchange(self, request: PeerRequest, stopped: Callable[[], bool] = never, *, ahead: bool = True) -> KeyedJagged:
        """What peers ask of this host's tower; a collective of all ranks.

        Parameters
        ----------
        ahead : bool
            Whether the thread that prepares batches asks, which has connections of its own.

        Raises
        ------
        RankError
            On all ranks, where one of them has a batch that cannot be looked up.
        """
        failed: StrataError | None = None
        messages = [torch.empty(0, dtype=torch.uint8)] * self._peers.ranks
        try:
            self._validator.check(request.features)
            messages = self._messages(request)
        except StrataError as error:
            failed = error
        channels = (self._peers.ids, self._mesh.ids) if ahead else (self._peers.rows, self._mesh.rows)
        parts = [Part.of(part) for part in send_requests(messages, failed, *channels, self._ranks, stopped)]
        found = join(parts, self._requests.streams[self._peers.rank])
        request.arrived.append(Arrived(found, [part.samples for part in parts]))
        return found.features

    def _messages(self, request: PeerRequest) -> list[Tensor]:
        asked, _ = self._requests.split(request.features)
        runs = None if request.starts is None else request.starts.diff()
        found = []
        for streams, part in zip(self._requests.streams, asked, strict=True):
            windows = {stream.key: _windows(request, stream.key) for stream in streams if stream.kind == "sequence"}
            shared = request.shared & {stream.key for stream in streams}
            mine = Part(
                asked=part, samples=request.samples, runs=runs if shared else None, shared=shared, windows=windows
            )  # fmt: skip
            found.append(mine.message(self._requests.message(part)))
        return found

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
            self.exchange(mine, ahead=False)
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


def _windows(request: Request, key: str) -> Windows:
    """Which of a feature's ids the histories are."""
    if key in request.windows:
        return request.windows[key]
    features = request.features
    ids, lengths = bags_of(features, key)
    if lengths is None:
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
    return Windows(start=offsets_of(lengths)[:-1], length=lengths)
