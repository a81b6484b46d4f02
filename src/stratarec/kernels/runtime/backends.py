"""The module that has an operation's kernels for a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stratarec.errors import ConfigError


def backend(modules: Mapping[str, Any], given: Tensor) -> Any:
    """Of `modules`, by kind of device, the one for the device on which `given` is."""
    kind = given.device.type
    if kind not in modules:
        raise ConfigError(f"a tensor is on device {kind!r}, expected {' or '.join(modules)}: move the model there")
    return modules[kind]
