"""Level 0: slots of float32 rows that are trained in place, behind one interface for every device.

All code that reads or writes trained rows goes through `SlotMemory`. Caches, stores, checkpoints
and the `nn.Module` use slot numbers, host rows (`FloatRows`) and records (bytes), never the arrays.
For a table that is completely in level 0 a slot is a row; under a cache, rows are fetched into a
slot and evicted from it. `Level0` allocates slots on a device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.slots.cpu import CpuSlots
from stratarec.embedding.slots.memory import SlotDevice, SlotMemory
from stratarec.errors import ConfigError
from stratarec.kernels.runtime.accelerator import CPU, require_triton
from stratarec.registry import Registry


class Level0(SlotDevice):
    """Allocates the slots of a collection in the memory of one device."""

    def __init__(self, device: torch.device = CPU) -> None:
        if device.type not in MEMORIES:
            raise ConfigError(
                f"rows cannot be trained in the memory of {device}, expected {' or '.join(MEMORIES)}"
            )
        super().__init__(device)

    def slots(self, slots: int, width: int, optimizer: RowOptimizerConfig) -> SlotMemory:
        """Return zeroed slots with the state of `optimizer`."""
        return MEMORIES[self.device.type](self, slots, width, optimizer)


def _device_slots(level0: SlotDevice, slots: int, width: int, optimizer: RowOptimizerConfig) -> SlotMemory:
    require_triton(level0.device)
    # Imported late: Triton is an optional dependency.
    from stratarec.embedding.slots.device import DeviceSlots

    return DeviceSlots(level0, slots, width, optimizer)


MEMORIES = Registry[Callable[[SlotDevice, int, int, RowOptimizerConfig], SlotMemory]](
    "memory of trained rows", {"cpu": CpuSlots, "cuda": _device_slots}
)
"""Device type -> constructor of its slots."""
