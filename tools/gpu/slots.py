"""Compare slots in GPU memory with those of the CPU in the workloads of `tests/slot_memories.py`.

``python tools/gpu/slots.py [WORKLOADS]`` prints a line for each workload. Without a GPU, kernels
run in Triton's interpreter, where all parts must be bitwise equal to the CPU's.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

from cells import DEVICE, GPU

warnings.filterwarnings("ignore")

import slot_memories  # noqa: E402

TOLERANCE = 1e-6


def run(kind: str, workload: dict[str, Any]) -> list[bytes]:
    """Return the results of a workload on slots of a kind."""
    on_gpu = GPU and kind == "device"
    return list(
        slot_memories.results("plain" if on_gpu else kind, **workload, place=DEVICE if on_gpu else "cpu")
    )


def main() -> int:
    failed = 0
    for number, workload in enumerate(
        slot_memories.WORK[: int(sys.argv[1]) if len(sys.argv) > 1 else None]
    ):
        began = time.time()
        expected, first, second = (run(kind, workload) for kind in ("plain", "device", "device"))
        apart = [slot_memories.difference(one, other) for one, other in zip(expected, first, strict=True)]
        largest = max(apart)
        failed += first != second or not largest <= TOLERANCE
        print(
            f"workload {number}, {workload['optimizer'].kind}: {sum(each != 0 for each in apart)} of "
            f"{len(apart)} parts differ from the CPU's, by {largest:.1e} at most; a second run has "
            f"{'the same' if first == second else 'OTHER'} bits; {time.time() - began:.0f} s",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
