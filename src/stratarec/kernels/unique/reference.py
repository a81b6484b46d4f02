"""Distinct ids in plain Python."""

from __future__ import annotations

from torch import Tensor


def number_distinct(ids: Tensor) -> tuple[list[int], list[int]]:
    """`distinct.number_distinct` by a dictionary."""
    number: dict[int, int] = {}
    places = [number.setdefault(row, len(number)) for row in ids.tolist()]
    return list(number), places
