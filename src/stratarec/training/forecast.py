"""Predict the time of a recipe's training step: on this machine, with a GPU, or on a cluster.

All predictions use `planning.step_model`. This module describes the work of a recipe (`step_work`)
and measures the rates of this machine (`measure_machine`). For that, the network is trained for
some steps on random numbers.

- `forecast_step` predicts a step of one process on the CPU. The network is timed at the recipe's
  batch size, because the time per sample depends on it, and while the loader reads batches, because
  the loader slows the network down.
- `device_steps` predicts a step with the network, or also the rows, on a GPU. Rates are from
  `stratarec doctor --gpu` or a data sheet. The time to launch the network's kernels is left out,
  although it dominates for small batches and networks.
- `predict_exchanges` predicts a step on a cluster with every exchange of rows, and with towers (one
  per host) at every compression. Overlap, stragglers, caches and the effect of towers on quality
  are left out. Benchmark `simulator` compares these predictions with measured steps.
- `count_hosts` returns the smallest number of hosts that can store the tables at a required
  throughput.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle, islice
from math import inf
from typing import Any

import torch
from torch import nn

from stratarec.batch.batch import Batch
from stratarec.config.units import format_bytes, format_milliseconds, parse_rate
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import BatchShare, Loader
from stratarec.distributed.measure import Collective, emulated_mesh
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharding import rows_sent
from stratarec.distributed.wire_formats import WIRES
from stratarec.errors import ConfigError
from stratarec.hot.config import HotConfig
from stratarec.kernels.runtime.accelerator import open_device
from stratarec.kernels.runtime.cores import cores, memory_bytes
from stratarec.kernels.runtime.threads import use_torch_threads
from stratarec.models import ModelConfig, build_network
from stratarec.models.base import autocast, build_tables
from stratarec.models.tower_config import TowersConfig, tied
from stratarec.planning.candidates import cold_popularity, describe_tables
from stratarec.planning.config import MemoryConfig
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
from stratarec.training.build import new_model, sharding_plan, table_loads
from stratarec.training.distributed import GradientReducer, RankPipeline
from stratarec.training.gpu_memory import rows_memory
from stratarec.training.steps.step import loader_config
from stratarec.training.steps.thread_tuner import ThreadTuner, share_of
from stratarec.training.torch_setup import build_optimizer, measured_rates, torch_settings

RATIOS = (2.0, 4.0, 8.0, 16.0)
ASSUMED = Collective(alpha=5e-5, alpha_peer=5e-6)
"""Latency of TCP between processes, assumed if there are no ranks with which to measure it."""
_ROUNDS, _SECONDS, _MEASURED_ROUNDS = 5, 1.0, 2
MEASURED_SHARE = 0.5
"""Share of this machine's memory that the tables of a rank may take while a step is measured for a
prediction.
"""


def step_work(
    recipe: Recipe, dataset: Dataset, towers: TowersConfig | None = None, ranks: int = 1
) -> StepWork:
    """Return the work of a training step on one of `ranks` ranks.

    The number of operations is an estimate: six per weight and sample, and the products of all
    pairs of features. With towers, the true number of products is smaller.
    """
    batch, model = recipe.train.batch_size, replace(recipe.model, towers=towers)
    tables = build_tables(model, dataset.schema, dataset.table_rows())
    loads = table_loads(recipe, dataset, tables, None, ranks)
    network = bare_network(model, dataset)
    modules = _weights(network.towers) if towers is not None else 0  # type: ignore[arg-type]
    parameters, features = _weights(network) - modules, len(dataset.schema.sparse)
    return StepWork(
        batch=max(batch // ranks, 1),
        features=features,
        width=model.vector_width,
        lookups=sum(load.lookups for load in loads) / batch,
        flops=6.0 * parameters + 3.0 * features * features * model.vector_width,
        parameters=parameters,
        tower_flops=6.0 * modules,
        tower_parameters=modules,
        flat_rows=rows_sent(loads, ranks) / batch,
        tower_columns=sum(tower.columns for tower in network.all_towers) if towers is not None else 0,  # type: ignore[union-attr]
    )


def bare_network(model: ModelConfig, dataset: Dataset) -> nn.Module:
    """Build the network on torch's meta device, without memory for its weights.

    Raises
    ------
    ConfigError
        If the features of the model's towers are not the features of the data set, or if the
        compression leaves a tower without an output column.
    """
    tables = build_tables(model, dataset.schema, dataset.table_rows())
    with torch.device("meta"):
        return build_network(
            model, dataset.schema, tuple(name for table in tables for name in table.feature_names)
        )


def _weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def measure_machine(recipe: Recipe, dataset: Dataset, cluster: Cluster | None = None) -> Machine:
    """Return the rates of this machine, as a rank of `cluster`.

    The recipe's network is timed now; rates of memories come from a cache, if they were measured
    before. The network is timed with two batch sizes, of which one is four times the other. This
    separates the time that grows with the batch from the time that does not.
    """
    use_torch_threads()
    batch = max(min(recipe.train.batch_size, 2048), 4)
    large, small = (network_seconds(recipe, dataset, size) for size in (batch, batch // 4))
    # If noise makes the larger batch appear no slower, all of the time is assumed to grow with the
    # batch.
    growing = 4 / 3 * (large - small) if large > small else large
    network = NetworkRates(
        flops_per_second=step_work(recipe, dataset).flops * batch / growing,
        fixed_seconds=max(large - growing, 0.0),
    )
    return Machine(tiers=measure_tiers(recipe.memory), network=network, cluster=cluster or Cluster())


def network_seconds(
    recipe: Recipe,
    dataset: Dataset,
    batch: int,
    *,
    batches: Iterator[object] | None = None,
    tuner: ThreadTuner | None = None,
) -> float:
    """Return the seconds of a step of the network, forward and backward, without the embedding
    layer.

    With `batches`, each step also waits for the next of these batches, and updates the weights.
    With `tuner`, threads wait as in training.
    """
    model = replace(recipe.model, towers=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        score: Any = bare_network(model, dataset).to_empty(device="cpu").score
        for weight in score.parameters():
            nn.init.uniform_(weight, -0.05, 0.05)
        dense = torch.rand(batch, len(dataset.schema.dense))
        vectors = torch.rand(batch, len(dataset.schema.sparse), model.vector_width)
    update = (
        None
        if batches is None or not list(score.parameters())
        else build_optimizer(recipe.train.dense, score)
    )

    def step() -> None:
        if batches is not None:
            next(batches)
        with autocast(recipe.train.precision, torch.device("cpu")):
            score(dense, vectors.clone().requires_grad_(), None).sum().backward()
        if update is not None:
            update.step()
            update.zero_grad(set_to_none=True)
        if tuner is not None:
            tuner.after_step(0)

    return cold_seconds(step, _ROUNDS, _SECONDS if batches is not None else 0.0)


def forecast_step(recipe: Recipe, dataset: Dataset, plan: Plan) -> StepTime:
    """Predict the time of a training step under `plan`, in one process on the CPU.

    To time the network, at least six steps are run, for at least one second.
    """
    loader, threads = Loader(dataset, "train", loader_config(recipe.train)), recipe.train.threads
    samples = min(recipe.train.batch_size, loader.samples)
    # Next to busy processes, threads that spin while they wait took 680 ms for a step of 8 ms.
    with (
        torch_settings(threads=threads),
        ThreadTuner(threads, 1) as tuner,
        closing(_endless(loader)) as batches,
    ):
        seconds = network_seconds(recipe, dataset, samples, batches=batches, tuner=tuner)
        network = NetworkRates(fixed_seconds=seconds)
        used = torch.get_num_threads()
    machine = Machine(
        tiers=measure_tiers(recipe.memory), network=network, busy_share=used / max(cores(), used)
    )
    tables = _without_first_reads(plan, dataset, recipe.train.steps(len(loader)))
    return step_time(StepWork(batch=samples), machine, tables=tables, lookahead=plan.lookahead)


def _endless(loader: Loader) -> Generator[Batch, None, None]:
    """Yield the batches of all epochs, without end."""
    for epoch in count():
        with closing(loader.epoch(epoch)) as batches:  # type: ignore[type-var]
            yield from batches


def _without_first_reads(plan: Plan, dataset: Dataset, steps: int) -> TableSeconds:
    """Return the mean seconds of table work per step in a run of `steps` steps.

    A row that was never written is not in the log, so fetching it for the first time costs no read
    of the device.
    """
    saved = 0.0
    for placed in plan.tables:
        if placed.tier == "log" and placed.misses:
            popularity, _ = cold_popularity(dataset, placed.table, placed.hot_rows)
            first = popularity.distinct(placed.lookups * steps) / (placed.misses * steps)
            saved += min(first, 1.0) * placed.seconds.device
    return replace(plan.seconds, device=plan.seconds.device - saved)


def device_rates(name: str) -> DeviceRates:
    """Return the rates of a GPU: estimated from a card's data sheet, or measured if `name` is a
    device of this machine.

    Raises
    ------
    ConfigError
        If `name` is neither a known card nor a device of this machine that was measured.
    """
    cards = f"a card of {', '.join(CARDS)}"
    if name.lower() in CARDS:
        return card_rates(name)
    try:
        if name == "cpu":
            raise ConfigError(
                "--device is cpu, but predictions are compared with the CPU: name a device such as cuda"
            )
        return measured_rates(open_device(name, "--device"))
    except ConfigError as error:
        raise ConfigError(f"{error}; or name {cards}") from None


@dataclass(frozen=True, kw_only=True)
class DeviceForecast:
    """Predicted steps for each placement of network and rows, and the plan with rows in GPU
    memory.
    """

    steps: list[dict[str, Any]]
    """For each placement: the memories of network and rows, the seconds of each part of a step, and
    their sum.
    """
    lines: list[str]
    """Remarks about the prediction, one line each."""
    plan: Plan | None
    """Plan of rows in GPU memory; None if rows stay in host memory."""
    age_seconds: float
    """Age of the oldest measurement."""


def device_steps(recipe: Recipe, dataset: Dataset, rates: DeviceRates) -> DeviceForecast:
    """Predict a step with network and rows on the CPU, with the network on the GPU, and with both
    on the GPU.
    """
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
    # The time per step that does not depend on the batch is left out for both devices: for the GPU,
    # the time to launch kernels is not known.
    on_cpu = replace(host, network=replace(host.network, fixed_seconds=0.0))
    times = {
        ("CPU", "host memory"): step_time(work, on_cpu, tables=plan.seconds, lookahead=plan.lookahead),
        ("GPU", "host memory"): step_time(
            replace(work, up_bytes=vectors + dense, down_bytes=vectors),
            replace(host, network=network),
            tables=plan.seconds,
            lookahead=plan.lookahead,
        ),
    }
    lines = [
        f"{'memory.hbm is 0' if rates.trains_rows else 'the card is too old'}: rows stay in host memory"
    ]
    if recipe.memory.hbm != 0 and rates.trains_rows:
        memory = rows_memory(recipe, dataset, rates)
        tiers = measure_tiers(memory, rates=rates)
        on_gpu = make(memory, recipe.hot, tiers=tiers)

        def with_rows(placed: Plan) -> StepTime:
            machine = Machine(tiers=tiers, network=network, busy_share=0.0)
            return step_time(
                replace(work, up_bytes=ids + dense),
                machine,
                tables=placed.seconds,
                lookahead=placed.lookahead,
            )

        times["GPU", "GPU memory"] = with_rows(on_gpu)
        lines = [
            on_gpu.summary,
            "rows in GPU memory make a step "
            f"{_times(times['GPU', 'host memory'], times['GPU', 'GPU memory'])} as "
            "fast as rows in host memory",
        ]
        if on_gpu.hit_rate == 1:
            lines.append("more GPU memory saves no time: no batch waits for rows")
        else:
            more = make(replace(memory, hbm=2 * (memory.hbm or 0)), recipe.hot, tiers=tiers)
            lines.append(
                f"twice the GPU memory for rows, {format_bytes(2 * (memory.hbm or 0))}: hit rate "
                f"{more.hit_rate:.1%} "
                f"instead of {on_gpu.hit_rate:.1%}, steps "
                f"{_times(times['GPU', 'GPU memory'], with_rows(more))} as fast"
            )
    steps = [
        {
            "network on": device, "rows in": rows, "look up, update": time.tables.compute,
            "fetch rows": time.tables.staging + time.tables.device, "up": time.up, "network": time.network,
            "down": time.down, "step": time.total,
        }
        for (device, rows), time in times.items()
    ]  # fmt: skip
    assumed = (
        f"assumed: {rates.origin}",
        "assumed: the CPU computes the network in float32, as timed here",
    )
    return DeviceForecast(
        steps=steps, lines=[*lines, *assumed], plan=on_gpu, age_seconds=host.tiers.age_seconds
    )


def _times(slow: StepTime, fast: StepTime) -> str:
    gain = slow.total / fast.total
    return f"{gain:,.{0 if gain >= 10 else 2}f} times"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One way to exchange rows between ranks, and the predicted step with it."""

    exchange: ExchangeModel
    towers: int
    """Number of towers; 0 if the model has none."""
    step: StepTime

    @property
    def name(self) -> str:
        """Text with the exchange, wire format, towers and predicted time of a step."""
        towers = f", {self.towers} towers of ratio {self.exchange.compression:g}" if self.towers else ""
        return f"{self.exchange.kind} {self.exchange.wire}{towers}: {format_milliseconds(self.step.total)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; times in seconds."""
        return {
            "exchange": self.exchange.kind,
            "wire": self.exchange.wire,
            "towers": self.towers,
            "ratio": self.exchange.compression,
            **{part: getattr(self.step, part) for part in ("compute", "reduction", "inside", "between")},
            "step": self.step.total,
        }


def rank_pipeline(recipe: Recipe, dataset: Dataset, mesh: Mesh) -> RankPipeline:
    """Build the parts of one rank of a run whose tables are all in DRAM."""
    config, model = recipe.train, new_model(recipe, dataset, None, "", mesh)
    share = BatchShare(rank=mesh.place, ranks=mesh.ranks)
    return RankPipeline(
        mesh,
        model,
        build_optimizer(config.dense, model.network),
        config,
        Loader(dataset, "train", loader_config(config), share),
        reduction=GradientReducer(mesh, model.network, recipe.distributed.dense_wire),
    )


def rank_seconds(recipe: Recipe, dataset: Dataset, cluster: Cluster, rank: int | None = None) -> float:
    """Return the seconds that a rank of a cluster computes in a step, without waiting for others.

    By default it is the slowest rank, measured on a machine that no other rank uses.

    The rank trains its share of real batches with its part of the tables here, alone; `EchoChannel`
    takes the place of its peers.

    Raises
    ------
    ConfigError
        If the rank's part of the tables does not fit in `MEASURED_SHARE` of this machine's memory.
    """
    by_towers = recipe.distributed.by_towers(recipe.towers, cluster.hosts)
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    sharding = sharding_plan(recipe, dataset, tables, None, cluster.all_ranks, by_towers=by_towers)
    most = int(memory_bytes() * MEASURED_SHARE) // (1 if rank is None else cluster.ranks)
    rank = sharding.critical if rank is None else rank
    if sharding.bytes[rank] > most:
        raise ConfigError(
            f"--hosts {cluster.hosts}x{cluster.ranks} gives a rank {format_bytes(sharding.bytes[rank])} of "
            "tables, and "
            f"this machine measures at most {format_bytes(most)}: name more hosts, or use a "
            "machine with more memory"
        )
    pipeline = rank_pipeline(
        recipe, dataset, emulated_mesh(rank, cluster.hosts, cluster.ranks, by_towers=by_towers)
    )
    with torch.random.fork_rng(devices=[]), closing(pipeline.model.embeddings):
        batches = list(islice(pipeline.loader.batches(0), _ROUNDS))
        items = ((batch, pipeline.request(batch)) for batch in cycle(batches))
        with pipeline.stage_ahead(items, depth=0) as staged:
            steps = count()

            def step() -> None:
                item, handle = next(staged)
                pipeline.train(next(steps), *item, handle)

            step()
            # The processor time of a single thread does not count other programs.
            clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
            return cold_seconds(step, 2 * _ROUNDS, clock=clock)


def predict_step(recipe: Recipe, dataset: Dataset, cluster: Cluster, seconds: float) -> Prediction:
    """Predict a step of a recipe on a cluster by the exchange and the wire that it names.

    Parameters
    ----------
    seconds : float
        Seconds that the slowest rank computes, from `rank_seconds`.
    """
    config, towers = recipe.distributed, recipe.model.towers
    work = step_work(recipe, dataset, towers, cluster.all_ranks)
    work = replace(work, gradient_bytes=2 if config.dense_wire == "bf16" else 4)
    by_towers = recipe.distributed.by_towers(recipe.towers, cluster.hosts)
    if not by_towers:  # every rank has all towers
        work = replace(work, parameters=work.parameters + work.tower_parameters, tower_parameters=0)
    compression = towers.compression if towers is not None and by_towers else 1.0
    exchange = ExchangeModel(
        kind="sptt" if by_towers else "flat", wire=config.wire, compression=compression
    )
    tiers = Tiers(dram=DramTier(row_bytes_per_second=inf))  # `seconds` includes the tables
    machine = Machine(tiers=tiers, network=NetworkRates(fixed_seconds=seconds), cluster=cluster)
    step = step_time(
        replace(work, flops=0.0, tower_flops=0.0), machine, tables=TableSeconds(), exchange=exchange
    )
    return Prediction(exchange=exchange, towers=cluster.hosts if compression > 1 else 0, step=step)


def choose_exchange(
    recipe: Recipe, dataset: Dataset, cluster: Cluster, measure: Callable[[Sequence[Recipe]], list[float]]
) -> Recipe:
    """Return the recipe with ``flat`` or ``sptt`` in place of ``auto``: the exchange with the
    shorter predicted step.

    Parameters
    ----------
    measure : callable
        Returns the seconds that the slowest rank computes with each recipe, from `rank_seconds`, or
        infinity if they are not known. If they are not known for both exchanges, both are assumed
        to compute equally long.
    """
    options = [recipe.with_fields({"distributed.exchange": kind}) for kind in ("flat", "sptt")]
    seconds = measure(options)
    computing = [0.0, 0.0] if inf in seconds else seconds
    flat, sptt = (
        predict_step(option, dataset, cluster, time)
        for option, time in zip(options, computing, strict=True)
    )
    return options[sptt.step.total < flat.step.total]


def resolve_exchange(
    recipe: Recipe, dataset: Dataset, hosts: int, ranks: int, mesh: Mesh | None = None
) -> Recipe:
    """Return the recipe with `choose_exchange` applied, if ``distributed.exchange`` is ``auto`` and
    may be ``sptt``.

    Each rank of `mesh` measures its own part of the tables; without `mesh`, this process measures
    the part of the slowest rank. This takes some seconds. Latencies are assumed: in the 40 cells of
    the benchmark `simulator` they changed no choice.
    """
    config, mesh = recipe.distributed, mesh or Mesh.alone()
    if not config.by_towers(recipe.towers, hosts) or config.exchange != "auto":
        return recipe
    between = parse_rate(config.network, "distributed.network")
    make_cluster = partial(cluster_of, hosts, ranks // hosts, between=between, latency=ASSUMED)
    # Only one rank measures its memory, so all ranks predict the same.
    cluster = make_cluster(inside=mesh.first(lambda: make_cluster(inside=None).inside_bytes_per_second))
    threads = share_of(recipe.train.threads, torch.get_num_threads(), mesh.ranks // mesh.hosts)

    def seconds_of(option: Recipe) -> float:
        seconds = inf
        with suppress(ConfigError), dataset.locked(), torch_settings(threads=threads):
            if recipe.train.device == "cpu":
                seconds = rank_seconds(option, dataset, cluster, mesh.rank if mesh.ranks > 1 else None)
        return seconds

    def measure(options: Sequence[Recipe]) -> list[float]:
        # In alternation, because other programs may slow a processor down for seconds.
        rounds = [[seconds_of(option) for option in options] for _ in range(_MEASURED_ROUNDS)]
        least = [min(times) for times in zip(*rounds, strict=True)]
        return [max(times) for times in zip(*mesh.files.gather_floats(least), strict=True)]

    return choose_exchange(recipe, dataset, cluster, measure)


def predict_exchanges(recipe: Recipe, dataset: Dataset, cluster: Cluster) -> list[Prediction]:
    """Predict a step with every way to exchange rows on a cluster.

    A batch of `train.batch_size` samples is divided among all ranks.

    Raises
    ------
    ConfigError
        If the batch has fewer samples than there are ranks, or if a rank's part of the tables is
        too large to measure.
    """
    if recipe.train.batch_size < cluster.all_ranks:
        raise ConfigError(
            f"train.batch_size is {recipe.train.batch_size}, expected at least one sample for each of "
            f"{cluster.all_ranks} ranks"
        )
    predictions = []
    for towers in (None, *_host_towers(dataset, cluster.hosts)):
        config = replace(recipe.distributed, exchange="flat" if towers is None else "sptt")
        changed = replace(recipe, model=replace(recipe.model, towers=towers), distributed=config)
        # A tower may have too few columns for its compression.
        with suppress(*([ConfigError] if towers is not None and not towers.plain else [])):
            seconds = rank_seconds(changed, dataset, cluster)
            for wire in (name for name, wire in WIRES.items() if wire.predicted):
                option = replace(changed, distributed=replace(config, wire=wire))
                predictions.append(predict_step(option, dataset, cluster, seconds))
    return predictions


def _host_towers(dataset: Dataset, hosts: int) -> Iterator[TowersConfig]:
    """Yield, for every compression, a configuration with one tower per host.

    Features are assigned to towers in rotation, because only the sizes of towers matter for the
    prediction.
    """
    items = tied(dataset.schema)
    if hosts < 2 or len(items) < hosts:
        return
    plan = tuple(tuple(name for item in items[host::hosts] for name in item) for host in range(hosts))
    for ratio in (1.0, *RATIOS):
        yield TowersConfig(plan=plan, compression=ratio)


def fastest(predictions: Sequence[Prediction]) -> dict[str, Prediction]:
    """Return the prediction with the shortest step among exchanges that have the same effect on
    training.
    """
    kinds = {
        "same results": [
            option for option in predictions if not option.towers and option.exchange.wire == "fp32"
        ],
        "rounded rows": [option for option in predictions if not option.towers],
        "towers, float32 rows": [
            option for option in predictions if option.towers and option.exchange.wire == "fp32"
        ],
        "towers, rounded rows": [option for option in predictions if option.towers],
    }
    return {kind: min(some, key=lambda option: option.step.total) for kind, some in kinds.items() if some}


def verdict(predictions: Sequence[Prediction]) -> str:
    """Return one line that says whether towers make a step shorter; empty if no towers were
    predicted.
    """
    best = fastest(predictions)
    if (towers := best.get("towers, float32 rows")) is None:
        return ""
    flat, ratio = best["same results"], best["same results"].step.total / towers.step.total
    if ratio > 1:
        name = f"{towers.towers} towers of ratio {towers.exchange.compression:g}"
        return f"towers would pay: a step with {name} is {ratio:.2f} times as fast; the model changes, so train both"
    return f"towers would not pay: with the best, a step takes {1 / ratio:.2f} times that of {flat.exchange.kind}"


def assumptions(recipe: Recipe, dataset: Dataset, cluster: Cluster, *, measured: bool) -> list[str]:
    """Return the assumptions behind `predict_exchanges`, one line each."""
    apart, latency = len(tied(dataset.schema)), cluster.between
    batch = max(recipe.train.batch_size // cluster.all_ranks, 1)
    origin = (
        "measured here"
        if measured
        else "not measured: for that, start `plan` by torchrun with 3 ranks or more"
    )
    none = [
        f"no towers: {cluster.hosts} hosts need one each, but only {apart} sets of "
        "features can be separated"
    ]
    return [
        *(none if cluster.hosts > apart else ()),
        f"{batch:,} samples for each of {cluster.all_ranks} ranks, of train.batch_size "
        f"{recipe.train.batch_size:,}",
        "every rank computes as fast as this process, which trained the part of the slowest "
        "rank here, without tiers",
        f"{cluster.inside_bytes_per_second / 1e9:.3g} GB/s per rank inside a host; "
        f"{cluster.between_bytes_per_second / 1e9:.3g} GB/s per host between hosts",
        f"{latency.alpha * 1e6:.3g} us per collective, "
        f"{latency.alpha_peer * 1e6:.3g} us per peer ({origin})",
        "even traffic; ids are exchanged during the step before",
        "what towers cost in quality is not predicted: train both",
    ]


def cluster_of(
    hosts: int, ranks: int, *, between: float, inside: float | None, latency: Collective
) -> Cluster:
    """Return a cluster.

    Parameters
    ----------
    between, inside : float
        Bytes per second from a host to the other hosts, and from a rank to the other ranks of its
        host. By default, `inside` is computed from the bandwidth of DRAM: the ranks of a host
        exchange through shared memory, where all bytes are written, copied and read.
    """
    inside = inside or measure_tiers(MemoryConfig()).dram.sequential_bytes_per_second / (4 * ranks)
    return Cluster(
        hosts=hosts,
        ranks=ranks,
        inside=latency,
        between=latency,
        inside_bytes_per_second=inside,
        between_bytes_per_second=between,
    )


def count_hosts(
    recipe: Recipe, dataset: Dataset, *, between: float, latency: Collective, rate: float
) -> list[HostCount]:
    """Return the smallest number of hosts with only DRAM, and with all memories of the recipe if it
    has others.

    Each host runs one process.
    """
    cluster = Cluster(inside=latency, between=latency, between_bytes_per_second=between)
    machine = measure_machine(recipe, dataset, cluster)
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    specs = describe_tables(tables, dataset, recipe.train.embedding, batch_size=recipe.train.batch_size)
    # With more hosts, the batch of each host is smaller and repeats fewer rows, so one row per
    # feature is sent.
    work = replace(step_work(recipe, dataset), flat_rows=0.0)
    everything = replace(recipe.memory, hbm=None)
    memories = dict.fromkeys((replace(everything, block=None, mapped=None), everything))
    return [fewest_hosts(specs, memory, machine, work, rate=rate) for memory in memories]
