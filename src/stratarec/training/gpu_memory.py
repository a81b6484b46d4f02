"""GPU memory for rows: whether rows of a recipe are trained in GPU memory, and how many bytes they
may use.

The free memory of the GPU is divided between rows, the network and a batch. `step_bytes` estimates
the bytes of network and batch as the sum of

- 20 bytes a parameter: weight, gradient, two moments and an average
- activations that the backward pass keeps, counted in a batch of a few samples and scaled to a
  whole one, twice: the gradients of activations and temporary tensors come on top; once for the
  larger batches of an evaluation
- pooled rows, rows of histories and their gradients
- a reserve for torch's libraries and for fragmentation of its allocator
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from stratarec.config.units import format_bytes
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader
from stratarec.embedding.slots import MEMORIES
from stratarec.errors import ConfigError
from stratarec.kernels.runtime.accelerator import device_memory, require_triton
from stratarec.models import build_model
from stratarec.models.base import autocast, build_tables
from stratarec.planning.bytes import output_bytes
from stratarec.planning.candidates import describe_tables
from stratarec.planning.config import MemoryConfig
from stratarec.planning.machine import DeviceRates
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.training import evaluate
from stratarec.training.steps.step import loader_config

_PARAMETER_BYTES = 20
_ACTIVATIONS = 2.0
_COUNTED_SAMPLES = 64
_RESERVE = 768 << 20


def on_gpu(recipe: Recipe, device: torch.device) -> bool:
    """Return whether rows are trained in the memory of `device`, a GPU."""
    return device.type != "cpu" and device.type in MEMORIES and recipe.memory.hbm != 0


def check_rows_device(recipe: Recipe, device: torch.device, plan: Plan | None = None) -> None:
    """Refuse a GPU or a Triton that cannot train rows, and GPU memory in a recipe or `plan` without
    a GPU.
    """
    if on_gpu(recipe, device):
        require_triton(device)
        return
    if recipe.memory.hbm:
        raise ConfigError(
            f"memory.hbm is {format_bytes(recipe.memory.hbm)}, but train.device is {recipe.train.device}: "
            "set train.device to cuda, or memory.hbm to 0"
        )
    if plan is not None and plan.level0 == "hbm":
        raise ConfigError(
            f"the plan has rows in GPU memory, but train.device is {recipe.train.device} and memory.hbm is "
            f"{recipe.memory.hbm}: set train.device to cuda without memory.hbm, or plan again"
        )


def rows_memory(recipe: Recipe, dataset: Dataset, rates: DeviceRates) -> MemoryConfig:
    """Return the memory section with `hbm` set to the bytes of GPU memory for rows.

    These are the bytes in `memory.hbm`, or, without it, all memory that the network and a batch
    leave free.

    Raises
    ------
    ConfigError
        If the GPU has too little free memory for the network, a batch and `memory.hbm`.
    """
    memory, batch = recipe.memory, recipe.train.batch_size
    free = total = round(rates.memory_bytes)
    if rates.device:
        free, total = device_memory(torch.device(rates.device))
    needed = step_bytes(recipe, dataset)
    room, name = free - needed, rates.device or "the GPU"
    used = f"; {format_bytes(total - free)} of {format_bytes(total)} are in use" if free < total else ""
    has = f"{name} has {format_bytes(free)} of free memory{used}"
    needs = f"the network and batches of {batch:,} samples need about {format_bytes(needed)}"
    if room <= 0:
        raise ConfigError(
            f"{has}, but {needs}: lower train.batch_size, end other programs on the GPU, "
            "or set train.device to cpu"
        )
    if memory.hbm and memory.hbm > room:
        raise ConfigError(
            f"memory.hbm is {memory.hbm} ({format_bytes(memory.hbm)}), but {has}, and {needs} of it: set "
            f"memory.hbm to at most {room} ({format_bytes(room)}), or lower train.batch_size"
        )
    return replace(memory, hbm=memory.hbm or room)


def step_bytes(recipe: Recipe, dataset: Dataset) -> int:
    """Return the estimated bytes of GPU memory that the network and a batch need (see the module
    docstring).
    """
    train, schema = recipe.train, dataset.schema
    # Tables have one row each, because only the network and the shapes of a batch matter here.
    rows = dict.fromkeys(dataset.table_rows(), 1)
    model = build_model(recipe.model, schema, rows)
    config = replace(
        loader_config(train), batch_size=min(train.batch_size, _COUNTED_SAMPLES), parallel_readers=1
    )
    batch = next(Loader(dataset, "train", config).batches(0, 0))
    weights = {weight.untyped_storage().data_ptr() for weight in model.network.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        request = model.request(batch)
        request.features.values.zero_()
        with torch.no_grad():
            dense, pooled, *others = model.vectors(batch, request)
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            autocast(train.precision),
        ):
            logits = model.network(dense, pooled.requires_grad_(), *others)
        activations = sum(storages.values()) / batch.size * train.batch_size
        del logits
    finally:
        model.embeddings.close()
    tables = build_tables(recipe.model, schema, dataset.table_rows())
    specs = describe_tables(tables, dataset, train.embedding, batch_size=train.batch_size)
    parameters = sum(weight.numel() for weight in model.network.parameters())
    # An evaluation scores more samples at a time, without gradients.
    share = max(1.0, evaluate.BATCH / train.batch_size / _ACTIVATIONS)
    outputs = output_bytes(sum(spec.outputs for spec in specs))
    return (
        math.ceil(_PARAMETER_BYTES * parameters + share * (_ACTIVATIONS * activations + outputs)) + _RESERVE
    )
