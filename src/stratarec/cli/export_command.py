"""`stratarec export`: a trained model as data for use elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import RUN_HELP, Subcommand, output_of, say


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help=RUN_HELP)
    command.add_argument("-o", "--output", help="directory (default: export in the run)")
    command.add_argument(
        "--since",
        metavar="EXPORT",
        help="also write what changed since that export, as OUTPUT.delta, for Scorer.update",
    )
    command.add_argument(
        "--program",
        action="store_true",
        help="also write program.pt2, which torch opens without StrataRec; opening one runs whatever its writer put in",
    )
    command.add_argument(
        "--onnx", action="store_true", help="also write network.onnx, the network as ONNX (needs stratarec[onnx])"
    )


def export(args: argparse.Namespace) -> None:
    """A trained model for use elsewhere."""
    from stratarec.serving.export_manifest import MANIFEST, ExportManifest
    from stratarec.serving.exported_model import ExportedModel
    from stratarec.training.export.export import check_new
    from stratarec.training.export.export import export as run
    from stratarec.training.export.write_delta import write_delta
    from stratarec.training.run.open_run import open_run

    output = output_of(args, "export")
    # A process that was killed between its two outputs left the first one.
    repeated = bool(args.since and output.name) and (output / MANIFEST).is_file()
    if not repeated:
        check_new(output)
    delta = output.with_name(f"{output.name}.delta")
    if args.since:
        check_new(delta)
        ExportManifest.read(Path(args.since))
    with open_run(args.run, same_samples=False) as trained:
        run(trained, output, program=args.program, onnx=args.onnx, repeated=repeated)
        say(f"exported {output}, {trained.description}")
    if args.since:
        share = write_delta(ExportedModel.open(Path(args.since)), output, delta)
        more = f"no delta: more than a quarter of the rows differ from {args.since}, use {output} itself"
        say(more if share is None else f"delta    {delta}, {share:.1%} of the rows, over {args.since}")


COMMAND = Subcommand(
    name="export",
    text="Write a model as data for use elsewhere: configuration, weights, tables, vocabularies. See stratarec.Scorer.",
    example="stratarec export runs/demo -o out",
    options=_options,
    run=export,
)
