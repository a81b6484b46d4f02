"""The flat exchange: ids go to the owners of their rows, rows come back, gradients go the same way as the ids.

Three collectives before a batch (what is asked for, the ids, and whether all ranks could prepare it), which belong to
the thread that prepares ahead; one for the rows and one for the gradients, on the thread that trains.

Shapes: B samples of this rank, G bags of all ranks together, W columns of the pooled output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stratarec.distributed.asked import WORDS, Asked, message_sizes, read
from stratarec.distributed.buffers import Buffer, grouped
from stratarec.distributed.collectives import Channel, never
from stratarec.distributed.legs import Leg
from stratarec.distributed.replicas import Replicas
from stratarec.distributed.requests import DistinctRows, Requests, joined
from stratarec.distributed.sharding import Sharding, Stream
from stratarec.distributed.wire import Wire
from stratarec.embedding.validation import Validator
from stratarec.errors import ConfigError, StrataError
from stratarec.jagged import KeyedJagged
from stratarec.kernels.memory import RECYCLER


@dataclass(frozen=True, kw_only=True)
class Routed:
    """One batch's ways through the exchange.

    Parameters
    ----------
    features : KeyedJagged
        Of this rank.
    own : KeyedJagged
        What this rank's own tables are asked for, by all.
    asking : Leg
        Arrays: pooled output, rows of each sequence feature that travels whole, each buffer of distinct rows.
    answering : Leg
        Arrays: own pooled output, own sequence features in the order of their engine.
    """

    features: KeyedJagged
    own: KeyedJagged
    buffers: Sequence[Buffer]
    sequences: Sequence[int]
    """Ids of each sequence feature that travels whole."""
    asking: Leg
    answering: Leg
    own_shapes: Sequence[tuple[int, int]]
    """Of the arrays of `answering`."""
    idle: bool = False
    """Whether no rank asks any for a row: all that are looked up are hot."""


class FlatExchange:
    """Every rank with every other, as all sharded embeddings do.

    Parameters
    ----------
    sharding : Sharding
    rank : int
    wire, gradient_wire : Wire
        Of rows, and of gradients.
    own_columns : mapping
        First column of each pooled feature in the output of this rank's own tables, and how many there are.
    own_rows : sequence of str
        Its sequence features in the order in which it gives their rows.
    replicas : Replicas or None
        Hot rows, which do not travel.
    """

    def __init__(
        self, sharding: Sharding, rank: int, wires: tuple[Wire, Wire], own_columns: dict[str, int], own_width: int,
        own_rows: Sequence[str], replicas: Replicas | None = None,
    ) -> None:  # fmt: skip
        self._sharding, self._rank, self._replicas = sharding, rank, replicas
        self._wire, self._gradient_wire = wires
        self._requests = Requests(sharding, self._replicas)
        self.pooled_keys = tuple(key for table in sharding.tables for key in table.feature_names)
        self.dims = tuple(table.embedding_dim for table in sharding.tables for _ in table.feature_names)
        self.sequence_keys = tuple(key for table in sharding.tables for key in table.sequence_features)
        self._columns = dict(zip(self.pooled_keys, np.cumsum([0, *self.dims]).tolist(), strict=False))
        self._width = sum(self.dims)
        travelling = [table for table in sharding.tables if sharding.places[table.name].travel == "rows"]
        self._buffers = grouped(travelling, self._columns)
        self._whole = [
            (key, table.embedding_dim)
            for table in sharding.tables
            if sharding.places[table.name].travel == "pooled"
            for key in table.sequence_features
        ]
        self.row_order = (
            *(key for key, _ in self._whole),
            *(key for group in self._buffers for _, key in group.sequences),
        )
        self._own_columns, self._own_width, self._own_rows = own_columns, own_width, list(own_rows)

    # Ids

    def route(
        self, features: KeyedJagged, validator: Validator, channel: Channel, stopped: Callable[[], bool] = never
    ) -> Routed:
        """Send the ids of a batch to their owners; a collective.

        Raises
        ------
        RankError
            On all ranks, where one of them has a batch that cannot be looked up.
        """
        failed: StrataError | None = None
        asked: list[list[Asked]] = [[] for _ in range(channel.ranks)]
        distinct: dict[str, DistinctRows] = {}
        try:
            validator.check(features)
            if features.weights is not None:
                raise ConfigError("per-sample weights do not travel between ranks; leave them out, or use one process")
            asked, distinct = self._requests.split(features)
        except StrataError as error:
            failed = error
        theirs, idle = self._announce(asked, failed, channel, stopped)
        message = [self._requests.message(part) for part in asked]
        sizes = message_sizes(theirs)
        given = torch.cat(message)
        if not idle:
            given = channel.exchange(given, [part.numel() for part in message], sizes, stopped)
        streams = self._requests.streams[self._rank]
        requests = [
            read(part, numbers)
            for part, numbers in zip(given.split(sizes), theirs.tolist(), strict=True)  # type: ignore[no-untyped-call]
        ]  # fmt: skip
        return replace(self._routed(features, asked, distinct, streams, requests), idle=idle)

    def _announce(
        self, asked: Sequence[Sequence[Asked]], failed: StrataError | None, channel: Channel,
        stopped: Callable[[], bool],
    ) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], bool]:  # fmt: skip
        """``[ranks, S * WORDS]`` what each rank is going to ask this one for; whether no rank asks any."""
        counts = [2 + WORDS * len(streams) for streams in self._requests.streams]
        numbers = np.zeros(sum(counts), dtype=np.int64)
        asks = any(each.rows or each.ids.numel() for part in asked for each in part)
        at = 0
        for part, count in zip(asked, counts, strict=True):
            numbers[at : at + 2] = failed is not None, asks
            numbers[at + 2 : at + 2 + WORDS * len(part)] = [number for each in part for number in each.announced]
            at += count
        mine = counts[self._rank]
        taken = channel.exchange(torch.from_numpy(numbers), counts, [mine] * channel.ranks, stopped)
        theirs = taken.view(channel.ranks, mine).numpy()
        if theirs[:, 0].any():
            channel.raise_together(failed, theirs[:, 0].tolist())
        return theirs[:, 2:], not theirs[:, 1].any()

    def _routed(
        self, features: KeyedJagged, asked: Sequence[Sequence[Asked]], distinct: dict[str, DistinctRows],
        streams: Sequence[Stream], requests: Sequence[Sequence[Asked]],
    ) -> Routed:  # fmt: skip
        buffers = [group.of(features, distinct) for group in self._buffers]
        own = joined(streams, requests)
        counts = [[each.rows for each in part] for part in requests]
        answering, shapes = self._answering(counts, own.batch_size)
        lengths = {
            stream.key: each.ids.numel()
            for part, mine in zip(asked, self._requests.streams, strict=True)
            for stream, each in zip(mine, part, strict=True)
            if stream.kind == "sequence"
        }
        return Routed(
            features=features, own=own, buffers=buffers, sequences=[lengths[key] for key, _ in self._whole],
            asking=self._asking(asked, distinct, buffers), answering=answering, own_shapes=shapes,
        )  # fmt: skip

    def _asking(
        self, asked: Sequence[Sequence[Asked]], distinct: dict[str, DistinctRows], buffers: Sequence[Buffer]
    ) -> Leg:  # fmt: skip
        whole = {key: 1 + place for place, (key, _) in enumerate(self._whole)}
        begin = 1 + len(whole)
        buffer_of = {
            table: (begin + place, first) for place, buffer in enumerate(buffers)
            for table, first in buffer.first_row.items()
        }  # fmt: skip
        done = dict.fromkeys(distinct, 0)
        leg = Leg(begin + len(buffers))
        for streams, part in zip(self._requests.streams, asked, strict=True):
            leg.begin()
            for stream, each in zip(streams, part, strict=True):
                width, name = stream.table.embedding_dim, stream.table.name
                if stream.kind == "pooled":
                    leg.add(0, each.rows, width, self._columns[stream.key], self._width)
                elif stream.kind == "sequence":
                    leg.add(whole[stream.key], each.rows, width, 0, width)
                else:
                    array, first = buffer_of[name]
                    leg.add(array, each.rows, width, (first + done[name]) * width, width)
                    done[name] += each.rows
        return leg

    def _answering(
        self, counts: Sequence[Sequence[int]], batch_size: int
    ) -> tuple[Leg, list[tuple[int, int]]]:  # fmt: skip
        streams = self._requests.streams[self._rank]
        row_array = {key: 1 + place for place, key in enumerate(self._own_rows)}
        shapes = [(batch_size, self._own_width), *((0, 0) for _ in row_array)]
        done = [0] * len(streams)
        leg = Leg(1 + len(row_array))
        for part in counts:
            leg.begin()
            for place, (stream, rows) in enumerate(zip(streams, part, strict=True)):
                width = stream.table.embedding_dim
                if stream.kind == "pooled":
                    first = done[place] * self._own_width + self._own_columns[stream.key]
                    leg.add(0, rows, width, first, self._own_width)
                else:
                    leg.add(row_array[stream.key], rows, width, done[place] * width, width)
                done[place] += rows
        for place, stream in enumerate(streams):
            if stream.kind != "pooled":
                shapes[row_array[stream.key]] = (done[place], stream.table.embedding_dim)
        return leg, shapes

    # Rows and gradients

    def send(
        self, routed: Routed, found: Sequence[Tensor], channel: Channel, step: int
    ) -> Tensor:  # fmt: skip
        """Give every rank the rows that it asked for; returns those that `asking` unpacks. A collective."""
        answering, asking, wire = routed.answering, routed.asking, self._wire
        if routed.idle:
            return torch.empty(0)
        message = wire.encode(answering.pack(found), answering.spans, "rows", step)
        taken = channel.exchange(message, answering.sizes(wire), asking.sizes(wire))
        return wire.decode(taken, asking.spans)

    def pooled(self, routed: Routed, arrays: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Pooled output ``[B, W]`` and rows of sequences in `row_order`, once the arrays are full."""
        whole, buffers = arrays[1 : 1 + len(self._whole)], arrays[1 + len(self._whole) :]
        for buffer, rows in zip(routed.buffers, buffers, strict=True):
            if self._replicas is not None and len(buffer.hot):
                self._replicas.read(buffer.hot, rows, buffer.hot_places)
        gathered = [
            row for buffer, rows in zip(routed.buffers, buffers, strict=True) for row in buffer.pool(rows, arrays[0])
        ]
        return (arrays[0], *whole, *gathered)

    def arrays(self, routed: Routed) -> list[Tensor]:
        """Those of `Routed.asking`, not filled."""
        return [
            RECYCLER.empty(routed.features.batch_size, self._width),
            *(RECYCLER.empty(count, width) for count, (_, width) in zip(routed.sequences, self._whole, strict=True)),
            *(RECYCLER.empty(buffer.rows, buffer.group.width) for buffer in routed.buffers),
        ]

    def sums(self, routed: Routed, pooled: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
        """``[U, D]`` of each buffer: gradients of its rows, from those of what this rank got."""
        found, at = [], len(self._whole)
        for buffer in routed.buffers:
            end = at + len(buffer.group.sequences)
            found.append(buffer.sum(pooled, rows[at:end]))
            at = end
        return found

    def gradients(
        self, routed: Routed, given: Sequence[Tensor], channel: Channel, step: int
    ) -> list[Tensor]:  # fmt: skip
        """Gradients of what this rank's tables gave, from those of what every rank got.

        Parameters
        ----------
        given : sequence of Tensor
            Of the pooled output, of each sequence feature that travels whole, and what `sums` gave.
        """
        found = [RECYCLER.empty(*shape) for shape in routed.own_shapes]
        if routed.idle:
            return [each.zero_() for each in found]
        wire = self._gradient_wire
        message = wire.encode(routed.asking.pack(given), routed.asking.spans, "gradients", step)
        taken = channel.exchange(message, routed.asking.sizes(wire), routed.answering.sizes(wire))
        routed.answering.unpack(wire.decode(taken, routed.answering.spans), found)
        return found

    def whole(self, rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of the gradients of all sequence features, those of features that travel whole."""
        return rows[: len(self._whole)]
