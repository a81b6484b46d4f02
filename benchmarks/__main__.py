"""``python -m benchmarks run NAME [--quick] [--out FILE]``, ``show NAME`` or ``show FILE``, and
``readme``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def give_everyone_good_memory() -> None:
    """Configure the memory allocator of torch: use huge pages and keep freed blocks.

    Tables and outputs of this library use recycled huge pages anyway. Without these two settings,
    which every user can make, the peers would pay page faults for each large output.
    """
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run one benchmark and write its result file")
    run.add_argument("name", help="name in benchmarks/registry.py")
    run.add_argument(
        "--quick",
        action="store_true",
        help="run a small version that takes about a minute; its figures are never published",
    )
    run.add_argument("--out", type=Path, help="result file (default: benchmarks/results/NAME.json)")
    run.add_argument("--data", type=Path, help="use this log or data set (clicks, hot_single)")
    run.add_argument("--rows", type=int, help="limit the rows of a table to save memory (hot_single only)")
    run.add_argument("--minutes", type=float, help="stop training on real data after this many minutes")
    run.add_argument(
        "--models", type=lambda text: text.split(","), help="train only these models, separated by commas"
    )
    run.add_argument(
        "--logs",
        type=lambda text: text.split(","),
        help="train only on these logs, separated by commas (tower_quality only)",
    )
    run.add_argument("--seeds", type=int, help="train each model with this many seeds")
    run.add_argument("--threads", type=int, help="train with this many threads (default: 1)")
    run.add_argument(
        "--precision",
        choices=("float32", "bf16"),
        help="train the network in this precision (quality only)",
    )
    run.add_argument(
        "--samples",
        type=_numbers,
        help="use logs of these sizes, separated by commas (sizes), or train on this many samples (globo)",
    )
    run.add_argument(
        "--peer-seeds",
        type=int,
        help="train FuxiCTR with this many seeds, if it is installed (quality only; default: 1)",
    )
    run.add_argument(
        "--parts", type=lambda text: text.split(","), help="measure only these parts (cores only)"
    )
    show = commands.add_parser("show", help="print a result file")
    show.add_argument("result", help="name of a benchmark, or a result file")
    commands.add_parser("readme", help="rewrite the figures in README.md and docs from the result files")
    args = parser.parse_args()
    from stratarec.errors import StrataError

    try:
        {"run": _run, "show": _show, "readme": _readme}[args.command](args)
    except StrataError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _show(args: argparse.Namespace) -> None:
    from benchmarks import report

    named = RESULTS / f"{args.result}.json"
    report.print_result(report.read_result(named if named.is_file() else Path(args.result)))


def _readme(args: argparse.Namespace) -> None:
    from benchmarks import report

    root = Path(__file__).parents[1]
    docs = root / "docs"
    report.update_documents(root / "README.md", docs / "benchmarks.md", docs / "figures.svg", RESULTS)


def _run(args: argparse.Namespace) -> None:
    give_everyone_good_memory()
    from benchmarks import registry, report
    from stratarec.io.atomic import check_output

    out = args.out or RESULTS / (f"{args.name}-quick.json" if args.quick else f"{args.name}.json")
    check_output(out)
    names = (
        "data",
        "rows",
        "minutes",
        "models",
        "logs",
        "seeds",
        "threads",
        "precision",
        "peer_seeds",
        "samples",
        "parts",
    )
    values = {name: getattr(args, name) for name in names}
    options = {name: value for name, value in values.items() if value is not None}
    result = registry.run(args.name, quick=args.quick, options=options)
    report.write_result(out, result)
    report.print_result(result)
    print(f"written to {out}")


if __name__ == "__main__":
    sys.exit(main())
