"""Compare whole training steps with the flat exchange, with SPTT, and with tower modules, between
two emulated hosts.

Two hosts have two ranks of one thread each, 26 tables with Criteo's sizes and skew (capped), and
1,024 samples per rank, at 100 Mbit/s, at 1 Gbit/s and without a limit. The flat exchange is that of
`stratarec train`: it sends distinct rows where they need fewer bytes than bags. `flat, bags` is the
published flat exchange, which sends every pooled vector. A model with towers is trained with both
exchanges. Gradients of the network are sent in bfloat16 on all sides.

There are three models. The first has D = 128, small layers and bags of four ids on average; as in
the paper, its flat step is mostly exchange. The second is the same with one id per bag, so the flat
exchange sends each row once; it is measured at 1 Gbit/s only. The third is a DLRM at D = 64.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.contenders import Shape
from benchmarks.exchange import ENVIRONMENT, told_by_ranks
from benchmarks.hosts import Hosts
from benchmarks.towers_ranks import Contender
from stratarec.data.sources.synthetic import CRITEO_ROWS

HOSTS, RANKS_A_HOST, BATCH = 2, 2, 1024
_LIMIT_SECONDS = 1500.0
_RATIOS = (2.0, 4.0, 8.0)
MODELS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "exchange-bound": (128, 4, {"bottom_mlp": (64,), "top_mlp": (128, 64)}),
    "single ids": (128, 1, {"bottom_mlp": (64,), "top_mlp": (128, 64)}),
    "dlrm": (64, 1, {"bottom_mlp": (512, 256), "top_mlp": (512, 256)}),
}
"""Width of embeddings, ids per bag, and layers."""


def contenders(quick: bool) -> list[Contender]:
    """Return all contenders. The first one of each wire format is its baseline."""
    flat = [
        Contender(name="flat"),
        Contender(name="flat, bags", deduplicate=False),
        *(Contender(name=f"flat, {wire}", wire=wire) for wire in ("fp16", "int8")),
    ]
    towers = [Contender(name="sptt", exchange="sptt")]
    for ratio, wire in (*((ratio, "fp32") for ratio in _RATIOS), (4.0, "fp16"), (4.0, "int8")):
        name = f"towers {ratio:g}" + (f", {wire}" if wire != "fp32" else "")
        towers.append(Contender(name=name, exchange="sptt", compression=ratio, wire=wire))
        towers.append(Contender(name=f"flat, {name}", compression=ratio, wire=wire))
    few = ("flat", "sptt", "towers 4", "flat, towers 4")
    return [each for each in (*flat, *towers) if not quick or each.name in few]


def measured(model: str, mbit: float | None, quick: bool) -> dict[str, Any]:
    """Return the measurements of the ranks for one model on one network."""
    width, ids, layers = MODELS[model]
    cap = 2_000 if quick else 40_000
    shape = Shape(sizes=[min(rows, cap) for rows in CRITEO_ROWS], width=width, batch=BATCH, ids=ids)
    slow = mbit is not None and mbit < 1000
    settings = {
        "shape": asdict(shape), "model": layers, "dense_wire": "bf16", "rounds": 1 if quick else 2 if slow else 3,
        "steps": 2 if slow else 3, "contenders": [asdict(each) for each in contenders(quick)],
    }  # fmt: skip
    with Hosts(HOSTS, mbit) as hosts:
        result: dict[str, Any] = told_by_ranks(
            "towers_ranks",
            settings,
            lambda arguments: hosts.torchrun(RANKS_A_HOST, arguments, ENVIRONMENT, _LIMIT_SECONDS),
        )
    return result


def ratios(rows: list[dict[str, Any]], ratio: float = 4.0) -> dict[str, float]:
    """Return the speed of towers at one compression, relative to the flat exchange with the same
    wire format.
    """
    step = {row["contender"]: row["step_ms"] for row in rows}
    towers = f"towers {ratio:g}"
    speeds = {"fp32": step["flat"] / step[towers], "bags": step.get("flat, bags", 0.0) / step[towers]}
    for wire in ("fp16", "int8"):
        if f"flat, {wire}" in step:
            speeds[wire] = step[f"flat, {wire}"] / step[f"{towers}, {wire}"]
    return speeds


def run(quick: bool) -> dict[str, Any]:
    """Measure all models on three networks; with `quick`, at 1 Gbit/s only."""
    networks = {"100 Mbit/s": 100.0, "1 Gbit/s": 1000.0, "unshaped": None}
    rows, metrics, parameters = [], {}, {}
    for model in MODELS:
        for name, mbit in ({"1 Gbit/s": 1000.0} if quick or model == "single ids" else networks).items():
            result = measured(model, mbit, quick)
            rows += [{"model": model, "network": name, **row} for row in result["rows"]]
            parameters[model] = result["parameters"]
            flat = result["rows"][0]
            key = (
                f"{model.replace('-', '_').replace(' ', '_')}_{name.split('/')[0].replace(' ', '').lower()}"
            )
            metrics |= {f"ratio_{key}_{wire}": value for wire, value in ratios(result["rows"]).items()}
            metrics[f"flat_exchange_share_{key}"] = (flat["exchange_ms"] + flat["inside_ms"]) / flat[
                "step_ms"
            ]
    if not quick:
        metrics["ratio_1gbit"] = metrics["ratio_exchange_bound_1gbit_fp32"]
        metrics["ratio_100mbit"] = metrics["ratio_exchange_bound_100mbit_fp32"]
    return {
        "config": {
            "hosts": HOSTS,
            "ranks_a_host": RANKS_A_HOST,
            "threads_a_rank": 1,
            "batch_a_rank": BATCH,
            "models": {
                name: {"width": width, "ids": ids, **layers}
                for name, (width, ids, layers) in MODELS.items()
            },
            "most_rows_a_table": 2_000 if quick else 40_000,
            "dense_wire": "bf16",
            "compression_of_ratios": 4.0,
            "parameters": parameters,
            "targets": {"ratio_1gbit": 1.9, "ratio_100mbit": 3.0},
        },
        "metrics": metrics,
        "samples": {"rows": rows},
    }
