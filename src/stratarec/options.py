"""The command line's options, and their help."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from stratarec import commands
from stratarec.naming import visible

_SPLITS = ("train", "valid", "test")
_WIDTH = 78
# Characters of a message that are repeated.
_LONGEST = 200
_MOST_RANKS = 4096
_MOST_TRIALS = 100_000


def _ranks(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes from 1 to {_MOST_RANKS}")
    return int(text)


def _trials(text: str) -> int:
    """A number of trials."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_TRIALS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of trials from 1 to {_MOST_TRIALS}")
    return int(text)


def _cluster(text: str) -> tuple[int, int]:
    """Hosts, and processes of each."""
    found = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,2})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no cluster, expected hosts x processes of each, such as 8x8")
    return int(found[1]), int(found[2])


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is in --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"stratarec: {visible(shortened(message))}; see {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="stratarec",
        description="Train recommendation models whose embedding tables outgrow fast memory.",
        epilog="start with your own log:\n  stratarec init LOG\nor with a made-up one:\n  stratarec init --recipe demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stratarec {version('stratarec')}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: object, text: str, example: str) -> argparse.ArgumentParser:
        command = subcommands.add_parser(
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

    def add_towers(group: argparse._ArgumentGroup) -> None:
        group.add_argument("--towers", type=int, metavar="N", help="deal the sparse features to N towers")
        group.add_argument(
            "--method",
            choices=("coherent", "diverse", "random", "round_robin"),
            help="what shares a tower: features that interact strongly (default), or weakly; or to compare with",
        )
        group.add_argument(
            "--interaction",
            choices=("mixed", "cosine"),
            help="of two features: mixed differences of the logit (default), or the cosine of their vectors",
        )
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
        group.add_argument("--write", action="store_true", help="write the towers into the recipe; comments stay")

    def add_cluster(group: argparse._ArgumentGroup) -> None:
        group.add_argument("--hosts", type=_cluster, metavar="TxL", help="predict T hosts of L processes, such as 8x8")
        group.add_argument("--network", metavar="RATE", help="of each host to the others: 100Mbit, 1Gbit, 200Gbit")
        group.add_argument(
            "--inside", metavar="RATE", help="of a process to others of its host (default: by this machine's memory)"
        )

    command = add(
        "init",
        commands.init,
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
        commands.prepare,
        "Turn raw logs into a prepared data set. Resumes where an interrupted call stopped.",
        "stratarec prepare criteo.yaml 'data.source.paths=[day_*.gz]'",
    )
    add_recipe(command)
    command.add_argument("--overwrite", action="store_true", help="replace a data set made from other logs or settings")
    command.add_argument(
        "--ray",
        metavar="CLUSTER",
        help="work on a Ray cluster whose machines share the paths of logs and data set: auto for the one that this "
        "machine is of, HOST:PORT, or local[:N] for N processes of this machine (needs stratarec[ray])",
    )

    command = add(
        "plan",
        commands.plan,
        "Print where each table would live, at which precision, with how much cache: bytes and predicted speed.",
        "stratarec plan criteo.yaml memory.dram=1GiB -o plan.json",
    )
    add_recipe(command)
    command.add_argument(
        "--ranks",
        type=_ranks,
        metavar="N",
        help="for N processes, each with the budgets of the recipe; default: this one, or those of torchrun",
    )
    command.add_argument("--measure", action="store_true", help="measure the memories again, not from the cache")
    command.add_argument("--json", action="store_true", help="print the plan as JSON instead of tables")
    command.add_argument("-o", "--output", help="also write the plan as JSON to this file")
    command.add_argument("--report", help="also write tables and a picture as HTML to this file")
    add_towers(command.add_argument_group("towers of features (model.towers.plan), instead of the tables"))
    add_cluster(command.add_argument_group("steps on a cluster by each exchange, instead of the tables"))

    command = add(
        "profile",
        commands.profile,
        "Measure how values repeat inside sessions and batches, and what deduplication saves; and which rows are hot.",
        "stratarec profile data/globo --batch-size 4096 --hot 64MiB",
    )
    command.add_argument("dataset", help="prepared data set")
    command.add_argument("--split", choices=_SPLITS, default="train", help="split to measure (default: train)")
    command.add_argument("--batch-size", type=int, default=4096, help="samples a batch (default: 4096)")
    command.add_argument("--batches", type=int, default=20, help="batches to look at (default: 20)")
    command.add_argument("-o", "--output", help="HTML report (default: beside the data set)")
    hot = command.add_argument_group("hot rows: which rows fill a budget best, and how many inputs need no others")
    hot.add_argument(
        "--hot",
        metavar="BYTES",
        help="for weights and optimizer state of hot rows, such as 64MiB; written as .hot.json",
    )
    hot.add_argument("--dim", type=int, default=16, metavar="D", help="floats of a row (default: 16)")
    hot.add_argument(
        "--optimizer", default="rowwise_adagrad", metavar="KIND", help="of rows (default: rowwise_adagrad)"
    )
    hot.add_argument(
        "--classify", action="store_true", help="count the hot inputs of every split, not only of a sample"
    )

    command = add(
        "train",
        commands.train,
        "Train a model on a prepared data set, test it once, write checkpoints and a report.",
        "stratarec train demo.yaml train.batch_size=4096 --resume",
    )
    add_recipe(command)
    either = command.add_mutually_exclusive_group()
    either.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    either.add_argument("--overwrite", action="store_true", help="remove the run and start anew")
    command.add_argument(
        "--from",
        dest="earlier",
        metavar="RUN",
        help="begin with weights and optimizer state of this run, whose data set is the data.vocabulary.base of this "
        "one; with --resume only where there is no checkpoint to go on from",
    )
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
        commands.evaluate,
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
        commands.predict,
        "Score raw logs, in their order and without labels, or a split of a prepared data set, each label by itself.",
        "stratarec predict runs/demo tomorrow.csv --keep user -o scores.csv",
    )
    add_data(command)
    command.add_argument(
        "--keep", action="append", default=[], metavar="COLUMN", help="pass this column through (repeatable)"
    )
    command.add_argument("--split", choices=_SPLITS, help="split to score (default: test)")
    command.add_argument("-o", "--output", help="Parquet file, or CSV for raw logs (default: in the run)")

    command = add(
        "tune",
        commands.tune,
        "Search values of a recipe's fields by validation alone (needs stratarec[tune]): each trial is a training that "
        "is not tested. What was stopped goes on by the same command.",
        "stratarec tune r.yaml --space 'train.dense.learning_rate=log(1e-4, 1e-2)'",
    )
    add_recipe(command)
    command.add_argument(
        "--space",
        nargs="+",
        action="extend",
        required=True,
        metavar="FIELD=VALUES",
        help="what is searched: uniform(low,high), log(low,high) or choice(a,b,...); or a YAML file of such lines",
    )
    command.add_argument(
        "--trials", type=_trials, default=20, metavar="N", help="in all, earlier ones too (default: 20)"
    )
    command.add_argument("-o", "--output", metavar="DIR", help="of the study (default: studies/<name of the recipe>)")

    command = add(
        "compare",
        commands.compare,
        "Show runs side by side: metrics, steps, time, bytes, and the fields in which their recipes differ.",
        "stratarec compare runs/small runs/large -o runs.html",
    )
    command.add_argument("runs", nargs="+", metavar="run", help="directories that `train` wrote")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("-o", "--output", metavar="FILE", help="also write an HTML page with the curves")

    command = add(
        "check",
        commands.check,
        "Read all of a data set, run, export or plan and check it: hashes, checksums, types, ranges.",
        "stratarec check runs/demo",
    )
    command.add_argument("path", help="what StrataRec wrote")

    command = add(
        "export",
        commands.export,
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
    command.add_argument(
        "--onnx", action="store_true", help="also write network.onnx, the network as ONNX (needs stratarec[onnx])"
    )
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, with overrides allowed behind options."""
    parser = make_parser()
    args, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(args, "overrides") or any(item.startswith("-") or "=" not in item for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def shortened(text: str) -> str:
    """A message of bounded length."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
