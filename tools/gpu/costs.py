"""Measure what the host pays for a launch, a copy, an event, a replay and a handover between
threads.

``python tools/gpu/costs.py OUT.jsonl`` writes one line of JSON per group of figures. They explain
the time of a step that the GPU does not need. Without a GPU, sizes are tiny and only operations of
the host are timed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from cells import DEVICE, GPU, MACHINE, SMALL, out_of_time, write
from triton import language as tl

import triton  # isort: skip

PLACE, MANY = torch.device(DEVICE), 3 if SMALL else 300


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def host_us(run: Callable[[], object], count: int = MANY, rounds: int = 5) -> float:
    """Return the median microseconds of the host for a call; the device may still work."""
    times = []
    for _ in range(1 if SMALL else rounds):
        synchronize()
        began = time.perf_counter()
        for _ in range(count):
            run()
        times.append(1e6 * (time.perf_counter() - began) / count)
        synchronize()
    return sorted(times)[len(times) // 2]


def device_ms(run: Callable[[], object]) -> float:
    """Return the median milliseconds of the device, with a cold L2."""
    if not GPU:
        run()
        return 0.0
    return float(triton.testing.do_bench(run, warmup=5, rep=40, return_mode="median"))


@triton.jit
def count_up(out, count, one, two, three, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, i, i < count)


def calls() -> None:
    """Time single operations, and 100 of them while another thread runs Python."""
    one = torch.zeros(1024, dtype=torch.int32, device=PLACE)
    floats = torch.zeros(1024, device=PLACE, requires_grad=True)
    result = {
        "torch add_": host_us(lambda: one.add_(1)),
        "torch.empty": host_us(lambda: torch.empty(1024, device=PLACE)),
        "triton launch": host_us(lambda: count_up[(4,)](one, 1024, 1, 2, 3, BLOCK=256)),
        "autograd, two nodes": host_us(
            lambda: torch.autograd.grad((floats * 2).sum(), floats), MANY // 10 or 1
        ),
    }
    if GPU:
        event: Any = torch.cuda.Event()
        pinned, target = torch.zeros(1024, dtype=torch.int32, pin_memory=True), torch.empty_like(one)
        result["event record"] = host_us(event.record)
        result["event synchronize, done"] = host_us(event.synchronize)
        result["copy of 4 KB up"] = host_us(lambda: target.copy_(pinned, non_blocking=True))
        result["copy of 4 KB down"] = host_us(lambda: pinned.copy_(target, non_blocking=True))
        result["launch and wait"] = host_us(
            lambda: (one.add_(1), torch.cuda.current_stream().synchronize())
        )
        for nodes in (10, 50, 100, 200):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(nodes):
                    one.add_(1)
            result[f"graph of {nodes}, host"] = host_us(graph.replay, 20)
            result[f"graph of {nodes}, device"] = 1e3 * device_ms(graph.replay)
    there, back = SimpleQueue[int](), SimpleQueue[int]()
    rounds = (1 if SMALL else 3) * MANY
    thread = threading.Thread(target=lambda: [back.put(there.get()) for _ in range(rounds)], daemon=True)
    thread.start()
    result["handover to a thread and back"] = host_us(lambda: (there.put(1), back.get()), MANY, 3)

    def work() -> None:
        for _ in range(100):
            one.add_(1)

    result["100 operations"] = host_us(work, 2, 3)
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            sum(range(300))

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    result["100 operations, and a thread that runs Python"] = host_us(work, 2, 3)
    ended.set()
    thread.join()
    write(cell="costs", benchmark="gpu_costs", unit="us", **MACHINE, **result)


def sorts() -> None:
    """Time the sort of a batch's lookups."""
    for count in (256,) if SMALL else (26_624, 106_496, 425_984):
        rows = torch.randint(0, 1 << 20, (count,), device=PLACE, dtype=torch.int32)
        stable = device_ms(lambda rows=rows: torch.sort(rows, stable=True))
        sums = device_ms(lambda rows=rows: torch.cumsum(rows, 0, dtype=torch.int32))
        write(
            cell="costs",
            benchmark="gpu_costs",
            what="sort",
            count=count,
            unit="ms",
            sort=stable,
            cumsum=sums,
        )


if __name__ == "__main__":
    calls()
    if not out_of_time("sorts"):
        sorts()
    sys.exit(0)
