"""`stratarec train`: train a model, test it once, write checkpoints and a report."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from stratarec.cli.arguments import Subcommand, add_json, add_recipe, progress_of, say, say_json


def _options(command: argparse.ArgumentParser) -> None:
    add_recipe(command)
    add_json(command)
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


def train(args: argparse.Namespace) -> None:
    """Train a model, test it once, write a report."""
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.distributed.mesh import joined, restarted
    from stratarec.planning.plan import Plan
    from stratarec.recipe import Recipe, read_content
    from stratarec.reporting.metric_texts import tested, verdict
    from stratarec.training.baseline.beside import beside
    from stratarec.training.checkpoint import SETTLED
    from stratarec.training.resolve import sized
    from stratarec.training.run.run_directory import RECIPE, read_recipe
    from stratarec.training.trainer import Trainer

    content = read_content(args.recipe, args.overrides)
    recipe = Recipe.from_dict(content, args.recipe)
    with joined(recipe.distributed, recipe.towers, {"recipe": recipe.to_dict()}, modules=recipe.modules) as mesh:
        dataset = mesh.first_then_others(lambda: Dataset.open(recipe.data.path))
        made = Plan.load(Path(args.plan)) if args.plan else None
        bases = [path for path in (recipe.run if args.resume else "", args.earlier or "") if path]
        base = next((path for path in map(Path, bases) if (path / RECIPE).is_file()), None)
        content, said = sized(content, dataset, None if base is None else read_recipe(base))
        recipe, progress = Recipe.from_dict(content, args.recipe), progress_of(args)
        trainer = Trainer(recipe, dataset, progress, plan=made, mesh=mesh, remark=said)
        # A run that torchrun starts again goes on by itself, from its own checkpoints, not those it was to overwrite.
        settled = mesh.is_recorded(SETTLED)
        result = trainer.train(
            resume=settled or args.resume or (restarted() and not args.overwrite),
            overwrite=args.overwrite and not settled,
            earlier=args.earlier,
        )
    if mesh.is_first:
        words = dataset.suspicions + verdict(trainer.state.evaluations, result, trainer.config.early_stopping.metric)
        if args.json:
            say_json({"run": str(trainer.run), **result, "verdict": list(words)})
            return
        _print_result(trainer.run, result)
        wrapped = [part for line in words for part in textwrap.wrap(line, 63)]
        say(*(f"{'' if number else 'verdict':17}{part}" for number, part in enumerate(wrapped)))
        split, figures = tested(trainer.state.evaluations, result)
        say(*beside(dataset, split, figures))


def _print_result(run: Path, result: dict[str, object]) -> None:
    from stratarec.config.units import readable
    from stratarec.reporting.metric_texts import lines

    if "test" in result:
        say(*lines("test", result["test"]))  # type: ignore[arg-type]
    if "uncalibrated" in result:
        for split, figures in result["uncalibrated"].items():  # type: ignore[attr-defined]
            say(*lines(f"{split}, before its correction", figures))
    say(f"speed            {result['samples_per_second']:,.0f} samples/s")
    tables, network, outputs = (readable(result[f"{part}_bytes"]) for part in ("table", "network", "output"))  # type: ignore[arg-type]
    say(f"tables and state {tables}, network {network}, vectors of a batch and their gradients {outputs}")
    say(f"peak memory      {readable(result['peak_rss_bytes'])}")  # type: ignore[arg-type]
    for rank, found in enumerate(result.get("ranks", ())):  # type: ignore[arg-type, var-annotated]
        exposed, hidden = found["exposed_seconds"], found["hidden_seconds"]
        say(
            f"rank {rank:<12}{readable(found['table_bytes'])} of tables, {readable(found['sent_bytes'])} sent, "
            f"{exposed / max(found['step_seconds'], 1e-9):.0%} of its time waiting, "
            f"{hidden / max(exposed + hidden, 1e-9):.0%} of the exchange hidden"
        )
    if result["memory"]:
        from stratarec.reporting.plan_page import print_comparison

        print_comparison(result["memory"])  # type: ignore[arg-type]
    say(f"model            {run / 'checkpoints' / str(result['checkpoint'])}")
    if (run / "report.html").exists():
        say(f"report           {run / 'report.html'}")
    if (run / "tensorboard").exists():
        say(f"TensorBoard      {run / 'tensorboard'}")


COMMAND = Subcommand(
    name="train",
    text="Train a model on a prepared data set, test it once, write checkpoints and a report.",
    example="stratarec train demo.yaml train.batch_size=4096 --resume",
    options=_options,
    run=train,
    by_ranks=True,
)
