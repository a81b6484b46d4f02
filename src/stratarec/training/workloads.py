"""What a recipe's network and look-ups are, and what this machine makes of them, in the figures of a predicted step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stratarec.data.dataset import Dataset
from stratarec.distributed.calibration import Collective
from stratarec.distributed.simulate import Calibration, Workload
from stratarec.kernels.threads import use_torch_threads
from stratarec.models import ModelConfig, build_network
from stratarec.models.base import build_tables
from stratarec.models.towers import TowersConfig
from stratarec.planning.tables import describe_tables
from stratarec.planning.tiers import measure_tiers
from stratarec.recipe import Recipe

ASSUMED = Collective(alpha=5e-5, alpha_peer=5e-6)
"""Of TCP between processes, where no ranks are at hand to measure it."""
_ROUNDS = 3


def workload(recipe: Recipe, dataset: Dataset, towers: TowersConfig | None, ranks: int) -> Workload:
    """What one of so many ranks does in a step.

    Operations are estimates: six a weight and sample, and the products of all pairs, which towers make fewer of.
    """
    batch, model = recipe.train.batch_size, replace(recipe.model, towers=towers)
    tables = build_tables(model, dataset.schema, dataset.table_rows())
    specs = describe_tables(tables, dataset, recipe.train.embedding, batch_size=batch)
    network = _network(model, dataset)
    modules = _weights(network.towers) if towers is not None else 0  # type: ignore[arg-type]
    everything, features = _weights(network), len(dataset.schema.sparse)
    return Workload(
        batch=max(batch // ranks, 1), features=features, width=model.vector_width,
        lookups=sum(spec.lookups for spec in specs) / batch,
        flops=6.0 * (everything - modules) + _pairs(features, model.vector_width),
        parameters=everything - modules, tower_flops=6.0 * modules, tower_parameters=modules,
    )  # fmt: skip


def _network(model: ModelConfig, dataset: Dataset) -> nn.Module:
    """The network without memory."""
    tables = build_tables(model, dataset.schema, dataset.table_rows())
    with torch.device("meta"):
        return build_network(model, dataset.schema, tuple(name for table in tables for name in table.feature_names))


def _weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _pairs(features: int, width: int) -> float:
    """Operations of the products of all pairs of vectors, forward and backward."""
    return 3.0 * features * features * width


def calibrate(
    recipe: Recipe, dataset: Dataset, inside: Collective = ASSUMED, between: Collective = ASSUMED
) -> Calibration:  # fmt: skip
    """What a rank of this machine does: its network timed for some steps, its memory as `measure_tiers` has it.

    Two batches, one four times the other, tell what grows with a batch from what does not.
    """
    bare = workload(recipe, dataset, None, 1)
    use_torch_threads()
    batch = max(min(recipe.train.batch_size, 2048), 4)
    large, small = (_network_seconds(recipe, dataset, size) for size in (batch, batch // 4))
    # Where noise is more than the difference, all of it grows.
    growing = 4 / 3 * (large - small) if large > small else large
    memory = measure_tiers(recipe.memory).dram
    return Calibration(
        flops_per_second=bare.flops * batch / growing, row_bytes_per_second=memory.row_bytes_per_second,
        inside=inside, between=between, fixed_seconds=max(large - growing, 0.0),
    )  # fmt: skip


def _network_seconds(recipe: Recipe, dataset: Dataset, batch: int) -> float:
    """The shortest of some steps, forward and backward, of the part behind the vectors."""
    model = replace(recipe.model, towers=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        score: Any = _network(model, dataset).to_empty(device="cpu").score
        for weight in score.parameters():
            nn.init.uniform_(weight, -0.05, 0.05)
        dense = torch.rand(batch, len(dataset.schema.dense))
        vectors = torch.rand(batch, len(dataset.schema.sparse), model.vector_width)
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        score(dense, vectors.clone().requires_grad_(), None).sum().backward()
        found.append(time.perf_counter() - began)
    return min(found)


def inside_rate(recipe: Recipe, ranks: int) -> float:
    """Bytes a second from a rank to others of its host through memory: written, copied and read by ranks that share it.

    An assumption; machines with links between devices have others.
    """
    return measure_tiers(recipe.memory).dram.sequential_bytes_per_second / (4 * ranks)
