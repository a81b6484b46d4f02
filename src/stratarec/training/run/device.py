"""On which device a run's network is: named by `train.device`, found, and verified here before anybody relies on it.

What `stratarec doctor --gpu` verified lies in ``$XDG_CACHE_HOME/stratarec/gpu.json``: for which machine, GPU, driver,
torch and code of StrataRec. Where any of these is another one, it is verified anew.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError, DatasetError
from stratarec.io.atomic import cache_directory, read_json, write_json
from stratarec.io.versions import versions
from stratarec.kernels.runtime.accelerator import CPU, open_device
from stratarec.models.base import CTRModel, autocast

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


def fitting_batch(model: CTRModel, dataset: Dataset, config: LoaderConfig, precision: str) -> int:
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
