"""FBGEMM with its default memory settings, in a child process: no huge pages, and malloc's default
thresholds.

A process fixes these settings at its first allocation, so they cannot change inside the benchmark.
The child keeps its tables and batches, runs one step per request, and answers with the seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import IO, Any

import torch

from benchmarks.contenders import Shape, best_threads, build_fbgemm

TUNING = ("THP_MEM_ALLOC_ENABLE", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


class PlainPeer:
    """Handle of the child process."""

    def __init__(self, shape: Shape, most_threads: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.plain_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name not in TUNING},
        )
        self.threads = int(self._ask(json.dumps({"shape": asdict(shape), "most_threads": most_threads})))

    def _ask(self, line: str) -> str:
        sender, receiver = self._child.stdin, self._child.stdout
        if sender is None or receiver is None:
            raise RuntimeError("the child has no pipes")
        sender.write(line + "\n")
        sender.flush()
        answer = receiver.readline()
        if not answer:
            raise RuntimeError(f"benchmarks.plain_peer ended with code {self._child.wait()}")
        return answer

    def step(self, number: int) -> float:
        """Run one step in the child and return its seconds."""
        return float(self._ask(str(number)))

    def close(self) -> None:
        """End the child process."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        self._child.wait(timeout=60)


def serve(orders: IO[str], answers: IO[str]) -> None:
    """Read a shape, answer with the fastest number of threads, then run one step per line and
    answer its seconds.
    """
    order: dict[str, Any] = json.loads(orders.readline())
    shape = Shape(**order["shape"])
    peer = build_fbgemm(shape)
    batches = [shape.bags(seed) for seed in range(8)]
    gradient = torch.randn(shape.batch, len(shape.sizes) * shape.width) * 1e-3

    def step(number: int) -> float:
        began = time.perf_counter()
        peer(*batches[number % 8]).backward(gradient)
        return time.perf_counter() - began

    best = best_threads(step, order["most_threads"])
    torch.set_num_threads(best)
    print(best, file=answers, flush=True)
    for line in orders:
        print(step(int(line)), file=answers, flush=True)


if __name__ == "__main__":
    # Libraries print to standard output when they load, so answers use a copy of it.
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, reply)
