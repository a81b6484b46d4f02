"""The command line: one subcommand, one plain function.

Errors that a user can mend are one line on standard error and exit code 2; anything else is one line too, which says
where the traceback is, and exit code 70.
"""

from __future__ import annotations

import argparse
import errno
import os
import platform
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from stratarec.errors import ConfigError, Interrupted, StrataError
from stratarec.naming import visible

# Heavy imports (torch, numba) are inside the functions, so that --help answers at once.

_SPLITS = ("train", "valid", "test")
_WIDTH = 78
# What sysexits.h calls an internal error, and what a shell gives a program that wrote to a closed pipe.
_DEFECT, _CLOSED_PIPE = 70, 141
# Characters of an unexpected error's message that are repeated.
_LONGEST = 200
_MOST_RANKS = 4096


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
    dataset = run(recipe.data, name=recipe.name, overwrite=args.overwrite, progress=make_progress(quiet=args.quiet))
    for split in dataset.splits:
        samples = dataset.samples(split)
        rate = f", {dataset.positives[split] / samples:.2%} positive" if samples else ""
        print(f"{split:6} {samples:>12,} samples{rate}")
    print(f"tables {len(dataset.vocabularies):>12,}, {sum(dataset.table_rows().values()):,} rows")
    if dataset.about.bad_rows:
        print(f"left out {dataset.about.bad_rows:,} bad rows")
    _say(f"prepared {dataset.path}")


def plan(args: argparse.Namespace) -> None:
    """Where the tables of a recipe would live, in bytes and predicted speed."""
    import json

    from stratarec.data.dataset import Dataset
    from stratarec.data.matching import check_prepared
    from stratarec.files import check_output
    from stratarec.models.base import build_tables
    from stratarec.planning.planner import make_plan
    from stratarec.planning.tiers import measure_tiers
    from stratarec.recipe import Recipe
    from stratarec.reporting.placement import print_plan, write_plan_report
    from stratarec.training.sharing import sharding_plan

    recipe = Recipe.load(args.recipe, args.overrides)
    for path in filter(None, (args.output, args.report)):
        check_output(Path(path))
    dataset = Dataset.open(recipe.data.path, verify="used")
    check_prepared(recipe.data, dataset)
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    tiers = measure_tiers(recipe.memory, again=args.measure)
    config = recipe.train
    with dataset.held():
        memory = recipe.memory.times(args.ranks)
        made = make_plan(tables, dataset, config.embedding, memory, batch_size=config.batch_size, tiers=tiers)
        sharding = sharding_plan(recipe, dataset, tables, made, args.ranks)
    if args.json:
        shared = {"sharding": sharding.to_dict()} if args.ranks > 1 else {}
        print(json.dumps({**made.to_dict(), **shared}, indent=1, allow_nan=False))
    else:
        print_plan(made.to_dict(), tiers.age_seconds)
        print("\n".join(sharding.lines() if args.ranks > 1 else ()), end="\n" if args.ranks > 1 else "")
    if args.output:
        made.save(Path(args.output))
    if args.report:
        write_plan_report(Path(args.report), recipe.name, made.to_dict())


def profile(args: argparse.Namespace) -> None:
    """How values repeat, as a table and an HTML report."""
    from stratarec.data.dataset import Dataset
    from stratarec.files import check_output
    from stratarec.profiling.duplication import profile as run
    from stratarec.reporting.duplication import print_profile, write_profile

    dataset = Dataset.open(args.dataset, verify="used")
    beside = dataset.path.resolve()
    output = Path(args.output or beside.with_name(f"{beside.name}-profile.html"))
    check_output(output)
    with dataset.held():
        found = run(dataset, args.split, batch_size=args.batch_size, batches=args.batches)
    print_profile(found)
    write_profile(output, found)
    _say(f"report {output}")


def train(args: argparse.Namespace) -> None:
    """Train a model, test it once, write a report."""
    from stratarec.data.dataset import Dataset
    from stratarec.distributed.mesh import joined, restarted
    from stratarec.planning.plan import Plan
    from stratarec.recipe import Recipe
    from stratarec.reporting.progress import make_progress
    from stratarec.training.keeping import SETTLED
    from stratarec.training.trainer import Trainer

    recipe = Recipe.load(args.recipe, args.overrides)
    with joined(recipe.distributed) as mesh:
        dataset = mesh.first_then_others(lambda: Dataset.open(recipe.data.path))
        made = Plan.load(Path(args.plan)) if args.plan else None
        trainer = Trainer(recipe, dataset, make_progress(quiet=args.quiet), plan=made, mesh=mesh)
        # A run that torchrun starts again goes on by itself, from its own checkpoints, not those it was to overwrite.
        settled = mesh.noted(SETTLED)
        result = trainer.train(
            resume=settled or args.resume or (restarted() and not args.overwrite),
            overwrite=args.overwrite and not settled,
        )
    if mesh.is_first:
        _print_result(trainer.run, result)


def _print_result(run: Path, result: dict[str, object]) -> None:
    from stratarec.reporting.metrics import lines
    from stratarec.sizes import readable

    if "test" in result:
        print("\n".join(lines("test", result["test"])))  # type: ignore[arg-type]
    print(f"speed            {result['samples_per_second']:,.0f} samples/s")
    tables, network, outputs = (readable(result[f"{part}_bytes"]) for part in ("table", "network", "output"))  # type: ignore[arg-type]
    print(f"tables and state {tables}, network {network}, looked up and its gradient {outputs}")
    print(f"peak memory      {readable(result['peak_rss_bytes'])}")  # type: ignore[arg-type]
    for rank, found in enumerate(result.get("ranks", ())):  # type: ignore[arg-type, var-annotated]
        share = found["exposed_seconds"] / max(found["step_seconds"], 1e-9)
        print(
            f"rank {rank:<12}{readable(found['table_bytes'])} of tables, {readable(found['sent_bytes'])} sent, "
            f"{share:.0%} of its steps waiting for others"
        )
    if result["memory"]:
        from stratarec.reporting.placement import print_comparison

        print_comparison(result["memory"])  # type: ignore[arg-type]
    _say(f"model            {run / 'checkpoints' / str(result['checkpoint'])}")
    _say(f"report           {run / 'report.html'}")
    _say(f"TensorBoard      {run / 'tensorboard'}")


def evaluate(args: argparse.Namespace) -> None:
    """Metrics of a trained model."""
    from stratarec.distributed.mesh import joined
    from stratarec.reporting.metrics import lines, sliced
    from stratarec.reporting.progress import make_progress
    from stratarec.training.evaluation import evaluate_split
    from stratarec.training.fresh import FreshLogs
    from stratarec.training.run import open_run
    from stratarec.training.slices import evaluate_logs

    data, logs = _data_or_logs(args, by=args.by)
    with joined() as mesh, open_run(args.run, data, mesh=mesh) as trained:
        progress = make_progress(quiet=args.quiet or not mesh.is_first)
        if logs:
            _refuse_ranks(mesh.ranks)
            fresh = FreshLogs(trained, logs, keep=args.by, earlier=args.history, labelled=True)
            whole, slices = evaluate_logs(fresh, progress)
            print("\n".join(lines("log", whole.to_dict())))
            for name, found in slices.items():
                print("\n".join(sliced(name, [(value, each.to_dict()) for value, each in found])))
            return
        for split in args.split or ["test"]:
            precision = trained.recipe.train.precision
            found_split, _, _ = evaluate_split(
                trained.model, trained.dataset, split, precision=precision, progress=progress, mesh=mesh
            )
            if mesh.is_first:
                print("\n".join(lines(split, found_split.to_dict())))


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
        _say(f"exported {run(trained, output, program=args.program)}")


def check(args: argparse.Namespace) -> None:
    """Everything that can be checked of what StrataRec wrote."""
    from stratarec.checking import check as run

    for line in run(Path(args.path)):
        _say(line)
    _say(f"{args.path} is whole")


def _ranks(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes from 1 to {_MOST_RANKS}")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is in --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"stratarec: {visible(_short(message))}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="stratarec",
        description="Train recommendation models whose embedding tables outgrow fast memory.",
        epilog="start with your own log:\n  stratarec init LOG\nor with a made-up one:\n  stratarec init --recipe demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stratarec {version('stratarec')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: object, text: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=textwrap.fill(text, _WIDTH),
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(command=run)
        command.add_argument("-q", "--quiet", action="store_true", help="no progress")
        return command

    def add_recipe(command: argparse.ArgumentParser) -> None:
        command.add_argument("recipe", help="YAML recipe; `stratarec init` writes one")
        command.add_argument(
            "overrides", nargs="*", default=[], metavar="FIELD=VALUE", help="change a field of the recipe"
        )

    command = add(
        "init",
        init,
        "Write a recipe to start from: look at a log (CSV, TSV, JSON lines, Parquet) and guess what its columns are, "
        "or copy a recipe that comes with StrataRec.",
        "stratarec init clicks.csv.gz && stratarec prepare clicks.yaml",
    )
    command.add_argument("log", nargs="*", help="files, globs or URLs of one log")
    command.add_argument("--label", default="", metavar="COLUMN", help="the label: 0 and 1, or numbers to compare")
    command.add_argument("--recipe", metavar="NAME", help="copy this one: avazu, criteo, demo, globo or trivago")
    command.add_argument("-o", "--output", help="YAML file (default: named like the log, here)")

    command = add(
        "prepare",
        prepare,
        "Turn raw logs into a prepared data set. Resumes where an interrupted call stopped.",
        "stratarec prepare criteo.yaml 'data.source.paths=[day_*.gz]'",
    )
    add_recipe(command)
    command.add_argument("--overwrite", action="store_true", help="replace a data set made from other logs or settings")

    command = add(
        "plan",
        plan,
        "Print where each table would live, at which precision, with how much cache: bytes and predicted speed.",
        "stratarec plan criteo.yaml memory.dram=1GiB -o plan.json",
    )
    add_recipe(command)
    command.add_argument(
        "--ranks", type=_ranks, default=1, metavar="N", help="for N processes, each with the budgets of the recipe"
    )
    command.add_argument("--measure", action="store_true", help="measure the memories again, not from the cache")
    command.add_argument("--json", action="store_true", help="print the plan as JSON instead of tables")
    command.add_argument("-o", "--output", help="also write the plan as JSON to this file")
    command.add_argument("--report", help="also write tables and a picture as HTML to this file")

    command = add(
        "profile",
        profile,
        "Measure how values repeat inside sessions and batches, and what deduplication saves.",
        "stratarec profile data/globo --batch-size 4096",
    )
    command.add_argument("dataset", help="prepared data set")
    command.add_argument("--split", choices=_SPLITS, default="train", help="split to measure (default: train)")
    command.add_argument("--batch-size", type=int, default=4096, help="samples a batch (default: 4096)")
    command.add_argument("--batches", type=int, default=20, help="batches to look at (default: 20)")
    command.add_argument("-o", "--output", help="HTML report (default: beside the data set)")

    command = add(
        "train",
        train,
        "Train a model on a prepared data set, test it once, write checkpoints and a report.",
        "stratarec train demo.yaml train.batch_size=4096 --resume",
    )
    add_recipe(command)
    either = command.add_mutually_exclusive_group()
    either.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    either.add_argument("--overwrite", action="store_true", help="remove the run and start anew")
    command.add_argument("--plan", help="place tables as this file says, which `plan -o` wrote")

    def add_data(command: argparse.ArgumentParser) -> None:
        command.add_argument("run", help="directory that `train` wrote")
        command.add_argument(
            "data",
            nargs="*",
            help="raw logs, read as the run's recipe says; or a prepared data set with the same vocabularies (default: "
            "the run's own)",
        )
        command.add_argument(
            "--history",
            action="append",
            default=[],
            metavar="FILE",
            help="earlier log with labels, for what users did before (repeatable)",
        )

    command = add(
        "evaluate",
        evaluate,
        "Print metrics of a trained model on raw logs with labels, or on splits of a prepared data set.",
        "stratarec evaluate runs/demo tomorrow.csv --by country",
    )
    add_data(command)
    command.add_argument(
        "--by", action="append", default=[], metavar="COLUMN", help="metrics of each value of this column (repeatable)"
    )
    command.add_argument(
        "--split", choices=_SPLITS, action="append", default=[], help="split to evaluate (repeatable; default: test)"
    )

    command = add(
        "predict",
        predict,
        "Score raw logs, in their order and without labels, or a split of a prepared data set.",
        "stratarec predict runs/demo tomorrow.csv --keep user -o scores.csv",
    )
    add_data(command)
    command.add_argument(
        "--keep", action="append", default=[], metavar="COLUMN", help="pass this column through (repeatable)"
    )
    command.add_argument("--split", choices=_SPLITS, help="split to score (default: test)")
    command.add_argument("-o", "--output", help="Parquet file, or CSV for raw logs (default: in the run)")

    command = add(
        "check",
        check,
        "Read all of a data set, run, export or plan and check it: hashes, checksums, types, ranges.",
        "stratarec check runs/demo",
    )
    command.add_argument("path", help="what StrataRec wrote")

    command = add(
        "export",
        export,
        "Write a model as data for use elsewhere: configuration, weights, tables, vocabularies. See stratarec.Scorer.",
        "stratarec export runs/demo -o out",
    )
    command.add_argument("run", help="directory that `train` wrote")
    command.add_argument("-o", "--output", help="directory (default: export in the run)")
    command.add_argument(
        "--program",
        action="store_true",
        help="also write program.pt2, which torch opens without StrataRec; opening one runs whatever its writer put in",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code, format_warning = 0, warnings.formatwarning
    warnings.formatwarning = _warning
    try:
        code = _run(arguments)
    finally:
        warnings.formatwarning = format_warning
        code = code or _flush()
    return code


def _run(arguments: Sequence[str] | None) -> int:
    args = _parse(arguments)
    try:
        _check_alone(args.command)
        args.command(args)
    except StrataError as error:
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        going_on = "; the same command goes on where it stopped" if args.command is prepare else ""
        return _complain(f"interrupted{going_on}", 130)
    except Interrupted as error:
        return _complain(str(error), 130)
    except BrokenPipeError:
        return _CLOSED_PIPE
    except Exception as error:
        refusal = _refusal(error)
        return _complain(refusal, 2) if refusal else _complain(_report(error), _DEFECT)
    return 0


def _check_alone(command: Callable[[argparse.Namespace], None]) -> None:
    """Refuse what several processes would do at once, each all of it."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and command not in (train, evaluate, predict):
        raise ConfigError(f"`{command.__name__}` is work of one process: start it without torchrun")


def _refusal(error: Exception) -> str:
    """What the machine ran out of or refuses, if that is what the error says; it comes in several forms."""
    number = error.errno if isinstance(error, OSError) else 0
    said = _short(str(error))
    if number == errno.ENOMEM or isinstance(error, MemoryError) or "can't allocate memory" in said:
        advice = "use smaller batches or tables, or let `stratarec plan` place them within memory.dram"
        return f"out of memory ({said}); {advice}"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        return f"cannot write: {said}"
    if number in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EIO):
        return f"cannot use a path: {said}"
    return ""


def _flush() -> int:
    """Write what is still to be written, where an error can be told; quiet where a reader has gone, as `head` does."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Else the interpreter tries once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return _CLOSED_PIPE
        return _complain(f"cannot write: {error}", 2)
    return 0


def _complain(message: str, code: int) -> int:
    print(f"stratarec: {visible(' '.join(message.split()))}", file=sys.stderr)
    return code


def _say(line: str) -> None:
    """Print a line that has a name or path in it."""
    print(visible(line))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _warning(message: Warning | str, category: type[Warning], *place: object, **more: object) -> str:
    return f"stratarec: {category.__name__}: {visible(' '.join(str(message).split()))}\n"


def _report(error: Exception) -> str:
    """What went wrong in a line, once the whole of it is in a file of its own."""
    trace = "".join(traceback.format_exception(error))
    about = f"stratarec {version('stratarec')}, Python {platform.python_version()}, {platform.platform()}"
    said = f"unexpected {type(error).__name__}: {_short(str(error))}"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="stratarec-error-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"{about}\n{sys.argv}\n\n{trace}")
    except OSError:
        print(trace, file=sys.stderr)
        return f"{said}; this is a defect of StrataRec: please report it with the traceback above"
    return f"{said}; this is a defect of StrataRec: please report it with the traceback in {file.name}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, with overrides allowed behind options."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(args, "overrides") or any(item.startswith("-") or "=" not in item for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


if __name__ == "__main__":
    sys.exit(main())
