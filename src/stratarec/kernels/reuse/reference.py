"""A cache of whole batches in plain Python, one size at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


def lru_hits(batches: Iterable[list[int]], size: int, ahead: int) -> int:
    """Different rows of each batch that a cache of `size` rows holds as the batch begins; then it takes them in, and
    the rows that were not used for longest go, but for those of the last `ahead` batches."""
    cache: OrderedDict[int, int] = OrderedDict()
    hits = 0
    for number, batch in enumerate(batches):
        distinct = list(dict.fromkeys(batch))
        hits += sum(row in cache for row in distinct)
        for row in distinct:
            cache[row] = number
            cache.move_to_end(row)
        while len(cache) > size and next(iter(cache.values())) <= number - ahead:
            cache.popitem(last=False)
    return hits
