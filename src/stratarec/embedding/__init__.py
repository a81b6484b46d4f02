"""The embedding engine: tables, row optimizers and the module that trains them."""

from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.module import Embeddings, TieredEmbeddingBagCollection
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.schedules import ScheduleConfig

__all__ = [
    "EmbeddingBagConfig",
    "Embeddings",
    "RowOptimizerConfig",
    "ScheduleConfig",
    "TieredEmbeddingBagCollection",
]
