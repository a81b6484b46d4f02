"""The recency map as an ordered dict."""

from __future__ import annotations

from collections import OrderedDict


class LruMap:
    """Rows in the order of their last write, oldest first."""

    def __init__(self) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def write(self, row: int) -> None:
        self.order[row] = None
        self.order.move_to_end(row)

    def evict(self, count: int) -> list[int]:
        return [self.order.popitem(last=False)[0] for _ in range(min(count, len(self.order)))]
