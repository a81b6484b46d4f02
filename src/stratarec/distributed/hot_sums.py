"""The sum over ranks of the gradients of hot rows: inside each host first, then between hosts, then back inside.

Hot rows are dealt to the places of a host, row n to place ``n % L``. The rank at a place adds its rows for its host, in
the order of ranks; ranks of equal place on the T hosts give each other what their hosts have, and add that in the order
of hosts; then all ranks of a host tell each other their sums. So a row that several ranks of a host look up leaves it
once, in `gradient_wire`; every rank has the same bits, which follow from the batch alone.

Which rows a batch looks up goes the same three ways when it is prepared, one bit a hot row.

Shapes: T hosts, L ranks of each, H hot rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.distributed.collectives import Channel, never
from stratarec.distributed.replicas import Replicas
from stratarec.distributed.sharding import Rows
from stratarec.distributed.wire import Wire

# What leaves every first summand its own bits.
_NOTHING = -0.0


class HotLookups(NamedTuple):
    """Who looks up which hot rows of a batch; all numbers ascend."""

    own: Rows
    """This rank."""
    inside: list[Rows]
    """Each rank of this host, of the rows of this place."""
    between: list[Rows]
    """Each host, of the rows of this place."""
    everyone: list[Rows]
    """All ranks, of the rows of each place."""


class HotSums:
    """This rank's part in the sums.

    Parameters
    ----------
    replicas : Replicas
    rank, hosts, ranks : int
        Ranks of a host follow one another.
    wire : Wire
        Between hosts.
    """

    def __init__(self, replicas: Replicas, rank: int, hosts: int, ranks: int, wire: Wire) -> None:
        self._replicas, self._wire = replicas, wire
        self._hosts, self._local = hosts, ranks // hosts
        self._host, self._place = divmod(rank, self._local)
        self._inside = [self._host * self._local + place for place in range(self._local)]
        self._between = [host * self._local + self._place for host in range(hosts)]
        self._ranks = ranks
        self._bits = [-(-len(range(place, replicas.rows, self._local)) // 8) for place in range(self._local)]

    # Which rows

    def look_up(self, numbers: Rows, channel: Channel, stopped: Callable[[], bool] = never) -> HotLookups:
        """Tell the others which hot rows this rank looks up; a collective."""
        found = np.zeros(self._replicas.rows, dtype=np.bool_)
        found[numbers] = True
        mine, place = self._bits[self._place], self._place
        asked = [np.packbits(found[other :: self._local]) for other in range(self._local)]
        inside = self._swap(channel, self._inside, asked, [mine] * self._local, stopped)
        host = np.bitwise_or.reduce(inside)
        between = self._swap(channel, self._between, [host] * self._hosts, [mine] * self._hosts, stopped)
        everyone = np.bitwise_or.reduce(between)
        known = self._swap(channel, self._inside, [everyone] * self._local, self._bits, stopped)
        return HotLookups(
            own=numbers,
            inside=[self._numbers(bits, place) for bits in inside],
            between=[self._numbers(bits, place) for bits in between],
            everyone=[self._numbers(bits, other) for other, bits in enumerate(known)],
        )

    def _numbers(self, bits: NDArray[np.uint8], place: int) -> Rows:
        return np.flatnonzero(np.unpackbits(bits)) * self._local + place

    def _swap(
        self, channel: Channel, with_: Sequence[int], given: Sequence[NDArray[np.uint8]], sizes: Sequence[int],
        stopped: Callable[[], bool] = never,
    ) -> list[NDArray[np.uint8]]:  # fmt: skip
        """Give some ranks their parts, and take theirs."""
        if len(with_) == 1:
            return list(given)
        given_sizes, taken_sizes = [0] * self._ranks, [0] * self._ranks
        for rank, part, size in zip(with_, given, sizes, strict=True):
            given_sizes[rank], taken_sizes[rank] = len(part), size
        message = torch.from_numpy(np.concatenate(given))
        taken = channel.exchange(message, given_sizes, taken_sizes, stopped).numpy()
        return np.split(taken, np.cumsum(sizes)[:-1])

    # Gradients

    def total(self, lookups: HotLookups, flat: Tensor, channel: Channel, step: int) -> tuple[Rows, Tensor]:
        """Ascending numbers and summed gradients of the rows that any rank looks up; a collective.

        Parameters
        ----------
        flat : Tensor
            The gradients of this rank's rows.
        """
        asked = [self._some(lookups.own, flat, lookups.own % self._local == place) for place in range(self._local)]
        sizes = [self._bytes(numbers) for numbers in lookups.inside]
        parts = self._swap(channel, self._inside, [_bytes(part) for part in asked], sizes)
        host = lookups.between[self._host]
        mine = self._added(host, zip(lookups.inside, map(_floats, parts), strict=True))
        place = lookups.everyone[self._place]
        mine = self._between_hosts(lookups, host, mine, place, channel, step)
        sizes = [self._bytes(numbers) for numbers in lookups.everyone]
        known = self._swap(channel, self._inside, [_bytes(mine)] * self._local, sizes)
        numbers = np.sort(np.concatenate(lookups.everyone))
        return numbers, self._added(numbers, zip(lookups.everyone, map(_floats, known), strict=True))

    def _between_hosts(
        self, lookups: HotLookups, host: Rows, mine: Tensor, place: Rows, channel: Channel, step: int
    ) -> Tensor:  # fmt: skip
        if self._hosts == 1:
            return mine
        wire, spans = self._wire, [self._replicas.spans(numbers) for numbers in lookups.between]
        message = wire.encode(mine, self._replicas.spans(host), "hot gradients", step).numpy()
        sizes = [wire.bytes_of(each) for each in spans]
        parts = self._swap(channel, self._between, [message] * self._hosts, sizes)
        # This host's own part, too, has the bits that the others see.
        sums = [wire.decode(torch.from_numpy(part), each) for part, each in zip(parts, spans, strict=True)]
        return self._added(place, zip(lookups.between, sums, strict=True))

    def _bytes(self, numbers: Rows) -> int:
        return sum(4 * rows * width for rows, width in self._replicas.spans(numbers))

    def _some(self, numbers: Rows, flat: Tensor, wanted: NDArray[np.bool_]) -> Tensor:
        """The wanted rows of those in `flat`."""
        parts = []
        for mine, rows in self._replicas.by_width(numbers, flat):
            first = int(np.searchsorted(numbers, mine[0])) if len(mine) else 0
            parts.append(rows[torch.from_numpy(np.flatnonzero(wanted[first : first + len(mine)]))].view(-1))
        return torch.cat(parts)

    def _added(self, numbers: Rows, parts: Iterable[tuple[Rows, Tensor]]) -> Tensor:
        """The sum, part after part, of rows of which each part has some."""
        replicas = self._replicas
        found = torch.full((sum(rows * width for rows, width in replicas.spans(numbers)),), _NOTHING)
        sums = replicas.by_width(numbers, found)
        for theirs, flat in parts:
            for (mine, rows), (some, more) in zip(sums, replicas.by_width(theirs, flat), strict=True):
                rows.index_add_(0, torch.from_numpy(np.searchsorted(mine, some)), more)
        return found


def _bytes(floats: Tensor) -> NDArray[np.uint8]:
    return floats.numpy().view(np.uint8)


def _floats(content: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(content).view(torch.float32)
