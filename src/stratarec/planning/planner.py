"""Data set and memory section in, plan out: describes the tables, measures the tiers, places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratarec.data.dataset import Dataset
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.planning.config import MemoryConfig
from stratarec.planning.placement import place
from stratarec.planning.plan import Plan
from stratarec.planning.tables import describe_tables
from stratarec.planning.tiers import Tiers, measure_tiers


def make_plan(
    tables: Sequence[EmbeddingBagConfig],
    dataset: Dataset,
    optimizer: RowOptimizerConfig,
    memory: MemoryConfig,
    *,
    batch_size: int,
    tiers: Tiers | None = None,
    ranks: int = 1,
    hot: Mapping[str, tuple[int, int]] | None = None,
) -> Plan:
    """Where the tables of a model live on this machine.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Each named as its vocabulary.
    dataset : Dataset
        Gives the access counts.
    optimizer : RowOptimizerConfig
        Decides the state of a row.
    memory : MemoryConfig
        Budgets of each process, precision and cache.
    batch_size : int
        Samples a step.
    tiers : Tiers
        What the memories give; from `measure_tiers` by default.
    ranks : int
        Processes that share the tables.
    hot : mapping of str to tuple of int
        Table -> how many of its first and of its last rows are hot: no cache is asked for them.

    Raises
    ------
    ConfigError
        When nothing fits; names the budget and the least number that would do.
    """
    memory.check_tables(table.name for table in tables)
    described = describe_tables(tables, dataset, optimizer, batch_size=batch_size, hot=hot)
    return place(described, memory.times(ranks), tiers or measure_tiers(memory), batch_size=batch_size, ranks=ranks)
