"""Weights and optimizer state of towers, which their own hosts alone train, on every rank: for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors.torch
import torch
from torch import Tensor, nn

from stratarec.distributed.mesh import Mesh
from stratarec.models import CTRModel
from stratarec.models.towers.network import TowerNetwork


def gather_towers(model: CTRModel, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Give every rank weights and optimizer state of all towers, which their own hosts alone train; a collective."""
    if mesh.inside is None or mesh.between is None:
        return
    assert isinstance(model.network, TowerNetwork)
    mine: dict[str, Tensor] = {}
    if not mesh.inside.rank:
        for name, weight in model.network.towers[mesh.between.rank].named_parameters():
            mine[f"weight/{name}"] = weight.detach()
            mine |= {f"{key}/{name}": value for key, value in optimizer.state[weight].items()}
    contents = mesh.files.gather(safetensors.torch.save(mine) if mine else b"")
    others = [content for rank, content in enumerate(contents) if not rank % mesh.inside.ranks]
    for host, (tower, content) in enumerate(zip(model.network.each, others, strict=True)):
        if host != mesh.between.rank:
            _take(tower, optimizer, safetensors.torch.load(content) if content else {})


def _take(tower: nn.Module, optimizer: torch.optim.Optimizer, found: Mapping[str, Tensor]) -> None:
    weights = dict(tower.named_parameters())
    for key, value in found.items():
        part, name = key.split("/", 1)
        if part == "weight":
            weights[name].data.copy_(value)
        else:
            optimizer.state[weights[name]][part] = value
