"""The flat exchange: a rank sends ids to the owners of their rows, receives the rows, and sends
back gradients.

`dispatch` sends the ids of a batch and returns a handle. With the handle, `combine` receives the
rows and `combine_backward` sends their gradients. The thread that stages ahead runs two collectives
per batch (sizes and ids), and the training thread runs one for rows and one for gradients.

Shapes: B samples of this rank, G bags of all ranks together, W columns of the pooled output, S
streams of an owner.
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
from stratarec.distributed.input_dist import (
    WORDS,
    DistinctRows,
    Requests,
    RowRequest,
    join_requests,
    message_sizes,
    parse_requests,
)
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.row_buffer import Buffer, grouped
from stratarec.distributed.sharding import Sharding
from stratarec.distributed.wire import MessageLayout, Wire
from stratarec.embedding.engine import Engine, Validator
from stratarec.errors import ConfigError, StrataError
from stratarec.kernels.runtime.memory import RECYCLER


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Handle of one batch in the exchange.

    Parameters
    ----------
    features : KeyedJagged
        Features of this rank.
    step : int
        Number of the batch, on which the rounding noise of wires depends.
    local : KeyedJagged
        Lookups of all ranks in this rank's tables.
    buffers : sequence of Buffer
        Buffers of the distinct rows that this rank receives, one for each width.
    sequences : sequence of int
        Number of this rank's ids for each sequence feature whose rows the owner of the table looks
        up.
    asking : MessageLayout
        Layout of received rows. Its arrays are the pooled output, the rows of each sequence feature
        in `sequences`, and the buffers of distinct rows.
    answering : MessageLayout
        Layout of sent rows. Its arrays are the pooled output and the sequence features of this
        rank's tables.
    local_shapes : sequence of tuple
        Shapes ``(rows, columns)`` of the arrays of `answering`.
    """

    features: KeyedJagged
    step: int
    local: KeyedJagged
    buffers: Sequence[Buffer]
    sequences: Sequence[int]
    asking: MessageLayout
    answering: MessageLayout
    local_shapes: Sequence[tuple[int, int]]


class FlatExchange:
    """Exchange in which every rank exchanges rows with every other rank.

    Parameters
    ----------
    sharding : Sharding
        Owners of all rows.
    mesh : Mesh
        The ranks that exchange rows.
    wires : tuple of Wire
        Wire of rows and wire of gradients.
    local : Engine or None
        Engine of this rank's tables; None if this rank has no tables.
    """

    def __init__(
        self, sharding: Sharding, mesh: Mesh, wires: tuple[Wire, Wire], local: Engine | None
    ) -> None:
        self._rank = mesh.rank
        self._rows = mesh.rows
        self._wire, self._gradient_wire = wires
        self._requests = Requests(sharding)
        self._streams = self._requests.streams
        tables = sharding.tables
        pooled = tuple(key for table in tables for key in table.feature_names)
        widths = tuple(table.embedding_dim for table in tables for _ in table.feature_names)
        self._columns = _columns(pooled, widths)
        self._width = sum(widths)
        travel = {name: place.travel for name, place in sharding.places.items()}
        self._buffers = grouped([table for table in tables if travel[table.name] == "rows"], self._columns)
        self._sequence_dims = {
            key: table.embedding_dim
            for table in tables
            if travel[table.name] == "pooled"
            for key in table.sequence_features
        }
        self.row_order = (
            *self._sequence_dims,
            *(key for group in self._buffers for _, key in group.sequences),
        )
        keys, dims = (local.pooled_keys, local.dims) if local else ((), ())
        self._local_columns = _columns(keys, dims)
        self._local_width = sum(dims)
        self._local_rows = local.row_order if local else ()
        self._validator = Validator(
            (*pooled, *(key for table in tables for key in table.sequence_features))
        )

    def dispatch(
        self, features: KeyedJagged, step: int, channel: Channel, stopped: Callable[[], bool] = never
    ) -> Dispatched:
        """Send the ids of a batch to their owners; a collective.

        Parameters
        ----------
        features : KeyedJagged
            Ids of this rank's batch, without weights.
        step : int
            Number of the batch, equal on all ranks; the rounding noise of wires is a function of
            it.
        channel : Channel
            Channel of the calling thread.
        stopped : callable
            The wait for other ranks is aborted when it returns true.

        Raises
        ------
        RankError
            On all ranks, if one of them has a batch that cannot be looked up.
        """
        failed: StrataError | None = None
        asked: list[list[RowRequest]] = [[] for _ in range(channel.ranks)]
        distinct: dict[str, DistinctRows] = {}
        try:
            self._validator.check(features)
            if features.weights is not None:
                raise ConfigError("per-sample weights are not supported with several ranks; remove them")
            asked, distinct = self._requests.split(features)
        except StrataError as error:
            failed = error
        theirs = self._announce(asked, failed, channel, stopped)
        # Lengths and ids for one owner are one message for all its streams.
        message = [self._requests.message(part) for part in asked]
        sizes = message_sizes(theirs)
        received = channel.exchange(torch.cat(message), [part.numel() for part in message], sizes, stopped)
        requests = [
            parse_requests(part, numbers)
            for part, numbers in zip(received.split(sizes), theirs.tolist(), strict=True)  # type: ignore[no-untyped-call]
        ]
        buffers = [group.of(features, distinct) for group in self._buffers]
        local = join_requests(self._streams[self._rank], requests)
        answering, shapes = self._answering(requests, local.batch_size)
        lengths = {
            stream.key: request.ids.numel()
            for part, mine in zip(asked, self._streams, strict=True)
            for stream, request in zip(mine, part, strict=True)
            if stream.kind == "sequence"
        }
        return Dispatched(
            features=features,
            step=step,
            local=local,
            buffers=buffers,
            sequences=[lengths[key] for key in self._sequence_dims],
            asking=self._asking(asked, buffers),
            answering=answering,
            local_shapes=shapes,
        )

    def _announce(
        self,
        asked: Sequence[Sequence[RowRequest]],
        failed: StrataError | None,
        channel: Channel,
        stopped: Callable[[], bool],
    ) -> NDArray[np.int64]:
        """Exchange the sizes of requests; return the sizes of all requests to this rank, ``[ranks,
        S * WORDS]``.
        """
        counts = [1 + WORDS * len(streams) for streams in self._streams]
        numbers, at = np.zeros(sum(counts), dtype=np.int64), 0
        for part, count in zip(asked, counts, strict=True):
            # A rank with an error requests nothing but takes part, because the others would wait
            # for it. The flag of a failure is sent with the sizes, which saves a collective.
            numbers[at] = failed is not None
            numbers[at + 1 : at + 1 + WORDS * len(part)] = [
                number for request in part for number in request.counts
            ]
            at += count
        mine = counts[self._rank]
        received = channel.exchange(torch.from_numpy(numbers), counts, [mine] * channel.ranks, stopped)
        theirs = received.view(channel.ranks, mine).numpy()
        if theirs[:, 0].any():
            channel.raise_everywhere(failed, theirs[:, 0].tolist())
        return theirs[:, 1:]

    def _asking(self, asked: Sequence[Sequence[RowRequest]], buffers: Sequence[Buffer]) -> MessageLayout:
        """Return the layout of the rows that this rank receives from each rank."""
        sequences = {key: 1 + place for place, key in enumerate(self._sequence_dims)}
        begin = 1 + len(sequences)
        buffer_of = {
            table: begin + place for place, buffer in enumerate(buffers) for table in buffer.first_row
        }
        # Rows of a table are in the order of its owners: first all rows of the first owner, then of
        # the next one.
        row_of = {table: first for buffer in buffers for table, first in buffer.first_row.items()}
        layout = MessageLayout(begin + len(buffers))
        for streams, part in zip(self._streams, asked, strict=True):
            layout.begin()
            for stream, request in zip(streams, part, strict=True):
                width, name = stream.table.embedding_dim, stream.table.name
                if stream.kind == "pooled":
                    layout.add(0, request.rows, width, self._columns[stream.key], self._width)
                elif stream.kind == "sequence":
                    layout.add(sequences[stream.key], request.rows, width, 0, width)
                else:
                    layout.add(buffer_of[name], request.rows, width, row_of[name] * width, width)
                    row_of[name] += request.rows
        return layout

    def _answering(
        self, requests: Sequence[Sequence[RowRequest]], bags: int
    ) -> tuple[MessageLayout, list[tuple[int, int]]]:
        """Return the layout of the rows that this rank sends to each rank, and the shapes of its
        tables' outputs.
        """
        streams = self._streams[self._rank]
        row_array = {key: 1 + n for n, key in enumerate(self._local_rows)}
        # ``done[s]`` counts the rows of previous ranks in stream s, because `join_requests` appends
        # rank after rank.
        shapes, done = [(bags, self._local_width), *((0, 0) for _ in row_array)], [0] * len(streams)
        layout = MessageLayout(1 + len(row_array))
        for part in requests:
            layout.begin()
            for place, (stream, request) in enumerate(zip(streams, part, strict=True)):
                width = stream.table.embedding_dim
                if stream.kind == "pooled":
                    first = done[place] * self._local_width + self._local_columns[stream.key]
                    layout.add(0, request.rows, width, first, self._local_width)
                else:
                    layout.add(row_array[stream.key], request.rows, width, done[place] * width, width)
                done[place] += request.rows
        for stream, rows in zip(streams, done, strict=True):
            if stream.kind != "pooled":
                shapes[row_array[stream.key]] = (rows, stream.table.embedding_dim)
        return layout, shapes

    def combine(self, rows: Sequence[Tensor], dispatched: Dispatched) -> tuple[Tensor, ...]:
        """Exchange rows, a collective. Return a batch's pooled output ``[B, W]``, and rows of
        sequences in `row_order`.

        Parameters
        ----------
        rows : sequence of Tensor
            Outputs of this rank's tables for `Dispatched.local`: the pooled output and the rows of
            each sequence feature.
        dispatched : Dispatched
            Handle of the batch.
        """
        asking, answering, wire = dispatched.asking, dispatched.answering, self._wire
        pooled = RECYCLER.empty(dispatched.features.batch_size, self._width)
        sequences = [
            RECYCLER.empty(count, width)
            for count, width in zip(dispatched.sequences, self._sequence_dims.values(), strict=True)
        ]
        buffers = [RECYCLER.empty(buffer.rows, buffer.group.width) for buffer in dispatched.buffers]
        message = wire.encode(answering.pack(rows), answering.spans, "rows", dispatched.step)
        received = self._rows.exchange(message, answering.sizes(wire), asking.sizes(wire))
        asking.unpack(wire.decode(received, asking.spans), [pooled, *sequences, *buffers])
        gathered = []
        for buffer, distinct in zip(dispatched.buffers, buffers, strict=True):
            gathered += buffer.pool(distinct, pooled)
        return (pooled, *sequences, *gathered)

    def combine_backward(self, gradients: Sequence[Tensor], dispatched: Dispatched) -> list[Tensor]:
        """Exchange gradients, a collective. Return the gradients of the outputs of this rank's
        tables.

        Parameters
        ----------
        gradients : sequence of Tensor
            Gradients of the outputs of `combine`.
        dispatched : Dispatched
            Handle of the batch.
        """
        asking, answering, wire = dispatched.asking, dispatched.answering, self._gradient_wire
        pooled, *rows = gradients
        count = len(self._sequence_dims)
        sequences, at, sums = rows[:count], count, list[Tensor]()
        for buffer in dispatched.buffers:
            end = at + len(buffer.group.sequences)
            sums.append(buffer.sum(pooled, rows[at:end]))
            at = end
        outputs = [RECYCLER.empty(*shape) for shape in dispatched.local_shapes]
        message = wire.encode(
            asking.pack([pooled, *sequences, *sums]), asking.spans, "gradients", dispatched.step
        )
        received = self._rows.exchange(message, asking.sizes(wire), answering.sizes(wire))
        answering.unpack(wire.decode(received, answering.spans), outputs)
        return outputs


def _columns(keys: Sequence[str], dims: Sequence[int]) -> dict[str, int]:
    """Return pooled feature -> its first column in the output."""
    return dict(zip(keys, np.cumsum([0, *dims]).tolist(), strict=False))
