"""On which device a run's network is: named by `train.device`, found, and verified here before anybody relies on it."""

from __future__ import annotations

import torch

from stratarec.errors import ConfigError
from stratarec.kernels.runtime.accelerator import CPU, open_device


def device_of(name: str, ranks: int = 1, field: str = "train.device") -> torch.device:
    """The device of that name.

    Raises
    ------
    ConfigError
        Where it is none of this machine, or there are several ranks.
    """
    if name == "cpu":
        return CPU
    if ranks > 1:
        raise ConfigError(
            f"{field} is {name}, and {ranks} ranks have their networks on the CPU: start one process, or set {field} "
            "to cpu"
        )
    return open_device(name, field)
