"""Exchange by towers (SPTT, arXiv 2403.00877, section 3): only tower outputs are sent between
hosts.

    batch          requests to tower s                               to the peer on host s
    inside host t  lookups of tower t, for the samples of all peers  a flat exchange among the
                                                                     host's ranks
    tower t        histories, module                                 on every rank of the host, for
                                                                     its peers' samples
    outputs        columns of every tower                            back to the peer of the samples

There are T hosts with L ranks each. The *peers* of rank (t, l) are the ranks (0, l) to (T - 1, l),
one on each host. Rank (t, l) looks up the features of tower t for the samples of all its peers.
Peers exchange requests, tower outputs and gradients of tower outputs, each once per batch. A rank
processes the samples of its peers as one deduplicated batch, because peers send segments and
windows with the ids.

Shapes: B_s samples of the peer on host s, R_s segments of its samples, W_t output columns of tower
t.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged, offsets_of, slice_places
from stratarec.distributed.collectives import Channel, never
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.input_dist import Requests, RowRequest, bags_of, join_requests, parse_requests
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharding import IdStream, Place, Sharding
from stratarec.distributed.wire import Span, Wire
from stratarec.embedding import EmbeddingBagConfig, Handle
from stratarec.embedding.engine import Validator
from stratarec.errors import StrataError
from stratarec.models import CTRModel
from stratarec.models.history import HistoryWindows
from stratarec.models.request import Request
from stratarec.models.towers import TowerNetwork


@dataclass(frozen=True)
class Arrived:
    """Requests of all peers to this host's tower."""

    request: Request
    """Joined request of all peers."""
    sizes: list[int]
    """Number of samples of each peer, B_s."""


@dataclass(frozen=True, kw_only=True)
class PeerRequest(Request):
    """Request of this rank. The exchange adds the joined request of all peers to `arrived`, as the
    only entry.
    """

    samples: int
    """Number of samples of this rank's batch."""
    arrived: list[Arrived] = field(default_factory=list)


class DisaggregatedModel(CTRModel):
    """Model with towers. This rank computes one of them, for the samples of all its peers.

    Parameters
    ----------
    model : CTRModel
        Model with a `TowerNetwork`. Its collection has the tables of this host's tower.
    mesh : Mesh
        Mesh for the exchange by towers.
    config : DistributedConfig
        Sets the wires of tower outputs and their gradients.
    seed : int
        Seed of the rounding noise of wires.
    """

    def __init__(self, model: CTRModel, mesh: Mesh, config: DistributedConfig, seed: int) -> None:
        super().__init__(model.embeddings, model.network)
        assert isinstance(model.network, TowerNetwork)
        assert mesh.between is not None
        self._mesh = mesh
        self._peers = mesh.between
        self.towers = model.network.all_towers
        self.tower = self.towers[self._peers.rank]
        self._wires = (Wire(config.wire, seed, mesh.rank), Wire(config.gradient_wire, seed, mesh.rank))
        tables = model.embeddings.tables
        places = {table.name: Place(first=_tower_of(table, self.towers)) for table in tables}
        self._requests = Requests(Sharding(tables, places, self._peers.ranks))
        keys = tuple(key for table in tables for key in (*table.feature_names, *table.sequence_features))
        self._validator = Validator(keys)
        self._ranks = mesh.devices.mesh[:, mesh.place // self._peers.ranks].tolist() if mesh.devices else []

    def request(self, batch: Batch) -> PeerRequest:
        """Return the ids of `batch` to look up; each distinct value of a deduplication group
        appears once.
        """
        base = super().request(batch)
        return PeerRequest(
            features=base.features,
            starts=base.starts,
            shared=base.shared,
            windows=base.windows,
            samples=batch.size,
        )

    def features(
        self, request: Request, stopped: Callable[[], bool] = never, *, ahead: bool = True
    ) -> KeyedJagged:
        """Exchange requests with peers; return the features to look up in this host's tower. A
        collective of all ranks.

        Parameters
        ----------
        request : PeerRequest
            Result of `request` for this rank's batch.
        stopped : callable
            The wait for other ranks is aborted when it returns true.
        ahead : bool
            Whether the call is on the thread that stages batches, which has separate connections.

        Raises
        ------
        RankError
            On all ranks, if one of them has a batch that cannot be looked up.
        """
        assert isinstance(request, PeerRequest)
        # An invalid batch is reported together with the sizes, so that no rank waits for its ids.
        failed: StrataError | None = None
        mine = [torch.empty(0, dtype=torch.uint8)] * self._peers.ranks
        try:
            self._validator.check(request.features)
            mine = messages(request, request.samples, self._requests)
        except StrataError as error:
            failed = error
        channels = (self._peers.ids, self._mesh.ids) if ahead else (self._peers.rows, self._mesh.rows)
        parts = [
            TowerRequest.of(part) for part in send_requests(mine, failed, *channels, self._ranks, stopped)
        ]
        joined = join(parts, self._requests.streams[self._peers.rank])
        # Stored in the request, by which the training thread receives it.
        request.arrived.append(Arrived(joined, [part.samples for part in parts]))
        return joined.features

    def forward(self, batch: Batch, request: Request | None = None, handle: Handle | None = None) -> Tensor:
        outputs = self._tower_outputs(batch, request, handle)
        return self.network.combine(batch.dense, outputs)  # type: ignore[operator, no-any-return]

    def lookup_zero(
        self, batch: Batch, request: Request | None = None, handle: Handle | None = None
    ) -> Tensor:
        return torch.cat(self._tower_outputs(batch, request, handle), dim=1).sum()

    def _tower_outputs(self, batch: Batch, request: Request | None, handle: Handle | None) -> list[Tensor]:
        """Return the output ``[B, W_s]`` of every tower s for this rank's samples."""
        mine = request or self.request(batch)
        assert isinstance(mine, PeerRequest)
        if not mine.arrived:
            self.features(mine, ahead=False)
        arrived, step = mine.arrived[0], self.embeddings.step
        size = sum(arrived.sizes)
        pooled, histories, segments = self.look_up(arrived.request, size, self.tower.sequence_keys, handle)
        if size:
            columns = self.tower(pooled.new_empty(size, 0), pooled, histories, segments)
        else:  # other ranks of the host still request rows of this rank
            columns = (
                pooled.sum()
                + sum(history.rows.sum() for history in histories)
                + torch.zeros(0, self.tower.columns)
            )
        widths = [tower.columns for tower in self.towers]
        exchange = PeerExchange(self._peers.rows, self._wires, widths, batch.size, arrived.sizes, step)
        return list(_ExchangeOutputs.apply(columns, exchange))  # type: ignore[no-untyped-call]


def _tower_of(table: EmbeddingBagConfig, towers: Sequence[Any]) -> int:
    keys = {*table.feature_names, *table.sequence_features}
    return next(n for n, tower in enumerate(towers) if keys & {*tower.pooled_keys, *tower.sequence_keys})


def gather_towers(model: CTRModel, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Copy the weights and optimizer state of every tower to all ranks; a collective.

    Each tower is trained only on its own host.

    Parameters
    ----------
    model : CTRModel
        Model of this rank. If its mesh is not one for the exchange by towers, nothing happens.
    optimizer : torch.optim.Optimizer
        Optimizer of its network.
    mesh : Mesh
        Ranks of the run.
    """
    if mesh.inside is None or mesh.between is None:
        return
    assert isinstance(model.network, TowerNetwork)
    mine: dict[str, Tensor] = {}
    if not mesh.inside.rank:
        for name, weight in model.network.towers[mesh.between.rank].named_parameters():
            mine[f"weight/{name}"] = weight.detach()
            mine |= {f"{key}/{name}": value for key, value in optimizer.state[weight].items()}
    # All ranks of a host have the same tower, so the first rank of the host sends it.
    contents = mesh.files.gather(safetensors.torch.save(mine) if mine else b"")
    others = [content for rank, content in enumerate(contents) if not rank % mesh.inside.ranks]
    for host, (tower, content) in enumerate(zip(model.network.all_towers, others, strict=True)):
        if host != mesh.between.rank:
            _take(tower, optimizer, safetensors.torch.load(content) if content else {})


def _take(tower: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    weights = dict(tower.named_parameters())
    for key, value in tensors.items():
        part, name = key.split("/", 1)
        if part == "weight":
            weights[name].data.copy_(value)
        else:
            optimizer.state[weights[name]][part] = value


@dataclass(frozen=True, kw_only=True)
class TowerRequest:
    """Request of one peer to one tower.

    Parameters
    ----------
    asked : sequence of RowRequest
        Requests for rows, one per stream.
    samples : int
        Number of samples of the peer, B_s.
    segments : Tensor or None
        ``[R_s]`` int64 number of samples of each segment; None without segments.
    shared : frozenset of str
        Features with one request per segment instead of one per sample.
    windows : mapping of str to HistoryWindows
        Windows of the histories of each feature without pooling.
    """

    asked: Sequence[RowRequest]
    samples: int
    segments: Tensor | None
    shared: frozenset[str]
    windows: Mapping[str, HistoryWindows]

    def message(self, ids: Tensor) -> Tensor:
        """Return the request as a flat uint8 message; `ids` are the lengths and ids of `asked`
        (`Requests.message`).
        """
        header = {
            "counts": [number for request in self.asked for number in request.counts],
            "samples": self.samples,
            "shared": sorted(self.shared),
            "segments": self.segments is not None,
            "windows": {key: window.inverse is not None for key, window in self.windows.items()},
        }
        arrays = [ids] if self.segments is None else [ids, self.segments.int()]
        for window in self.windows.values():
            parts = (window.start, window.length, window.inverse)
            arrays += [part.int() for part in parts if part is not None]
        return packed(header, arrays)

    @classmethod
    def of(cls, message: Tensor) -> TowerRequest:
        """Return the request in a message that `TowerRequest.message` returned."""
        header, (ids, *arrays) = unpacked(message)
        parts = iter(arrays)
        segments = next(parts).long() if header["segments"] else None
        windows = {
            key: HistoryWindows(
                start=next(parts).long(),
                length=next(parts).long(),
                inverse=next(parts) if inverse else None,
            )
            for key, inverse in header["windows"].items()
        }
        asked = parse_requests(ids, header["counts"])
        return cls(
            asked=asked,
            samples=header["samples"],
            segments=segments,
            shared=frozenset(header["shared"]),
            windows=windows,
        )

    def by_sample(self, streams: Sequence[IdStream]) -> TowerRequest:
        """Return an equal request without segments, with an entry for each sample; `streams` are
        those of `asked`.
        """
        if self.segments is None:
            return self
        asked = [
            _repeated(request, self.segments) if stream.key in self.shared else request
            for stream, request in zip(streams, self.asked, strict=True)
        ]
        return replace(self, asked=asked, segments=None, shared=frozenset())


def _repeated(asked: RowRequest, times: Tensor) -> RowRequest:
    """Repeat bag i ``times[i]`` times."""
    if asked.lengths is None:
        return RowRequest(bags=int(times.sum()), ids=asked.ids.repeat_interleave(times))
    lengths = asked.lengths.long()
    start = (offsets_of(lengths)[:-1]).repeat_interleave(times)
    lengths = lengths.repeat_interleave(times)
    return RowRequest(bags=len(lengths), ids=asked.ids[slice_places(start, lengths)[0]], lengths=lengths)


def join(parts: Sequence[TowerRequest], streams: Sequence[IdStream]) -> Request:
    """Join the requests of all peers into one.

    Parameters
    ----------
    parts : sequence of TowerRequest
        Request of each peer. The samples of the result have the same order.
    streams : sequence of IdStream
        Streams of ids to this host's tower.
    """
    shared = frozenset[str]().union(*(part.shared for part in parts))
    # If peers use segments for different features, all requests are converted to requests without
    # segments.
    if any(part.segments is not None and part.shared != shared for part in parts):
        parts, shared = [part.by_sample(streams) for part in parts], frozenset()
    features = join_requests(
        streams, [part.asked for part in parts], least=sum(part.samples for part in parts)
    )
    starts = None
    if shared:
        sizes = [
            torch.ones(part.samples, dtype=torch.int64) if part.segments is None else part.segments
            for part in parts
        ]
        starts = offsets_of(torch.cat(sizes))
    windows = {}
    for place, stream in enumerate(streams):
        if stream.kind == "sequence":
            events = [part.asked[place].ids.numel() for part in parts]
            windows[stream.key] = _joined_windows([part.windows[stream.key] for part in parts], events)
    return Request(features=features, starts=starts, shared=shared, windows=windows)


def _joined_windows(parts: Sequence[HistoryWindows], events: Sequence[int]) -> HistoryWindows:
    firsts, histories = (
        np.cumsum([0, *events]).tolist(),
        np.cumsum([0, *(len(part.start) for part in parts)]).tolist(),
    )
    start = torch.cat([part.start + first for part, first in zip(parts, firsts, strict=False)])
    inverse = None
    if any(part.inverse is not None for part in parts):
        parts_inverse = [
            torch.arange(len(part.start)) if part.inverse is None else part.inverse for part in parts
        ]
        inverse = torch.cat([part + first for part, first in zip(parts_inverse, histories, strict=False)])
    return HistoryWindows(start=start, length=torch.cat([part.length for part in parts]), inverse=inverse)


def messages(request: Request, samples: int, requests: Requests) -> list[Tensor]:
    """Return the message to each tower for a batch, flat uint8.

    Parameters
    ----------
    request : Request
        Ids of this rank's batch.
    samples : int
        Number of samples of the batch.
    requests : Requests
        Divides ids by the towers of their tables; a tower takes the place of an owner.

    Raises
    ------
    ConfigError
        If a feature is missing or an id is outside its table.
    """
    asked, _ = requests.split(request.features)
    segments = None if request.starts is None else request.starts.diff()
    encoded = []
    for streams, part in zip(requests.streams, asked, strict=True):
        windows = {
            stream.key: _windows(request, stream.key) for stream in streams if stream.kind == "sequence"
        }
        shared = request.shared & {stream.key for stream in streams}
        mine = TowerRequest(
            asked=part,
            samples=samples,
            segments=segments if shared else None,
            shared=shared,
            windows=windows,
        )
        encoded.append(mine.message(requests.message(part)))
    return encoded


def _windows(request: Request, key: str) -> HistoryWindows:
    """Return the windows of a feature's histories, which are slices of its ids."""
    if key in request.windows:
        return request.windows[key]
    features = request.features
    ids, lengths = bags_of(features, key)
    if lengths is None:
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
    return HistoryWindows(start=offsets_of(lengths)[:-1], length=lengths)


_TYPES = {"int32": torch.int32, "int64": torch.int64}


def packed(header: Any, arrays: Sequence[Tensor]) -> Tensor:
    """Pack JSON data `header` and int32 or int64 `arrays` as flat uint8; see `unpacked`."""
    shapes = [(str(array.dtype).removeprefix("torch."), array.numel()) for array in arrays]
    head = json.dumps([header, shapes]).encode()
    # Arrays begin at multiples of 8 bytes, as their types require.
    head += b" " * (-len(head) % 8)
    size = torch.tensor([len(head)]).view(torch.uint8)
    parts = [array.contiguous().view(-1).view(torch.uint8) for array in arrays]
    padded = [torch.nn.functional.pad(part, (0, -part.numel() % 8)) for part in parts]
    return torch.cat([size, torch.from_numpy(np.frombuffer(head, dtype=np.uint8).copy()), *padded])


def unpacked(content: Tensor) -> tuple[Any, list[Tensor]]:
    """Return the JSON value and the arrays in `content`, the result of `packed`."""
    length = int(content[:8].clone().view(torch.int64))
    header, shapes = json.loads(content[8 : 8 + length].numpy().tobytes())
    arrays, at = [], 8 + length
    for kind, count in shapes:
        size = count * _TYPES[kind].itemsize
        arrays.append(content[at : at + size].clone().view(_TYPES[kind]))
        at += size + -size % 8
    return header, arrays


def send_requests(
    messages: Sequence[Tensor],
    failed: StrataError | None,
    peers: Channel,
    everybody: Channel,
    order: Sequence[int],
    stopped: Callable[[], bool] = never,
) -> list[Tensor]:
    """Exchange messages with all peers; a collective of all ranks.

    Parameters
    ----------
    messages : sequence of Tensor
        Flat uint8, one for each host.
    failed : StrataError or None
        Error that left this rank without messages, or None.
    peers, everybody : Channel
        Channel of this rank's peers, and channel of all ranks.
    order : sequence of int
        Numbers of this rank's peers among all ranks.
    stopped : callable
        The wait for other ranks is aborted when it returns true.

    Raises
    ------
    RankError
        On all ranks, if one of them failed.
    """
    sizes = [message.numel() for message in messages]
    # Sizes and failures in one collective of all ranks, as peers could not stop the others.
    gathered = everybody.gather_ints([failed is not None, *sizes], stopped)
    if any(numbers[0] for numbers in gathered):
        everybody.raise_everywhere(failed, [numbers[0] for numbers in gathered])
    theirs = [gathered[rank][1 + peers.rank] for rank in order]
    received = peers.exchange(torch.cat(list(messages)), sizes, theirs, stopped)
    return list(received.split(theirs))  # type: ignore[no-untyped-call]


class _ExchangeOutputs(torch.autograd.Function):
    """Send this host's tower outputs ``[sum of B_s, W_t]`` to the peers, and receive all towers'
    outputs for this rank.

    Forward and backward are one collective of peers each. The results are ``[B, W_s]`` for each
    tower s.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, exchange: PeerExchange) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(True)
        parts = mine.detach().split(exchange.sizes)  # type: ignore[no-untyped-call]
        return tuple(exchange.send(parts, exchange.sent, exchange.received, exchange.wire, "towers"))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchange: PeerExchange = ctx.exchange
        mine = exchange.send(
            gradients, exchange.received, exchange.sent, exchange.gradient_wire, "tower gradients"
        )
        return torch.cat(mine), None


class PeerExchange:
    """Exchange of the tower outputs of one batch between peers.

    Parameters
    ----------
    channel : Channel
        Channel of peers.
    wires : tuple of Wire
        Wire of tower outputs and wire of their gradients.
    columns : sequence of int
        Number of output columns of each tower, W_t.
    samples : int
        Samples of this rank.
    sizes : sequence of int
        Number of samples of each peer, B_s.
    step : int
        Number of the step, of which the noise of stochastic rounding is a function.
    """

    def __init__(
        self,
        channel: Channel,
        wires: tuple[Wire, Wire],
        columns: Sequence[int],
        samples: int,
        sizes: Sequence[int],
        step: int,
    ) -> None:
        self.channel = channel
        self.wire, self.gradient_wire = wires
        self.step = step
        self.sizes = list(sizes)
        # Shapes of tower outputs: received from each tower, and sent to each peer.
        self.received = [Span(samples, width) for width in columns]
        self.sent = [Span(size, columns[channel.rank]) for size in sizes]

    def send(
        self,
        rows: Sequence[Tensor],
        sent: Sequence[Span],
        received: Sequence[Span],
        wire: Wire,
        direction: str,
    ) -> list[Tensor]:
        """Send rows to each peer, and return the rows from each peer; a collective of peers.

        Parameters
        ----------
        rows : sequence of Tensor
            Rows for each peer.
        sent, received : sequence of Span
            Shape of the rows for each peer, and of the rows from each peer.
        wire : Wire
            Encodes the rows.
        direction : str
            Name of the direction, of which the noise of stochastic rounding is a function.
        """
        # Under autocast tower outputs are bfloat16; wires encode float32.
        flat = torch.cat([part.float().reshape(-1) for part in rows])
        message = wire.encode(flat, sent, direction, self.step)
        sent_sizes, sizes = ([wire.bytes_of([shape]) for shape in shapes] for shapes in (sent, received))
        floats = wire.decode(self.channel.exchange(message, sent_sizes, sizes), received)
        parts = floats.split([count * width for count, width in received])  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(parts, received, strict=True)]
