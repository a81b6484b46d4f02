"""What the kernels of batches compute, in plain Python; checks of places in plain torch, on any device."""

from __future__ import annotations

from torch import Tensor


def number_pointers(pointers: list[int]) -> tuple[list[int], list[int]]:
    """Number of each pointer by first appearance, and the distinct pointers."""
    used = list(dict.fromkeys(pointers))
    return [used.index(pointer) for pointer in pointers], used


def covered(windows: list[tuple[int, int]]) -> list[int]:
    """Places that some window (start, length) covers, ascending."""
    return sorted({place for start, length in windows for place in range(start, start + length)})


def join_bags(parts: list[list[list[list[int]]]], size: int) -> list[list[int]]:
    """All features' bags ``parts[p][f]`` one after another, each feature filled up with empty bags to `size`."""
    return [bag for part in parts for bags in part for bag in bags + [[]] * (size - len(bags))]


def outside(places: Tensor, limit: int) -> int:
    """The first index at which a place is not in [0, limit), or -1."""
    return _first((places < 0) | (places >= limit))


def outside_windows(start: Tensor, length: Tensor, limit: int) -> int:
    """The first window that does not lie in [0, limit], or -1."""
    # No sum, which could be more than an integer holds.
    return _first((start < 0) | (length < 0) | (length > limit) | (start > limit - length))


def _first(wrong: Tensor) -> int:
    return int(wrong.int().argmax()) if wrong.any() else -1
