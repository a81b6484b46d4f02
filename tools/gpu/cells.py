"""Shared parts of the measurements: the device, its slots, and results as one line of JSON per
cell.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SMALL = not GPU or os.environ.get("SMALL") == "1"
"""Whether sizes are tiny and times meaningless: in Triton's interpreter, and under
compute-sanitizer.
"""
MACHINE = {"device": torch.cuda.get_device_name() if GPU else "interpreter"} | {
    package: metadata.version(package) for package in ("torch", "triton")
}
_BUDGET, _BEGAN = float(os.environ.get("SECONDS_LEFT", "150")), time.time()

if not GPU:
    import triton_interpreter  # noqa: F401  # before Triton


from stratarec.embedding import slots as _slots  # noqa: E402
from stratarec.embedding.slots.cpu import CpuSlots  # noqa: E402
from stratarec.embedding.slots.device import DeviceSlots  # noqa: E402


def use_device_slots(on_device: bool = True) -> None:
    """Without a GPU: build new tables with the slots of a GPU on the CPU, or with plain ones."""
    if not GPU:
        _slots.MEMORIES["cpu"] = DeviceSlots if on_device else CpuSlots


def out_of_time(name: str) -> bool:
    """Whether the time of this process is used up; if so, write a cell that names the skipped
    measurement.
    """
    spent = time.time() - _BEGAN > _BUDGET
    if spent:
        write(cell="stopped", before=name)
    return spent


def write(**cell: Any) -> None:
    """Append a cell to the file that the command line names, or print it, with the seconds since
    the start.
    """
    line = json.dumps({**cell, "at_s": round(time.time() - _BEGAN, 1)})
    if len(sys.argv) > 1:
        with Path(sys.argv[1]).open("a") as file:
            file.write(f"{line}\n")
    else:
        print(line, flush=True)
