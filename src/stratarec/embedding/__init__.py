"""The embedding engine: tables, row optimizers and the module that trains them."""

from stratarec.embedding.collection import EmbeddingCollection, Embeddings, TieredEmbeddingBagCollection
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.lookup_engine import Handle, Prepared
from stratarec.embedding.optimizers import RowOptimizerConfig, ScheduleConfig
from stratarec.embedding.prefetch import Prefetcher

__all__ = [
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "Embeddings",
    "Handle",
    "Prefetcher",
    "Prepared",
    "RowOptimizerConfig",
    "ScheduleConfig",
    "TieredEmbeddingBagCollection",
]
