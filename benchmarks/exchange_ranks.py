"""One rank of the benchmark `exchange`, started by torchrun: checks correctness, then times all
contenders.

Rank 0 writes the results. On emulated hosts, the bytes on the wire are read from the host's
interface.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.__main__ import give_everyone_good_memory


def wire_bytes() -> int:
    """Return the bytes that this host has sent so far, or 0 without an emulated interface."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    counter = Path(f"/sys/class/net/{name}/statistics/tx_bytes")
    return int(counter.read_text()) if name != "lo" and counter.exists() else 0


class Bench:
    """All contenders with their tables, and their steps."""

    def __init__(self, mesh: Any, makes: Any, shape: Any, batches: int = 4) -> None:
        from benchmarks.sharded import Theirs, batch_of, gradients_of

        self.mesh = mesh
        self._batches = [batch_of(shape, 1000 * mesh.rank + number) for number in range(batches)]
        gradients = gradients_of(shape, mesh.rank)
        self.steps: dict[str, Callable[[int], object]] = {}
        self.contenders = {}
        for name, make in makes.items():
            self.contenders[name] = each = make(shape)
            if isinstance(each, Theirs):
                each.learn_order(self._batches[0])
            self.steps[name] = self._step(each, each.gradient(gradients))

    def _step(self, each: Any, gradient: Any) -> Callable[[int], object]:
        return lambda number: each.step(self._batches[number % len(self._batches)], gradient)

    def together(self) -> None:
        """Wait for all ranks."""
        self.mesh.rows.agree(None)

    def stretch(self, name: str, first: int, steps: int) -> tuple[float, int]:
        """Return seconds per step, until the slowest rank is done, and bytes per step on this
        host's wire.
        """
        self.together()
        sent, began = wire_bytes(), time.perf_counter()
        for number in range(first, first + steps):
            self.steps[name](number)
        self.together()
        return (time.perf_counter() - began) / steps, (wire_bytes() - sent) // steps

    def alternate(self, rounds: int, steps: int, warmup: int = 1) -> dict[str, dict[str, list[float]]]:
        """Return seconds and bytes between hosts of a step, for each contender and round."""
        measured: dict[str, dict[str, list[float]]] = {
            name: {"seconds": [], "wire_bytes": []} for name in self.steps
        }
        for round_ in range(-warmup, rounds):
            for name in list(self.steps) if round_ % 2 else list(reversed(self.steps)):
                seconds, sent = self.stretch(name, round_ + warmup, steps)
                # The first rank of a host counts the bytes of the host.
                is_counted = int(os.environ["LOCAL_RANK"]) == 0
                all_hosts = sum(part for (part,) in self.mesh.rows.gather_ints([sent if is_counted else 0]))
                if round_ >= 0:
                    measured[name]["seconds"].append(seconds)
                    measured[name]["wire_bytes"].append(all_hosts)
        return measured


def figures(bench: Bench, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Return a row with the medians of each contender."""
    rows = []
    for name, measured in bench.alternate(rounds, steps).items():
        ordered = sorted(measured["seconds"])
        rows.append(
            {
                "contender": name,
                "step_ms": 1e3 * median(ordered),
                "low_ms": 1e3 * ordered[len(ordered) // 4],
                "high_ms": 1e3 * ordered[(3 * len(ordered)) // 4],
                "wire_mb_a_step": median(measured["wire_bytes"]) / 1e6,
            }
        )
    return rows


def main() -> int:
    settings = json.loads(sys.argv[1])
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    from benchmarks.contenders import Shape
    from benchmarks.sharded import contenders, gate
    from stratarec.distributed.mesh import joined

    shape = Shape(**settings["shape"])
    small = Shape(sizes=[min(rows, 1000) for rows in shape.sizes], width=shape.width, batch=64)
    with joined() as mesh:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        makes = contenders(mesh, local, shape)
        gate(mesh, makes, small)
        bench = Bench(mesh, makes, shape)
        rows = figures(bench, settings["rounds"], settings["steps"])
        if mesh.is_first:
            Path(settings["out"]).write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    give_everyone_good_memory()
    sys.exit(main())
