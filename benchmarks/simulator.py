"""Predict steps of 16 to 1,024 GPUs of three generations, with towers and with the flat exchange.

The model is `stratarec.planning.step_model`. First its predictions are compared with replayed steps
of forty small clusters (`benchmarks.cluster_cells`), and the replay with processes. Nothing is
measured on GPUs. The model is given figures of data sheets, assumptions about the share of these
figures that is reached (`Generation`), and an invented model (`Model`). It returns the parts of a
step with the flat exchange, and with SPTT and one tower per host. The paper (arXiv 2403.00877)
reports up to 1.9 times the speed of its best flat training, on up to 512 GPUs of three generations,
with other models and clusters. Overlapping an exchange with other work makes both sides faster, and
the ratio smaller.

``--data RESULT`` takes the replayed steps from an earlier result file, and computes only
predictions and choices again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cluster_cells import ROUNDS, STEPS, measured
from benchmarks.replay import BATCHES
from benchmarks.report import read_result
from stratarec.distributed.config import WireKind
from stratarec.distributed.measure import Collective
from stratarec.planning.machine import Cluster, DramTier, Machine, NetworkRates, Tiers
from stratarec.planning.step_model import ExchangeModel, StepWork, step_time

GPUS = (16, 32, 64, 128, 256, 512, 1024)
GPUS_PER_HOST = 8
PUBLISHED = 1.9


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A host of eight GPUs. Rates are from data sheets, in one direction."""

    name: str
    teraflops: float
    """Rate of dense matrix products of a GPU, in the precision of float32 training: FP32, or TF32
    where it exists.
    """
    memory_gb_s: float
    """Memory bandwidth of a GPU."""
    nvlink_gb_s: float
    """Bandwidth of a GPU to the other GPUs of its host: half of the data sheet's figure for both
    directions.
    """
    link_gb_s: float
    """Bandwidth of all network adapters of a host together."""
    reached_flops: float = 0.3
    """Share of `teraflops` that layers of this size reach."""
    reached_memory: float = 0.5
    """Share of `memory_gb_s` that random rows reach."""
    reached_links: float = 0.7
    """Share of the rates of NVLink and network that an all-to-all reaches."""
    latency: Collective = field(default_factory=lambda: Collective(alpha=2e-5, alpha_peer=2e-6))
    """Latency of a collective: 20 us, and 2 us per peer."""

    def cluster(self, gpus: int) -> Cluster:
        """Return a cluster of `gpus` GPUs."""
        return Cluster(
            adds_by_host=True,
            hosts=gpus // GPUS_PER_HOST,
            ranks=GPUS_PER_HOST,
            inside_bytes_per_second=self.nvlink_gb_s * 1e9 * self.reached_links,
            between_bytes_per_second=self.link_gb_s * 1e9 * self.reached_links,
            inside=self.latency,
            between=self.latency,
        )

    def machine(self, gpus: int) -> Machine:
        """Return the rates that one of `gpus` GPUs reaches."""
        return Machine(
            tiers=Tiers(dram=DramTier(row_bytes_per_second=self.memory_gb_s * 1e9 * self.reached_memory)),
            network=NetworkRates(flops_per_second=self.teraflops * 1e12 * self.reached_flops),
            cluster=self.cluster(gpus),
        )


GENERATIONS = (
    # DGX-1: FP32; four adapters of 100 Gbit/s. DGX A100: TF32, 80 GB; eight of 200. DGX H100: TF32;
    # eight of 400.
    Generation(name="V100", teraflops=15.7, memory_gb_s=900, nvlink_gb_s=150, link_gb_s=50),
    Generation(name="A100", teraflops=156, memory_gb_s=2039, nvlink_gb_s=300, link_gb_s=200),
    Generation(name="H100", teraflops=494.5, memory_gb_s=3350, nvlink_gb_s=450, link_gb_s=400),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """An invented DLRM with enough features for a tower on each host of the largest cluster."""

    batch: int = 4096
    """Samples per GPU, for any number of GPUs (weak scaling)."""
    features: int = 256
    width: int = 128
    lookups: float = 512.0
    """Number of ids per sample: two per bag."""
    top: tuple[int, ...] = (1024, 512)
    """Sizes of the hidden layers after the products of pairs."""

    def workload(self, compression: float) -> StepWork:
        """Return the work of a GPU in a step.

        All towers together send F / c vectors, which are linear mixtures of their F vectors. With T
        towers, the mixing layers have F F / (T c) weights, computed for T = 2. The network after
        them has only pairs of F / c vectors.
        """
        vectors = int(self.features / compression)
        sizes = (vectors * (vectors + 1) // 2, *self.top, 1)
        network = sum(before * after for before, after in pairwise(sizes))
        modules = self.features * vectors // 2 if compression > 1 else 0
        return StepWork(
            batch=self.batch,
            features=self.features,
            width=self.width,
            lookups=self.lookups,
            flops=6.0 * network + 3.0 * vectors**2 * self.width,
            parameters=network,
            tower_flops=6.0 * modules * self.width,
            tower_parameters=modules,
        )


def line(
    model: Model, generation: Generation, gpus: int, compression: float, wire: WireKind
) -> dict[str, Any]:
    """Return the predicted parts of a step with towers, and with the flat exchange, for one wire
    format.
    """
    machine = generation.machine(gpus)
    flat = step_time(model.workload(1.0), machine, exchange=ExchangeModel(wire=wire))
    alone = step_time(model.workload(1.0), machine, exchange=ExchangeModel(kind="sptt", wire=wire))
    exchange = ExchangeModel(kind="sptt", wire=wire, compression=compression)
    towers = step_time(model.workload(compression), machine, exchange=exchange)
    return {
        "gpu": generation.name,
        "gpus": gpus,
        "wire": wire,
        "ratio": compression,
        "flat_ms": 1e3 * flat.total,
        "flat_between_ms": 1e3 * flat.between,
        "towers_ms": 1e3 * towers.total,
        "towers_between_ms": 1e3 * towers.between,
        "sptt_speed": flat.total / alone.total,
        "towers_speed": flat.total / towers.total,
    }


def run(quick: bool, data: Path | None = None) -> dict[str, Any]:
    """Predict every generation and size at compression 2, and other compressions and a 16-bit wire
    at 512 GPUs.

    `data` is a result file from which replayed steps are taken.
    """
    model = Model()
    sizes = (16, 512) if quick else GPUS
    rows = [line(model, each, gpus, 2.0, "fp32") for each in GENERATIONS for gpus in sizes]
    others: list[tuple[float, WireKind]] = [(2.0, "fp16"), (4.0, "fp32"), (8.0, "fp32")]
    more = [line(model, each, 512, ratio, wire) for each in GENERATIONS for ratio, wire in others]
    earlier = None if data is None else read_result(data)
    metrics, samples = measured(quick, earlier and earlier["samples"])
    speeds = {row["gpu"]: row["towers_speed"] for row in rows if row["gpus"] == 512}
    return {
        "config": {
            "targets": {"within_15_percent_share": 0.8, "auto_right_share": 0.9},
            "rounds": ROUNDS,
            "recorded_steps": STEPS,
            "batches": BATCHES,
            "predicted": True,
            "published_up_to": PUBLISHED,
            "gpus_per_host": GPUS_PER_HOST,
            "model": asdict(model),
            "replayed": earlier["config"].get("replayed") or earlier["created"] if earlier else None,
            "generations": [asdict(each) for each in GENERATIONS],
        },
        "metrics": {
            **metrics,
            **{f"predicted_speed_512_{name.lower()}": speed for name, speed in speeds.items()},
            "predicted_speed_most": max(row["towers_speed"] for row in rows),
            "predicted_speed_least": min(row["towers_speed"] for row in rows),
            "published_speed_up_to": PUBLISHED,
        },
        "samples": {"rows": rows + more, **samples},
    }
