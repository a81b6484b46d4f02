"""Comparison of runs on the terminal, with a column for each run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stratarec.config.units import format_bytes
from stratarec.io.names import visible
from stratarec.models.metrics import METRICS
from stratarec.reporting.metric_texts import by_label, show
from stratarec.reporting.terminal_tables import make_console, print_table

Content = Mapping[str, Any]
"""Output of `RunComparison.to_dict`."""

# Maximum number of characters that are shown of a recipe's value, which may be a list of a hundred
# features.
_WIDEST = 24
_MARK = "*"


def print_comparison(content: Content) -> None:
    """Print a table of metrics, a table of the recipe fields that differ, and the meaning of the
    marks.
    """
    console = make_console()
    heads = ("", *_heads(content))
    print_table(console, heads, figures(content), text=("",))
    if content["differences"]:
        print_table(console, ("recipe", *heads[1:]), fields(content), text=("recipe",))
    for line in remarks(content):
        console.print(line)


def _heads(content: Content) -> list[str]:
    """Return the names of the runs, marked where their data differ."""
    return [f"{run['run']}{_MARK if run['other_data'] else ''}" for run in content["runs"]]


def figures(content: Content) -> list[tuple[str, ...]]:
    """Return a row for each metric or other result, with a column for each run."""
    runs = content["runs"]
    rows = []
    for split, results in (
        ("test", [_test(run) for run in runs]),
        ("validation", [run["validation"] for run in runs]),
    ):
        labels = [{} if one is None else dict(by_label(split, one)) for one in results]
        for name in dict.fromkeys(name for one in labels for name in one):
            rows += [
                (f"{name}: {metric.label}", *(show(one.get(name, {}).get(key), 5) for one in labels))
                for key, metric in METRICS.items()
                if metric.compared and any(one.get(name, {}).get(key) is not None for one in labels)
            ]
    return [*rows, *(tuple(row) for row in _costs(runs))]


def _test(run: Content) -> Mapping[str, Any] | None:
    return None if run["result"] is None else run["result"].get("test")


def _costs(runs: Sequence[Content]) -> Iterator[list[str]]:
    yield ["steps", *(f"{run['steps']:,}" for run in runs)]
    yield ["checkpoint", *(f"{run['checkpoint']:,}" for run in runs)]
    yield ["seconds in steps", *(f"{run['seconds']:,.1f}" for run in runs)]
    speeds = (run["samples_per_second"] for run in runs)
    yield ["samples/s", *(f"{speed:,.0f}" if speed else "-" for speed in speeds)]
    for name, key in (
        ("tables with state", "table_bytes"),
        ("network", "network_bytes"),
        ("peak memory", "peak_rss_bytes"),
    ):
        yield [name, *("-" if run["result"] is None else format_bytes(run["result"][key]) for run in runs)]


def fields(content: Content) -> list[tuple[str, ...]]:
    """Return a row for each field of the recipes that differs between runs."""
    return [(name, *map(_short, values)) for name, values in content["differences"].items()]


def _short(value: object) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def remarks(content: Content) -> list[str]:
    """Return remarks on the comparison, such as runs on different data."""
    first, *others = content["runs"]
    lines = []
    if any(run["other_data"] for run in others):
        lines.append(
            f"{_MARK} trained and tested on different data than {visible(first['run'])}: "
            "compare its metrics with care"
        )
    unfinished = [visible(run["run"]) for run in content["runs"] if run["result"] is None]
    if unfinished:
        lines.append(f"not finished, so without a test: {', '.join(unfinished)}")
    lines += [f"{visible(run['run'])}: {visible(note)}" for run in content["runs"] for note in run["notes"]]
    if not content["differences"]:
        lines.append("the recipes are the same")
    return lines
