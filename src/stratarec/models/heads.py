"""Heads for several labels on one network: towers on a shared bottom, or on mixtures of experts.

Shapes: B samples, H width of the network's last layer, T labels, E experts, X width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from stratarec.models.config import HeadsConfig
from stratarec.models.layers import MLP
from stratarec.models.zoo.fields import Terms

Build: TypeAlias = Callable[[int, Sequence[int]], MLP]


class Towers(nn.ModuleList):
    """An MLP and a linear layer for each label."""

    def __init__(self, inputs: int, labels: int, config: HeadsConfig, mlp: Build) -> None:
        bodies = [mlp(inputs, config.tower_mlp) for _ in range(labels)]
        super().__init__(nn.Sequential(body, nn.Linear(body.outputs, 1)) for body in bodies)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return ``[B, T]`` logits from the ``[B, .]`` input of each tower."""
        return torch.cat([tower(part) for tower, part in zip(self, inputs, strict=True)], dim=1)


class SharedBottom(nn.Module):
    """A tower for each label on the network's output."""

    def __init__(self, inputs: int, labels: int, config: HeadsConfig, mlp: Build) -> None:
        super().__init__()
        self.towers = Towers(inputs, labels, config, mlp)

    def forward(self, bottom: Tensor) -> Tensor:
        """Return logits ``[B, T]`` from the network's output ``[B, H]``."""
        logits: Tensor = self.towers([bottom] * len(self.towers))
        return logits


class MMoE(nn.Module):
    """Multi-gate mixture of experts (Ma et al., KDD 2018, section 4.2) on the network's output.

    For label k and input x ``[H]``: y_k = h^k(f^k(x)), f^k(x) = sum_i g^k(x)_i f_i(x), g^k(x) =
    softmax(W_gk x), with experts f_i and towers h^k. Gates have no bias.
    """

    def __init__(self, inputs: int, labels: int, config: HeadsConfig, mlp: Build) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(inputs, config.expert_mlp) for _ in range(config.experts))
        self.gates = nn.ModuleList(nn.Linear(inputs, config.experts, bias=False) for _ in range(labels))
        self.towers = Towers(config.expert_mlp[-1], labels, config, mlp)

    def forward(self, bottom: Tensor) -> Tensor:
        """Return logits ``[B, T]`` from the network's output ``[B, H]``."""
        experts = torch.stack([expert(bottom) for expert in self.experts], dim=1)
        mixed = [
            torch.softmax(gate(bottom), dim=1).unsqueeze(1).to(experts.dtype) @ experts
            for gate in self.gates
        ]
        logits: Tensor = self.towers([part.squeeze(1) for part in mixed])
        return logits


def build_heads(inputs: int, labels: int, config: HeadsConfig, mlp: Build) -> SharedBottom | MMoE:
    """Return the heads that replace the last layer for several labels; `mlp` builds their MLPs."""
    return (MMoE if config.kind == "mmoe" else SharedBottom)(inputs, labels, config, mlp)


def last_biases(out: nn.Module) -> list[Tensor]:
    """Return the bias ``[1]`` of each label's logit."""
    if isinstance(out, nn.Linear | Terms):
        return [out.bias]
    assert isinstance(out, SharedBottom | MMoE)
    return [tower[-1].bias for tower in out.towers]  # type: ignore[index]
