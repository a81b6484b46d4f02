"""The embedding engine: tables, row optimizers and the module that trains them."""

from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.module import EmbeddingCollection, Embeddings, TieredEmbeddingBagCollection
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.prefetch import Prefetcher
from stratarec.embedding.prepared import Handle, Prepared
from stratarec.embedding.schedules import ScheduleConfig

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
