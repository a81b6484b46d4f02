"""``python -m benchmarks run NAME [--quick] [--out FILE]``, ``show NAME`` or ``show FILE``, and ``readme``."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def give_everyone_good_memory() -> None:
    """Let torch's allocator use huge pages and keep freed blocks, which helps the peers more than us.

    Our own tables and outputs are on recycled huge pages anyway; without this the peers would pay page faults for
    every large output, which a user could avoid by the same two settings.
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
    run.add_argument("--quick", action="store_true", help="a minute's look; the file says so and is never quoted")
    run.add_argument("--out", type=Path, help="result file (default: benchmarks/results/NAME.json)")
    run.add_argument("--data", type=Path, help="real data, for a benchmark that reads some (clicks): log or data set")
    run.add_argument("--rows", type=int, help="of hot_single: most rows of a table, where memory is small")
    run.add_argument("--minutes", type=float, help="end the training of a benchmark on real data after so long")
    run.add_argument(
        "--models", type=lambda text: text.split(","), help="of quality and tower_quality: models to train, by comma"
    )
    run.add_argument("--logs", type=lambda text: text.split(","), help="of tower_quality: logs to train on, by comma")
    run.add_argument("--seeds", type=int, help="of quality, sizes, globo, tower_quality: seeds of each model")
    run.add_argument("--threads", type=int, help="of quality, sizes and globo: threads of training, by default 1")
    run.add_argument("--precision", choices=("float32", "bf16"), help="of quality: of the network")
    run.add_argument("--samples", type=_numbers, help="of sizes: rows of the logs, by comma; of globo: to train on")
    run.add_argument("--peer-seeds", type=int, help="of quality: seeds of FuxiCTR, where it is installed; 1 by default")
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
    names = ("data", "rows", "minutes", "models", "logs", "seeds", "threads", "precision", "peer_seeds", "samples")
    given = {name: getattr(args, name) for name in names}
    options = {name: value for name, value in given.items() if value is not None}
    result = registry.run(args.name, quick=args.quick, options=options)
    report.write_result(out, result)
    report.print_result(result)
    print(f"written to {out}")


if __name__ == "__main__":
    sys.exit(main())
