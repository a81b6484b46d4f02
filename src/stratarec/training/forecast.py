"""Predict the time of a recipe's training step: on this machine, with a GPU, or on a cluster.

All predictions come from `planning.step_model`. This module describes the work of a recipe (`step_work`) and measures
the rates of this machine (`measure_machine`): the network is trained for some steps on random numbers at the size of
the recipe.

- `forecast_step`: one process on the CPU. The loader reads batches meanwhile: what a sample costs at one batch size is
  not what it costs at another, and threads of the network wait for one that the loader holds up.
- `device_steps`: the network, and also the rows, on a GPU, by what `stratarec doctor --gpu` measured or a data sheet.
  Launches of the network are left out; small batches and networks wait for them.
- `predict_exchanges`: every exchange on a cluster, and every compression of towers, one tower a host. Overlap,
  stragglers and caches are left out, and so is what towers cost in quality. Benchmark `simulator` compares the model
  with measured steps.
- `count_hosts`: the fewest hosts that hold the tables.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import nn

from stratarec.batch.batch import Batch
from stratarec.config.units import format_bytes, format_milliseconds
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader
from stratarec.distributed.measure import Collective
from stratarec.distributed.sharding import rows_sent
from stratarec.distributed.wire import WireKind
from stratarec.errors import ConfigError
from stratarec.hot.config import HotConfig
from stratarec.kernels.runtime.accelerator import open_device
from stratarec.kernels.runtime.cores import cores
from stratarec.kernels.runtime.threads import use_torch_threads
from stratarec.models import ModelConfig, build_network
from stratarec.models.base import autocast, build_tables
from stratarec.models.tower_config import TowersConfig, tied
from stratarec.planning.candidates import cold_popularity, describe_tables
from stratarec.planning.host_count import HostCount, fewest_hosts
from stratarec.planning.machine import (
    CARDS,
    Cluster,
    DeviceRates,
    DramTier,
    Machine,
    NetworkRates,
    Tiers,
    card_rates,
    cold_seconds,
    measure_tiers,
)
from stratarec.planning.placement import make_hot_plan
from stratarec.planning.plan import Plan
from stratarec.planning.step_model import ExchangeModel, StepTime, StepWork, TableSeconds, step_time
from stratarec.recipe import Recipe
from stratarec.training.build import table_loads
from stratarec.training.gpu_memory import rows_memory
from stratarec.training.steps.step import loader_config
from stratarec.training.torch_setup import build_optimizer, measured_rates, torch_settings

PREDICTED_WIRES: tuple[WireKind, ...] = ("fp32", "bf16", "int8")
RATIOS = (2.0, 4.0, 8.0, 16.0)
ASSUMED = Collective(alpha=5e-5, alpha_peer=5e-6)
"""Latency of TCP between processes, where there are no ranks to measure it."""
_ROUNDS, _SECONDS = 5, 1.0


def step_work(recipe: Recipe, dataset: Dataset, towers: TowersConfig | None = None, ranks: int = 1) -> StepWork:
    """Describe the work of one of `ranks` ranks in a step.

    Operations are estimates: six a weight and sample, and the products of all pairs, which towers make fewer of.
    """
    batch, model = recipe.train.batch_size, replace(recipe.model, towers=towers)
    tables = build_tables(model, dataset.schema, dataset.table_rows())
    loads = table_loads(recipe, dataset, tables, None, ranks)
    network = bare_network(model, dataset)
    modules = _weights(network.towers) if towers is not None else 0  # type: ignore[arg-type]
    parameters, features = _weights(network) - modules, len(dataset.schema.sparse)
    return StepWork(
        batch=max(batch // ranks, 1), features=features, width=model.vector_width,
        lookups=sum(load.lookups for load in loads) / batch,
        flops=6.0 * parameters + 3.0 * features * features * model.vector_width,
        parameters=parameters, tower_flops=6.0 * modules, tower_parameters=modules,
        flat_rows=rows_sent(loads, ranks) / batch,
    )  # fmt: skip


def bare_network(model: ModelConfig, dataset: Dataset) -> nn.Module:
    """Build the network without memory.

    Raises
    ------
    ConfigError
        When the model's towers name other features than the data set has, or a tower has less than a column.
    """
    tables = build_tables(model, dataset.schema, dataset.table_rows())
    with torch.device("meta"):
        return build_network(model, dataset.schema, tuple(name for table in tables for name in table.feature_names))


def _weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def measure_machine(recipe: Recipe, dataset: Dataset, cluster: Cluster | None = None) -> Machine:
    """Return the rates of this machine in `cluster`: the recipe's network is timed, the memories are cached.

    Two batches, one four times the other, separate what grows with a batch from what does not.
    """
    use_torch_threads()
    batch = max(min(recipe.train.batch_size, 2048), 4)
    large, small = (network_seconds(recipe, dataset, size) for size in (batch, batch // 4))
    # Where noise is more than the difference, all of it grows.
    growing = 4 / 3 * (large - small) if large > small else large
    network = NetworkRates(
        flops_per_second=step_work(recipe, dataset).flops * batch / growing, fixed_seconds=max(large - growing, 0.0)
    )
    return Machine(tiers=measure_tiers(recipe.memory), network=network, cluster=cluster or Cluster())


def network_seconds(
    recipe: Recipe, dataset: Dataset, batch: int, *, batches: Iterator[object] | None = None
) -> float:  # fmt: skip
    """Return the seconds of a step of the network without its embedding layer, forward and backward.

    With `batches` each step also takes one of these, which it may wait for, and updates the weights.
    """
    model = replace(recipe.model, towers=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        score: Any = bare_network(model, dataset).to_empty(device="cpu").score
        for weight in score.parameters():
            nn.init.uniform_(weight, -0.05, 0.05)
        dense = torch.rand(batch, len(dataset.schema.dense))
        vectors = torch.rand(batch, len(dataset.schema.sparse), model.vector_width)
    update = None if batches is None or not list(score.parameters()) else build_optimizer(recipe.train.dense, score)

    def step() -> None:
        if batches is not None:
            next(batches)
        with autocast(recipe.train.precision, torch.device("cpu")):
            score(dense, vectors.clone().requires_grad_(), None).sum().backward()
        if update is not None:
            update.step()
            update.zero_grad(set_to_none=True)

    return cold_seconds(step, _ROUNDS, _SECONDS if batches is not None else 0.0)


def forecast_step(recipe: Recipe, dataset: Dataset, plan: Plan) -> StepTime:
    """Predict the time of a training step under `plan`, in one process on the CPU.

    To time the network, at least six steps are run, for at least one second.
    """
    loader, threads = Loader(dataset, "train", loader_config(recipe.train, None)), recipe.train.threads
    samples = min(recipe.train.batch_size, loader.samples)
    with torch_settings(threads=threads), closing(_endless(loader)) as batches:
        network = NetworkRates(fixed_seconds=network_seconds(recipe, dataset, samples, batches=batches))
        used = torch.get_num_threads()
    machine = Machine(
        tiers=measure_tiers(recipe.memory), network=network, busy_share=used / max(cores(), used)
    )  # fmt: skip
    tables = _without_first_reads(plan, dataset, recipe.train.steps(len(loader)))
    return step_time(StepWork(batch=samples), machine, tables=tables, lookahead=plan.lookahead)


def _endless(loader: Loader) -> Generator[Batch, None, None]:
    """Yield the batches of one epoch after the other."""
    for epoch in count():
        with closing(loader.epoch(epoch)) as batches:  # type: ignore[type-var]
            yield from batches


def _without_first_reads(plan: Plan, dataset: Dataset, steps: int) -> TableSeconds:
    """Return the table seconds of a step in a run of `steps`: no log has a row that is fetched for the first time."""
    saved = 0.0
    for placed in plan.tables:
        if placed.tier == "log" and placed.misses:
            popularity = cold_popularity(dataset.access_counts(placed.table), placed.hot_rows)
            first = popularity.distinct(placed.lookups * steps) / (placed.misses * steps)
            saved += min(first, 1.0) * placed.seconds.device
    return replace(plan.seconds, device=plan.seconds.device - saved)


def device_rates(name: str) -> DeviceRates:
    """Return the rates of a card by its data sheet, or of a device of this machine as it was measured.

    Raises
    ------
    ConfigError
        When it is neither.
    """
    cards = f"a card of {', '.join(CARDS)}"
    if name.lower() in CARDS:
        return card_rates(name)
    try:
        if name == "cpu":
            raise ConfigError("--device is cpu, which predictions are compared with: name a device such as cuda")
        device = open_device(name, "--device")
    except ConfigError as error:
        raise ConfigError(f"{error}; or name {cards}") from None
    try:
        return measured_rates(device)
    except ConfigError as error:
        raise ConfigError(f"{error}, or name {cards}") from None


@dataclass(frozen=True, kw_only=True)
class DeviceForecast:
    """Predicted steps with the network and the rows in each place, and the plan of rows in GPU memory."""

    steps: list[dict[str, Any]]
    """Parts of each option, in seconds."""
    lines: list[str]
    """Remarks."""
    plan: Plan | None
    """Plan of rows in GPU memory; None if `memory.hbm` is 0."""
    age_seconds: float
    """Age of the oldest measurement."""


def device_steps(recipe: Recipe, dataset: Dataset, rates: DeviceRates) -> DeviceForecast:
    """Predict a step for each place of the network and the rows."""
    batch, memory = recipe.train.batch_size, replace(recipe.memory, hbm=None)
    recipe_on_host = replace(recipe, memory=memory)
    host = measure_machine(recipe_on_host, dataset)
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    specs = describe_tables(tables, dataset, recipe.train.embedding, batch_size=batch)
    make = partial(make_hot_plan, tables, dataset, recipe.train.embedding, batch_size=batch)
    hot = recipe.hot if memory.dram is not None else HotConfig()
    plan, on_gpu = make(memory, hot, tiers=host.tiers), None
    work = replace(step_work(recipe, dataset), flat_rows=0.0)
    vectors, dense = 4 * sum(spec.outputs for spec in specs), 4 * batch * len(dataset.schema.dense)
    ids = 4 * sum(spec.lookups for spec in specs)
    network = rates.network(bf16=recipe.train.precision == "bf16")
    # What a step takes whatever its batch is left out of the CPU's, too: launches of a device are not known.
    on_cpu = replace(host, network=replace(host.network, fixed_seconds=0.0))
    times = {
        ("CPU", "host memory"): step_time(work, on_cpu, tables=plan.seconds, lookahead=plan.lookahead),
        ("GPU", "host memory"): step_time(
            replace(work, up_bytes=vectors + dense, down_bytes=vectors), replace(host, network=network),
            tables=plan.seconds, lookahead=plan.lookahead,
        ),
    }  # fmt: skip
    lines = ["memory.hbm is 0: rows stay in host memory"]
    if recipe.memory.hbm != 0:
        memory = rows_memory(recipe, dataset, rates)
        tiers = measure_tiers(memory, rates=rates)
        on_gpu = make(memory, recipe.hot, tiers=tiers)

        def with_rows(placed: Plan) -> StepTime:
            machine = Machine(tiers=tiers, network=network, busy_share=0.0)
            return step_time(
                replace(work, up_bytes=ids + dense), machine, tables=placed.seconds, lookahead=placed.lookahead
            )  # fmt: skip

        times["GPU", "GPU memory"] = with_rows(on_gpu)
        lines = [
            on_gpu.summary,
            f"rows in GPU memory make a step {_times(times['GPU', 'host memory'], times['GPU', 'GPU memory'])} as fast "
            "as rows in host memory",
        ]
        if on_gpu.hit_rate == 1:
            lines.append("more GPU memory saves no time: no batch waits for rows")
        else:
            more = make(replace(memory, hbm=2 * (memory.hbm or 0)), recipe.hot, tiers=tiers)
            lines.append(
                f"twice the GPU memory for rows, {format_bytes(2 * (memory.hbm or 0))}: hit rate {more.hit_rate:.1%} "
                f"for {on_gpu.hit_rate:.1%}, steps {_times(times['GPU', 'GPU memory'], with_rows(more))} as fast"
            )
    steps = [
        {
            "network on": device, "rows in": rows, "look up, update": time.tables.compute,
            "fetch rows": time.tables.staging + time.tables.device, "up": time.up, "network": time.network,
            "down": time.down, "step": time.total,
        }
        for (device, rows), time in times.items()
    ]  # fmt: skip
    assumed = (f"assumed: {rates.origin}", "assumed: the network of the CPU in float32, as it was timed here")
    return DeviceForecast(steps=steps, lines=[*lines, *assumed], plan=on_gpu, age_seconds=host.tiers.age_seconds)


def _times(slow: StepTime, fast: StepTime) -> str:
    gain = slow.total / fast.total
    return f"{gain:,.{0 if gain >= 10 else 2}f} times"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One exchange between ranks, and its predicted step."""

    exchange: ExchangeModel
    towers: int
    """Number of towers; 0 where the model has none."""
    step: StepTime

    @property
    def name(self) -> str:
        """Exchange, wire and towers in words, and the time of a step."""
        towers = f", {self.towers} towers of ratio {self.exchange.compression:g}" if self.towers else ""
        return f"{self.exchange.kind} {self.exchange.wire}{towers}: {format_milliseconds(self.step.total)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; times in seconds."""
        return {
            "exchange": self.exchange.kind, "wire": self.exchange.wire, "towers": self.towers,
            "ratio": self.exchange.compression,
            **{part: getattr(self.step, part) for part in ("compute", "reduction", "inside", "between")},
            "step": self.step.total,
        }  # fmt: skip


def predict_exchanges(recipe: Recipe, dataset: Dataset, machine: Machine) -> list[Prediction]:
    """Predict a step with every exchange on the machine's cluster; all ranks share `train.batch_size`.

    Raises
    ------
    ConfigError
        When the batch has fewer samples than there are ranks.
    """
    ranks, hosts = machine.cluster.all_ranks, machine.cluster.hosts
    if recipe.train.batch_size < ranks:
        raise ConfigError(
            f"train.batch_size is {recipe.train.batch_size}, expected at least a sample for each of {ranks} ranks"
        )
    work = step_work(recipe, dataset, None, ranks)
    kinds: tuple[Literal["flat", "sptt"], ...] = ("flat", "sptt")
    exchanges = [(work, ExchangeModel(kind=kind, wire=wire)) for kind in kinds for wire in PREDICTED_WIRES]
    for towers in _host_towers(dataset, hosts):
        with suppress(ConfigError):  # a tower may be too small for the ratio
            work = step_work(recipe, dataset, towers, ranks)
            ratio = towers.compression
            exchanges += [
                (work, ExchangeModel(kind="sptt", wire=option, compression=ratio)) for option in PREDICTED_WIRES
            ]
    return [
        Prediction(
            exchange=exchange, towers=hosts if exchange.compression > 1 else 0,
            step=step_time(work, machine, exchange=exchange),
        )
        for work, exchange in exchanges
    ]  # fmt: skip


def _host_towers(dataset: Dataset, hosts: int) -> Iterator[TowersConfig]:
    """Yield towers of one host each at every ratio, with features dealt round robin: only their sizes matter here."""
    items = tied(dataset.schema)
    if hosts < 2 or len(items) < hosts:
        return
    plan = tuple(tuple(name for item in items[host::hosts] for name in item) for host in range(hosts))
    for ratio in RATIOS:
        yield TowersConfig(plan=plan, compression=ratio)


def fastest(predictions: Sequence[Prediction]) -> dict[str, Prediction]:
    """Return the shortest step of each kind of change to the training."""
    kinds = {
        "same results": [option for option in predictions if not option.towers and option.exchange.wire == "fp32"],
        "rounded rows": [option for option in predictions if not option.towers],
        "towers, float32 rows": [option for option in predictions if option.towers and option.exchange.wire == "fp32"],
        "towers, rounded rows": [option for option in predictions if option.towers],
    }
    return {kind: min(some, key=lambda option: option.step.total) for kind, some in kinds.items() if some}


def verdict(predictions: Sequence[Prediction]) -> str:
    """Say in one line whether towers would make a step shorter; empty where there can be none."""
    best = fastest(predictions)
    if (towers := best.get("towers, float32 rows")) is None:
        return ""
    flat, ratio = best["same results"], best["same results"].step.total / towers.step.total
    if ratio > 1:
        name = f"{towers.towers} towers of ratio {towers.exchange.compression:g}"
        return f"towers would pay: a step {ratio:.2f} times as fast by {name}; they change the model, so train both"
    return f"towers would not pay: a step by the best of them takes {1 / ratio:.2f} times that of {flat.exchange.kind}"


def assumptions(recipe: Recipe, dataset: Dataset, machine: Machine, *, measured: bool) -> list[str]:
    """Return the assumptions behind `predict_exchanges`, a line option."""
    cluster, network, apart = machine.cluster, machine.network, len(tied(dataset.schema))
    batch, latency = max(recipe.train.batch_size // cluster.all_ranks, 1), cluster.between
    origin = "measured here" if measured else "not measured: start it by torchrun with 3 ranks or more"
    none = [f"no towers: {cluster.hosts} hosts need one option, and {apart} sets of features can be apart"]
    return [
        *(none if cluster.hosts > apart else ()),
        f"{batch:,} samples a rank of {cluster.all_ranks}, of train.batch_size {recipe.train.batch_size:,}",
        f"every rank computes as this process: {network.flops_per_second / 1e9:.3g} GFLOP/s, "
        f"{machine.tiers.dram.row_bytes_per_second / 1e9:.3g} GB/s of rows, "
        f"{format_milliseconds(network.fixed_seconds)} a step",
        f"{cluster.inside_bytes_per_second / 1e9:.3g} GB/s inside a host, a rank; "
        f"{cluster.between_bytes_per_second / 1e9:.3g} GB/s between hosts, a host",
        f"{latency.alpha * 1e6:.3g} us a collective, {latency.alpha_peer * 1e6:.3g} us a peer ({origin})",
        "float32 gradients; even loads; no part of a step hides another; no tiers",
        "what towers cost in quality is not predicted: train both",
    ]


def cluster_machine(
    recipe: Recipe, dataset: Dataset, hosts: int, ranks: int, *, between: float, inside: float | None,
    latency: Collective,
) -> Machine:  # fmt: skip
    """Return the rates of this machine as one rank of a cluster.

    Parameters
    ----------
    between, inside : float
        Bytes a second of a host to the others, and of a rank to the others of its host. By default, ranks of a host
        exchange through memory that they share: bytes are written, copied and read.
    """
    machine = measure_machine(recipe, dataset)
    dram = machine.tiers.dram
    cluster = Cluster(
        hosts=hosts, ranks=ranks, inside=latency, between=latency, between_bytes_per_second=between,
        inside_bytes_per_second=inside or dram.sequential_bytes_per_second / (4 * ranks),
    )  # fmt: skip
    # Every lookup is a distinct row of memory: caches and the engine's own costs are left out.
    tiers = Tiers(dram=DramTier(row_bytes_per_second=dram.row_bytes_per_second))
    return replace(machine, tiers=tiers, cluster=cluster)


def count_hosts(
    recipe: Recipe, dataset: Dataset, *, between: float, latency: Collective, rate: float
) -> list[HostCount]:  # fmt: skip
    """Return the fewest hosts of one process each with DRAM alone, and with all memories of the recipe."""
    cluster = Cluster(inside=latency, between=latency, between_bytes_per_second=between)
    machine = measure_machine(recipe, dataset, cluster)
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    specs = describe_tables(tables, dataset, recipe.train.embedding, batch_size=recipe.train.batch_size)
    # A smaller batch repeats fewer rows, so a row a feature travels.
    work = replace(step_work(recipe, dataset), flat_rows=0.0)
    alone = replace(recipe.memory, block=None, mapped=None)
    return [
        fewest_hosts(specs, memory, machine, work, rate=rate)
        for memory in ([alone] if alone == recipe.memory else [alone, recipe.memory])
    ]
