"""What one rank sends early: which rows are final, and the courier that takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from stratarec.distributed.collectives import Channel
from stratarec.distributed.courier import Courier, Parcel
from stratarec.distributed.halves import Flags
from stratarec.embedding.engine import Engine
from stratarec.embedding.prepared import Flight, Prepared
from stratarec.embedding.recent import Recent
from stratarec.jagged import KeyedJagged


class Early:
    """The rows of each batch that the one before does not look up.

    Parameters
    ----------
    own : Engine or None
        Of this rank's tables.
    flight : Flight
        Of the same.
    channel : Channel
        For them alone.
    """

    def __init__(self, own: Engine | None, flight: Flight, channel: Channel) -> None:
        self._own, self._courier = own, Courier(channel, flight)
        self._recent: Recent | None = None
        self._lost = False

    def touched(self, asked: KeyedJagged, prepared: Prepared | None) -> Flags:
        """``[N]`` for each id that this rank is asked for whether the batch before looks up its row."""
        if self._lost or self._recent is None or prepared is None:
            return np.full(asked.values.numel(), self._lost)
        return self._recent.holds(prepared)

    def give(self, prepared: Prepared | None, send: Callable[[Callable[[], bool]], Sequence[Tensor]]) -> Parcel:
        """Send this batch's final rows when they are; it is the batch before of the next one."""
        parcel = Parcel(None if self._recent is None else self._recent.number, send)
        if prepared is not None and self._own is not None:
            self._recent = self._recent or Recent(self._own.tables)
            self._recent.replace(prepared)
        self._lost = False
        self._courier.give(parcel)
        return parcel

    def take(self, parcel: Parcel) -> Sequence[Tensor]:
        """See `Courier.take`."""
        return self._courier.take(parcel)

    def hurry(self, parcel: Parcel) -> None:
        """See `Courier.hurry`."""
        self._courier.hurry(parcel)

    def lose(self) -> None:
        """A batch came that was not prepared ahead, of which nothing is noted: all of the next one waits for it."""
        self._lost = True

    def forget(self) -> None:
        """Rows were loaded: no batch is under way."""
        self._lost = False
        if self._recent is not None:
            self._recent.forget()

    def close(self) -> None:
        """See `Courier.close`."""
        self._courier.close()

    @property
    def nbytes(self) -> int:
        """Bytes of what is noted of the last batch."""
        return 0 if self._recent is None else self._recent.nbytes
