"""The sum over ranks of the gradients of hot rows: inside each host first, then between hosts, then back inside.

Hot rows are dealt to the places of a host, row n to place ``n % L``. The rank at a place adds its rows for its host, in
the order of ranks; ranks of equal place on the T hosts give each other what their hosts have, and add that in the order
of hosts; then all ranks of a host tell each other their sums. So a row that several ranks of a host look up leaves it
once, in `gradient_wire`; every rank has the same bits, which follow from the batch alone.

Which rows a batch looks up goes the same three ways when it is prepared, one bit a hot row. All of it rides on
collectives of the exchange (`rides`) but for the turn between hosts: the last one rides on the rows of the next batch.

Shapes: T hosts, L ranks of each, H hot rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.distributed.replicas import Replicas
from stratarec.distributed.rides import Content, Turn, Turns
from stratarec.distributed.sharding import Rows
from stratarec.distributed.wire import Wire
from stratarec.kernels.memory import RECYCLER

# What leaves every first summand its own bits.
_NOTHING = -0.0
_NO_CONTENT: Content = np.empty(0, dtype=np.uint8)


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


Summed = list[tuple[Rows, Tensor]]
"""Ascending numbers of hot rows of each place, and their gradients one after another."""


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
        self.replicas, self._wire = replicas, wire
        self._hosts, self._local = hosts, ranks // hosts
        self._host, self._place = divmod(rank, self._local)
        self._inside = [self._host * self._local + place for place in range(self._local)]
        self._between = [host * self._local + self._place for host in range(hosts)]
        self._ranks = ranks
        # Where a row lies among those that are added: sorted numbers would be searched for as long as all else takes.
        self._where = np.empty(replicas.rows, dtype=np.int64)
        self._bits = [-(-len(range(place, replicas.rows, self._local)) // 8) for place in range(self._local)]

    # Which rows

    def look_up(self, numbers: Rows) -> Turns[HotLookups]:
        """Tell the others which hot rows this rank looks up, by numbers in any order."""
        found = np.zeros(self.replicas.rows, dtype=np.bool_)
        found[numbers] = True
        mine, place = self._bits[self._place], self._place
        asked = [np.packbits(found[other :: self._local]) for other in range(self._local)]
        inside = yield from self._swap(self._inside, asked, [mine] * self._local)
        host = np.bitwise_or.reduce(inside)
        between = yield from self._swap(self._between, [host] * self._hosts, [mine] * self._hosts)
        everyone = np.bitwise_or.reduce(between)
        known = yield from self._swap(self._inside, [everyone] * self._local, self._bits)
        return HotLookups(
            own=np.flatnonzero(found),
            inside=[self._numbers(bits, place) for bits in inside],
            between=[self._numbers(bits, place) for bits in between],
            everyone=[self._numbers(bits, other) for other, bits in enumerate(known)],
        )

    def _numbers(self, bits: Content, place: int) -> Rows:
        return np.flatnonzero(np.unpackbits(bits)) * self._local + place

    def _swap(self, ranks: Sequence[int], given: Sequence[Content], sizes: Sequence[int]) -> Turns[list[Content]]:
        """Give some ranks their parts, and take theirs; no turn where that is this rank alone."""
        if len(ranks) == 1:
            return list(given)
        every, expected = [_NO_CONTENT] * self._ranks, [0] * self._ranks
        for rank, part, size in zip(ranks, given, sizes, strict=True):
            every[rank], expected[rank] = part, size
        taken = yield Turn(every, expected)
        return [taken[rank] for rank in ranks]

    # Gradients

    @property
    def turns_alone(self) -> int:
        """Turns of `total` between the first and the last one of two or more."""
        return int(self._local > 1 and self._hosts > 1)

    def total(self, lookups: HotLookups, flat: Tensor, step: int) -> Turns[Summed]:
        """Summed gradients of the rows that any rank looks up, place by place.

        Parameters
        ----------
        flat : Tensor
            The gradients of this rank's rows.
        """
        asked = [self._some(lookups.own, flat, lookups.own % self._local == place) for place in range(self._local)]
        sizes = [self._bytes(numbers) for numbers in lookups.inside]
        parts = yield from self._swap(self._inside, [_bytes(part) for part in asked], sizes)
        host, place = lookups.between[self._host], lookups.everyone[self._place]
        mine = self._added(host, zip(lookups.inside, map(_floats, parts), strict=True))
        if self._hosts > 1:
            wire, spans = self._wire, [self.replicas.spans(numbers) for numbers in lookups.between]
            message = wire.encode(mine, self.replicas.spans(host), "hot gradients", step).numpy()
            sizes = [wire.bytes_of(each) for each in spans]
            parts = yield from self._swap(self._between, [message] * self._hosts, sizes)
            # This host's own part, too, has the bits that the others see.
            sums = [wire.decode(torch.from_numpy(part), each) for part, each in zip(parts, spans, strict=True)]
            mine = self._added(place, zip(lookups.between, sums, strict=True))
        sizes = [self._bytes(numbers) for numbers in lookups.everyone]
        known = yield from self._swap(self._inside, [_bytes(mine)] * self._local, sizes)
        return list(zip(lookups.everyone, map(_floats, known), strict=True))

    def _bytes(self, numbers: Rows) -> int:
        return sum(4 * rows * width for rows, width in self.replicas.spans(numbers))

    def _some(self, numbers: Rows, flat: Tensor, wanted: NDArray[np.bool_]) -> Tensor:
        """The wanted rows of those in `flat`."""
        parts = []
        for mine, rows in self.replicas.by_width(numbers, flat):
            first = int(np.searchsorted(numbers, mine[0])) if len(mine) else 0
            parts.append(rows[torch.from_numpy(np.flatnonzero(wanted[first : first + len(mine)]))].view(-1))
        return torch.cat(parts)

    def _added(self, numbers: Rows, parts: Iterable[tuple[Rows, Tensor]]) -> Tensor:
        """The sum, part after part, of rows of which each part has some."""
        replicas = self.replicas
        found = RECYCLER.empty(self._bytes(numbers) // 4).fill_(_NOTHING)
        sums = replicas.by_width(numbers, found)
        for mine, _ in sums:
            self._where[mine] = np.arange(len(mine))
        for theirs, flat in parts:
            for (_, rows), (some, more) in zip(sums, replicas.by_width(theirs, flat), strict=True):
                rows.index_add_(0, torch.from_numpy(self._where[some]), more)
        return found


def _bytes(floats: Tensor) -> Content:
    return floats.numpy().view(np.uint8)


def _floats(content: Content) -> Tensor:
    # By numpy: behind other content it may begin at any byte.
    return torch.from_numpy(np.ascontiguousarray(content).view(np.float32))
