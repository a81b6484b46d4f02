"""Compare slots in GPU memory with those of the CPU in the workloads of `tests/slot_memories.py`.

``python tools/gpu/slots.py [WORKLOADS]`` prints a line a workload. Without a GPU, kernels run in Triton's interpreter
(``TRITON_INTERPRET=1``), where all parts must have the CPU's bits, except gradients of per-sample weights.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from prototype.device_slots import DeviceSlots
from prototype.placement import place_rows

warnings.filterwarnings("ignore")

import slot_memories  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-6


def run(kind: str, workload: dict[str, Any]) -> list[bytes]:
    """Return the results of a workload on slots of a kind."""
    place_rows("cpu" if kind == "plain" else DEVICE, slot_memories.KINDS[kind])
    return list(slot_memories.results(kind, **workload))


def difference(one: bytes, other: bytes) -> float:
    """Return the largest absolute difference of two parts, which are float32 numbers or the text of a gradient norm."""
    if one == other:
        return 0.0
    if max(len(one), len(other)) < 32:
        return abs(float(one) - float(other)) / float(one)
    left, right = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
    return float(np.nanmax(np.abs(left - right)))


def main() -> int:
    slot_memories.KINDS["device"] = DeviceSlots
    failed = 0
    for number, workload in enumerate(slot_memories.WORK[: int(sys.argv[1]) if len(sys.argv) > 1 else None]):
        began = time.time()
        expected, first, second = (run(kind, workload) for kind in ("plain", "device", "device"))
        apart = [difference(one, other) for one, other in zip(expected, first, strict=True)]
        largest = max(apart)
        failed += first != second or not largest <= TOLERANCE
        print(
            f"workload {number}, {workload['optimizer'].kind}: {sum(each != 0 for each in apart)} of {len(apart)} "
            f"parts differ from the CPU's, by {largest:.1e} at most; a second run has "
            f"{'the same' if first == second else 'OTHER'} bits; {time.time() - began:.0f} s",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
