"""One rank of the benchmark `hot_distributed`, started by torchrun on emulated hosts: the gate, then all in turns."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from benchmarks.__main__ import give_everyone_good_memory
from benchmarks.contenders import Shape
from benchmarks.towers_ranks import Bench, Contender, figures, main, merged

_DENSE_WIRE = "bf16"


def gate(mesh: Any, shape: Shape, model: dict[str, Any]) -> None:
    """Refuse figures where copies are not the model that rows with their owners are."""
    from stratarec.errors import TrainingError

    small = replace(shape, sizes=[min(rows, 1000) for rows in shape.sizes], batch=64)
    copies, losses = {f"f{place}": min(20, rows) for place, rows in enumerate(small.sizes)}, []
    for contender in (Contender(name="flat"), Contender(name="copies", copies=copies)):
        bench = Bench(contender, mesh, small, model, "fp32")
        losses.append(bench.stretch(4)["loss"])
        bench.close()
    if abs(losses[0] - losses[1]) > 1e-6 * abs(losses[0]):
        raise TrainingError(f"losses with copies of hot rows and without differ: {losses}")


def measured(mesh: Any, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A line for each contender, which take turns."""
    shape, model = Shape(**settings["shape"]), settings["model"]
    gate(mesh, shape, model)
    benches = [Bench(Contender(**each), mesh, shape, model, _DENSE_WIRE) for each in settings["contenders"]]
    found: dict[str, list[dict[str, float]]] = {bench.contender.name: [] for bench in benches}
    for round_ in range(-1, settings["rounds"]):
        for bench in benches if round_ % 2 else benches[::-1]:
            mine = merged(mesh, bench.stretch(settings["steps"]))
            if round_ >= 0:
                found[bench.contender.name].append(mine)
    for bench in benches:
        bench.close()
    return figures(found)


if __name__ == "__main__":
    give_everyone_good_memory()
    sys.exit(main(measured))
