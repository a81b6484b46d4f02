"""Models: a batch -> logits. A recipe names one by its `kind`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import torch
from pydantic import Field

from stratarec.data.schema import Schema
from stratarec.embedding import RowOptimizerConfig
from stratarec.embedding.tiers import TierConfig
from stratarec.models.base import CTRModel
from stratarec.models.dcn import DCNv2Config, build_dcnv2
from stratarec.models.dlrm import DLRMConfig, build_dlrm
from stratarec.models.sequence import HistoryConfig

ModelConfig: TypeAlias = Annotated[DLRMConfig | DCNv2Config, Field(discriminator="kind")]

__all__ = ["CTRModel", "DCNv2Config", "DLRMConfig", "HistoryConfig", "ModelConfig", "build_model"]


def build_model(
    config: ModelConfig,
    schema: Schema,
    table_rows: Mapping[str, int],
    *,
    optimizer: RowOptimizerConfig | None = None,
    seed: int = 0,
    click_rate: float | None = None,
    tiers: TierConfig | None = None,
) -> CTRModel:
    """The model that `config` describes; its weights are a function of `seed` alone.

    Parameters
    ----------
    schema : Schema
        Features of the data set.
    table_rows : mapping of str to int
        Vocabulary -> rows, as `Dataset.table_rows` gives.
    optimizer : RowOptimizerConfig
        For the embedding tables.
    click_rate : float
        Share of positives; the model starts at its log-odds.
    tiers : TierConfig
        Tables whose rows are at home outside level 0; by default none.
    """
    optimizer = optimizer or RowOptimizerConfig()
    # torch's layers draw initial weights of their own before ours replace them.
    with torch.random.fork_rng(devices=[]):
        if isinstance(config, DLRMConfig):
            return build_dlrm(config, schema, table_rows, optimizer, seed, click_rate, tiers)
        return build_dcnv2(config, schema, table_rows, optimizer, seed, click_rate, tiers)
