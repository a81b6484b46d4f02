"""Set up torch: process-wide settings, the optimizer of the network, and the device that the network is on.

A device other than the CPU is used only if `stratarec doctor --gpu` verified it on this machine. The result is stored
in ``$XDG_CACHE_HOME/stratarec/gpu.json`` with machine, GPU, driver, torch version and a hash of StrataRec's code; if
any of these changes, the device must be verified again.
"""

from __future__ import annotations

import contextlib
import inspect
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError, DatasetError
from stratarec.io.atomic import cache_directory, read_json, write_json
from stratarec.io.hashes import versions
from stratarec.kernels.runtime.accelerator import CPU, open_device
from stratarec.models.base import CTRModel, autocast
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


_DRIVER = Path("/proc/driver/nvidia/version")


def device_of(name: str, ranks: int = 1, field: str = "train.device") -> torch.device:
    """The device of that name.

    Raises
    ------
    ConfigError
        Where it is none of this machine or was not verified on it, or there are several ranks.
    """
    if name == "cpu":
        return CPU
    if ranks > 1:
        raise ConfigError(
            f"{field} is {name}, and {ranks} ranks have their networks on the CPU: start one process, or set {field} "
            "to cpu"
        )
    device = open_device(name, field)
    if verified(device) is None:
        raise ConfigError(
            f"{field} is {name}, and {about(device)['device']} was not verified on this machine with torch "
            f"{torch.__version__} and this version of StrataRec: run `stratarec doctor --gpu {name}` once, or set "
            f"{field} to cpu"
        )
    return device


def about(device: torch.device) -> dict[str, str]:
    """What a verification is of."""
    named: Any = getattr(torch.get_device_module(device), "get_device_name", None)
    driver = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        driver = _DRIVER.read_text().partition("\n")[0]
    return {
        "host": platform.node(),
        "device": f"{named(device.index)} ({device})" if named else str(device),
        "driver": driver,
        "runtime": str(torch.version.cuda or torch.version.hip or torch.version.xpu),
        **versions("stratarec", "torch"),
    }


def largest_fitting_batch(model: CTRModel, dataset: Dataset, config: LoaderConfig, precision: str) -> int:
    """The largest of the halves of a batch with whose gradients the network fits its device; 0 if none does."""
    size = config.batch_size
    while size > 1:
        size //= 2
        with contextlib.suppress(torch.OutOfMemoryError):
            # Gradients, and what the optimizer keeps.
            spare = [torch.empty_like(weight) for weight in model.network.parameters() for _ in range(3)]
            batch = next(Loader(dataset, "train", replace(config, batch_size=size)).batches(0, 0))
            with torch.no_grad():
                dense, pooled, *others = model.vectors(batch, model.request(batch))
            with autocast(precision, model.device):
                total = model.network(dense, pooled.requires_grad_(), *others).float().sum()
            total.backward()
            total.item()  # what it queued has run
            del spare
            return size
    return 0


def record_file() -> Path:
    """Where verifications are kept."""
    return cache_directory() / "gpu.json"


def verified(device: torch.device) -> dict[str, float] | None:
    """The figures of a device that was verified as it is now; None where it was not."""
    mine = about(device)
    return next((entry["figures"] for entry in _entries() if entry["about"] == mine), None)


def record(device: torch.device, figures: Mapping[str, float]) -> None:
    """Note that a device was verified."""
    mine = about(device)
    others = [entry for entry in _entries() if entry["about"]["device"] != mine["device"]]
    write_json(record_file(), [*others, {"about": mine, "figures": dict(figures)}])


def _entries() -> list[dict[str, Any]]:
    # What is missing or damaged is verified anew.
    with contextlib.suppress(DatasetError):
        found = read_json(record_file())
        if isinstance(found, list):
            return [entry for entry in found if isinstance(entry, dict) and {"about", "figures"} <= entry.keys()]
    return []
