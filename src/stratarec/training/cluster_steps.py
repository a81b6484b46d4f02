"""A recipe on a cluster that is not here: which exchange, and which compression of towers, makes the shortest step.

Towers are as many as hosts, one each: that is what keeps look-ups inside a host.

This ranks ways to train by what they send. Overlap, stragglers and caches are left out, and so is what towers cost in
quality. Benchmark `simulator` holds the model behind it against measured steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from stratarec.config.units import milliseconds
from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.measure import Collective
from stratarec.distributed.simulate import Cluster, ExchangeModel, MeasuredCosts, StepTime, Workload, step_time
from stratarec.distributed.table_placement import rows_sent
from stratarec.distributed.wire import WireKind
from stratarec.errors import ConfigError
from stratarec.kernels.runtime.threads import use_torch_threads
from stratarec.models import ModelConfig, build_network
from stratarec.models.base import autocast, build_tables
from stratarec.models.towers.tower_config import TowersConfig, tied
from stratarec.planning.engine_costs import cold_seconds
from stratarec.planning.memories import measure_tiers
from stratarec.recipe import Recipe
from stratarec.training.build import table_loads
from stratarec.training.torch_setup import build_optimizer

PREDICTED_WIRES: tuple[WireKind, ...] = ("fp32", "bf16", "int8")
RATIOS = (2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A way to train, and its step."""

    exchange: ExchangeModel
    towers: int
    """0 where the model has none."""
    step: StepTime

    @property
    def name(self) -> str:
        """In words."""
        towers = f", {self.towers} towers of ratio {self.exchange.compression:g}" if self.towers else ""
        return f"{self.exchange.kind} {self.exchange.wire}{towers}: {milliseconds(self.step.total)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; times in seconds."""
        return {
            "exchange": self.exchange.kind, "wire": self.exchange.wire, "towers": self.towers,
            "ratio": self.exchange.compression, **asdict(self.step), "step": self.step.total,
        }  # fmt: skip


def predictions(recipe: Recipe, dataset: Dataset, cluster: Cluster, calibration: MeasuredCosts) -> list[Prediction]:
    """Steps of a recipe on a cluster by every exchange, `train.batch_size` being that of all ranks together.

    Raises
    ------
    ConfigError
        When the batch has fewer samples than there are ranks.
    """
    if recipe.train.batch_size < cluster.all_ranks:
        raise ConfigError(
            f"train.batch_size is {recipe.train.batch_size}, expected at least a sample for each of "
            f"{cluster.all_ranks} ranks"
        )
    bare = workload(recipe, dataset, None, cluster.all_ranks)
    exchanges = [ExchangeModel(kind=kind, wire=wire) for kind in ("flat", "sptt") for wire in PREDICTED_WIRES]
    found = [
        Prediction(exchange=each, towers=0, step=step_time(cluster, bare, each, calibration)) for each in exchanges
    ]
    for towers in _towers(dataset, cluster.hosts):
        try:
            with_towers = workload(recipe, dataset, towers, cluster.all_ranks)
        except ConfigError:  # of a tower too small for the ratio nothing is left
            continue
        for wire in PREDICTED_WIRES:
            exchange = ExchangeModel(kind="sptt", wire=wire, compression=towers.compression)
            step = step_time(cluster, with_towers, exchange, calibration)
            found.append(Prediction(exchange=exchange, towers=cluster.hosts, step=step))
    return found


def _towers(dataset: Dataset, hosts: int) -> Iterator[TowersConfig]:
    """Towers of a host each, dealt in turn: their sizes are what counts here."""
    items = tied(dataset.schema)
    if hosts < 2 or len(items) < hosts:
        return
    plan = tuple(tuple(name for item in items[host::hosts] for name in item) for host in range(hosts))
    for ratio in RATIOS:
        yield TowersConfig(plan=plan, compression=ratio)


def fastest(found: Sequence[Prediction]) -> dict[str, Prediction]:
    """The shortest step of each kind of change to what is trained."""
    kinds = {
        "same results": [each for each in found if not each.towers and each.exchange.wire == "fp32"],
        "rounded rows": [each for each in found if not each.towers],
        "towers, float32 rows": [each for each in found if each.towers and each.exchange.wire == "fp32"],
        "towers, rounded rows": [each for each in found if each.towers],
    }
    return {kind: min(each, key=lambda one: one.step.total) for kind, each in kinds.items() if each}


def verdict(found: Sequence[Prediction]) -> str:
    """Whether towers would pay, in a line; empty where there can be none."""
    best = fastest(found)
    if (towers := best.get("towers, float32 rows")) is None:
        return ""
    flat, ratio = best["same results"], best["same results"].step.total / towers.step.total
    if ratio > 1:
        name = f"{towers.towers} towers of ratio {towers.exchange.compression:g}"
        return f"towers would pay: a step {ratio:.2f} times as fast by {name}; they change the model, so train both"
    return f"towers would not pay: a step by the best of them takes {1 / ratio:.2f} times that of {flat.exchange.kind}"


def assumptions(
    recipe: Recipe, dataset: Dataset, cluster: Cluster, calibration: MeasuredCosts, *, measured: bool
) -> list[str]:
    """What predictions stand on, a line each."""
    batch = max(recipe.train.batch_size // cluster.all_ranks, 1)
    origin = "measured here" if measured else "not measured: start it by torchrun with 3 ranks or more"
    latency, apart = calibration.between, len(tied(dataset.schema))
    none = [f"no towers: {cluster.hosts} hosts need one each, and {apart} sets of features can be apart"]
    return [
        *(none if cluster.hosts > apart else ()),
        f"{batch:,} samples a rank of {cluster.all_ranks}, of train.batch_size {recipe.train.batch_size:,}",
        f"every rank computes as this process: {calibration.flops_per_second / 1e9:.3g} GFLOP/s, "
        f"{calibration.row_bytes_per_second / 1e9:.3g} GB/s of rows, {milliseconds(calibration.fixed_seconds)} a step",
        f"{cluster.inside_bytes_per_second / 1e9:.3g} GB/s inside a host, a rank; "
        f"{cluster.between_bytes_per_second / 1e9:.3g} GB/s between hosts, a host",
        f"{latency.alpha * 1e6:.3g} us a collective, {latency.alpha_peer * 1e6:.3g} us a peer ({origin})",
        "float32 gradients; even loads; no part of a step hides another; no tiers",
        "what towers cost in quality is not predicted: train both",
    ]


ASSUMED = Collective(alpha=5e-5, alpha_peer=5e-6)
"""Of TCP between processes, where no ranks are at hand to measure it."""
_ROUNDS, _SECONDS = 5, 1.0


def workload(recipe: Recipe, dataset: Dataset, towers: TowersConfig | None, ranks: int) -> Workload:
    """What one of so many ranks does in a step.

    Operations are estimates: six a weight and sample, and the products of all pairs, which towers make fewer of.
    """
    batch, model = recipe.train.batch_size, replace(recipe.model, towers=towers)
    tables = build_tables(model, dataset.schema, dataset.table_rows())
    loads = table_loads(recipe, dataset, tables, None, ranks)
    network = bare_network(model, dataset)
    modules = _weights(network.towers) if towers is not None else 0  # type: ignore[arg-type]
    everything, features = _weights(network), len(dataset.schema.sparse)
    return Workload(
        batch=max(batch // ranks, 1), features=features, width=model.vector_width,
        lookups=sum(load.lookups for load in loads) / batch,
        flops=6.0 * (everything - modules) + 3.0 * features * features * model.vector_width,
        parameters=everything - modules, tower_flops=6.0 * modules, tower_parameters=modules,
        flat_rows=rows_sent(loads, ranks) / batch,
    )  # fmt: skip


def beside_tables(
    recipe: Recipe, dataset: Dataset, calibration: MeasuredCosts, between: float
) -> Callable[[int], float]:
    """Hosts of a process each -> seconds of a step that are not the tables': network, its gradients, the exchange."""
    # A smaller batch repeats fewer rows, so a row a feature travels.
    whole = replace(workload(recipe, dataset, None, 1), flat_rows=0.0)

    def seconds(hosts: int) -> float:
        mine = replace(whole, batch=max(whole.batch // hosts, 1))
        dense = calibration.fixed_seconds + mine.batch * mine.flops / calibration.flops_per_second
        if hosts == 1:
            return dense
        cluster = Cluster(hosts=hosts, ranks=1, inside_bytes_per_second=1e15, between_bytes_per_second=between)
        step = step_time(cluster, mine, ExchangeModel(), calibration)
        return dense + step.reduction + step.inside + step.between

    return seconds


def bare_network(model: ModelConfig, dataset: Dataset) -> nn.Module:
    """The network without memory.

    Raises
    ------
    ConfigError
        Where the data has no such network: towers of other features, or of less than a column.
    """
    tables = build_tables(model, dataset.schema, dataset.table_rows())
    with torch.device("meta"):
        return build_network(model, dataset.schema, tuple(name for table in tables for name in table.feature_names))


def _weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def calibrate(
    recipe: Recipe, dataset: Dataset, inside: Collective = ASSUMED, between: Collective = ASSUMED
) -> MeasuredCosts:  # fmt: skip
    """What a rank of this machine does: its network timed for some steps, its memory as `measure_tiers` has it.

    Two batches, one four times the other, tell what grows with a batch from what does not.
    """
    bare = workload(recipe, dataset, None, 1)
    use_torch_threads()
    batch = max(min(recipe.train.batch_size, 2048), 4)
    large, small = (network_seconds(recipe, dataset, size) for size in (batch, batch // 4))
    # Where noise is more than the difference, all of it grows.
    growing = 4 / 3 * (large - small) if large > small else large
    memory = measure_tiers(recipe.memory).dram
    return MeasuredCosts(
        flops_per_second=bare.flops * batch / growing, row_bytes_per_second=memory.row_bytes_per_second,
        inside=inside, between=between, fixed_seconds=max(large - growing, 0.0),
    )  # fmt: skip


def network_seconds(
    recipe: Recipe, dataset: Dataset, batch: int, *, beside: Iterator[object] | None = None
) -> float:  # fmt: skip
    """Of a step of the part behind the vectors, forward and backward; with its update where it trains `beside` batches.

    Each step then takes one of these, which may have to be waited for.
    """
    model = replace(recipe.model, towers=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        score: Any = bare_network(model, dataset).to_empty(device="cpu").score
        for weight in score.parameters():
            nn.init.uniform_(weight, -0.05, 0.05)
        dense = torch.rand(batch, len(dataset.schema.dense))
        vectors = torch.rand(batch, len(dataset.schema.sparse), model.vector_width)
    update = None if beside is None or not list(score.parameters()) else build_optimizer(recipe.train.dense, score)

    def step() -> None:
        if beside is not None:
            next(beside)
        with autocast(recipe.train.precision, torch.device("cpu")):
            score(dense, vectors.clone().requires_grad_(), None).sum().backward()
        if update is not None:
            update.step()
            update.zero_grad(set_to_none=True)

    return cold_seconds(step, _ROUNDS, _SECONDS if beside is not None else 0.0)


def inside_rate(recipe: Recipe, ranks: int) -> float:
    """Bytes a second from a rank to others of its host through memory: written, copied and read by ranks that share it.

    An assumption; machines with links between devices have others.
    """
    return measure_tiers(recipe.memory).dram.sequential_bytes_per_second / (4 * ranks)
