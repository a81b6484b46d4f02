"""A network as a `torch.export` program: (dense ``[B, F]``, pooled ``[B, P * D]``, rows ``[B, L, D]`` and mask
``[B, L]`` of each history) -> probabilities ``[B]``, or ``[B, T]`` of T labels.

For use without StrataRec. torch unpickles parts of such a file, so opening one runs whatever its writer put in:
StrataRec writes programs and never opens them.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from stratarec.models.base import Network
from stratarec.training.run import TrainedModel


class _Probability(nn.Module):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, dense: Tensor, pooled: Tensor, *sequences: Tensor) -> Tensor:
        return torch.sigmoid(self.network.padded(dense, pooled, *sequences))


def program_bytes(trained: TrainedModel) -> memoryview:
    """What ``program.pt2`` holds."""
    # Into memory: torch's own writer ends the process where a disk is full.
    content = io.BytesIO()
    torch.export.save(_program(trained), content)
    return content.getbuffer()


def _program(trained: TrainedModel) -> torch.export.ExportedProgram:
    network, embeddings = trained.model.network, trained.model.embeddings
    widths = {
        name: table.embedding_dim
        for table in embeddings.tables
        for name in (*table.feature_names, *table.sequence_features)
    }
    batch = torch.export.Dim("batch", min=1)
    pooled = sum(widths[name] for name in embeddings.pooled_keys)
    inputs: list[Tensor] = [torch.zeros(3, len(trained.dataset.schema.dense)), torch.zeros(3, pooled)]
    shapes: list[dict[int, Any]] = [{0: batch}, {0: batch}]
    for number, columns in enumerate(network.event_columns):
        longest = torch.export.Dim(f"length_{number}", min=1)
        for name in columns:
            inputs += [torch.zeros(3, 5, widths[name]), torch.ones(3, 5, dtype=torch.bool)]
            shapes += [{0: batch, 1: longest}, {0: batch, 1: longest}]
    extra = [tuple(shapes[2:])] if len(shapes) > 2 else []
    model = _Probability(network).eval()
    return torch.export.export(model, tuple(inputs), dynamic_shapes=(*shapes[:2], *extra))
