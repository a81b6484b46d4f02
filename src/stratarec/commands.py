"""What each subcommand does: a plain function of its arguments.

Heavy imports (torch, numba) are inside the functions, so that --help answers at once.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from stratarec.naming import visible

if TYPE_CHECKING:
    from stratarec.data.dataset import Dataset
    from stratarec.data.executing import Executor
    from stratarec.distributed.calibration import NetworkFigures
    from stratarec.hot.profile import HotProfile
    from stratarec.recipe import Recipe


def init(args: argparse.Namespace) -> None:
    """A log, or the name of a shipped recipe -> a recipe to start from."""
    from stratarec.drafting.draft import draft
    from stratarec.drafting.guessing import lines
    from stratarec.drafting.shipped import copy_shipped, shipped
    from stratarec.errors import ConfigError

    output = Path(args.output) if args.output else None
    if bool(args.recipe) == bool(args.log):
        raise ConfigError(f"init needs a log, or one of --recipe {', '.join(shipped())}")
    if args.recipe:
        path = copy_shipped(args.recipe, output)
    else:
        path, sample, guesses = draft(tuple(args.log), output, args.label)
        width = max(len(visible(name)) for name, _, _ in lines(guesses))
        for name, role, reason in lines(guesses):
            _say(f"{visible(name):{width}}  {role:8}  {reason}")
        if not sample.whole:
            _say(f"guessed from {sample.frame.height:,} rows of about {sample.total:,}")
    _say(f"wrote {path}; look at it, then: stratarec prepare {path} && stratarec train {path}")


def prepare(args: argparse.Namespace) -> None:
    """Raw logs -> a prepared data set."""
    from stratarec.data.prepare import prepare as run
    from stratarec.recipe import Recipe
    from stratarec.reporting.progress import make_progress

    recipe = Recipe.load(args.recipe, args.overrides)
    with _executor(args.ray) as executor:
        dataset = run(
            recipe.data,
            name=recipe.name,
            overwrite=args.overwrite,
            progress=make_progress(quiet=args.quiet),
            executor=executor,
        )
    for split in dataset.splits:
        samples = dataset.samples(split)
        counts = dataset.label_counts(split).items()
        rate = "".join(
            f", {count.positives / count.known:.2%} positive"
            + (f" ({visible(label)})" if dataset.schema.labels else "")
            for label, count in counts
            if count.known
        )
        print(f"{split:6} {samples:>12,} samples{rate}")
    print(f"tables {len(dataset.vocabularies):>12,}, {sum(dataset.table_rows().values()):,} rows")
    if dataset.about.bad_rows:
        print(f"left out {dataset.about.bad_rows:,} bad rows")
    _say(f"prepared {dataset.path}")


def _executor(address: str | None) -> AbstractContextManager[Executor | None]:
    """Who does the pieces of `prepare`."""
    if address is None:
        return nullcontext()
    from stratarec.cluster.tasks import on_ray

    return on_ray(address)


def plan(args: argparse.Namespace) -> None:
    """Where the tables of a recipe would live, in bytes and predicted speed; of several processes the first says so."""
    from stratarec.distributed.calibration import network_at_hand
    from stratarec.distributed.mesh import joined
    from stratarec.recipe import Recipe

    recipe = Recipe.load(args.recipe, args.overrides)
    _check_kind(args)
    run = _plan if args.towers is None else _plan_towers
    with joined(recipe.distributed, recipe.towers) as mesh:
        if args.hosts is not None:
            network = network_at_hand(mesh)
            mesh.first(lambda: _plan_cluster(args, _sized(args), network))
        else:
            hosts = (recipe.distributed.hosts or 1) if args.ranks else mesh.hosts
            mesh.first(lambda: run(args, _sized(args), args.ranks or mesh.ranks, hosts))


def _sized(args: argparse.Namespace) -> Recipe:
    """The recipe with what it leaves to the size of its data set, which is prepared."""
    from stratarec.data.dataset import Dataset
    from stratarec.recipe import Recipe, read_content
    from stratarec.training.sizing import sized

    content = read_content(args.recipe, args.overrides)
    path = Recipe.from_dict(content, args.recipe).data.path
    return Recipe.from_dict(sized(content, Dataset.open(path, verify="used"))[0], args.recipe)


def _check_kind(args: argparse.Namespace) -> None:
    """Refuse options of another kind of plan than the one asked for: of tables, of towers, or of steps on a cluster."""
    from stratarec.errors import ConfigError

    kinds = {
        "tables": {"ranks": args.ranks, "output": args.output, "measure": args.measure or None, "report": args.report},
        "towers": {
            "method": args.method, "interaction": args.interaction, "from": args.run, "steps": args.steps,
            "balance": args.balance, "write": args.write or None, "ranks": args.ranks, "report": args.report,
        },
        "a cluster": {"network": args.network, "inside": args.inside, "measure": args.measure or None},
    }  # fmt: skip
    if args.towers is not None and args.hosts is not None:
        raise ConfigError("--towers deals features to towers and --hosts predicts steps: ask for one of them")
    kind = "towers" if args.towers is not None else "a cluster" if args.hosts is not None else "tables"
    for other, options in kinds.items():
        for name, value in options.items():
            if value is not None and name not in kinds[kind]:
                start = {"tables": "", "towers": "; start with --towers N", "a cluster": "; start with --hosts TxL"}
                raise ConfigError(f"--{name} is of a plan of {other}, and this is one of {kind}{start[other]}")
    if args.hosts is not None and args.network is None:
        raise ConfigError("--hosts needs --network, the rate of each host to the others, such as 200Gbit")


def _plan_cluster(args: argparse.Namespace, recipe: Recipe, network: NetworkFigures | None) -> None:
    """Steps on a cluster that is not here."""
    import json

    from stratarec.data.dataset import Dataset
    from stratarec.data.matching import check_prepared
    from stratarec.distributed.simulate import Cluster
    from stratarec.planning.tiers import measure_tiers
    from stratarec.reporting.scaling import print_steps
    from stratarec.sizes import parse_rate
    from stratarec.training.scaling import assumptions, fastest, predictions
    from stratarec.training.workloads import ASSUMED, calibrate, inside_rate

    hosts, ranks = args.hosts
    between = parse_rate(args.network, "--network")
    inside = parse_rate(args.inside, "--inside") if args.inside else None
    dataset = Dataset.open(recipe.data.path, verify="used")
    check_prepared(recipe.data, dataset)
    measure_tiers(recipe.memory, again=args.measure)
    cluster = Cluster(
        hosts=hosts, ranks=ranks, between_bytes_per_second=between,
        inside_bytes_per_second=inside or inside_rate(recipe, ranks),
    )  # fmt: skip
    with dataset.held():
        calibration = calibrate(recipe, dataset, network or ASSUMED, network or ASSUMED)
        found = predictions(recipe, dataset, cluster, calibration)
    lines = assumptions(recipe, dataset, cluster, calibration, measured=network is not None)
    rows, best = [each.to_dict() for each in found], {kind: each.name for kind, each in fastest(found).items()}
    if args.json:
        content = {"steps": rows, "fastest": best, "assumed": lines}
        print(json.dumps(content, indent=1, allow_nan=False))
    else:
        print_steps(rows, best, lines)


def _plan_towers(args: argparse.Namespace, recipe: Recipe, ranks: int, hosts: int) -> None:
    """Which features share a tower."""
    import json

    from stratarec.data.dataset import Dataset
    from stratarec.data.matching import check_prepared
    from stratarec.drafting.rewriting import write_towers
    from stratarec.files import check_output
    from stratarec.reporting.progress import make_progress
    from stratarec.reporting.towers import print_towers, write_towers_report
    from stratarec.training.partitioning import TowerRequest, make_towers

    for path in (args.report, args.recipe if args.write else None):
        if path:
            check_output(Path(path).resolve())
    options = {
        "method": args.method, "measure": args.interaction, "run": args.run, "steps": args.steps,
        "balance": args.balance,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    request = TowerRequest(towers=args.towers, ranks=ranks, **given)
    dataset = Dataset.open(recipe.data.path, verify="used")
    check_prepared(recipe.data, dataset)
    request = request.on(recipe, dataset)
    with dataset.held():
        made = make_towers(recipe, dataset, request, make_progress(quiet=args.quiet))
    if args.json:
        print(json.dumps(made.to_dict(), indent=1, allow_nan=False))
    else:
        print_towers(made.to_dict(), request.source)
    if args.report:
        write_towers_report(Path(args.report), recipe.name, made.to_dict(), request.source)
    if args.write:
        write_towers(Path(args.recipe), made.plan)
        if not args.json:
            _say(f"written to {args.recipe}")


def _plan(args: argparse.Namespace, recipe: Recipe, ranks: int, hosts: int) -> None:
    import json

    from stratarec.data.dataset import Dataset
    from stratarec.data.matching import check_prepared
    from stratarec.files import check_output
    from stratarec.models.base import build_tables
    from stratarec.planning.hot_rows import make_hot_plan
    from stratarec.planning.tiers import measure_tiers
    from stratarec.reporting.placement import print_plan, write_plan_report
    from stratarec.training.sharing import sharding_plan

    for path in filter(None, (args.output, args.report)):
        check_output(Path(path))
    dataset = Dataset.open(recipe.data.path, verify="used")
    check_prepared(recipe.data, dataset)
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    tiers = measure_tiers(recipe.memory, again=args.measure)
    config = recipe.train
    with dataset.held():
        made = make_hot_plan(
            tables, dataset, config.embedding, recipe.memory, recipe.hot, batch_size=config.batch_size, tiers=tiers,
            ranks=ranks,
        )  # fmt: skip
        by_towers = ranks > 1 and recipe.distributed.by_towers(recipe.towers, hosts)
        sharding = sharding_plan(recipe, dataset, tables, made, ranks, by_towers=by_towers)
    if args.json:
        shared = {"sharding": sharding.to_dict()} if ranks > 1 else {}
        print(json.dumps({**made.to_dict(), **shared}, indent=1, allow_nan=False))
    else:
        print_plan(made.to_dict(), tiers.age_seconds)
        print("\n".join(sharding.lines() if ranks > 1 else ()), end="\n" if ranks > 1 else "")
    if args.output:
        made.save(Path(args.output))
    if args.report:
        write_plan_report(Path(args.report), recipe.name, made.to_dict())


def profile(args: argparse.Namespace) -> None:
    """How values repeat, and which rows are hot, as tables and an HTML report."""
    from stratarec.data.dataset import Dataset
    from stratarec.errors import ConfigError
    from stratarec.files import check_output
    from stratarec.hot.calibrator import passed_over
    from stratarec.profiling.duplication import profile as run
    from stratarec.reporting.duplication import print_profile, write_profile
    from stratarec.reporting.hot import print_hot

    dataset = Dataset.open(args.dataset, verify="used")
    beside = dataset.path.resolve()
    output = Path(args.output or beside.with_name(f"{beside.name}-profile.html"))
    check_output(output)
    if args.classify and args.hot is None:
        raise ConfigError("--classify counts inputs that need hot rows alone: say how many bytes these have by --hot")
    with dataset.held():
        hot = None if args.hot is None else _profile_hot(args, dataset, output.with_suffix(".hot.json"))
        counted = _classify(args, dataset, hot, output) if hot is not None and args.classify else []
        found = run(dataset, args.split, batch_size=args.batch_size, batches=args.batches)
    print_profile(found)
    if hot is not None:
        remark = passed_over(dataset)
        print_hot(hot, [*counted, *([f"note: {remark}"] if remark else [])])
    write_profile(output, found, hot)
    _say(f"report {output}")


def _profile_hot(args: argparse.Namespace, dataset: Dataset, output: Path) -> HotProfile:
    """Which rows are hot, written to `output`."""
    from stratarec.embedding.optimizers import RowOptimizerConfig
    from stratarec.files import check_output
    from stratarec.hot.calibrator import calibrate
    from stratarec.hot.parts import row_bytes_of
    from stratarec.sizes import parse_bytes

    check_output(output)
    row_bytes = row_bytes_of(dataset, args.dim, RowOptimizerConfig(kind=args.optimizer))
    profile = calibrate(dataset, row_bytes, parse_bytes(args.hot, "--hot"))
    profile.write(output)
    _say(f"hot rows {output}")
    return profile


def _classify(args: argparse.Namespace, dataset: Dataset, profile: HotProfile, beside: Path) -> list[str]:
    """How many inputs of each split are hot, counted; counts are kept `beside`."""
    from stratarec.hot.classifier import classify
    from stratarec.hot.parts import parts_of
    from stratarec.reporting.progress import make_progress

    parts, lines = parts_of(dataset, profile.row_bytes), []
    hot = profile.hot(parts)
    for split in dataset.splits:
        if samples := dataset.samples(split):
            path = beside.with_suffix(f".hot-{split}.json")
            found = classify(dataset, parts, hot, split, path, make_progress(quiet=args.quiet)).inputs
            lines.append(f"{split:6} {found:>12,} of {samples:,} inputs are hot, {found / samples:.2%}")
    return lines


def train(args: argparse.Namespace) -> None:
    """Train a model, test it once, write a report."""
    from stratarec.data.dataset import Dataset
    from stratarec.distributed.mesh import joined, restarted
    from stratarec.planning.plan import Plan
    from stratarec.recipe import Recipe, read_content
    from stratarec.reporting.progress import make_progress
    from stratarec.training.keeping import SETTLED
    from stratarec.training.sizing import sized
    from stratarec.training.trainer import Trainer

    content = read_content(args.recipe, args.overrides)
    recipe = Recipe.from_dict(content, args.recipe)
    with joined(recipe.distributed, recipe.towers) as mesh:
        dataset = mesh.first_then_others(lambda: Dataset.open(recipe.data.path))
        made = Plan.load(Path(args.plan)) if args.plan else None
        content, said = sized(content, dataset)
        recipe, progress = Recipe.from_dict(content, args.recipe), make_progress(quiet=args.quiet)
        if said and mesh.is_first:
            progress.say(said)
        trainer = Trainer(recipe, dataset, progress, plan=made, mesh=mesh)
        # A run that torchrun starts again goes on by itself, from its own checkpoints, not those it was to overwrite.
        settled = mesh.noted(SETTLED)
        result = trainer.train(
            resume=settled or args.resume or (restarted() and not args.overwrite),
            overwrite=args.overwrite and not settled,
            earlier=args.earlier,
        )
    if mesh.is_first:
        _print_result(trainer.run, result)


def _print_result(run: Path, result: dict[str, object]) -> None:
    from stratarec.reporting.metrics import lines
    from stratarec.sizes import readable

    if "test" in result:
        print("\n".join(lines("test", result["test"])))  # type: ignore[arg-type]
    if "uncalibrated" in result:
        for split, figures in result["uncalibrated"].items():  # type: ignore[attr-defined]
            print("\n".join(lines(f"{split}, before its correction", figures)))
    print(f"speed            {result['samples_per_second']:,.0f} samples/s")
    tables, network, outputs = (readable(result[f"{part}_bytes"]) for part in ("table", "network", "output"))  # type: ignore[arg-type]
    print(f"tables and state {tables}, network {network}, looked up and its gradient {outputs}")
    print(f"peak memory      {readable(result['peak_rss_bytes'])}")  # type: ignore[arg-type]
    for rank, found in enumerate(result.get("ranks", ())):  # type: ignore[arg-type, var-annotated]
        exposed, hidden = found["exposed_seconds"], found["hidden_seconds"]
        print(
            f"rank {rank:<12}{readable(found['table_bytes'])} of tables, {readable(found['sent_bytes'])} sent, "
            f"{exposed / max(found['step_seconds'], 1e-9):.0%} of its time waiting, "
            f"{hidden / max(exposed + hidden, 1e-9):.0%} of the exchange hidden"
        )
    if result["memory"]:
        from stratarec.reporting.placement import print_comparison

        print_comparison(result["memory"])  # type: ignore[arg-type]
    _say(f"model            {run / 'checkpoints' / str(result['checkpoint'])}")
    if (run / "report.html").exists():
        _say(f"report           {run / 'report.html'}")
    _say(f"TensorBoard      {run / 'tensorboard'}")


def evaluate(args: argparse.Namespace) -> None:
    """Metrics of a trained model."""
    from stratarec.distributed.mesh import joined
    from stratarec.reporting.metrics import bins, lines, sliced
    from stratarec.reporting.progress import make_progress
    from stratarec.training.evaluation import evaluate_split
    from stratarec.training.fresh import FreshLogs
    from stratarec.training.metrics import figures
    from stratarec.training.run import open_run
    from stratarec.training.slices import evaluate_logs

    data, logs = _data_or_logs(args, by=args.by)
    with joined() as mesh, open_run(args.run, data, mesh=mesh) as trained:
        progress = make_progress(quiet=args.quiet or not mesh.is_first)
        if logs:
            _refuse_ranks(mesh.ranks)
            fresh = FreshLogs(trained, logs, keep=args.by, earlier=args.history, labelled=True)
            whole, slices = evaluate_logs(fresh, progress)
            print("\n".join([*lines("log", figures(whole)), *bins("log", figures(whole))]))
            for name, found in slices.items():
                for label in whole:
                    head = name if len(whole) == 1 else f"{name} ({label})"
                    print("\n".join(sliced(head, [(value, each[label].to_dict()) for value, each in found])))
            return
        for split in args.split or ["test"]:
            precision = trained.recipe.train.precision
            found_split, _ = evaluate_split(
                trained.model, trained.dataset, split, precision=precision, progress=progress, mesh=mesh
            )
            if mesh.is_first:
                told = figures(found_split)
                print("\n".join([*lines(split, told), *bins(split, told)]))


def predict(args: argparse.Namespace) -> None:
    """Scores as Parquet or CSV."""
    from stratarec.distributed.mesh import joined
    from stratarec.files import check_output
    from stratarec.reporting.progress import make_progress
    from stratarec.training.fresh import FreshLogs
    from stratarec.training.predict import predict as run
    from stratarec.training.predict import predict_logs
    from stratarec.training.run import open_run

    data, logs = _data_or_logs(args, keep=args.keep)
    split = args.split or "test"
    output = Path(args.output or Path(args.run) / f"predictions-{'log' if logs else split}.parquet")
    check_output(output)
    with joined() as mesh, open_run(args.run, data, mesh=mesh) as trained:
        progress = make_progress(quiet=args.quiet or not mesh.is_first)
        if logs:
            _refuse_ranks(mesh.ranks)
            rows = predict_logs(FreshLogs(trained, logs, keep=args.keep, earlier=args.history), output, progress)
        else:
            rows = run(trained, split, output, progress)
    if mesh.is_first:
        _say(f"{rows:,} scores in {output}")


def _refuse_ranks(ranks: int) -> None:
    """Raw logs are read in their order, by one process."""
    from stratarec.errors import ConfigError

    if ranks > 1:
        raise ConfigError(f"raw logs are scored by one process, not by {ranks}: start it without torchrun")


def _data_or_logs(args: argparse.Namespace, **options: list[str]) -> tuple[str | None, list[str]]:
    """The prepared data set behind a run, or the raw logs; what is of one of them alone is refused for the other."""
    from stratarec.errors import ConfigError

    logs = [] if len(args.data) == 1 and Path(args.data[0]).is_dir() else args.data
    if logs and args.split:
        raise ConfigError("--split is of prepared data sets, and raw logs have no splits; leave it out")
    for name, given in {**options, "history": args.history}.items():
        if given and not logs:
            raise ConfigError(f"--{name} is of raw logs, and prepared data sets hold no raw columns; name the files")
    return (None if logs or not args.data else args.data[0]), logs


def export(args: argparse.Namespace) -> None:
    """A trained model for use elsewhere."""
    from stratarec.training.export import check_new
    from stratarec.training.export import export as run
    from stratarec.training.run import open_run

    output = Path(args.output or Path(args.run) / "export")
    check_new(output)
    with open_run(args.run, same_samples=False) as trained:
        _say(f"exported {run(trained, output, program=args.program, onnx=args.onnx)}")


def tune(args: argparse.Namespace) -> None:
    """Many trainings of a recipe, and its best values by validation."""
    from stratarec.errors import ConfigError
    from stratarec.recipe import Recipe, read_content
    from stratarec.reporting.metrics import LABELS
    from stratarec.reporting.progress import make_progress
    from stratarec.tuning.space import Space

    content = read_content(args.recipe, args.overrides)
    recipe = Recipe.from_dict(content, args.recipe)
    space = Space.read(args.space, content, args.recipe)
    try:
        from stratarec.tuning.study import tune as run
    except ImportError as error:
        raise ConfigError(
            f"tune needs optuna, which is not installed ({error}): pip install 'stratarec[tune]'"
        ) from error
    folder = Path(args.output or Path("studies") / recipe.place)
    best = run(content, space, folder, args.trials, make_progress(quiet=args.quiet), args.recipe)
    for field, value in best.values.items():
        _say(f"{field}={value}")
    _say(f"validation {LABELS[best.metric]} {best.value:.6f}, of {best.run}")
    _say(f"wrote {best.recipe}; to train and test it: stratarec train {best.recipe}")


def compare(args: argparse.Namespace) -> None:
    """Runs side by side."""
    import json

    from stratarec.files import check_output
    from stratarec.training.contest import Contest

    if args.output:
        check_output(Path(args.output).resolve())
    found = Contest.read(args.runs)
    if args.json:
        print(json.dumps(found.to_dict(), indent=1, allow_nan=False))
    else:
        from stratarec.reporting.contest import print_contest

        print_contest(found.to_dict())
    if args.output:
        from stratarec.reporting.contest import write_contest

        losses = {run.name: run.losses for run in found.runs}
        validations = {
            run.name: [(each["step"], each["auc"]) for each in run.evaluations if each["auc"] is not None]
            for run in found.runs
        }
        write_contest(Path(args.output), found.to_dict(), losses, validations)


def check(args: argparse.Namespace) -> None:
    """Everything that can be checked of what StrataRec wrote."""
    from stratarec.checking import check as run

    for line in run(Path(args.path)):
        _say(line)
    _say(f"{args.path} is whole")


def _say(line: str) -> None:
    """Print a line that has a name or path in it."""
    print(visible(line))
