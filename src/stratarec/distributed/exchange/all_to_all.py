"""The flat exchange: ids go to the owners of their rows, rows come back, gradients go the same way as the ids.

`dispatch` sends the ids of a batch and gives the handle by which `combine` takes what is looked up, and
`combine_backward` returns the gradients. Two collectives before a batch (what is asked for, and the ids), on the thread
that prepares ahead; one for the rows and one for the gradients, on the thread that trains.

Shapes: B samples of this rank, G bags of all ranks together, W columns of the pooled output, S streams of an owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.distributed.collectives import Channel, never
from stratarec.distributed.exchange.input_dist import (
    WORDS,
    DistinctRows,
    Requests,
    RowRequest,
    joined,
    message_sizes,
    read,
)
from stratarec.distributed.exchange.message import MessageLayout
from stratarec.distributed.exchange.row_buffer import Buffer, grouped
from stratarec.distributed.hot_replicas import HotGradients, Replicas
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharding import Sharding
from stratarec.distributed.wire import Wire
from stratarec.embedding.engine import Engine, Validator
from stratarec.errors import ConfigError, StrataError
from stratarec.kernels.runtime.memory import RECYCLER


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """One batch's ways through the exchange.

    Parameters
    ----------
    features : KeyedJagged
        Of this rank.
    step : int
        Number of the batch, for the noise of wires.
    own : KeyedJagged
        What this rank's own tables are asked for, by all.
    asking : MessageLayout
        Arrays: pooled output, rows of each sequence feature that travels whole, each buffer of distinct rows.
    answering : MessageLayout
        Arrays: own pooled output, own sequence features in the order of their engine.
    """

    features: KeyedJagged
    step: int
    own: KeyedJagged
    buffers: Sequence[Buffer]
    sequences: Sequence[int]
    """Ids of each sequence feature that travels whole."""
    asking: MessageLayout
    answering: MessageLayout
    own_shapes: Sequence[tuple[int, int]]
    """Of the arrays of `answering`."""
    idle: bool
    """Whether no rank asks any for a row: all that are looked up are hot. All ranks know, so none waits for rows."""


class FlatExchange:
    """Every rank with every other, as all sharded embeddings do.

    Parameters
    ----------
    sharding : Sharding
    mesh : Mesh
        The ranks that exchange rows.
    wires : tuple of Wire
        Of rows, and of gradients.
    own : Engine or None
        Of this rank's own tables.
    replicas : Replicas or None
        Hot rows, which do not travel.
    """

    def __init__(
        self, sharding: Sharding, mesh: Mesh, wires: tuple[Wire, Wire], own: Engine | None, replicas: Replicas | None
    ) -> None:  # fmt: skip
        self._rank, self._rows, self._replicas = mesh.rank, mesh.rows, replicas
        self._wire, self._gradient_wire = wires
        self._requests = Requests(sharding, replicas)
        self._streams, tables = self._requests.streams, sharding.tables
        pooled = tuple(key for table in tables for key in table.feature_names)
        widths = tuple(table.embedding_dim for table in tables for _ in table.feature_names)
        self._columns, self._width = _columns(pooled, widths), sum(widths)
        travel = {name: place.travel for name, place in sharding.places.items()}
        self._buffers = grouped([table for table in tables if travel[table.name] == "rows"], self._columns)
        self._whole = {
            key: table.embedding_dim
            for table in tables if travel[table.name] == "pooled" for key in table.sequence_features
        }  # fmt: skip
        self.row_order = (*self._whole, *(key for group in self._buffers for _, key in group.sequences))
        keys, dims = (own.pooled_keys, own.dims) if own else ((), ())
        self._own_columns, self._own_width = _columns(keys, dims), sum(dims)
        self._own_rows = own.row_order if own else ()
        self._validator = Validator((*pooled, *(key for table in tables for key in table.sequence_features)))

    # Ids

    def dispatch(
        self, features: KeyedJagged, step: int, channel: Channel, stopped: Callable[[], bool] = never
    ) -> Dispatched:  # fmt: skip
        """Send the ids of a batch to their owners; a collective.

        Parameters
        ----------
        step : int
            Number of the batch.
        channel : Channel
            Of the thread that this is called on.
        stopped : callable
            See `Channel.exchange`.

        Raises
        ------
        RankError
            On all ranks, where one of them has a batch that cannot be looked up.
        """
        failed: StrataError | None = None
        asked: list[list[RowRequest]] = [[] for _ in range(channel.ranks)]
        distinct: dict[str, DistinctRows] = {}
        try:
            self._validator.check(features)
            if features.weights is not None:
                raise ConfigError("per-sample weights do not travel between ranks; leave them out, or use one process")
            asked, distinct = self._requests.split(features)
        except StrataError as error:
            failed = error
        theirs, idle = self._announce(asked, failed, channel, stopped)
        # Lengths and ids of one owner lie together: one message, however many streams.
        message = [self._requests.message(part) for part in asked]
        sizes, taken = message_sizes(theirs), torch.cat(message)
        if not idle:
            taken = channel.exchange(taken, [part.numel() for part in message], sizes, stopped)
        requests = [
            read(part, numbers)
            for part, numbers in zip(taken.split(sizes), theirs.tolist(), strict=True)  # type: ignore[no-untyped-call]
        ]  # fmt: skip
        buffers = [group.of(features, distinct) for group in self._buffers]
        own = joined(self._streams[self._rank], requests)
        answering, shapes = self._answering(requests, own.batch_size)
        lengths = {
            stream.key: each.ids.numel()
            for part, mine in zip(asked, self._streams, strict=True)
            for stream, each in zip(mine, part, strict=True)
            if stream.kind == "sequence"
        }
        return Dispatched(
            features=features, step=step, own=own, buffers=buffers, sequences=[lengths[key] for key in self._whole],
            asking=self._asking(asked, buffers), answering=answering, own_shapes=shapes, idle=idle,
        )  # fmt: skip

    def _announce(
        self, asked: Sequence[Sequence[RowRequest]], failed: StrataError | None, channel: Channel,
        stopped: Callable[[], bool],
    ) -> tuple[NDArray[np.int64], bool]:  # fmt: skip
        """``[ranks, S * WORDS]`` what each rank is going to ask this one for; whether no rank asks any."""
        counts = [2 + WORDS * len(streams) for streams in self._streams]
        numbers, at = np.zeros(sum(counts), dtype=np.int64), 0
        # Told beside the failure, so that it costs no collective of its own.
        asks = any(each.rows or each.ids.numel() for part in asked for each in part)
        for part, count in zip(asked, counts, strict=True):
            # A rank that failed asks for nothing, and still takes part: the others would wait for it.
            numbers[at : at + 2] = failed is not None, asks
            numbers[at + 2 : at + 2 + WORDS * len(part)] = [number for each in part for number in each.announced]
            at += count
        mine = counts[self._rank]
        taken = channel.exchange(torch.from_numpy(numbers), counts, [mine] * channel.ranks, stopped)
        theirs = taken.view(channel.ranks, mine).numpy()
        if theirs[:, 0].any():
            channel.raise_together(failed, theirs[:, 0].tolist())
        return theirs[:, 2:], not theirs[:, 1].any()

    def _asking(self, asked: Sequence[Sequence[RowRequest]], buffers: Sequence[Buffer]) -> MessageLayout:
        """Where what comes from each rank goes."""
        whole = {key: 1 + place for place, key in enumerate(self._whole)}
        begin = 1 + len(whole)
        buffer_of = {table: begin + place for place, buffer in enumerate(buffers) for table in buffer.first_row}
        # Rows of a table lie in the order of its owners, so each owner's begin where those before end.
        row_of = {table: first for buffer in buffers for table, first in buffer.first_row.items()}
        layout = MessageLayout(begin + len(buffers))
        for streams, part in zip(self._streams, asked, strict=True):
            layout.begin()
            for stream, each in zip(streams, part, strict=True):
                width, name = stream.table.embedding_dim, stream.table.name
                if stream.kind == "pooled":
                    layout.add(0, each.rows, width, self._columns[stream.key], self._width)
                elif stream.kind == "sequence":
                    layout.add(whole[stream.key], each.rows, width, 0, width)
                else:
                    layout.add(buffer_of[name], each.rows, width, row_of[name] * width, width)
                    row_of[name] += each.rows
        return layout

    def _answering(
        self, requests: Sequence[Sequence[RowRequest]], bags: int
    ) -> tuple[MessageLayout, list[tuple[int, int]]]:
        """Where what each rank asks for lies in what this rank's tables give, and the shapes of that."""
        streams, row_array = self._streams[self._rank], {key: 1 + n for n, key in enumerate(self._own_rows)}
        # `done`: ranks follow one another in each stream, as `joined` laid their bags out.
        shapes, done = [(bags, self._own_width), *((0, 0) for _ in row_array)], [0] * len(streams)
        layout = MessageLayout(1 + len(row_array))
        for part in requests:
            layout.begin()
            for place, (stream, each) in enumerate(zip(streams, part, strict=True)):
                width = stream.table.embedding_dim
                if stream.kind == "pooled":
                    first = done[place] * self._own_width + self._own_columns[stream.key]
                    layout.add(0, each.rows, width, first, self._own_width)
                else:
                    layout.add(row_array[stream.key], each.rows, width, done[place] * width, width)
                done[place] += each.rows
        for stream, rows in zip(streams, done, strict=True):
            if stream.kind != "pooled":
                shapes[row_array[stream.key]] = (rows, stream.table.embedding_dim)
        return layout, shapes

    # Rows and gradients

    def combine(self, rows: Sequence[Tensor], dispatched: Dispatched) -> tuple[Tensor, ...]:
        """What a batch looks up: pooled output ``[B, W]`` and the rows of sequences in `row_order`; a collective.

        Parameters
        ----------
        rows : sequence of Tensor
            What this rank's own tables gave for `Dispatched.own`: pooled output and rows of each sequence feature.
        """
        asking, answering, wire = dispatched.asking, dispatched.answering, self._wire
        pooled = RECYCLER.empty(dispatched.features.batch_size, self._width)
        whole = [
            RECYCLER.empty(count, width)
            for count, width in zip(dispatched.sequences, self._whole.values(), strict=True)
        ]
        buffers = [RECYCLER.empty(buffer.rows, buffer.group.width) for buffer in dispatched.buffers]
        if not dispatched.idle:
            message = wire.encode(answering.pack(rows), answering.spans, "rows", dispatched.step)
            taken = self._rows.exchange(message, answering.sizes(wire), asking.sizes(wire))
            asking.unpack(wire.decode(taken, asking.spans), [pooled, *whole, *buffers])
        gathered = []
        for buffer, distinct in zip(dispatched.buffers, buffers, strict=True):
            if self._replicas is not None and len(buffer.hot):
                # After rows came, before pooling: copies fill the places that nobody was asked for.
                self._replicas.read(buffer.hot, distinct, buffer.hot_places)
            gathered += buffer.pool(distinct, pooled)
        return (pooled, *whole, *gathered)

    def combine_backward(self, gradients: Sequence[Tensor], dispatched: Dispatched) -> list[Tensor]:
        """Gradients of what this rank's tables gave, from those of what every rank got; a collective.

        Those of hot rows are left with the replicas.

        Parameters
        ----------
        gradients : sequence of Tensor
            Of what `combine` gave.
        """
        asking, answering, wire = dispatched.asking, dispatched.answering, self._gradient_wire
        pooled, *rows = gradients
        whole, at, sums = rows[: len(self._whole)], len(self._whole), list[Tensor]()
        for buffer in dispatched.buffers:
            end = at + len(buffer.group.sequences)
            sums.append(buffer.sum(pooled, rows[at:end]))
            at = end
        if self._replicas is not None:
            self._replicas.note(
                HotGradients(buffer.hot, buffer.hot_places, mine)
                for buffer, mine in zip(dispatched.buffers, sums, strict=True)
            )
        found = [RECYCLER.empty(*shape) for shape in dispatched.own_shapes]
        if dispatched.idle:
            # Own tables still take their step, of no rows: steps are counted alike on all ranks.
            return [each.zero_() for each in found]
        message = wire.encode(asking.pack([pooled, *whole, *sums]), asking.spans, "gradients", dispatched.step)
        taken = self._rows.exchange(message, asking.sizes(wire), answering.sizes(wire))
        answering.unpack(wire.decode(taken, answering.spans), found)
        return found


def _columns(keys: Sequence[str], dims: Sequence[int]) -> dict[str, int]:
    """The first column of each pooled feature."""
    return dict(zip(keys, np.cumsum([0, *dims]).tolist(), strict=False))
