"""What some ranks have to tell each other in several turns, carried by collectives that are made anyway.

On few processors a collective costs more than the bytes of many rows, because all ranks must come to it. So whoever
needs turns of its own writes a generator: it yields what each rank is to get, and is sent what each rank gave.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.distributed.collectives import Channel, never

Result = TypeVar("Result")
Content = NDArray[np.uint8]


class Turn(NamedTuple):
    """One exchange."""

    given: Sequence[Content]
    """For each rank."""
    sizes: Sequence[int]
    """Bytes from each rank."""


Turns = Generator[Turn, list[Content], Result]


class Ride(Generic[Result]):
    """Turns on their way.

    Parameters
    ----------
    turns : generator
        Yields as many turns on all ranks.
    """

    def __init__(self, turns: Turns[Result]) -> None:
        self._turns, self.result = turns, None  # type: Turns[Result], Result | None
        self._turn: Turn | None = None
        self._go_on(None)

    def _go_on(self, taken: list[Content] | None) -> None:
        try:
            self._turn = next(self._turns) if taken is None else self._turns.send(taken)
        except StopIteration as ended:
            self._turn, self.result = None, ended.value

    @property
    def waiting(self) -> bool:
        """Whether a turn is left."""
        return self._turn is not None

    def alone(self, channel: Channel) -> None:
        """Make the next turn by itself."""
        nothing = [0] * channel.ranks
        carried(channel, self, torch.empty(0, dtype=torch.uint8), nothing, nothing)

    def carry(
        self, channel: Channel, given: Tensor, given_sizes: Sequence[int], sizes: Sequence[int],
        stopped: Callable[[], bool],
    ) -> Tensor:  # fmt: skip
        """As `carried`."""
        assert self._turn is not None
        turn, width = self._turn, given.element_size()
        parts = given.view(torch.uint8).split([size * width for size in given_sizes])  # type: ignore[no-untyped-call]
        message = [
            piece for part, more in zip(parts, turn.given, strict=True) for piece in (part, torch.from_numpy(more))
        ]
        both = [size * width + more for size, more in zip(sizes, turn.sizes, strict=True)]
        mine = [size * width + len(more) for size, more in zip(given_sizes, turn.given, strict=True)]
        taken = channel.exchange(torch.cat(message), mine, both, stopped)
        pieces = taken.split(both)  # type: ignore[no-untyped-call]
        cuts = [size * width for size in sizes]
        self._go_on([piece[cut:].numpy() for piece, cut in zip(pieces, cuts, strict=True)])
        return torch.cat([piece[:cut] for piece, cut in zip(pieces, cuts, strict=True)]).view(given.dtype)


def carried(
    channel: Channel, ride: Ride[Result] | None, given: Tensor, given_sizes: Sequence[int], sizes: Sequence[int],
    stopped: Callable[[], bool] = never,
) -> Tensor:  # fmt: skip
    """`Channel.exchange`, with the next turn of a ride where one waits."""
    if ride is None or not ride.waiting:
        return channel.exchange(given, given_sizes, sizes, stopped)
    return ride.carry(channel, given, given_sizes, sizes, stopped)
