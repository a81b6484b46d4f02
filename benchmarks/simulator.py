"""Steps that nobody here can take: towers over the flat exchange on 16 to 1,024 GPUs of three generations, predicted.

The model, `stratarec.planning.step_model`, is first compared with the replayed steps of forty cells of small clusters
(`benchmarks.cluster_cells`), and the replay with processes. Of GPUs nothing is measured: the model is given public
figures of machines and assumptions about what is reached of them (`Generation`), and a made-up model (`Model`), and
gives the parts of a step by the flat exchange and by SPTT with towers of one host each. The paper (arXiv 2403.00877)
reports up to 1.9 times the speed of the best flat training it compared with, on up to 512 GPUs of three generations;
its models and clusters are not these. Whatever hides an exchange behind other work makes both sides faster, and the
ratio smaller.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.cluster_cells import measured
from stratarec.distributed.config import WireKind
from stratarec.distributed.measure import Collective
from stratarec.planning.machine import Cluster, DramTier, Machine, NetworkRates, Tiers
from stratarec.planning.step_model import ExchangeModel, StepWork, step_time

GPUS = (16, 32, 64, 128, 256, 512, 1024)
OF_A_HOST = 8
PUBLISHED = 1.9


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A host of eight GPUs; rates are of makers' data sheets, in one direction."""

    name: str
    teraflops: float
    """Dense matrix products of a GPU at the precision that training of float32 models uses: FP32, then TF32."""
    memory_gb_s: float
    """Of a GPU."""
    nvlink_gb_s: float
    """Of a GPU to the others of its host: half of what data sheets give for both directions."""
    network_gb_s: float
    """Of a host, all its adapters."""
    reached_flops: float = 0.3
    """Share of `teraflops` in layers of this size."""
    reached_memory: float = 0.5
    """Share of `memory_gb_s` of random rows."""
    reached_links: float = 0.7
    """Share of the rates of NVLink and network in an all-to-all."""
    latency: Collective = field(default_factory=lambda: Collective(alpha=2e-5, alpha_peer=2e-6))
    """Of a collective: 20 us, and 2 us for each peer."""

    def cluster(self, gpus: int) -> Cluster:
        """So many of them."""
        return Cluster(
            adds_by_host=True,
            hosts=gpus // OF_A_HOST,
            ranks=OF_A_HOST,
            inside_bytes_per_second=self.nvlink_gb_s * 1e9 * self.reached_links,
            between_bytes_per_second=self.network_gb_s * 1e9 * self.reached_links,
            inside=self.latency,
            between=self.latency,
        )

    def machine(self, gpus: int) -> Machine:
        """Return the rates that one of so many GPUs reaches."""
        return Machine(
            tiers=Tiers(dram=DramTier(row_bytes_per_second=self.memory_gb_s * 1e9 * self.reached_memory)),
            network=NetworkRates(flops_per_second=self.teraflops * 1e12 * self.reached_flops),
            cluster=self.cluster(gpus),
        )


GENERATIONS = (
    # DGX-1: FP32; four adapters of 100 Gbit/s. DGX A100: TF32, 80 GB; eight of 200. DGX H100: TF32; eight of 400.
    Generation(name="V100", teraflops=15.7, memory_gb_s=900, nvlink_gb_s=150, network_gb_s=50),
    Generation(name="A100", teraflops=156, memory_gb_s=2039, nvlink_gb_s=300, network_gb_s=200),
    Generation(name="H100", teraflops=494.5, memory_gb_s=3350, nvlink_gb_s=450, network_gb_s=400),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A made-up DLRM that has a feature for every host of the largest cluster."""

    batch: int = 4096
    """Samples of a GPU, whatever their number (weak scaling)."""
    features: int = 256
    width: int = 128
    lookups: float = 512.0
    """Ids of a sample: two a bag."""
    top: tuple[int, ...] = (1024, 512)
    """Hidden sizes over the products of pairs."""

    def workload(self, compression: float) -> StepWork:
        """What a GPU does in a step.

        A tower of a DLRM tells F / c vectors, mixtures of its F / T (a layer a tower: F F / (T c) weights in all, taken
        at T = 2), so the network behind has pairs of F / c vectors alone.
        """
        vectors = int(self.features / compression)
        sizes = (vectors * (vectors + 1) // 2, *self.top, 1)
        network = sum(before * after for before, after in pairwise(sizes))
        modules = self.features * vectors // 2 if compression > 1 else 0
        return StepWork(
            batch=self.batch, features=self.features, width=self.width, lookups=self.lookups,
            flops=6.0 * network + 3.0 * vectors**2 * self.width, parameters=network,
            tower_flops=6.0 * modules * self.width, tower_parameters=modules,
        )  # fmt: skip


def line(model: Model, generation: Generation, gpus: int, compression: float, wire: WireKind) -> dict[str, Any]:
    """Parts of a step with towers, beside the flat exchange on the same wire."""
    machine = generation.machine(gpus)
    flat = step_time(model.workload(1.0), machine, exchange=ExchangeModel(wire=wire))
    alone = step_time(model.workload(1.0), machine, exchange=ExchangeModel(kind="sptt", wire=wire))
    exchange = ExchangeModel(kind="sptt", wire=wire, compression=compression)
    towers = step_time(model.workload(compression), machine, exchange=exchange)
    return {
        "gpu": generation.name, "gpus": gpus, "wire": wire, "ratio": compression,
        "flat_ms": 1e3 * flat.total, "flat_between_ms": 1e3 * flat.between,
        "towers_ms": 1e3 * towers.total, "towers_between_ms": 1e3 * towers.between,
        "sptt_speed": flat.total / alone.total, "towers_speed": flat.total / towers.total,
    }  # fmt: skip


def run(quick: bool) -> dict[str, Any]:
    """Every generation and size at ratio 2; other ratios and a 16-bit wire at 512 GPUs."""
    model = Model()
    sizes = (16, 512) if quick else GPUS
    rows = [line(model, each, gpus, 2.0, "fp32") for each in GENERATIONS for gpus in sizes]
    others: list[tuple[float, WireKind]] = [(2.0, "fp16"), (4.0, "fp32"), (8.0, "fp32")]
    more = [line(model, each, 512, ratio, wire) for each in GENERATIONS for ratio, wire in others]
    metrics, samples = measured(quick)
    speeds = {row["gpu"]: row["towers_speed"] for row in rows if row["gpus"] == 512}
    return {
        "config": {
            "targets": {"within_15_percent_share": 0.8, "auto_right_share": 0.9}, "predicted": True,
            "published_up_to": PUBLISHED, "of_a_host": OF_A_HOST, "model": asdict(model),
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
    }  # fmt: skip
