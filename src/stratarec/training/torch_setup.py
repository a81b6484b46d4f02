"""Set up torch: settings of the process, the optimizer of the network, and the device of the
network.

A device other than the CPU is used only if `stratarec doctor --gpu` has verified it on this
machine. The result is stored in ``$XDG_CACHE_HOME/stratarec/gpu.json``, with the machine, GPU,
driver, torch version and a hash of StrataRec's code. If any of these changes, the device must be
verified again.
"""

from __future__ import annotations

import contextlib
import inspect
import platform
import resource
import sys
import time
import timeit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
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
from stratarec.kernels.runtime.memory import keep_free_memory
from stratarec.models.base import CTRModel, autocast
from stratarec.models.dense_optimizers import DENSE_OPTIMIZERS
from stratarec.planning.machine import DeviceRates
from stratarec.recipe.train_section import DenseOptimizerConfig


@contextmanager
def torch_settings(*, threads: int = 0, seed: int = 0) -> Iterator[None]:
    """Use deterministic algorithms, a number of threads and a random seed inside the context.

    With 0 `threads`, their number does not change. All settings are restored afterwards, except
    that malloc keeps free memory (`keep_free_memory`). They apply to the whole process, so two runs
    that train in one process at the same time need the same settings.
    """
    keep_free_memory()
    options: Any = torch.utils.deterministic
    before, fills = torch.get_num_threads(), options.fill_uninitialized_memory
    # `torch.use_deterministic_algorithms` would also import torch's compiler, to pass the setting
    # to it.
    strictness = torch.get_deterministic_debug_mode()
    try:
        if threads:
            torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode("error")
        # torch need not fill every new tensor, because this package never reads memory that it has
        # not written.
        options.fill_uninitialized_memory = False
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_deterministic_debug_mode(strictness)
        options.fill_uninitialized_memory = fills
        if threads:
            torch.set_num_threads(before)


# These methods of `torch.optim.Optimizer` are decorated for `torch.compile`, and the decorator
# imports the compiler at the first call: a second of CPU time and 60 MiB in every process, although
# nothing is compiled here. The undecorated functions give the same bits.
_MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


@cache
def uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the optimizer class `kind`, such as `torch.optim.Adam`, without decorators for
    `torch.compile`.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in _MARKED}
    # Unwrapping also removes the decorator that disables gradients.
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


def build_optimizer(config: DenseOptimizerConfig, network: nn.Module) -> Optimizer:
    """Build the fused torch optimizer of a network, without decorators for ``torch.compile``."""
    kind, weights = DENSE_OPTIMIZERS[config.kind], list(network.parameters())
    make: Any = uncompiled(kind.load())
    fused = kind.fused == "everywhere" or (kind.fused == "cpu" and weights[0].device.type == "cpu")
    options = {"fused": True} if fused else {}
    optimizer: Optimizer = make(
        weights, lr=config.learning_rate, weight_decay=config.weight_decay, **options
    )
    return optimizer


@cache
def bf16_slowness() -> float:
    """Return the time of a matrix product in bfloat16 relative to float32 on this processor.

    Below 1 with AVX-512 BF16 or AMX; about 30 without AVX-512.
    """

    def least(dtype: torch.dtype) -> float:
        matrix = torch.ones(256, 256, dtype=dtype)
        # The minimum of six runs, because the first products also load libraries.
        return min(timeit.repeat(lambda: matrix @ matrix, timer=time.thread_time, repeat=6, number=1))

    return least(torch.bfloat16) / least(torch.float32)


def peak_rss_bytes() -> int:
    """Return the peak of this process's resident memory so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_DRIVER = Path("/proc/driver/nvidia/version")


def device_of(name: str, ranks: int = 1, field: str = "train.device") -> torch.device:
    """Return the torch device with this name. `field` is the name of the setting in error messages.

    Raises
    ------
    ConfigError
        If the machine does not have the device, if it was not verified on this machine, or if it is
        not the CPU and there are several ranks.
    """
    if name == "cpu":
        return CPU
    if ranks > 1:
        raise ConfigError(
            f"{field} is {name}, but with {ranks} ranks networks must be on the CPU: start one process, or "
            f"set {field} to cpu"
        )
    device = open_device(name, field)
    if verified(device) is None:
        raise ConfigError(
            f"{field} is {name}, but {about(device)['device']} was not verified on this machine with torch "
            f"{torch.__version__} and this version of StrataRec: run `stratarec doctor --gpu {name}` once, "
            f"or set {field} to cpu"
        )
    return device


def about(device: torch.device) -> dict[str, str]:
    """Return the host, device, driver and versions for which a verification of the device is
    valid.
    """
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
    """Return a batch size with which a step fits in the memory of the device, or 0 if there is
    none.

    It is found by halving the configured batch size until a step fits.
    """
    size = config.batch_size
    while size > 1:
        size //= 2
        with contextlib.suppress(torch.OutOfMemoryError):
            # Occupies as much memory as gradients and the two moments of an optimizer need.
            spare = [torch.empty_like(weight) for weight in model.network.parameters() for _ in range(3)]
            batch = next(Loader(dataset, "train", replace(config, batch_size=size)).batches(0, 0))
            with torch.no_grad():
                dense, pooled, *others = model.vectors(batch, model.request(batch))
            with autocast(precision, model.device):
                total = model.network(dense, pooled.requires_grad_(), *others).float().sum()
            total.backward()
            total.item()  # waits for the device
            del spare
            return size
    return 0


def record_file() -> Path:
    """Return the path of the file in which verifications of devices are stored."""
    return cache_directory() / "gpu.json"


def verified(device: torch.device) -> dict[str, float] | None:
    """Return the figures that were measured when a device was verified; None without a valid
    verification.
    """
    mine = about(device)
    return next((entry["figures"] for entry in _entries() if entry["about"] == mine), None)


def measured_rates(device: torch.device) -> DeviceRates:
    """Return the rates of a device as `stratarec doctor --gpu` measured them.

    Raises
    ------
    ConfigError
        If the device was not measured on this machine.
    """
    figures = verified(device)
    if figures is None or figures.keys() != {
        field.name for field in fields(DeviceRates) if field.type == "float"
    }:
        raise ConfigError(f"{device} was not measured here: run `stratarec doctor --gpu {device}`")
    name = about(device)["device"]
    return DeviceRates(
        **figures,
        origin=f"{name}, as `stratarec doctor --gpu` measured it here",
        trains_rows=True,
        device=str(device),
    )


def record(device: torch.device, figures: Mapping[str, float]) -> None:
    """Store that a device was verified, with the measured figures."""
    mine = about(device)
    others = [entry for entry in _entries() if entry["about"]["device"] != mine["device"]]
    write_json(record_file(), [*others, {"about": mine, "figures": dict(figures)}])


def _entries() -> list[dict[str, Any]]:
    # A missing or damaged file means that nothing was verified.
    with contextlib.suppress(DatasetError):
        entries = read_json(record_file())
        if isinstance(entries, list):
            return [
                entry
                for entry in entries
                if isinstance(entry, dict) and {"about", "figures"} <= entry.keys()
            ]
    return []
