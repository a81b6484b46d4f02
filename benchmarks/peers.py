"""TorchRec's side of benchmarks of whole models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.registry import import_peer
from benchmarks.torchrec_tables import to_torchrec
from stratarec.batch.batch import Batch
from stratarec.embedding.config import EmbeddingBagConfig


def fused_collection(
    tables: list[EmbeddingBagConfig], *, rate: float, eps: float, initial: Mapping[str, Tensor]
) -> Any:
    """Build TorchRec's `FusedEmbeddingBagCollection` (FBGEMM with exact row-wise Adagrad) with the
    given weights.
    """
    fused = import_peer("torchrec.modules.fused_embedding_modules")
    optimizers = import_peer("torchrec.optim.rowwise_adagrad")
    collection = fused.FusedEmbeddingBagCollection(
        tables=[to_torchrec(table) for table in tables],
        optimizer_type=optimizers.RowWiseAdagrad,
        optimizer_kwargs={"lr": rate, "eps": eps},
        device=torch.device("cpu"),
    )
    state = collection.state_dict()
    for name, weight in initial.items():
        state[f"embedding_bags.{name}.weight"].copy_(weight)
    return collection


class TorchRecDLRM(nn.Module):
    """TorchRec's own DLRM on its fused collection."""

    def __init__(self, collection: Any, dense: int, bottom: list[int], top: list[int]) -> None:
        super().__init__()
        models = import_peer("torchrec.models.dlrm")
        self.dlrm = models.DLRM(
            embedding_bag_collection=collection,
            dense_in_features=dense,
            dense_arch_layer_sizes=bottom,
            over_arch_layer_sizes=top,
        )

    def regularize(self, dropout: float) -> None:
        """Add torch's batch normalization and dropout to every hidden layer, as in `MLP`."""
        perceptron = import_peer("torchrec.modules.mlp").Perceptron
        *bottom, _ = [layer for layer in self.dlrm.dense_arch.modules() if isinstance(layer, perceptron)]
        for layer in (*bottom, *self.dlrm.over_arch.modules()):
            if isinstance(layer, perceptron):
                layer._activation_fn = nn.Sequential(
                    nn.BatchNorm1d(layer._out_size), nn.ReLU(inplace=True), nn.Dropout(dropout)
                )

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.dlrm(batch.dense, to_torchrec(batch.sparse))
        return logits.squeeze(-1).float()
