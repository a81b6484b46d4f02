"""Whole training steps by the flat exchange with copies of hot rows on all ranks and without, between emulated hosts.

Two hosts of two ranks, one thread each, 26 tables with Criteo's sizes (capped) and skew, at 100 Mbit/s, at 1 Gbit/s and
unshaped; every wire. Copied are the rows that a rank's batch looks up once or more, by the law that ids are drawn by.
Two models: D = 16 with one id a bag, and D = 64 with bags of four ids on average. Ratios are the best flat step over
the best one with copies. Started by torchrun, this module is one of the ranks.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.__main__ import give_everyone_good_memory
from benchmarks.contenders import Shape
from benchmarks.exchange import ENVIRONMENT, told_by_ranks
from benchmarks.hosts import Hosts
from benchmarks.towers_ranks import Bench, Contender, figures, loads_of, main, merged
from stratarec.data.sources.synthetic import CRITEO_ROWS, EXPONENT
from stratarec.distributed.sharding import travel

HOSTS, LOCAL = 2, 2
NETWORKS = {"unshaped": None, "1 Gbit/s": 1000.0, "100 Mbit/s": 100.0}
WIRES = ("fp32", "int8")
MODELS: dict[str, tuple[int, int, int]] = {"D 16": (16, 1, 4096), "D 64, bags": (64, 4, 1024)}
"""Width, ids a bag, samples a rank."""
_LAYERS = {"bottom_mlp": (64,), "top_mlp": (64,)}
_DENSE_WIRE = "bf16"
_LIMIT_SECONDS = 900.0


def shape_of(model: str, quick: bool) -> Shape:
    """Tables and batches of a model."""
    width, ids, batch = MODELS[model]
    cap = 2_000 if quick else 40_000
    return Shape(
        sizes=[min(rows, cap) for rows in CRITEO_ROWS], width=width, batch=batch // (8 if quick else 1), ids=ids
    )


def lookups_of(shape: Shape, rows: int) -> Any:
    """``[rows]`` lookups of each row of a table in the batch of a rank, by the law that ids are drawn by."""
    edges = (np.arange(rows + 1) / rows) ** (1 / EXPONENT)
    return np.diff(edges) * shape.batch * shape.ids


def copied_rows(shape: Shape) -> dict[str, int]:
    """First rows of each table that a rank's batch looks up once or more, of tables whose rows travel anyway."""
    found = {}
    loads = {load.name: load for load in loads_of(shape, HOSTS * LOCAL)}
    for place, rows in enumerate(shape.sizes):
        if travel(loads[f"f{place}"], HOSTS * LOCAL).travel == "pooled":
            continue
        found[f"f{place}"] = int(np.count_nonzero(lookups_of(shape, rows) >= 1))
    return found


def contenders(copies: dict[str, int], quick: bool) -> list[Contender]:
    """With copies and without, by wire."""
    return [
        Contender(name=f"{'copies' if some else 'flat'}, {wire}", wire=wire, copies=some)
        for wire in WIRES[: 1 if quick else None]
        for some in ({}, copies)
    ]


def asked(shape: Shape, mbit: float | None, quick: bool) -> list[dict[str, Any]]:
    """What the ranks measured on one network."""
    settings = {
        "shape": asdict(shape), "model": _LAYERS, "rounds": 1 if quick else 2, "steps": 2 if quick else 4,
        "contenders": [asdict(each) for each in contenders(copied_rows(shape), quick)],
    }  # fmt: skip
    with Hosts(HOSTS, mbit) as hosts:
        found: list[dict[str, Any]] = told_by_ranks(
            "hot_distributed", settings, lambda arguments: hosts.torchrun(LOCAL, arguments, ENVIRONMENT, _LIMIT_SECONDS)
        )
    return found


def best(rows: list[dict[str, Any]], kind: str) -> float:
    """The shortest step of a kind, whatever its wire."""
    return min(float(row["step_ms"]) for row in rows if row["contender"].startswith(kind))


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


def run(quick: bool) -> dict[str, Any]:
    """All models on all networks."""
    rows, metrics = [], {}
    for model in list(MODELS)[: 1 if quick else None]:
        shape = shape_of(model, quick)
        for network, mbit in NETWORKS.items():
            found = [{"model": model, "network": network, **row} for row in asked(shape, mbit, quick)]
            key = (
                f"{model.replace(', ', '_').replace(' ', '').lower()}_{network.split('/')[0].replace(' ', '').lower()}"
            )
            metrics[f"ratio_{key}"] = best(found, "flat") / best(found, "copies")
            sent = {row["contender"]: row["wire_mb_a_step"] for row in found}
            metrics[f"ratio_wire_bytes_{key}"] = sent["flat, fp32"] / sent["copies, fp32"]
            rows += found
    for network in ("1gbit", "100mbit"):
        metrics[f"ratio_{network}"] = min(value for name, value in metrics.items() if name == f"ratio_d16_{network}")
    return {
        "config": {
            "hosts": HOSTS, "ranks_a_host": LOCAL, "threads_a_rank": 1, "models": {
                name: {"width": width, "ids": ids, "batch_a_rank": batch, **_LAYERS}
                for name, (width, ids, batch) in MODELS.items()
            },
            "most_rows_a_table": 2_000 if quick else 40_000, "dense_wire": _DENSE_WIRE,
            "copied_rows": {name: sum(copied_rows(shape_of(name, quick)).values()) for name in MODELS},
            "targets": {"ratio_1gbit": 1.25, "ratio_100mbit": 1.5},
        },
        "metrics": metrics,
        "samples": {"rows": rows},
    }  # fmt: skip


if __name__ == "__main__":
    give_everyone_good_memory()
    sys.exit(main(measured))
