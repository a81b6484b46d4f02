"""Rows in the memory of the lazy device: kernels in Triton's interpreter, which run when their stream arrives at them.

Import this module before Triton and before the first gradient is computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import lazy_device
import triton_interpreter  # noqa: F401  # before Triton

lazy_device.install()

import slot_memories  # noqa: E402
import torch  # noqa: E402
from slot_memories import DEVICE_WORK  # noqa: E402

from stratarec.embedding import packed_batch, rings, slots  # noqa: E402
from stratarec.embedding.slots import device  # noqa: E402


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Queue a kernel on the current stream."""
    given = lazy_device.inner(arguments)
    lazy_device.current().put(lambda: kernel[(programs,)](*given, **constants))


for _module in (packed_batch, device):
    _module.launch = launch  # type: ignore[assignment]
slots.MEMORIES["lazy"] = device.DeviceSlots


def _nothing(*given: Any) -> None:
    pass


FAULTS: dict[str, Callable[[], None]] = {
    "moves do not wait for steps": lambda: setattr(rings.DeviceOrder, "after", _nothing),
    "steps do not wait for moves": lambda: setattr(rings.DeviceOrder, "start", _nothing),
    "places are reused too early": lambda: setattr(rings.Place, "release", _nothing),
    "pinned buffers are written too early": lambda: setattr(rings.Place, "is_sent", True),
    "lists do not wait for the copy": lambda: setattr(rings.Place, "wait", _nothing),
}
"""Name -> function that removes a wait."""


def compare(number: int, schedules: tuple[str, ...], fault: str = "", **more: Any) -> None:
    """Print, as JSON, under which schedules a workload has other results than with plain slots.

    With a fault, only the first of these schedules is printed.
    """
    workload = {**DEVICE_WORK[number], **more}
    expected = list(slot_memories.results("plain", **workload))
    if fault:
        FAULTS[fault]()
    differing = []
    for schedule in schedules:
        lazy_device.follow(schedule)
        try:
            same = list(slot_memories.results("plain", **workload, place="lazy")) == expected
        except Exception:
            if not fault:
                raise
            same = False
        differing += [] if same else [schedule]
        if fault and differing:
            break
        for stream in lazy_device._STREAMS:
            stream.drain()
    print(json.dumps(differing))


torch.set_num_threads(1)
