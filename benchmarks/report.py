"""Result files, the table on the terminal, and the figures in the README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stratarec.files import write_json

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file."""
    write_json(path, result)


def print_result(result: dict[str, Any]) -> None:
    """Show the samples and the metrics."""
    rows = result.get("samples", {}).get("rows", [])
    console = Console()
    if rows:
        table = Table(title=result["benchmark"])
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)
    for name, value in result["metrics"].items():
        console.print(f"{name:32} {value:.5g}", highlight=False)


def update_readme(path: Path, results: Path) -> None:
    """Replace what stands between the markers by a table of the result files' metrics."""
    lines = ["| benchmark | metric | value |", "| --- | --- | ---: |"]
    for file in sorted(results.glob("*.json")):
        result = json.loads(file.read_text())
        if not result["quick"]:
            lines += [
                f"| {result['benchmark']} | `{name}` | {value:.4g} |" for name, value in result["metrics"].items()
            ]
    text = path.read_text()
    head, rest = text.split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}" + rest.split(END)[1])
