"""`stratarec train`: train a model, test it once, write checkpoints and a report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stratarec.cli.arguments import (
    add_json,
    add_recipe,
    print_findings,
    print_json,
    print_lines,
    progress_of,
    subcommand,
)


def _options(command: argparse.ArgumentParser) -> None:
    add_recipe(command)
    add_json(command)
    start = command.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
    start.add_argument("--overwrite", action="store_true", help="delete the existing run and start again")
    command.add_argument(
        "--from",
        dest="earlier",
        metavar="RUN",
        help="start from the weights and optimizer state of RUN (its data set must be this recipe's "
        "data.vocabulary.base); with --resume, used only if this run has no checkpoint yet",
    )
    command.add_argument("--plan", help="place the tables as in this plan, a file that `plan -o` wrote")


@subcommand(
    name="train",
    text="Train a model on a prepared data set, test it once, and write checkpoints and a report.",
    example="stratarec train demo.yaml train.batch_size=4096 --resume",
    options=_options,
    multi_process=True,
)
def train(args: argparse.Namespace) -> None:
    """Train a model, test it once, write a report."""
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.distributed.mesh import joined, restarted
    from stratarec.planning.plan import Plan
    from stratarec.recipe import Recipe, leaves, read_content
    from stratarec.reporting.metric_texts import verdict
    from stratarec.training.checkpoint import SETTLED
    from stratarec.training.run.mirror import RunMirror
    from stratarec.training.run.run_directory import RECIPE, read_recipe
    from stratarec.training.trainer import Trainer

    content = read_content(args.recipe, args.overrides)
    recipe = Recipe.from_dict(content, args.recipe)
    with joined(recipe.distributed, recipe.towers, {"recipe": recipe.to_dict()}) as mesh:
        dataset = mesh.first_then_others(lambda: Dataset.open(recipe.data.path))
        plan = Plan.load(Path(args.plan)) if args.plan else None
        progress = progress_of(args)
        if args.resume and recipe.train.mirror:  # before the recipe of the run is read
            mesh.first(
                lambda: RunMirror(recipe.train.mirror, Path(recipe.run), progress).claim(
                    resume=True, overwrite=False
                )
            )
        bases = [path for path in (recipe.run if args.resume else "", args.earlier or "") if path]
        base = next((path for path in map(Path, bases) if (path / RECIPE).is_file()), None)
        trainer = Trainer(
            recipe,
            dataset,
            progress,
            plan=plan,
            mesh=mesh,
            named=leaves(content),
            earlier=None if base is None else read_recipe(base),
        )
        # With its first checkpoint, a run leaves a note. If torchrun restarts the processes after
        # that, they resume from the run's own checkpoints, and do not overwrite the run again.
        settled = mesh.is_recorded(SETTLED)
        result = trainer.train(
            resume=settled or args.resume or (restarted() and not args.overwrite),
            overwrite=args.overwrite and not settled,
            earlier=args.earlier,
        )
    if not mesh.is_first:
        return
    section = trainer.recipe.to_dict()["train"]
    sentences = dataset.suspicions + verdict(
        trainer.state.evaluations, result, section, odd_split=bool(dataset.odd_split)
    )
    if args.json:
        print_json({"run": str(trainer.run), **result, "verdict": list(sentences)})
        return
    _print_result(trainer.run, result)
    print_findings("verdict", sentences)
    print_findings("baselines", result["baselines"])


def _print_result(run: Path, result: dict[str, Any]) -> None:
    from stratarec.config.units import format_bytes
    from stratarec.reporting.metric_texts import lines, speed_text
    from stratarec.training.run.run_directory import REFIT

    if "test" in result:
        print_lines(*lines("test", result["test"]))
    print_lines(f"speed            {speed_text(result['samples_per_second'])}")
    tables, network, activations = (
        format_bytes(result[f"{part}_bytes"]) for part in ("table", "network", "output")
    )
    print_lines(
        f"tables and state {tables}, network {network}, activations of the embedding layer {activations}",
        f"peak memory      {format_bytes(result['peak_rss_bytes'])}",
    )
    for rank, costs in enumerate(result.get("ranks", ())):
        exposed, hidden = costs["exposed_seconds"], costs["hidden_seconds"]
        print_lines(
            f"rank {rank:<12}{format_bytes(costs['table_bytes'])} of tables, "
            f"{format_bytes(costs['sent_bytes'])} sent, {exposed / max(costs['step_seconds'], 1e-9):.0%} "
            f"of its time waiting for the exchange, {hidden / max(exposed + hidden, 1e-9):.0%} "
            "of the exchange overlapped"
        )
    if result["memory"]:
        from stratarec.reporting.plan_page import print_comparison

        print_comparison(result["memory"])
    model = run / "checkpoints" / str(result["checkpoint"])
    if "refit" in result:
        print_lines(f"tested model     {model}")
        model = run / REFIT / "checkpoints" / str(result["refit"]["checkpoint"])
    print_lines(f"model            {model}")
    for title, name in (("report", "report.html"), ("TensorBoard", "tensorboard")):
        if (run / name).exists():
            print_lines(f"{title:17}{run / name}")
