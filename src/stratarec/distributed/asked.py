"""What one rank asks another one for: announced in numbers, then sent as lengths and ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

WORDS = 3
"""Numbers that announce a stream: bags, ids, and whether every bag holds one id, so that lengths need not travel."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one rank asks one owner for, of one stream.

    Parameters
    ----------
    bags : int
        Of a pooled feature; 1 otherwise.
    ids : Tensor
        Rows as the owner numbers them.
    lengths : Tensor or None
        ``[bags]``; None where every bag holds one id, and where nothing is pooled.
    """

    bags: int
    ids: Tensor
    lengths: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows that come back: pooled ones, or one an id."""
        return self.ids.numel() if self.lengths is None else self.bags

    @property
    def announced(self) -> tuple[int, int, int]:
        """`WORDS` numbers."""
        return self.bags, self.ids.numel(), int(self.lengths is None)


def read(message: Tensor, announced: Sequence[int]) -> list[Asked]:
    """What a rank asks for, from what it announced and its message."""
    found, done = [], 0
    for bags, ids, single in np.array(announced, dtype=np.int64).reshape(-1, WORDS).tolist():
        lengths = None if single else message[done : done + bags]
        done += 0 if single else bags
        found.append(Asked(bags=bags, ids=message[done : done + ids], lengths=lengths))
        done += ids
    return found


def message_sizes(announced: NDArray[np.int64]) -> list[int]:
    """Elements of the message of each rank, from ``[ranks, S * WORDS]`` that they announced."""
    bags, ids, single = announced.reshape(len(announced), -1, WORDS).transpose(2, 0, 1)
    sizes: list[int] = (ids + bags * (1 - single)).sum(axis=1).tolist()
    return sizes
