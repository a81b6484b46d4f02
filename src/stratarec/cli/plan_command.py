"""`stratarec plan`: where tables would live; or which features share a tower; or how long steps elsewhere take."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from stratarec.cli.arguments import Subcommand, add_json, add_recipe, progress_of, say, say_json, whole_number
from stratarec.errors import ConfigError
from stratarec.io.names import shell_word, visible

if TYPE_CHECKING:
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.distributed.measure import NetworkFigures
    from stratarec.recipe import Recipe

_MOST_RANKS = 4096


def _options(command: argparse.ArgumentParser) -> None:
    add_recipe(command)
    command.add_argument(
        "--ranks",
        type=whole_number("processes", _MOST_RANKS),
        metavar="N",
        help="for N processes, each with the budgets of the recipe; default: this one, or those of torchrun",
    )
    command.add_argument("--measure", action="store_true", help="measure the memories again, not from the cache")
    add_json(command, "print the plan as JSON instead of tables")
    command.add_argument("-o", "--output", help="also write the plan as JSON to this file")
    command.add_argument("--report", help="also write tables and a picture as HTML to this file")
    _tower_options(command.add_argument_group("towers of features (model.towers.plan), instead of the tables"))
    command.add_argument(
        "--device",
        metavar="NAME",
        help="steps with the network on a GPU, instead: on cuda as it was measured here, or a card such as h100",
    )
    _cluster_options(command.add_argument_group("steps on a cluster by each exchange, instead of the tables"))


def _tower_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--towers", type=int, metavar="N", help="deal the sparse features to N towers")
    group.add_argument("--from", dest="run", metavar="RUN", help="ask the model of this run, instead of a probe")
    group.add_argument(
        "--steps",
        type=int,
        help="steps of the probe that is trained and thrown away (default: 200, or those of a run if fewer)",
    )
    group.add_argument(
        "--balance",
        type=float,
        metavar="R",
        help="most and fewest features of a tower, over the mean (default: 1.5)",
    )
    group.add_argument(
        "--write", action="store_true", help="write them beside the recipe, for its model.towers.plan to name the file"
    )


def _cluster_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hosts",
        type=_cluster,
        metavar="TxL",
        help="predict T hosts of L processes, such as 8x8; or `fewest`: how many hosts the model needs, of the "
        "recipe's budgets each, by DRAM alone and by all memories that it names",
    )
    group.add_argument("--samples", type=_samples, metavar="N", help="of --hosts fewest: samples a second of all hosts")
    group.add_argument("--network", metavar="RATE", help="of each host to the others: 100Mbit, 1Gbit, 200Gbit")
    group.add_argument(
        "--inside", metavar="RATE", help="of a process to others of its host (default: by this machine's memory)"
    )


def _samples(text: str) -> float:
    """Samples a second."""
    if not re.fullmatch(r"[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of samples a second, expected such as 1000000")
    return float(text)


def _cluster(text: str) -> tuple[int, int]:
    """Hosts, and processes of each; none of both where the fewest are asked for."""
    if text == "fewest":
        return 0, 0
    found = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,2})", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no cluster, expected hosts x processes of each, such as 8x8, or fewest"
        )
    return int(found[1]), int(found[2])


def plan(args: argparse.Namespace) -> None:
    """Where the tables of a recipe would live, in bytes and predicted speed; of several processes the first says so."""
    from stratarec.distributed.measure import network_at_hand
    from stratarec.distributed.mesh import joined
    from stratarec.recipe import Recipe

    recipe = Recipe.load(args.recipe, args.overrides)
    _check_kind(args)
    run = _plan_towers if args.towers is not None else _plan_device if args.device is not None else _plan
    with joined(recipe.distributed, recipe.towers, {"recipe": recipe.to_dict()}, modules=recipe.modules) as mesh:
        if args.hosts is not None:
            network = network_at_hand(mesh)
            run_cluster = _plan_cluster if all(args.hosts) else _plan_hosts
            mesh.first(lambda: run_cluster(args, *_prepared(args), network))
        else:
            hosts = (recipe.distributed.hosts or 1) if args.ranks else mesh.hosts
            mesh.first(lambda: run(args, *_prepared(args), args.ranks or mesh.ranks, hosts))


def _prepared(args: argparse.Namespace) -> tuple[Recipe, Dataset]:
    """The recipe with what it leaves to the size of its data set, and that data set."""
    from stratarec.data.dataset.compatibility import check_prepared
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.recipe import Recipe, read_content
    from stratarec.training.resolve import sized

    content = read_content(args.recipe, args.overrides)
    dataset = Dataset.open(Recipe.from_dict(content, args.recipe).data.path, verify="used")
    recipe = Recipe.from_dict(sized(content, dataset)[0], args.recipe)
    check_prepared(recipe.data, dataset)
    if not dataset.table_rows():
        raise ConfigError(f"{dataset.path} has numbers alone, and a model of it no tables: there is nothing to place")
    return recipe, dataset


def _check_kind(args: argparse.Namespace) -> None:
    """Refuse options of another kind of plan than the one asked for: of tables, of towers, or of steps on a cluster."""

    kinds = {
        "tables": {"ranks": args.ranks, "output": args.output, "measure": args.measure or None, "report": args.report},
        "towers": {
            "from": args.run, "steps": args.steps, "balance": args.balance, "write": args.write or None,
            "ranks": args.ranks, "report": args.report,
        },
        "a cluster": {
            "network": args.network, "inside": args.inside, "measure": args.measure or None, "samples": args.samples,
        },
        "a device": {"measure": args.measure or None},
    }  # fmt: skip
    asked = {"towers": args.towers, "a cluster": args.hosts, "a device": args.device}
    kind, *more = [each for each, option in asked.items() if option is not None] or ["tables"]
    if more:
        raise ConfigError(f"this asks for a plan of {kind} and for one of {more[0]}: ask for one of them")
    for other, options in kinds.items():
        for name, value in options.items():
            if value is not None and name not in kinds[kind]:
                start = {
                    "tables": "", "towers": "; start with --towers N", "a cluster": "; start with --hosts TxL",
                    "a device": "; start with --device NAME",
                }  # fmt: skip
                raise ConfigError(f"--{name} is of a plan of {other}, and this is one of {kind}{start[other]}")
    if args.hosts is not None and args.network is None:
        raise ConfigError("--hosts needs --network, the rate of each host to the others, such as 200Gbit")
    if args.samples is not None and args.hosts != (0, 0):
        raise ConfigError("--samples is what the fewest hosts must train: start with --hosts fewest")


def _plan_cluster(args: argparse.Namespace, recipe: Recipe, dataset: Dataset, network: NetworkFigures | None) -> None:
    """Predict steps on a cluster."""
    from stratarec.config.units import parse_rate
    from stratarec.planning.machine import measure_tiers
    from stratarec.reporting.plan_page import print_steps
    from stratarec.training import forecast

    measure_tiers(recipe.memory, again=args.measure)
    with dataset.locked():
        machine = forecast.cluster_machine(
            recipe, dataset, *args.hosts, between=parse_rate(args.network, "--network"),
            inside=parse_rate(args.inside, "--inside") if args.inside else None, latency=network or forecast.ASSUMED,
        )  # fmt: skip
        predictions = forecast.predict_exchanges(recipe, dataset, machine)
    lines = forecast.assumptions(recipe, dataset, machine, measured=network is not None)
    rows = [each.to_dict() for each in predictions]
    best = {kind: each.name for kind, each in forecast.fastest(predictions).items()}
    towers = forecast.verdict(predictions)
    if args.json:
        say_json({"steps": rows, "fastest": best, "assumed": lines, "towers": towers})
    else:
        print_steps(rows, best, lines, towers)


def _plan_hosts(args: argparse.Namespace, recipe: Recipe, dataset: Dataset, network: NetworkFigures | None) -> None:
    """Find the fewest hosts that hold and train the model."""
    from dataclasses import asdict

    from stratarec.config.units import parse_rate
    from stratarec.planning.machine import measure_tiers
    from stratarec.training.forecast import ASSUMED, count_hosts

    measure_tiers(recipe.memory, again=args.measure)
    with dataset.locked():
        counts = count_hosts(
            recipe, dataset, between=parse_rate(args.network, "--network"), latency=network or ASSUMED,
            rate=args.samples or 0.0,
        )  # fmt: skip
    if args.json:
        say_json({"hosts": [asdict(each) for each in counts]})
        return
    for each in counts:
        say(
            f"{each.memories}: {each.hosts:,} host{'s'[: each.hosts != 1]} ({each.for_bytes:,} for the bytes), "
            f"{each.samples_per_second:,.0f} samples/s predicted; most of a step is {each.waits_for}"
        )
    say("assumed: every host is like this machine, whose memories and network were measured; even loads")


def _plan_towers(args: argparse.Namespace, recipe: Recipe, dataset: Dataset, ranks: int, hosts: int) -> None:
    """Which features share a tower."""
    import yaml

    from stratarec.io.atomic import check_output, write_text
    from stratarec.models.registry import has_towers
    from stratarec.reporting.tower_page import print_towers, write_towers_report
    from stratarec.training.tower_partition import TowerRequest, make_towers

    file = Path(args.recipe).with_suffix(".towers.yaml")
    for path, ending in ((args.report, ".html"), (file if args.write else None, ".yaml")):
        if path:
            check_output(Path(path).resolve(), ending)
    options = {"run": args.run, "steps": args.steps, "balance": args.balance}
    given = {name: value for name, value in options.items() if value is not None}
    request = TowerRequest(towers=args.towers, ranks=ranks, **given)
    request = request.on(recipe, dataset)
    with dataset.locked():
        made = make_towers(recipe, dataset, request, progress_of(args))
    if args.json:
        say_json(made.to_dict())
    else:
        print_towers(made.to_dict(), request.source)
    if args.report:
        write_towers_report(Path(args.report), recipe.name, made.to_dict(), request.source)
    if args.write:
        lists = [list(features) for features in made.plan]
        text = yaml.safe_dump(lists, default_flow_style=None, width=float("inf"), allow_unicode=True)
        write_text(
            file, f"# A tower a line, for a recipe beside this file: model.towers.plan: {visible(file.name)}\n{text}"
        )
        if not args.json:
            fields = [f"model.towers.plan={file.name}"]
            fields += [] if has_towers(recipe.model.kind) else ["model.kind=dlrm"]
            words = " ".join(map(shell_word, (args.recipe, *fields)))
            say(f"wrote {file}; to train with it: stratarec train {words}")


def _plan_device(args: argparse.Namespace, recipe: Recipe, dataset: Dataset, ranks: int, hosts: int) -> None:
    """Steps with the network on a GPU."""
    from stratarec.planning.machine import measure_tiers
    from stratarec.reporting.plan_page import print_parts
    from stratarec.training.forecast import device_rates, device_steps

    rates = device_rates(args.device)
    if ranks > 1:
        raise ConfigError(f"--device is of one process, and there are {ranks}")
    measure_tiers(recipe.memory, again=args.measure)
    with dataset.locked():
        steps, lines = device_steps(recipe, dataset, rates)
    if args.json:
        say_json({"steps": steps, "said": lines})
    else:
        print_parts(steps, recipe.train.batch_size, lines)


def _plan(args: argparse.Namespace, recipe: Recipe, dataset: Dataset, ranks: int, hosts: int) -> None:
    from stratarec.io.atomic import check_output
    from stratarec.models.base import build_tables
    from stratarec.planning.machine import measure_tiers
    from stratarec.planning.placement import make_hot_plan
    from stratarec.reporting.plan_page import print_plan, write_plan_report
    from stratarec.training.build import sharding_plan
    from stratarec.training.forecast import bare_network, forecast_step

    for path, ending in ((args.output, ".json"), (args.report, ".html")):
        if path:
            check_output(Path(path), ending)
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    if recipe.towers:
        bare_network(recipe.model, dataset)  # refused here, not by the run that is planned for
    tiers = measure_tiers(recipe.memory, again=args.measure)
    config = recipe.train
    with dataset.locked():
        made = make_hot_plan(
            tables, dataset, config.embedding, recipe.memory, recipe.hot, batch_size=config.batch_size, tiers=tiers,
            ranks=ranks,
        )  # fmt: skip
        # What several ranks or a device take is of `--hosts` and `--device`.
        alone = ranks == 1 and config.device == "cpu"
        content = made.to_dict()
        content["predicted"]["forecast"] = forecast_step(recipe, dataset, made).to_dict() if alone else None
        by_towers = ranks > 1 and recipe.distributed.by_towers(recipe.towers, hosts, modules=recipe.modules)
        sharding = sharding_plan(recipe, dataset, tables, made, ranks, by_towers=by_towers)
    if args.json:
        shared = {"sharding": sharding.to_dict()} if ranks > 1 else {}
        say_json({**content, **shared})
    else:
        print_plan(content, tiers.age_seconds)
        say(*(sharding.lines() if ranks > 1 else ()))
    if args.output:
        made.save(Path(args.output))
    if args.report:
        write_plan_report(Path(args.report), recipe.name, content)


COMMAND = Subcommand(
    name="plan",
    text="Print where each table would live, at which precision, with how much cache: bytes and predicted speed.",
    example="stratarec plan criteo.yaml memory.dram=1GiB -o plan.json",
    options=_options,
    run=plan,
    by_ranks=True,
)
