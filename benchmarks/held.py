"""The predicted steps of `stratarec.distributed.simulate` beside the steps that the benchmark `towers` measured.

One measured cell calibrates: SPTT at 1 Gbit/s, of one model (`ONE`) for all cells, or of each model for its own, as
`stratarec plan --hosts` times the network of the recipe that it is asked about. Its exchange inside a host gives the
rate at which bytes are copied, its reduction the latency, its compute a rest that no batch changes, beside matrix
products and rows at rates that are measured here, halved since four ranks share two processors. Links have the rates
that they are shaped to.

Flat steps by distinct rows are left out: the model leaves out ids that repeat.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.towers import HOSTS, RANKS_A_HOST
from benchmarks.towers_ranks import DENSE, plan
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.distributed.measure import Collective
from stratarec.distributed.simulate import Cluster, ExchangeModel, MeasuredCosts, Workload, step_time, traffic
from stratarec.models import DLRMConfig, TowersConfig, build_network
from stratarec.planning.config import MemoryConfig
from stratarec.planning.memories import measure_tiers

RESULT = Path(__file__).with_name("results") / "towers.json"
ONE = "exchange-bound"
_NETWORK = "1 Gbit/s"
# Bytes a second of a link that is shaped to a Mbit/s: what TCP carries of it.
LINK = 0.96e6 / 8
_MBIT = {"100 Mbit/s": 100.0, "1 Gbit/s": 1000.0, "unshaped": 1e9}
_PARTS = ("compute", "dense", "inside", "exchange")
_NEAR = 0.15
_FEATURES = 26


def workload_of(model: dict[str, Any], batch: int, compression: float, by_towers: bool) -> Workload:
    """What a rank of the benchmark does in a step."""
    names = tuple(f"f{place}" for place in range(_FEATURES))
    schema = Schema(
        dense=tuple(DenseFeature(name=f"d{place}") for place in range(DENSE)),
        sparse=tuple(SparseFeature(name=name) for name in names),
    )
    layers = {name: tuple(model[name]) for name in ("bottom_mlp", "top_mlp")}
    towers = TowersConfig(plan=plan(_FEATURES), compression=compression) if by_towers else None
    with torch.device("meta"):
        network: Any = build_network(DLRMConfig(embedding_dim=model["width"], towers=towers, **layers), schema, names)
    modules = sum(w.numel() for w in network.towers.parameters()) if by_towers else 0
    behind = sum(w.numel() for w in network.parameters()) - modules
    vectors = 1 + _FEATURES / compression
    return Workload(
        batch=batch, features=_FEATURES, width=model["width"], lookups=float(_FEATURES * model["ids"]),
        flops=6.0 * behind + 3.0 * vectors**2 * model["width"], parameters=behind,
        # A module of vectors is applied to every column of them.
        tower_flops=6.0 * modules, tower_parameters=modules, gradient_bytes=2,
    )  # fmt: skip


def predictable(row: dict[str, Any]) -> bool:
    """Whether a cell is of what the model speaks of."""
    return bool(row["contender"] == "flat, bags" or row["contender"].startswith(("sptt", "towers")))


def exchange_of(row: dict[str, Any]) -> ExchangeModel:
    """How rows travel in a cell."""
    name, _, wire = row["contender"].partition(", ")
    if name == "flat":
        return ExchangeModel()
    ratio = float(name.removeprefix("towers ")) if name.startswith("towers ") else 1.0
    return ExchangeModel(kind="sptt", wire=wire or "fp32", compression=ratio)


def flops_at_hand() -> float:
    """Operations a second of one thread in a layer of 512 x 512 at 1,024 samples: the shortest of some."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left, right, found = torch.rand(1024, 512), torch.rand(512, 512), []
    for _ in range(20):
        began = time.perf_counter()
        left @ right
        found.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return float(2 * 1024 * 512 * 512 / min(found))


class Machine:
    """What one cell of SPTT says of the ranks and the network that took it.

    Parameters
    ----------
    cell : dict
        A line of the result.
    workload : Workload
        Of that line.
    rates : tuple of float
        Operations, and bytes of random rows, that a rank does a second.
    """

    def __init__(self, cell: dict[str, Any], workload: Workload, rates: tuple[float, float]) -> None:
        exchange, seconds = exchange_of(cell), {part: cell[f"{part}_ms"] / 1e3 for part in _PARTS}
        moved = traffic(_cluster(1.0, 1.0), workload, exchange)
        nothing = Collective(alpha=0.0, alpha_peer=0.0)
        known = MeasuredCosts(
            flops_per_second=rates[0], row_bytes_per_second=rates[1], inside=nothing, between=nothing
        )  # fmt: skip
        # Latency is what a reduction takes beyond its bytes.
        bare = step_time(_cluster(1e15, LINK * _MBIT[cell["network"]]), workload, exchange, known)
        latency = max(seconds["dense"] - bare.reduction, 0.0) / 2
        each = Collective(alpha=latency, alpha_peer=0.0)
        self.calibration = replace(
            known, inside=each, between=each, fixed_seconds=max(seconds["compute"] - bare.compute, 0.0)
        )  # fmt: skip
        self._inside = moved.inside / max(seconds["inside"] - latency * len(moved.inside_peers), 1e-3)

    def cluster(self, network: str) -> Cluster:
        """The emulated hosts on a network: bytes are copied as inside a host, and then pass a link that is shaped."""
        link = LINK * _MBIT[network]
        return _cluster(self._inside, 1 / (1 / (self._inside * RANKS_A_HOST) + 1 / link))


def _cluster(inside: float, between: float) -> Cluster:
    return Cluster(
        hosts=HOSTS, ranks=RANKS_A_HOST, inside_bytes_per_second=inside, between_bytes_per_second=between
    )  # fmt: skip


def held(result: Path = RESULT) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics, and a line for each cell that the model speaks of."""
    known = json.loads(result.read_text())
    config, cells = known["config"], [row for row in known["samples"]["rows"] if predictable(row)]
    memory, sharing = measure_tiers(MemoryConfig()).dram, 2.0  # four ranks on two processors
    rates = flops_at_hand() / sharing, memory.row_bytes_per_second / (2 * sharing)

    def workload(row: dict[str, Any]) -> Workload:
        name, exchange = row["contender"], exchange_of(row)
        compression = exchange.compression if name.startswith("towers") else 1.0
        by_towers = exchange.kind == "sptt"
        return workload_of(config["models"][row["model"]], config["batch_a_rank"], compression, by_towers)

    first = {row["model"]: row for row in cells if (row["contender"], row["network"]) == ("sptt", _NETWORK)}
    machines = {model: Machine(row, workload(row), rates) for model, row in first.items()}
    lines = []
    for row in cells:
        for way, machine in (("one cell", machines[ONE]), ("a cell a model", machines[row["model"]])):
            if row is first[ONE if way == "one cell" else row["model"]]:
                continue
            cluster = machine.cluster(row["network"])
            step = step_time(cluster, workload(row), exchange_of(row), machine.calibration)
            lines.append({
                "calibrated": way, **{key: row[key] for key in ("model", "network", "contender")},
                "measured_ms": row["step_ms"], "predicted_ms": 1e3 * step.total,
                "error": 1e3 * step.total / row["step_ms"] - 1,
                "parts_ms": [1e3 * part for part in (step.compute, step.reduction, step.inside, step.between)],
            })  # fmt: skip
    return _metrics(lines), lines


def _metrics(lines: list[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for way in ("one cell", "a cell a model"):
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
    return found


def ratios_of(lines: list[dict[str, Any]]) -> list[tuple[float, bool]]:
    """Of each cell by towers: predicted over measured speed over the flat exchange of bags, and whether both sides
    have the same one ahead."""
    at = {(line["model"], line["network"], line["contender"]): line for line in lines}
    found = []
    for (model, network, contender), line in at.items():
        if contender != "flat, bags" and (flat := at.get((model, network, "flat, bags"))):
            predicted, measured = (flat[side] / line[side] for side in ("predicted_ms", "measured_ms"))
            found.append((predicted / measured, (predicted > 1) == (measured > 1)))
    return found
