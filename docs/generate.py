"""Write the reference pages from the code: recipe fields, the command line, metrics, public names
and figures.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

import stratarec
from stratarec.cli.run_command import EXIT_CODES, make_parser
from stratarec.config.choices import OneOf, Sections
from stratarec.models.metrics import METRICS
from stratarec.recipe import Recipe


def write(folder: Path) -> None:
    """Write all pages to `folder`; files whose content is the same are left unchanged."""
    for name, text in (
        ("recipe", recipe()),
        ("command-line", commands()),
        ("metrics", metrics()),
        ("api", api()),
        ("figures", figures()),
    ):
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


# Recipe


def recipe() -> str:
    """Return a page with a section for each dataclass of a recipe, in the order of the fields."""
    lines = [
        "# Recipe fields",
        "",
        "A recipe is one YAML file. On the command line any field is set by its path, such as "
        "`train.batch_size=8192`. This page is generated from the dataclasses of the code.",
        "",
    ]
    for path, kind in _sections():
        lines += _section(path, kind)
    return "\n".join(lines)


def _sections() -> Iterator[tuple[str, type]]:
    """Yield each dataclass of a recipe with the path of the first field that has this type."""
    seen: set[type] = set()
    waiting: list[tuple[str, type]] = [("", Recipe)]
    while waiting:
        path, kind = waiting.pop(0)
        if kind in seen:
            continue
        seen.add(kind)
        yield path, kind
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = [
            (f"{path}.{each.name}".lstrip("."), hints[each.name]) for each in dataclasses.fields(kind)
        ]
        waiting = [(place, found) for place, hint in fields for found in _dataclasses(hint)] + waiting


def paths() -> set[str]:
    """Return the paths of all fields, such as ``train.batch_size``."""
    seen = [(path, each.name) for path, kind in _sections() for each in dataclasses.fields(kind)]
    found = {f"{path}.{name}".lstrip(".") for path, name in seen}
    # `_sections` yields a dataclass once, even if two fields have its type.
    return found | {f"train.{part}.{name}" for part in ("embedding", "dense") for _, name in seen}


DOCS = Path(__file__).parent
_RECIPES = "how-to/recipes.md"
EXPLANATIONS = {
    "Recipe": "tutorial.md#draft-a-recipe",
    "Recipe.train": "tutorial.md#train",
    "Recipe.memory": "how-to/larger-than-memory.md",
    "Recipe.model": "models.md",
    "Recipe.hot": "explanation/hot-batches.md",
    "Recipe.distributed": "how-to/several-hosts.md",
    "PrepareConfig": "tutorial.md#prepare",
    "PrepareConfig.on_bad_row": f"{_RECIPES}#the-file-is-not-a-plain-csv",
    "PrepareConfig.split": "how-to/reading-a-report.md#what-is-tested-and-what-is-used",
    "PrepareConfig.vocabulary": "explanation/ranked-ids.md",
    "PrepareConfig.shard_samples": "how-to/slow-or-wrong.md#it-runs-out-of-memory",
    "PrepareConfig.groups": "explanation/deduplication.md",
    "ClicksConfig": "how-to/click-logs.md",
    "ClicksConfig.contexts": f"{_RECIPES}#only-clicks-not-what-was-shown",
    "ClicksConfig.popularity_window": f"{_RECIPES}#only-clicks-not-what-was-shown",
    "CsvConfig": f"{_RECIPES}#the-file-is-not-a-plain-csv",
    "Schema": "tutorial.md#draft-a-recipe",
    "Schema.labels": f"{_RECIPES}#clicks-and-likes-at-once",
    "Schema.weight": f"{_RECIPES}#the-label-is-a-rating-or-a-word",
    "Schema.dense": f"{_RECIPES}#numbers-with-a-long-tail-prices-and-dates",
    "Schema.sparse": f"{_RECIPES}#lists-and-weighted-lists",
    "Schema.time": "how-to/dates.md",
    "Schema.time_format": "how-to/dates.md",
    "Schema.dates": "how-to/dates.md",
    "Schema.session": "explanation/deduplication.md",
    "LabelRule": f"{_RECIPES}#the-label-is-a-rating-or-a-word",
    "DenseFeature": f"{_RECIPES}#numbers-with-a-long-tail-prices-and-dates",
    "DenseFeature.group": "explanation/deduplication.md",
    "SparseFeature": f"{_RECIPES}#lists-and-weighted-lists",
    "SparseFeature.kind": "how-to/long-histories.md",
    "SparseFeature.of": "how-to/long-histories.md",
    "SparseFeature.within": "how-to/long-histories.md",
    "SparseFeature.group": "explanation/deduplication.md",
    "DateColumn": "how-to/dates.md",
    "ParquetConfig": "reference/formats.md#logs-read-by-init-prepare-predict-and-other-commands",
    "SyntheticConfig": f"{_RECIPES}#no-log-yet-to-try-or-to-measure",
    "SplitConfig": f"{_RECIPES}#the-model-must-hold-in-the-future",
    "SplitConfig.negatives": f"{_RECIPES}#one-click-in-a-thousand-rows",
    "VocabularyOverride": f"{_RECIPES}#a-hundred-million-values-in-one-column",
    "VocabularyConfig": f"{_RECIPES}#a-hundred-million-values-in-one-column",
    "VocabularyConfig.evict": "how-to/daily-training.md",
    "VocabularyConfig.half_life": "how-to/daily-training.md",
    "VocabularyConfig.base": "how-to/daily-training.md",
    "Eviction": "how-to/daily-training.md",
    "VectorsConfig": "models.md",
    "VectorsConfig.history": "how-to/long-histories.md",
    "VectorsConfig.heads": f"{_RECIPES}#clicks-and-likes-at-once",
    "VectorsConfig.towers": "explanation/towers.md",
    "VectorsConfig.dropout": "how-to/tuning.md",
    "VectorsConfig.embedding_dim": "how-to/tuning.md",
    "VectorsConfig.batch_norm": "how-to/tuning.md",
    "VectorsConfig.initial_rows": "how-to/own-model.md",
    "HistoryConfig": "how-to/long-histories.md",
    "HeadsConfig": f"{_RECIPES}#clicks-and-likes-at-once",
    "TowersConfig": "explanation/towers.md",
    "TowersConfig.plan": "how-to/slow-links.md",
    "TrainConfig": "tutorial.md#train",
    "TrainConfig.run": "reference/formats.md#a-run-written-by-train",
    "TrainConfig.batch_size": f"{_RECIPES}#large-batches-or-a-loss-that-jumps",
    "TrainConfig.epochs": "how-to/tuning.md",
    "TrainConfig.max_steps": "how-to/reading-a-report.md",
    "TrainConfig.precision": "how-to/gpu.md",
    "TrainConfig.device": "how-to/gpu.md",
    "TrainConfig.threads": "how-to/slow-or-wrong.md#it-is-slow",
    "TrainConfig.seed": "how-to/tuning.md",
    "TrainConfig.tree_seconds": "models.md",
    "TrainConfig.dense": "how-to/tuning.md",
    "TrainConfig.embedding": "how-to/tuning.md",
    "TrainConfig.clip_norm": "how-to/slow-or-wrong.md#it-is-no-better-than-chance",
    "TrainConfig.clip_rows": f"{_RECIPES}#large-batches-or-a-loss-that-jumps",
    "TrainConfig.eval_every": f"{_RECIPES}#it-overfits-after-one-epoch",
    "TrainConfig.early_stopping": f"{_RECIPES}#it-overfits-after-one-epoch",
    "TrainConfig.plateau": f"{_RECIPES}#it-overfits-after-one-epoch",
    "TrainConfig.average": f"{_RECIPES}#it-overfits-after-one-epoch",
    "TrainConfig.checkpoint": f"{_RECIPES}#the-machine-can-be-taken-away",
    "TrainConfig.mirror": "how-to/object-stores.md#the-mirror-of-a-run",
    "TrainConfig.log_every": f"{_RECIPES}#the-machine-can-be-taken-away",
    "TrainConfig.curves": "how-to/reading-a-report.md#over-time",
    "TrainConfig.trace": "how-to/slow-or-wrong.md#it-is-slow",
    "TrainConfig.report": "how-to/reading-a-report.md",
    "TrainConfig.shuffle_row_groups": "how-to/slow-or-wrong.md#it-runs-out-of-memory",
    "TrainConfig.portions": f"{_RECIPES}#several-hosts-with-slow-links",
    "TrainConfig.shuffle": "explanation/deduplication.md",
    "TrainConfig.loss": f"{_RECIPES}#a-loss-other-than-cross-entropy",
    "LossConfig": f"{_RECIPES}#a-loss-other-than-cross-entropy",
    "TrainConfig.loss_weights": f"{_RECIPES}#clicks-and-likes-at-once",
    "TrainConfig.class_weight": "how-to/reading-a-report.md#calibration",
    "TrainConfig.calibration": "how-to/reading-a-report.md#calibration",
    "TrainConfig.refit": "how-to/reading-a-report.md#what-is-tested-and-what-is-used",
    "TrainConfig.deduplicate": "explanation/deduplication.md",
    "DenseOptimizerConfig": "how-to/tuning.md",
    "DenseOptimizerConfig.weight_decay": f"{_RECIPES}#it-overfits-after-one-epoch",
    "DenseOptimizerConfig.schedule": f"{_RECIPES}#large-batches-or-a-loss-that-jumps",
    "ScheduleConfig": f"{_RECIPES}#large-batches-or-a-loss-that-jumps",
    "RowOptimizerConfig": "explanation/mixed-precision.md",
    "RowOptimizerConfig.learning_rate": "how-to/tuning.md",
    "RowOptimizerConfig.weight_decay": f"{_RECIPES}#it-overfits-after-one-epoch",
    "RowOptimizerConfig.decay": f"{_RECIPES}#it-overfits-after-one-epoch",
    "RowOptimizerConfig.schedule": f"{_RECIPES}#large-batches-or-a-loss-that-jumps",
    "EarlyStoppingConfig": f"{_RECIPES}#it-overfits-after-one-epoch",
    "EarlyStoppingConfig.metric": "reference/metrics.md",
    "PlateauConfig": f"{_RECIPES}#it-overfits-after-one-epoch",
    "PlateauConfig.metric": "reference/metrics.md",
    "AverageConfig": f"{_RECIPES}#it-overfits-after-one-epoch",
    "CheckpointConfig": f"{_RECIPES}#the-machine-can-be-taken-away",
    "MemoryConfig": "how-to/larger-than-memory.md",
    "MemoryConfig.hbm": "how-to/gpu.md",
    "MemoryConfig.precision": "how-to/larger-than-memory.md#which-precision",
    "MemoryConfig.rounding": "explanation/mixed-precision.md",
    "MemoryConfig.parameters": f"{_RECIPES}#tables-do-not-fit-into-memory",
    "MemoryConfig.state": "explanation/mixed-precision.md",
    "MemoryConfig.lookahead": "explanation/levels.md",
    "BlockConfig": "how-to/larger-than-memory.md#rows-on-an-ssd",
    "MappedConfig": "how-to/larger-than-memory.md",
    "CacheConfig": "how-to/larger-than-memory.md",
    "CacheConfig.policy": "explanation/ranked-ids.md",
    "HotConfig": "explanation/hot-batches.md",
    "DistributedConfig": "how-to/slow-links.md",
    "DistributedConfig.timeout": "how-to/several-hosts.md",
    "DistributedConfig.hosts": "how-to/several-hosts.md",
    "DistributedConfig.sharding": "how-to/several-hosts.md",
}
"""Page that explains a field or a dataclass: `Dataclass.field` or `Dataclass` -> page.

The entry of a dataclass is for its fields without an entry.
"""


def explanation(kind: type, field: str) -> tuple[str, str]:
    """Return the key in `EXPLANATIONS` for a field of the dataclass `kind`, and the page.

    Entries of fields have precedence over entries of dataclasses.
    """
    names = [base.__name__ for base in kind.__mro__]
    key = next(key for key in (*(f"{name}.{field}" for name in names), *names) if key in EXPLANATIONS)
    return key, EXPLANATIONS[key]


def _link(kind: type, field: str) -> str:
    """Return a link from the reference to the page that explains a field; its text is the title of
    the page.
    """
    _, target = explanation(kind, field)
    page = target.partition("#")[0]
    title = (
        "Metrics"
        if page == "reference/metrics.md"
        else (DOCS / page).read_text().splitlines()[0].lstrip("# ")
    )
    return f"[{title}](../{target})"


def _section(path: str, kind: type) -> Iterator[str]:
    hints, texts = typing.get_type_hints(kind, include_extras=True), _texts(kind)
    default_kind = next((f.default for f in dataclasses.fields(kind) if f.name == "kind"), None)
    name = path or "The recipe"
    yield f"## {name}" + (f", kind {default_kind}" if isinstance(default_kind, str) else "")
    yield ""
    yield (inspect.getdoc(kind) or "").replace("``", "`")
    yield ""
    for each in dataclasses.fields(kind):
        if each.name == "kind" and len(get_args(hints["kind"])) < 2:
            continue
        inner = [*_dataclasses(hints[each.name])]
        what = "a section" if inner else f"`{_type(hints[each.name])}`"
        yield f"`{each.name}`"
        parts = (
            f": {what}, {_default(each)}.",
            texts.get(each.name, ""),
            _abouts(hints[each.name]),
            f"See {_link(kind, each.name)}.",
        )
        yield " ".join(part for part in parts if part)
        yield ""


def _choices(hint: Any) -> OneOf | Sections | None:
    """What the hint says of the entries of a registry."""
    marks = hint.__metadata__ if get_origin(hint) is typing.Annotated else ()
    return next((mark for mark in marks if isinstance(mark, (OneOf, Sections))), None)


def _abouts(hint: Any) -> str:
    """What the entries of a registry say of themselves."""
    names = mark.names() if isinstance(mark := _choices(hint), OneOf) else ()
    abouts = names.items() if isinstance(names, dict) else ()
    texts = [f"`{name}`: {text}" for name, text in abouts if text and isinstance(text, str)]
    return f"{'; '.join(texts)}." if texts else ""


def _dataclasses(hint: Any) -> Iterator[type]:
    if isinstance(mark := _choices(hint), Sections):
        hint = mark.union
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _dataclasses(part)


def _type(hint: Any) -> str:
    if isinstance(mark := _choices(hint), OneOf):
        return " | ".join(mark.names())
    if get_origin(hint) is typing.Annotated:
        return _type(hint.__origin__)
    if get_origin(hint) is typing.Literal:
        return " | ".join(map(str, get_args(hint)))
    if hint is type(None):
        return "null"
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(map(_type, get_args(hint)))
    if get_args(hint):
        name = "mapping" if "apping" in str(get_origin(hint)) or get_origin(hint) is dict else "list"
        parts = [_type(part) for part in get_args(hint) if part is not Ellipsis]
        return f"{name} of {' to '.join(dict.fromkeys(parts))}"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true | false"}.get(
        getattr(hint, "__name__", ""), getattr(hint, "__name__", str(hint))
    )


def _default(each: dataclasses.Field[Any]) -> str:
    if each.default is not dataclasses.MISSING:
        value = (
            {None: "null", True: "true", False: "false", "": "empty", (): "none"}.get(
                each.default, each.default
            )
            if isinstance(each.default, (type(None), bool, str, tuple))
            else each.default
        )
        return f"by default `{value}`" if isinstance(value, (int, float, str)) else "with a default"
    return "required" if each.default_factory is dataclasses.MISSING else "with defaults"


def _texts(kind: type) -> dict[str, str]:
    """Return field -> the docstring below it, for the fields of a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = _body(base)
        for field, text in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(text.value.value).split()).replace("``", "`")
    return found


def _body(kind: type) -> list[ast.stmt]:
    found = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(found, ast.ClassDef)
    return found.body


# Command line


def commands() -> str:
    """Return a page with each subcommand and its options."""
    parser = make_parser()
    action = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    lines = [
        "# Command line",
        "",
        "`stratarec COMMAND --help` prints the same texts. The table lists the exit codes of all commands.",
        "",
        "| exit code | meaning |",
        "| ---: | --- |",
        *(f"| {code} | {text} |" for code, text in EXIT_CODES.items()),
        "",
        "## Completion",
        "",
        "With this line in `~/.bashrc` or `~/.zshrc`, Bash and zsh complete commands, options and files:",
        "",
        "```console",
        '$ eval "$(register-python-argcomplete stratarec)"',
        "```",
        "",
        "## Progress",
        "",
        "On a terminal, a bar shows the completed share of the work and the remaining time (ETA), which is "
        "computed "
        "from the pace of the last minute, without the time before the first unit was done. If the output "
        "is not a "
        "terminal, a line is printed every ten seconds. With `-q`, nothing is printed. With `--json`, "
        "standard output is the result as JSON, and standard error has one line of JSON for each event:",
        "",
        "```json",
        '{"event": "start", "time": 1780000000.0, "task": "train", "unit": "steps", '
        '"total": 4000, "done": 0}',
        '{"event": "progress", "time": 1780000021.0, "task": "train", "unit": "steps", "total": 4000, '
        '"done": 800, "seconds": 21.0, "eta_seconds": 80.1, "note": "loss 0.4612  41,200 samples/s"}',
        '{"event": "figures", "time": 1780000021.4, "step": 800, "values": {"train/loss": 0.4612}}',
        '{"event": "message", "time": 1780000110.2, "text": "step 4000: validation AUC '
        '0.78120, log loss 0.45310"}',
        '{"event": "end", "time": 1780000110.9, "task": "train", "unit": "steps", "total": 4000, "done": '
        '4000, "seconds": 110.9}',
        '{"event": "error", "time": 1780000111.0, "text": "cannot write: no space left", "exit_code": 2}',
        "```",
        "",
        "Later versions may add fields and events. `eta_seconds` is null while the remaining time is "
        "unknown. An `error` is the last event.",
        "",
    ]
    for name, command in action.choices.items():
        lines += [f"## {name}", "", " ".join((command.description or "").split()), ""]
        lines += ["```text", *command.format_usage().removeprefix("usage: ").splitlines(), "```", ""]
        for each in command._actions:
            if isinstance(each, argparse._HelpAction):
                continue
            shown = ", ".join(each.option_strings) or each.metavar or each.dest
            if each.option_strings and each.nargs != 0:
                shown += f" {each.metavar or each.dest.upper()}"
            shown = shown if isinstance(shown, str) else each.dest
            text = (
                (each.help or "").replace("%%", "%") % {**vars(each), "prog": command.prog}
                if each.help
                else ""
            )
            lines += [f"`{shown}`", f": {text}", ""]
        lines += ["```console", f"$ {(command.epilog or '').split(':', 1)[1].strip()}", "```", ""]
    return "\n".join(lines)


# Metrics


def metrics() -> str:
    """Return a page with the definition of each metric."""
    lines = [
        "# Metrics",
        "",
        "The table defines each metric. A metric that is undefined (samples of one class only, no users) "
        "is a dash in tables and null in JSON.",
        "",
        "| name in JSON and recipes | display name | better | definition |",
        "| --- | --- | --- | --- |",
    ]
    for name, metric in METRICS.items():
        lines.append(f"| `{name}` | {metric.label or '-'} | {metric.better or '-'} | {metric.about} |")
    lines += ["", "`train.early_stopping.metric` must be a metric for which higher or lower is better: "]
    lines[-1] += ", ".join(f"`{name}`" for name, metric in METRICS.items() if metric.better) + "."
    return "\n".join([*lines, ""])


# Public names


INTERNAL = {
    "Dataset": (
        "carried_counts", "clicks", "complete", "counted_ids", "events", "first_rows", "held_out_values", "inputs",
        "joined", "locked", "odd_split", "reader", "row_group", "row_numbers", "session_keys", "shards", "windows",
    ),
    "EmbeddingBagConfig": ("numbering",),
    "Loader": ("draws", "row_groups"),
    "Recipe": ("modules", "place", "scratch_prefix", "towers"),
    "RowOptimizerConfig": ("clocked", "rule", "state_shape"),
    "TieredEmbeddingBagCollection": ("extra_repr", "named"),
    "Trainer": ("build",),
}  # fmt: skip
"""Members of public classes that only other packages of StrataRec use. The reference leaves them
out.
"""
OTHER_BASES = ("Exception", "Module")
"""Base classes whose members the reference leaves out."""


def public_members(value: Any) -> dict[str, Any]:
    """Return the methods and properties of a public class that the reference lists, by name; none
    of a function.
    """
    members = {}
    for base in reversed(value.__mro__ if inspect.isclass(value) else ()):
        if base.__module__.startswith("stratarec") and base.__name__ not in OTHER_BASES:
            members.update(vars(base))
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    return {
        name: member
        for name, member in members.items()
        if isinstance(member, kinds)
        and not name.startswith("_")
        and inspect.getdoc(member)
        and name not in INTERNAL.get(value.__name__, ())
    }


def api() -> str:
    """Return a page with the docstrings of the public names."""
    lines = [
        "# Python",
        "",
        "All of these are names of `stratarec`. Everything else may change without notice.",
        "",
        "The examples use the files of the [tutorial](../tutorial.md): the log `clicks.csv`, the recipe "
        "`clicks.yaml`, "
        "the data set `data/clicks`, the run `runs/clicks` and the export `exported`. An example of a "
        "method continues the example of its class.",
        "",
    ]
    for name in stratarec.__all__:
        found = getattr(stratarec, name)
        kind = "autofunction" if inspect.isfunction(found) else "autoclass"
        lines += [f"## {name}", "", "```{eval-rst}", f".. {kind}:: {found.__module__}.{found.__qualname__}"]
        if kind == "autoclass":
            lines.append(f"   :inherited-members: {', '.join(OTHER_BASES)}")
        if name in INTERNAL:
            lines.append(f"   :exclude-members: {', '.join(INTERNAL[name])}")
        lines += ["```", ""]
    return "\n".join(lines)


# Benchmarks


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def figures() -> str:
    """Return a page with the ratios of each result file as bars; at 1, both programs are equal."""
    lines = [
        "# Figures as bars",
        "",
        "The bars are ratios from the result files in `benchmarks/results/`: a speed or size of StrataRec, "
        "divided by "
        "that of a peer or of StrataRec without the feature. A bar beyond the line at 1 is in favour of "
        "StrataRec. [Benchmarks](../benchmarks.md) explains each ratio, and has all other results.",
        "",
    ]
    for file in sorted(RESULTS.glob("*.json")):
        result = json.loads(file.read_text())
        ratios = {name: value for name, value in result["metrics"].items() if _is_ratio(name) and value > 0}
        if ratios and not result["quick"]:
            machine, versions = result["hardware"], result["versions"]
            peers = [f"{each} {versions[each]}" for each in ("torchrec", "lightgbm") if each in versions]
            lines += [
                f"## {file.stem}",
                "",
                f"{result['created'][:10]}, {machine['threads']} threads of {machine['processor']}; "
                f"torch {versions['torch']}, {', '.join(peers)}.",
                "",
                *_bars(ratios),
                "",
            ]
    return "\n".join(lines)


def _is_ratio(name: str) -> bool:
    return "ratio" in name or name.startswith(("speed_", "dedup_gain", "predicted_speed"))


def _bars(ratios: dict[str, float]) -> Iterator[str]:
    most = max(*ratios.values(), 1.2)
    yield '<div class="bars">'
    for name, value in ratios.items():
        kind = "for" if value >= 1 else "against"
        yield (
            f'<div><span>{name.replace("_", " ")}</span><span class="track" style="--one: '
            f'{100 / most:.1f}%">'
            f'<i class="{kind}" style="width: '
            f'{100 * value / most:.1f}%"></i></span><b>{value:.2f}</b></div>'
        )
    yield "</div>"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
