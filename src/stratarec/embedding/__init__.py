"""The embedding engine: tables, row optimizers and the module that trains them."""

from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.module import Embeddings, TieredEmbeddingBagCollection
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.prefetch import Prefetcher
from stratarec.embedding.prepared import Prepared
from stratarec.embedding.schedules import ScheduleConfig

__all__ = [
    "EmbeddingBagConfig",
    "Embeddings",
    "Prefetcher",
    "Prepared",
    "RowOptimizerConfig",
    "ScheduleConfig",
    "TieredEmbeddingBagCollection",
]
