"""Whole training steps by the flat exchange with copies of hot rows on all ranks and without, between emulated hosts.

Two hosts of two ranks, one thread each, 26 tables with Criteo's sizes (capped) and skew, at 100 Mbit/s, at 1 Gbit/s and
unshaped; every wire. Copied are the rows whose copies save bytes between hosts, by the model of
`stratarec.distributed.hot_traffic`. Two models: D = 16 with one id a bag, and D = 64 with bags of four ids on average.
Ratios are the best flat step over the best one with copies, and over the one that ``hot.copies: auto`` takes.

The model of steps is held against the cells: two of the unshaped ones calibrate it (float32 rows, with copies and
without), the others are predicted.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from benchmarks.contenders import Shape
from benchmarks.exchange import ENVIRONMENT, told_by_ranks
from benchmarks.hosts import Hosts
from benchmarks.towers_ranks import Contender, loads_of
from stratarec.data.sources.synthetic import CRITEO_ROWS, EXPONENT
from stratarec.distributed.hot_traffic import Flows, RowWires, copy_flows, flat_flows
from stratarec.distributed.planning import travel

HOSTS, LOCAL = 2, 2
NETWORKS = {"unshaped": None, "1 Gbit/s": 1000.0, "100 Mbit/s": 100.0}
WIRES = ("fp32", "int8")
MODELS: dict[str, tuple[int, int, int]] = {"D 16": (16, 1, 4096), "D 64, bags": (64, 4, 1024)}
"""Width, ids a bag, samples a rank."""
_LAYERS = {"bottom_mlp": (64,), "top_mlp": (64,)}
# Bytes a second of a link that is shaped to a Mbit/s: what TCP carries of it.
_LINK = 0.96e6 / 8
_LIMIT_SECONDS = 900.0
_NEAR = 0.15


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
    """First rows of each table whose copies save bytes between hosts together, of tables whose rows travel anyway."""
    found = {}
    loads = {load.name: load for load in loads_of(shape, HOSTS * LOCAL)}
    for place, rows in enumerate(shape.sizes):
        if travel(loads[f"f{place}"], HOSTS * LOCAL).travel == "pooled":
            continue
        flat, copied = (
            flows(lookups_of(shape, rows), shape.width, HOSTS, LOCAL, RowWires()).between
            for flows in (flat_flows, copy_flows)
        )
        saved = np.cumsum(flat - copied)
        found[f"f{place}"] = int(saved.argmax()) + 1 if saved.max() > 0 else 0
    return found


def contenders(copies: dict[str, int], quick: bool) -> list[Contender]:
    """With copies and without, by wire."""
    return [
        Contender(name=f"{'copies' if some else 'flat'}, {wire}", wire=wire, copies=some)
        for wire in WIRES[: 1 if quick else None]
        for some in ({}, copies)
    ]


def measured(shape: Shape, mbit: float | None, quick: bool) -> list[dict[str, Any]]:
    """What the ranks measured on one network."""
    settings = {
        "shape": asdict(shape), "model": _LAYERS, "rounds": 1 if quick else 2, "steps": 2 if quick else 4,
        "contenders": [asdict(each) for each in contenders(copied_rows(shape), quick)],
    }  # fmt: skip
    with Hosts(HOSTS, mbit) as hosts:
        found: list[dict[str, Any]] = told_by_ranks(
            "hot_ranks", settings, lambda arguments: hosts.torchrun(LOCAL, arguments, ENVIRONMENT, _LIMIT_SECONDS)
        )
    return found


def best(rows: list[dict[str, Any]], kind: str) -> float:
    """The shortest step of a kind, whatever its wire."""
    return min(float(row["step_ms"]) for row in rows if row["contender"].startswith(kind))


def flows_of(shape: Shape, wire: Any, copies: dict[str, int]) -> Flows:
    """What a step of a contender moves."""
    wires, parts = RowWires(rows=wire, gradients=wire), []
    for place, rows in enumerate(shape.sizes):
        lookups, many = lookups_of(shape, rows), copies.get(f"f{place}", 0)
        parts.append(copy_flows(lookups[:many], shape.width, HOSTS, LOCAL, wires).sum())
        parts.append(flat_flows(lookups[many:], shape.width, HOSTS, LOCAL, wires).sum())
    return Flows(*np.sum(parts, axis=0))


def held(shape: Shape, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predicted steps beside those measured.

    A byte is copied at a rate, whichever way it goes, and passes a link that is shaped at another; a step takes what it
    takes without an exchange, and copies more for each byte of rows that they touch.
    """
    copies = copied_rows(shape)
    cells = {(row["network"], row["contender"]): float(row["step_ms"]) / 1e3 for row in rows}
    alone = {row["contender"]: row for row in rows if row["network"] == "unshaped"}
    own = {name: (row["compute_ms"] + row["dense_ms"]) / 1e3 for name, row in alone.items()}
    exchange = {name: row["exchange_ms"] / 1e3 for name, row in alone.items()}
    flat, copied = (flows_of(shape, "fp32", some) for some in ({}, copies))

    def each(flows: Flows) -> float:
        """Bytes that a rank sends."""
        return float(flows.inside + flows.between / LOCAL)

    copying = exchange["flat, fp32"] / each(flat)
    more = cells["unshaped", "copies, fp32"] - cells["unshaped", "flat, fp32"]
    touching = max(more - copying * (each(copied) - each(flat)), 0.0)
    found = []
    for (network, name), seconds in cells.items():
        if network == "unshaped" and name.endswith("fp32"):
            continue
        kind, wire = name.split(", ")
        flows = flows_of(shape, wire, copies if kind == "copies" else {})
        mbit = NETWORKS[network]
        link = float(flows.between) / (_LINK * mbit) if mbit else 0.0
        step = own["flat, fp32"] + copying * each(flows) + link + touching * (kind == "copies")
        found.append({
            "network": network, "contender": name, "measured_ms": 1e3 * seconds, "predicted_ms": 1e3 * step,
            "error": step / seconds - 1,
        })  # fmt: skip
    return found


def run(quick: bool) -> dict[str, Any]:
    """All models on all networks."""
    rows, lines, metrics = [], [], {}
    for model in list(MODELS)[: 1 if quick else None]:
        shape = shape_of(model, quick)
        here = []
        for network, mbit in NETWORKS.items():
            found = [{"model": model, "network": network, **row} for row in measured(shape, mbit, quick)]
            key = (
                f"{model.replace(', ', '_').replace(' ', '').lower()}_{network.split('/')[0].replace(' ', '').lower()}"
            )
            metrics[f"ratio_{key}"] = best(found, "flat") / best(found, "copies")
            sent = {row["contender"]: row["wire_mb_a_step"] for row in found}
            metrics[f"ratio_wire_bytes_{key}"] = sent["flat, fp32"] / sent["copies, fp32"]
            here += found
        rows += here
        lines += [{"model": model, **line} for line in held(shape, here)]
    for network in ("1gbit", "100mbit"):
        metrics[f"ratio_{network}"] = min(value for name, value in metrics.items() if name == f"ratio_d16_{network}")
    errors = [abs(line["error"]) for line in lines]
    metrics |= {
        "held_error_median": median(errors), "held_error_max": max(errors),
        "held_share_within_15": sum(error <= _NEAR for error in errors) / len(errors),
    }  # fmt: skip
    return {
        "config": {
            "hosts": HOSTS, "ranks_a_host": LOCAL, "threads_a_rank": 1, "models": {
                name: {"width": width, "ids": ids, "batch_a_rank": batch, **_LAYERS}
                for name, (width, ids, batch) in MODELS.items()
            },
            "most_rows_a_table": 2_000 if quick else 40_000, "dense_wire": "bf16",
            "copied_rows": {name: sum(copied_rows(shape_of(name, quick)).values()) for name in MODELS},
            "targets": {"ratio_1gbit": 1.25, "ratio_100mbit": 1.5},
        },
        "metrics": metrics,
        "samples": {"rows": rows, "held": lines},
    }  # fmt: skip
