"""The predicted steps of `stratarec.planning.step_model` compared with steps that the benchmark `towers` measured.

Four ranks share two processors, so nothing that one rank takes alone says what it takes beside the others. What a rank
computes is therefore found from steps of all ranks together, on the network that is not shaped, and what networks take
from exchanges alone, which the same ranks made before they trained (`probes` of the result). Cells that calibrate
(`CALIBRATING`) give, by least squares of relative errors, what no batch changes, what SPTT adds to it, operations a
second, and seconds a byte that is packed and a parameter that is trained. They are of one model (`ONE`), for all
cells, or of each model for its own (where it was not measured on that network, those of `ONE`). No other cell is
fitted: none of another network or wire, of rows of the model without towers, or of four-fold compression.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from benchmarks.contenders import Shape
from benchmarks.towers import BATCH, HOSTS, RANKS_A_HOST
from benchmarks.towers_ranks import DENSE, PROBED, loads_of, plan
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.synthetic import CRITEO_ROWS
from stratarec.distributed.measure import Collective
from stratarec.distributed.sharding import rows_sent
from stratarec.models import DLRMConfig, TowersConfig, build_network
from stratarec.planning.machine import Cluster, DramTier, Machine, NetworkRates, Tiers
from stratarec.planning.step_model import ExchangeModel, StepWork, packed_bytes, step_time, trained_parameters

RESULT = Path(__file__).with_name("results") / "towers.json"
ONE = "exchange-bound"
CALIBRATING = ("flat, bags", "flat, towers 2", "flat, towers 8", "sptt", "towers 2", "towers 8")
_NETWORK = "unshaped"
_NEAR = 0.15
_FEATURES = len(CRITEO_ROWS)
# Rows of tables at random, a rank among others: what is left of them is in what is fitted.
_ROWS_A_SECOND = 4e9


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A contender of the benchmark, as the model has it."""

    exchange: ExchangeModel
    compression: float
    """Of towers; 1 without modules."""
    distinct: bool
    """Whether distinct rows travel where they are fewer."""

    @classmethod
    def of(cls, contender: str) -> Cell:
        """By its name: ``flat``, ``flat, bags``, ``flat, towers 4``, ``sptt``, ``towers 4``; then a wire."""
        kind, *more = contender.split(", ")
        towers = [each for each in (kind, *more) if each.startswith("towers ")]
        wires: list[Any] = [each for each in more if each in ("fp16", "bf16", "int8")]
        ratio = float(towers[0].removeprefix("towers ")) if towers else 1.0
        flat, wire = kind == "flat", wires[0] if wires else "fp32"
        exchange = (
            ExchangeModel(wire=wire) if flat else ExchangeModel(kind="sptt", wire=wire, compression=ratio)
        )  # fmt: skip
        return cls(exchange=exchange, compression=ratio, distinct=flat and "bags" not in more)


def workload_of(model: dict[str, Any], cell: Cell, rows: float = 0.0) -> StepWork:
    """What a rank of the benchmark does in a step; `rows` a sample travel where distinct ones do."""
    names = tuple(f"f{place}" for place in range(_FEATURES))
    schema = Schema(
        dense=tuple(DenseFeature(name=f"d{place}") for place in range(DENSE)),
        sparse=tuple(SparseFeature(name=name) for name in names),
    )
    layers = {name: tuple(model[name]) for name in ("bottom_mlp", "top_mlp")}
    by_towers = cell.exchange.kind == "sptt" or cell.compression > 1
    towers = TowersConfig(plan=plan(_FEATURES), compression=cell.compression) if by_towers else None
    with torch.device("meta"):
        network: Any = build_network(DLRMConfig(embedding_dim=model["width"], towers=towers, **layers), schema, names)
    modules = sum(w.numel() for w in network.towers.parameters()) if by_towers else 0
    behind = sum(w.numel() for w in network.parameters()) - modules
    vectors = 1 + _FEATURES / cell.compression
    # By the flat exchange all ranks add the gradients of all modules.
    shared, own = (behind, modules) if cell.exchange.kind == "sptt" else (behind + modules, 0)
    return StepWork(
        batch=BATCH, features=_FEATURES, width=model["width"], lookups=float(_FEATURES * model["ids"]),
        flops=6.0 * behind + 3.0 * vectors**2 * model["width"], parameters=shared,
        # A module is applied to all columns of its tower.
        tower_flops=6.0 * modules, tower_parameters=own, gradient_bytes=2,
        flat_rows=rows if cell.distinct else 0.0,
    )  # fmt: skip


def distinct_rows(model: dict[str, Any], most_rows: int) -> float:
    """Rows a sample that the flat exchange of the benchmark sends: of each table bags or distinct ones."""
    sizes, ranks = [min(rows, most_rows) for rows in CRITEO_ROWS], HOSTS * RANKS_A_HOST
    loads = loads_of(Shape(sizes=sizes, width=model["width"], batch=BATCH, ids=model["ids"]), ranks)
    return rows_sent(loads, ranks) / (BATCH * ranks)


class Network:
    """What ranks that only exchanged say of a network.

    Parameters
    ----------
    probes : dict
        Of `towers_ranks.probes`.
    """

    def __init__(self, probes: dict[str, Any]) -> None:
        small, large = ({name: probes[name][place] for name in ("all", "inside", "between")} for place in (0, 1))
        more = max(small["all"] - small["between"], 0.0) / (HOSTS * RANKS_A_HOST - HOSTS)
        # What a large one takes more is its bytes; ranks of a host share its link.
        sent = PROBED[1] * (RANKS_A_HOST - 1), PROBED[1] * RANKS_A_HOST * (HOSTS - 1)
        inside, between = (
            size / max(large[name] - small[name], 1e-9)
            for size, name in zip(sent, ("inside", "between"), strict=True)
        )  # fmt: skip
        self.cluster = Cluster(
            hosts=HOSTS, ranks=RANKS_A_HOST, inside_bytes_per_second=inside, between_bytes_per_second=between,
            inside=Collective(alpha=small["inside"], alpha_peer=0.0),
            between=Collective(alpha=max(small["between"] - more, 0.0), alpha_peer=more),
        )  # fmt: skip

    def machine(self, **computed: float) -> Machine:
        """Return a rank of this network, with fitted rates of what it computes."""
        network = NetworkRates(**{"flops_per_second": 1e18, **computed})
        tiers = Tiers(dram=DramTier(row_bytes_per_second=_ROWS_A_SECOND))
        return Machine(tiers=tiers, network=network, cluster=self.cluster)


def computed(cells: Sequence[tuple[Network, StepWork, ExchangeModel, float]]) -> dict[str, float]:
    """Return the fields of `NetworkRates` with which predicted steps come nearest to the measured seconds of cells."""
    lines, left = [], []
    for network, workload, exchange, seconds in cells:
        bare = step_time(workload, network.machine(), exchange=exchange).total
        flops = workload.batch * (workload.flops + workload.tower_flops)
        trained = trained_parameters(network.cluster, workload)
        lines.append([1.0, float(exchange.kind == "sptt"), flops, packed_bytes(workload, exchange), trained])
        left.append((seconds - bare, seconds))
    matrix, (rest, whole) = np.array(lines), np.array(left).T
    scale = matrix.max(0)
    found = nnls(matrix / scale / whole[:, None], rest / whole)[0] / scale
    return {
        "fixed_seconds": float(found[0]), "sptt_seconds": float(found[1]),
        "flops_per_second": 1 / max(float(found[2]), 1e-18), "packed_seconds": float(found[3]),
        "parameter_seconds": float(found[4]),
    }  # fmt: skip


def held(result: Path = RESULT, one: str = ONE) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics, and a line for each cell but those that calibrate."""
    known = json.loads(result.read_text())
    config, cells = known["config"], known["samples"]["rows"]
    networks = {(each["model"], each["network"]): Network(each) for each in known["samples"]["probes"]}
    rows = {name: distinct_rows(model, config["most_rows_a_table"]) for name, model in config["models"].items()}

    def known_of(row: dict[str, Any]) -> tuple[Network, StepWork, ExchangeModel, float]:
        cell = Cell.of(row["contender"])
        workload = workload_of(config["models"][row["model"]], cell, rows[row["model"]])
        return networks[row["model"], row["network"]], workload, cell.exchange, row["step_ms"] / 1e3

    def calibrates(row: dict[str, Any], model: str) -> bool:
        return bool(row["model"] == model and row["network"] == _NETWORK and row["contender"] in CALIBRATING)

    found = {}
    for model in config["models"]:
        mine = [known_of(row) for row in cells if calibrates(row, model)]
        found[model] = computed(mine) if mine else None
    lines = []
    for row in cells:
        network, workload, exchange, seconds = known_of(row)
        for way, model in (("one model", one), ("each model", row["model"])):
            if calibrates(row, model):
                continue
            step = step_time(workload, network.machine(**(found[model] or found[one] or {})), exchange=exchange)
            lines.append({
                "calibrated": way, **{key: row[key] for key in ("model", "network", "contender")},
                "measured_ms": 1e3 * seconds, "predicted_ms": 1e3 * step.total, "error": step.total / seconds - 1,
                "parts_ms": [1e3 * part for part in (step.compute, step.reduction, step.inside, step.between)],
            })  # fmt: skip
    return _metrics(lines), lines


def _metrics(lines: list[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for way in ("one model", "each model"):
        errors = [abs(line["error"]) for line in lines if line["calibrated"] == way]
        name = way.replace(" ", "_")
        found |= {
            f"held_error_median_{name}": median(errors), f"held_error_max_{name}": max(errors),
            f"held_share_within_15_{name}": sum(error <= _NEAR for error in errors) / len(errors),
        }  # fmt: skip
        ratios = sorted(ratios_of([line for line in lines if line["calibrated"] == way]))
        found |= {
            f"held_choice_right_{name}": sum(right for _, right in ratios) / len(ratios),
            f"held_ratio_low_{name}": ratios[len(ratios) // 10][0],
            f"held_ratio_high_{name}": ratios[-1 - len(ratios) // 10][0],
        }  # fmt: skip
    return {**found, "share_within_15": found["held_share_within_15_each_model"]}


def ratios_of(lines: list[dict[str, Any]]) -> list[tuple[float, bool]]:
    """Of each cell by towers: predicted over measured speed over the flat exchange of distinct rows, and whether both
    sides have the same one ahead."""
    at = {(line["model"], line["network"], line["contender"]): line for line in lines}
    found = []
    for (model, network, contender), line in at.items():
        if not contender.startswith("flat") and (flat := at.get((model, network, "flat"))):
            predicted, measured = (flat[side] / line[side] for side in ("predicted_ms", "measured_ms"))
            found.append((predicted / measured, (predicted > 1) == (measured > 1)))
    return found
