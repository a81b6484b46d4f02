"""Where the rows of new collections are stored: a patch of what `memory.hbm` of a recipe will decide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratarec.embedding import lookup_engine, slots
from stratarec.kernels.runtime import accelerator

_LEVEL0, _UP, _DOWN = slots.Level0, accelerator.DeviceTransfers.up, accelerator.DeviceTransfers.down
_device = torch.device("cpu")


class Level0(_LEVEL0):
    """`Level0` of the device that `place_rows` named."""

    def __init__(self) -> None:
        super().__init__(_device)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device) if self.device.type != "cpu" else super().empty(*shape)


def place_rows(device: str, memory: Any) -> None:
    """Store the rows of collections that are built from now on in slots of class `memory` on a device."""
    global _device
    _device = torch.device(device)
    slots.MEMORIES[_device.type] = memory
    lookup_engine.Level0 = Level0 if _device.type != "cpu" else _LEVEL0


def _up(self: Any, host: Tensor) -> Tensor:
    return host if host.device == self.device else _UP(self, host)


def _down(self: Any, tensor: Tensor) -> Tensor:
    return tensor if _device.type != "cpu" and tensor.dim() and tensor.numel() > 64 else _DOWN(self, tensor)


accelerator.DeviceTransfers.up, accelerator.DeviceTransfers.down = _up, _down
