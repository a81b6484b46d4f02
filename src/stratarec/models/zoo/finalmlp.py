"""FinalMLP (Mao et al. 2023, arXiv 2304.00902): two networks on gated vectors, joined by a bilinear
form.

Shapes: B samples, F fields, D width, X and Y outputs of the two networks, K heads.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from stratarec.errors import ConfigError
from stratarec.models.base import Score
from stratarec.models.layers import MLP
from stratarec.models.request import Segments
from stratarec.models.zoo.config import FinalMLPConfig
from stratarec.models.zoo.fields import Fields, Terms


class GatedStream(nn.Module):
    """deep(g * V) for vectors V, with g = 2 sigmoid(gate(the gate's vectors)); without a gate,
    deep(V) (section 3.2).
    """

    def __init__(self, config: FinalMLPConfig, fields: int, sizes: tuple[int, ...], gated_by: int) -> None:
        super().__init__()
        width = config.embedding_dim
        self.deep = config.mlp(fields * width, sizes)
        self.gate = None
        if gated_by:
            body = MLP(gated_by * width, config.gate_mlp)
            self.gate = nn.Sequential(body, nn.Linear(body.outputs, fields * width))
        self.outputs = self.deep.outputs

    def forward(self, fields: Tensor, context: Tensor | None) -> Tensor:
        """Return ``[B, .]`` from all vectors ``[B, F D]`` and the gate's vectors, both
        concatenated.
        """
        if self.gate is not None:
            fields = fields * (2 * torch.sigmoid(self.gate(context).to(fields.dtype)))
        hidden: Tensor = self.deep(fields)
        return hidden


class FinalMLPScore(Score):
    """logit = b + w_x · x + w_y · y + sum over heads k of x_k^T W_k y_k, for the networks' outputs
    x and y.
    """

    config: ClassVar = FinalMLPConfig

    def __init__(self, config: FinalMLPConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.vector_width)
        self.width = config.embedding_dim
        self.gate_features = config.gate_features
        self.heads = config.fusion_heads
        self._dense = dense
        self._places = [[0] * len(names) for names in config.gate_features]
        gated_by = [len(names) for names in config.gate_features] or [0, 0]
        self.streams = nn.ModuleList(
            GatedStream(config, self.fields.count, sizes, inputs)
            for sizes, inputs in zip((config.first_mlp, config.second_mlp), gated_by, strict=True)
        )
        first, second = config.first_mlp[-1], config.second_mlp[-1]
        # A linear layer over all products x_ki y_kj, so that initial weights are scaled for this
        # number of inputs.
        self.forms = nn.Linear(first * second // self.heads, 1, bias=False)
        self.out = Terms(first + second, 1)

    def set_features(self, names: tuple[str, ...]) -> None:
        for gate in self.gate_features:
            other = next((name for name in gate if name not in names), None)
            if other is not None:
                raise ConfigError(
                    f"model.gate_features names {other!r}; the features with vectors are {', '.join(names)}"
                )
        self._places = [[self._dense + names.index(name) for name in gate] for gate in self.gate_features]

    def forward(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Tensor:
        fields = self.fields(dense, vectors, segments)
        contexts = [fields[:, places, -self.width :].flatten(1) for places in self._places] or [None, None]
        flat = fields[..., : self.width].flatten(1)
        x, y = (stream(flat, context) for stream, context in zip(self.streams, contexts, strict=True))
        return self.logits(torch.cat([x, y, self.fused(x, y)], dim=1).to(fields.dtype))

    def fused(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the heads' bilinear forms of `x` ``[B, X]`` and `y` ``[B, Y]``, as
        ``[B, 1]``.
        """
        x_heads, y_heads = (part.view(part.shape[0], self.heads, -1) for part in (x, y))
        forms = self.forms.weight.view(self.heads, x_heads.shape[2], y_heads.shape[2])
        return (torch.einsum("bki,kij->bkj", x_heads, forms) * y_heads).sum((1, 2)).unsqueeze(1)
