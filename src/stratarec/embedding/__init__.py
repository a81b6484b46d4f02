"""The embedding engine: tables, row optimizers and the module that trains them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratarec.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from stratarec.embedding.collection import EmbeddingCollection as EmbeddingCollection
    from stratarec.embedding.collection import Embeddings as Embeddings
    from stratarec.embedding.collection import TieredEmbeddingBagCollection as TieredEmbeddingBagCollection
    from stratarec.embedding.config import CodecConfig as CodecConfig
    from stratarec.embedding.config import EmbeddingBagConfig as EmbeddingBagConfig
    from stratarec.embedding.lookup_engine import Handle as Handle
    from stratarec.embedding.lookup_engine import StagedBatch as StagedBatch
    from stratarec.embedding.optimizers import RowOptimizerConfig as RowOptimizerConfig
    from stratarec.embedding.optimizers import ScheduleConfig as ScheduleConfig
    from stratarec.embedding.prefetch import Prefetcher as Prefetcher
    from stratarec.embedding.tiers import TableTier as TableTier
    from stratarec.embedding.tiers import TierConfig as TierConfig

__getattr__, __all__ = lazy_names(__name__, __file__)
