"""What training needs of torch as a whole, torch's optimizers without its compiler, and what the process uses."""

from __future__ import annotations

import inspect
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stratarec.recipe.train_section import DenseOptimizerConfig


@contextmanager
def torch_settings(*, threads: int = 0, seed: int = 0) -> Iterator[None]:
    """Deterministic algorithms, `threads` (0 leaves them) and a random state of `seed`; everything is given back after.

    Notes
    -----
    These are settings of the process: two trainings at a time, on threads of one process, need the same ones.
    """
    options: Any = torch.utils.deterministic
    before, fills = torch.get_num_threads(), options.fill_uninitialized_memory
    # Not `torch.use_deterministic_algorithms`, which also tells torch's compiler and imports it for that.
    strictness = torch.get_deterministic_debug_mode()
    try:
        if threads:
            torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode("error")
        # Else every new tensor is filled first; nothing here reads memory that it has not written.
        options.fill_uninitialized_memory = False
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_deterministic_debug_mode(strictness)
        options.fill_uninitialized_memory = fills
        if threads:
            torch.set_num_threads(before)


# These methods of `torch.optim.Optimizer` are marked for `torch.compile`, and the mark imports the compiler when one is
# first called: a second of a processor and 60 MiB, in every process, for what is not compiled here. The functions below
# the marks are the same to the bit.
_MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


@cache
def uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    """The optimizer `kind`, such as `torch.optim.Adam`, whose methods are not marked for `torch.compile`."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in _MARKED}
    # What unwrapping takes away from a step besides the mark: gradients are not recorded in it.
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


def build_optimizer(config: DenseOptimizerConfig, network: nn.Module) -> Optimizer:
    """The torch optimizer of a network, in its fused form, without what marks it for ``torch.compile``."""
    kinds = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    make: Any = uncompiled(kinds[config.kind])
    weights = list(network.parameters())
    # Adagrad's is for few devices.
    fused = True if config.kind != "adagrad" or weights[0].device.type == "cpu" else None
    found: Optimizer = make(weights, lr=config.learning_rate, weight_decay=config.weight_decay, fused=fused)
    return found


@cache
def bf16_slowness() -> float:
    """How many times as long as in float32 a product of matrices takes in bfloat16 on this processor.

    Below 1 where it has instructions for them (AVX-512 BF16, AMX); without AVX-512, torch's take some 30 times as long.
    """

    def least(dtype: torch.dtype) -> float:
        matrix, seconds = torch.ones(256, 256, dtype=dtype), []
        for _ in range(6):  # the first ones load what they need
            began = time.thread_time()
            matrix @ matrix
            seconds.append(time.thread_time() - began)
        return min(seconds)

    return least(torch.bfloat16) / least(torch.float32)


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
