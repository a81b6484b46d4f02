"""The embedding engine: tables, row optimizers and the module that trains them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratarec.embedding.collection import EmbeddingCollection as EmbeddingCollection
    from stratarec.embedding.collection import Embeddings as Embeddings
    from stratarec.embedding.collection import TieredEmbeddingBagCollection as TieredEmbeddingBagCollection
    from stratarec.embedding.config import CodecConfig as CodecConfig
    from stratarec.embedding.config import EmbeddingBagConfig as EmbeddingBagConfig
    from stratarec.embedding.lookup_engine import Handle as Handle
    from stratarec.embedding.lookup_engine import Prepared as Prepared
    from stratarec.embedding.optimizers import RowOptimizerConfig as RowOptimizerConfig
    from stratarec.embedding.optimizers import ScheduleConfig as ScheduleConfig
    from stratarec.embedding.prefetch import Prefetcher as Prefetcher
    from stratarec.embedding.tiers import TableTier as TableTier
    from stratarec.embedding.tiers import TierConfig as TierConfig

# Loaded when first used: recipes are read without torch and Numba, which take seconds to load.
_HOMES = {
    "CodecConfig": "config",
    "EmbeddingBagConfig": "config",
    "EmbeddingCollection": "collection",
    "Embeddings": "collection",
    "Handle": "lookup_engine",
    "Prefetcher": "prefetch",
    "Prepared": "lookup_engine",
    "RowOptimizerConfig": "optimizers",
    "ScheduleConfig": "optimizers",
    "TableTier": "tiers",
    "TierConfig": "tiers",
    "TieredEmbeddingBagCollection": "collection",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
