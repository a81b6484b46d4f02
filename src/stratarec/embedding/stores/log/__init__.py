"""Records on block devices: append-only segments, locations in DRAM, compaction behind the reader's back."""

from __future__ import annotations

from stratarec.embedding.stores.log.layout import LogConfig
from stratarec.embedding.stores.log.store import LogRecords

__all__ = ["LogConfig", "LogRecords"]
