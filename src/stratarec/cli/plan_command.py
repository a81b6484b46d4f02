"""`stratarec plan`: place tables in memories, partition features into towers, or predict step times
elsewhere.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stratarec.cli.arguments import (
    add_json,
    add_recipe,
    print_json,
    print_lines,
    progress_of,
    subcommand,
    whole_number,
)
from stratarec.errors import ConfigError
from stratarec.io.names import shell_word, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stratarec.data.dataset.dataset import Dataset
    from stratarec.distributed.measure import Collective
    from stratarec.embedding.config import EmbeddingBagConfig
    from stratarec.planning.plan import Plan
    from stratarec.recipe import Recipe

_MOST_RANKS = 4096
_FEWEST = (0, 0)
"""Number that represents ``--hosts fewest``."""


def _options(command: argparse.ArgumentParser) -> None:
    add_recipe(command)
    command.add_argument(
        "--ranks",
        type=whole_number("processes", _MOST_RANKS),
        metavar="N",
        help="plan for N processes, each with the memory budgets of the recipe (default: this process, or "
        "those of torchrun)",
    )
    command.add_argument(
        "--measure",
        action="store_true",
        help="measure the speed of the memories again instead of using the cache",
    )
    add_json(command, "print the plan as JSON instead of tables")
    command.add_argument(
        "-o", "--output", help="also write the plan as JSON to this file, for `train --plan`"
    )
    towers = command.add_argument_group(
        "towers: partition the features (model.towers.plan) instead of placing tables"
    )
    towers.add_argument(
        "--towers", type=int, metavar="N", help="partition the sparse features into N towers"
    )
    towers.add_argument(
        "--steps",
        type=int,
        help="largest number of training batches for measuring interactions (default: one pass, or fewer "
        "if a pass would take minutes)",
    )
    towers.add_argument(
        "--balance",
        type=float,
        metavar="R",
        help="largest number of features in a tower, relative to the mean (default: 1.5)",
    )
    towers.add_argument(
        "--write",
        action="store_true",
        help="write the towers to a file next to the recipe, which model.towers.plan can name",
    )
    towers.add_argument("--report", help="also write an HTML report to this file")
    command.add_argument(
        "--device",
        metavar="NAME",
        help="plan rows in the memory of a GPU and predict the step time, as measured by `stratarec doctor "
        "--gpu`, or of a card such as h100",
    )
    cluster = command.add_argument_group(
        "cluster: predict step times on several hosts instead of placing tables"
    )
    cluster.add_argument(
        "--hosts",
        type=_cluster,
        metavar="TxL",
        help="predict T hosts with L processes each, such as 8x8; or `fewest`: the smallest number of "
        "hosts that holds the model, each with the memory budgets of the recipe, with DRAM "
        "only and with all memories",
    )
    cluster.add_argument(
        "--samples",
        type=_samples,
        metavar="N",
        help="target throughput of the whole cluster, in samples per second",
    )
    cluster.add_argument(
        "--network", metavar="RATE", help="network rate between hosts: 100Mbit, 1Gbit, 200Gbit"
    )
    cluster.add_argument(
        "--inside",
        metavar="RATE",
        help="rate between processes of one host (default: from the memory speed of this machine)",
    )


def _samples(text: str) -> float:
    """Parse a throughput in samples per second."""
    if not re.fullmatch(r"[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(
            f"must be a number of samples per second, such as 1000000; got {text!r}"
        )
    return float(text)


def _cluster(text: str) -> tuple[int, int]:
    """Parse ``TxL``: the number of hosts, and the number of processes on each host."""
    if text == "fewest":
        return _FEWEST
    match = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,2})", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"must be hosts x processes per host, such as 8x8, or fewest; got {text!r}"
        )
    return int(match[1]), int(match[2])


@subcommand(
    name="plan",
    text="Print where each table is placed, with which precision and cache size, and the "
    "predicted memory and speed.",
    example="stratarec plan criteo.yaml memory.dram=1GiB -o plan.json",
    options=_options,
    multi_process=True,
)
def plan(args: argparse.Namespace) -> None:
    """Print a plan. With several processes, only the first one prints."""
    from stratarec.distributed.measure import measure_latency
    from stratarec.distributed.mesh import joined
    from stratarec.recipe import Recipe

    recipe = Recipe.load(args.recipe, args.overrides)
    _check_options(args)
    run = (
        _plan_towers
        if args.towers is not None
        else _plan_device
        if args.device is not None
        else _plan_tables
    )
    with joined(recipe.distributed, recipe.towers, {"recipe": recipe.to_dict()}) as mesh:
        if args.hosts is not None:
            latency = measure_latency(mesh)
            run_cluster = _plan_fewest_hosts if args.hosts == _FEWEST else _plan_cluster
            mesh.first(lambda: run_cluster(args, *_open_data(args), latency))
        else:
            hosts = (recipe.distributed.hosts or 1) if args.ranks else mesh.hosts
            mesh.first(lambda: run(args, *_open_data(args), args.ranks or mesh.ranks, hosts))


def _open_data(args: argparse.Namespace) -> tuple[Recipe, Dataset]:
    """Return the recipe, with the defaults that depend on its data set filled in, and the data
    set.
    """
    from stratarec.data.dataset.compatibility import check_prepared
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.recipe import Recipe, leaves, read_content
    from stratarec.training.resolve import choose_defaults

    content = read_content(args.recipe, args.overrides)
    recipe = Recipe.from_dict(content, args.recipe)
    dataset = Dataset.open(recipe.data.path, verify="used")
    recipe = recipe.with_fields(choose_defaults(recipe, leaves(content), dataset))
    check_prepared(recipe.data, dataset)
    if not dataset.table_rows():
        raise ConfigError(f"{dataset.path} has no sparse features, so its models have no tables to place")
    return recipe, dataset


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not belong to the requested kind of plan."""
    options = {
        "tables": {"ranks": args.ranks, "output": args.output, "measure": args.measure or None},
        "towers": {
            "steps": args.steps, "balance": args.balance, "write": args.write or None,
            "ranks": args.ranks, "report": args.report,
        },
        "cluster": {
            "network": args.network, "inside": args.inside, "measure": args.measure or None, "samples": args.samples,
        },
        "device": {"measure": args.measure or None, "output": args.output},
    }  # fmt: skip
    selectors = {"towers": "--towers N", "cluster": "--hosts TxL", "device": "--device NAME"}
    selected = {"towers": args.towers, "cluster": args.hosts, "device": args.device}
    kind, *others = [name for name, value in selected.items() if value is not None] or ["tables"]
    if others:
        raise ConfigError(
            f"{selectors[kind]} and {selectors[others[0]]} ask for different plans: use one of them"
        )
    for other, values in options.items():
        for name, value in values.items():
            if value is not None and name not in options[kind]:
                advice = (
                    f"requires {selectors[other]}" if other in selectors else "applies to plans of tables"
                )
                raise ConfigError(f"--{name} {advice}; this is a plan of {kind}")
    if args.hosts is not None and args.network is None:
        raise ConfigError("--hosts requires --network, the network rate between hosts, such as 200Gbit")
    if args.samples is not None and args.hosts != _FEWEST:
        raise ConfigError("--samples requires --hosts fewest")


def _plan_cluster(
    args: argparse.Namespace, recipe: Recipe, dataset: Dataset, latency: Collective | None
) -> None:
    """Predict step times on a cluster for each method of exchanging data between processes."""
    from stratarec.config.units import parse_rate
    from stratarec.planning.machine import measure_tiers
    from stratarec.reporting.plan_page import print_steps
    from stratarec.training import forecast
    from stratarec.training.resolve import in_numbers

    measure_tiers(recipe.memory, again=args.measure)
    with dataset.locked():
        cluster = forecast.cluster_of(
            *args.hosts,
            between=parse_rate(args.network, "--network"),
            inside=parse_rate(args.inside, "--inside") if args.inside else None,
            latency=latency or forecast.ASSUMED,
        )
        predictions = forecast.predict_exchanges(in_numbers(recipe, dataset), dataset, cluster)
    lines = forecast.assumptions(recipe, dataset, cluster, measured=latency is not None)
    rows = [prediction.to_dict() for prediction in predictions]
    best = {kind: prediction.name for kind, prediction in forecast.fastest(predictions).items()}
    towers = forecast.verdict(predictions)
    if args.json:
        print_json({"steps": rows, "fastest": best, "assumed": lines, "towers": towers})
    else:
        print_steps(rows, best, lines, towers)


def _plan_fewest_hosts(
    args: argparse.Namespace, recipe: Recipe, dataset: Dataset, latency: Collective | None
) -> None:
    """Find the smallest number of hosts that holds the model and reaches the target throughput."""
    from stratarec.config.units import parse_rate
    from stratarec.planning.machine import measure_tiers
    from stratarec.training.forecast import ASSUMED, count_hosts

    measure_tiers(recipe.memory, again=args.measure)
    with dataset.locked():
        counts = count_hosts(
            recipe,
            dataset,
            between=parse_rate(args.network, "--network"),
            latency=latency or ASSUMED,
            rate=args.samples or 0.0,
        )
    if args.json:
        print_json({"hosts": [asdict(count) for count in counts]})
        return
    print_lines(
        *(
            f"{count.memories}: {count.hosts:,} host{'s'[: count.hosts != 1]} ({count.for_bytes:,} to hold "
            f"the bytes), {count.samples_per_second:,.0f} samples/s predicted; "
            f"bottleneck: {count.waits_for}"
            for count in counts
        ),
        "assumes hosts like this machine, whose memories and network were measured, and evenly spread load",
    )


def _plan_towers(
    args: argparse.Namespace, recipe: Recipe, dataset: Dataset, ranks: int, hosts: int
) -> None:
    """Choose which features share a tower."""
    import yaml

    from stratarec.io.atomic import check_output, write_text
    from stratarec.models.registry import has_towers
    from stratarec.reporting.tower_page import print_towers, write_towers_report
    from stratarec.training.tower_partition import TowerRequest, make_towers

    file = Path(args.recipe).with_suffix(".towers.yaml")
    for path, ending in ((args.report, ".html"), (file if args.write else None, ".yaml")):
        if path:
            check_output(Path(path).resolve(), ending)
    options = {"steps": args.steps, "balance": args.balance}
    set_options = {name: value for name, value in options.items() if value is not None}
    request = TowerRequest(towers=args.towers, ranks=ranks, **set_options)
    with dataset.locked():
        towers = make_towers(recipe, dataset, request, progress_of(args))
    if args.json:
        print_json(towers.to_dict())
    else:
        print_towers(towers.to_dict(), dataset.samples("train"))
    if args.report:
        write_towers_report(Path(args.report), recipe.name, towers.to_dict())
    if args.write:
        lists = [list(features) for features in towers.plan]
        text = yaml.safe_dump(lists, default_flow_style=None, width=float("inf"), allow_unicode=True)
        write_text(
            file,
            "# One tower per line. In the recipe next to this file: model.towers.plan: "
            f"{visible(file.name)}\n{text}",
        )
        if not args.json:
            fields = [f"model.towers.plan={file.name}"]
            fields += [] if has_towers(recipe.model.kind) else ["model.kind=dlrm"]
            words = " ".join(map(shell_word, (args.recipe, *fields)))
            print_lines(f"wrote {file}; to train with it: stratarec train {words}")


def _plan_device(
    args: argparse.Namespace, recipe: Recipe, dataset: Dataset, ranks: int, hosts: int
) -> None:
    """Plan which rows are in GPU memory, and predict step times with these rows and the network on
    the GPU.
    """
    from stratarec.io.atomic import check_output
    from stratarec.planning.machine import measure_tiers
    from stratarec.reporting.plan_page import print_parts, print_plan
    from stratarec.training.forecast import device_rates, device_steps

    rates = device_rates(args.device)
    if ranks > 1:
        raise ConfigError(f"--device predicts one process; got {ranks}: start it without torchrun")
    if args.output:
        check_output(Path(args.output), ".json")
    measure_tiers(recipe.memory, rates=rates, again=args.measure)
    with dataset.locked():
        forecast = device_steps(recipe, dataset, rates)
    content = None if forecast.plan is None else forecast.plan.to_dict()
    if args.json:
        print_json({"steps": forecast.steps, "said": forecast.lines, "plan": content})
    else:
        if content is not None:
            print_plan(content, forecast.age_seconds)
        print_parts(forecast.steps, recipe.train.batch_size, forecast.lines)
    if args.output and forecast.plan is not None:
        forecast.plan.save(Path(args.output))


def _plan_tables(
    args: argparse.Namespace, recipe: Recipe, dataset: Dataset, ranks: int, hosts: int
) -> None:
    """Place each table in a memory."""
    from stratarec.config.units import format_bytes
    from stratarec.io.atomic import check_output
    from stratarec.models.base import build_tables
    from stratarec.planning.placement import make_hot_plan
    from stratarec.reporting.plan_page import print_plan
    from stratarec.training.build import measured_memory, sharding_plan
    from stratarec.training.forecast import bare_network, forecast_step, resolve_exchange
    from stratarec.training.gpu_memory import check_rows_device
    from stratarec.training.run.refit import refit_plan
    from stratarec.training.torch_setup import device_of

    if args.output:
        check_output(Path(args.output), ".json")
    try:
        device = device_of(recipe.train.device, ranks)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; to plan for a GPU that is not here, name a card, such as --device h100"
        ) from None
    check_rows_device(recipe, device)
    if recipe.towers:
        bare_network(recipe.model, dataset)  # refuses the recipe now, not when it is trained
    config = recipe.train
    with dataset.locked():
        memory, tiers = measured_memory(recipe, dataset, device, again=args.measure)

        def tables_of(dataset: Dataset) -> Sequence[EmbeddingBagConfig]:
            return build_tables(recipe.model, dataset.schema, dataset.table_rows())

        def place(dataset: Dataset) -> Plan:
            return make_hot_plan(
                tables_of(dataset),
                dataset,
                config.embedding,
                memory,
                recipe.hot,
                batch_size=config.batch_size,
                tiers=tiers,
                ranks=ranks,
            )

        plan, refit = place(dataset), refit_plan(recipe, dataset, place)
        content = plan.to_dict()
        # Here one process on the CPU is predicted; `--hosts` predicts several ranks, and `--device`
        # a GPU.
        is_local = ranks == 1 and config.device == "cpu"
        content["predicted"]["forecast"] = (
            forecast_step(recipe, dataset, plan).to_dict() if is_local else None
        )
        content["predicted"]["refit"] = None if refit is None else refit.to_dict()["predicted"]
        chosen = resolve_exchange(recipe, dataset, hosts, ranks) if ranks > 1 else recipe
        by_towers = ranks > 1 and chosen.distributed.by_towers(recipe.towers, hosts)
        sharding = sharding_plan(recipe, dataset, tables_of(dataset), plan, ranks, by_towers=by_towers)
    if args.json:
        print_json({**content, **({"sharding": sharding.to_dict()} if ranks > 1 else {})})
    else:
        print_plan(content, tiers.age_seconds)
        print_lines(*(sharding.lines() if ranks > 1 else ()))
        if refit is not None:
            rows, used = sum(table.rows for table in refit.tables), format_bytes(refit.used(refit.level0))
            print_lines(
                f"the refit (train.refit) has {rows:,} rows in all, and takes {used} "
                f"of {refit.level0.upper()}"
            )
    if args.output:
        plan.save(Path(args.output))
