"""The embedding collection whose tables are shared among ranks."""

from __future__ import annotations

from collections.abc import Mapping

from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.hot_replicas import HotRows
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import SharedBatch, SharedEngine
from stratarec.distributed.sharding import Sharding
from stratarec.embedding.collection import EmbeddingCollection
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tiers import TierConfig


class ShardedCollection(EmbeddingCollection[SharedBatch]):
    """An embedding collection whose tables are shared among the ranks of a mesh.

    To models it is what `TieredEmbeddingBagCollection` is. Each rank passes its own batch; with one rank it trains the
    same bits as that class. Where tables travel whole (`Place.travel` of ``pooled``) and wires are fp32, the tables get
    the bits that one process gets on the batches of all ranks one after another; else they agree up to the rounding of
    sums.

    Parameters
    ----------
    sharding, mesh, optimizer, seed, tiers, config, hot
        As those of `SharedEngine`.
    """

    def __init__(
        self, sharding: Sharding, mesh: Mesh, *, optimizer: RowOptimizerConfig | None = None, seed: int = 0,
        tiers: TierConfig | None = None, config: DistributedConfig | None = None,
        hot: Mapping[str, HotRows] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            SharedEngine(
                sharding, mesh, optimizer or RowOptimizerConfig(), seed, tiers or TierConfig(),
                config or DistributedConfig(), hot,
            )
        )  # fmt: skip
