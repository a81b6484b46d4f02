"""What the kernels of batches compute, in plain Python."""

from __future__ import annotations


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
