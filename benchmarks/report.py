"""Result files, the table on the terminal, and the figures in the README and docs/benchmarks.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster_cells import speed_errors
from benchmarks.growth import panels_of
from benchmarks.picture import write_curves, write_picture
from benchmarks.registry import BENCHMARKS
from benchmarks.sources import source_hash
from stratarec.errors import DatasetError
from stratarec.io.atomic import read_json, write_json
from stratarec.reporting.terminal_tables import make_console, print_table

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
MATTER = (
    ("Embedding lookups and updates in 30 random shapes, speed over FBGEMM's (median, {processor})",
     "embedding", "ratio_fbgemm_random_median", "{:.2f}"),
    ("Training of a DLRM in float32, speed over TorchRec's",
     "train", "ratio_torchrec_float32", "{:.2f}"),
    ("Models of `init` on 40 public logs, mean rank by AUC among five methods (1 is best)",
     "small_logs", "mean_rank_stratarec", "{:.2f}"),
    ("... of CatBoost",
     "small_logs", "mean_rank_catboost", "{:.2f}"),
    ("AUC on the last day of a news portal's log",
     "clicks", "auc_ours", "{:.4f}"),
    ("... of TorchRec on the same batches",
     "clicks", "auc_torchrec", "{:.4f}"),
    ("Embedding tables over four ranks on two hosts at 1 Gbit/s, speed over TorchRec's",
     "exchange", "ratio_torchrec_1gbit", "{:.2f}"),
    ("Bytes of float32 rows over those of int8 rows (64 wide)",
     "precision", "bytes_ratio_int8_d64", "{:.2f}"),
    ("Rows read, changed and written on an SSD, speed over RocksDB's",
     "blockstore", "ratio_rocksdb", "{:.2f}"),
    ("Training with an eighth of the tables' bytes in DRAM, speed over all in DRAM",
     "tiers", "speed_at_8x", "{:.2f}"),
    ("Transformer over histories, speed with deduplication over without",
     "dedup_train", "ratio_transformer", "{:.2f}"),
)  # fmt: skip
"""Figures of the README: text (which may name the processor), benchmark, metric and number
format.
"""
_OLDER = "\\*"
GPU_BENCHMARKS = {
    "gpu_embedding": "tools.gpu.kernels",
    **dict.fromkeys(("gpu_train", "gpu_hot", "gpu_precision", "gpu_tiers", "gpu_dedup"), "tools.gpu.steps"),
}
"""Modules of the benchmarks that `tools/gpu/check.sh` runs on a machine with a GPU."""
# Numbers from here on are printed without decimals.
_LARGE = 10_000


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file."""
    write_json(path, result)


def read_result(path: Path) -> dict[str, Any]:
    """Read a result file of `write_result`."""
    content = read_json(path)
    if not isinstance(content, dict) or "benchmark" not in content:
        raise DatasetError(f"{path} is not a result file of a benchmark")
    return content


def print_result(result: dict[str, Any]) -> None:
    """Print the samples and the metrics in the width of the terminal."""
    console = make_console()
    rows = result.get("samples", {}).get("rows", [])
    if rows:
        console.print(f"{result['benchmark']}{' (quick: not to be quoted)' if result['quick'] else ''}")
        console.print()
        _print_rows(console, rows)
    width = max(map(len, result["metrics"]), default=0)
    for name, value in result["metrics"].items():
        console.print(f"{name:{width}}  {value:.5g}")


def _print_rows(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table: names first, then figures. Values that are the same in all rows are
    printed above it.

    Rows may lack values. Values with parts, such as evaluations, are only in the file.
    """
    names = list(dict.fromkeys(name for row in rows for name in row if not _has_parts(row[name])))
    same = [
        name for name in names if len(rows) > 1 and all(row.get(name) == rows[0].get(name) for row in rows)
    ]
    columns = [name for name in names if name not in same]
    keys = [name for name in columns if all(isinstance(row.get(name), str | int) for row in rows)]
    columns = [*keys, *(name for name in columns if name not in keys)]
    heads = [name.replace("_", " ") for name in columns]
    if same:
        console.print(", ".join(f"{name.replace('_', ' ')} {_cell(rows[0].get(name))}" for name in same))
        console.print()
    words = {head for head, name in zip(heads, columns, strict=True) if isinstance(rows[0].get(name), str)}
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    print_table(console, heads, cells, text=words, keys=len(keys))


def _has_parts(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(each, dict) for each in value)
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < _LARGE else f"{value:,.0f}"
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return "-" if value is None else str(value)


def update_documents(readme: Path, page: Path, picture: Path, results: Path) -> None:
    """Replace the text between the markers of both documents, and draw the figures.

    The README gets the figures of `MATTER`, the page of benchmarks every metric of the result
    files. The picture shows the figures of `MATTER` that are ratios.
    """
    results_read = [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))]
    # A benchmark may have several files, if its contenders ran separately.
    metrics: dict[str, dict[str, float]] = {}
    older: set[str] = set()
    targets: dict[str, dict[str, float]] = {}
    limits: dict[str, dict[str, float]] = {}
    processors: dict[str, set[str]] = {}
    for result in results_read:
        if not result["quick"]:
            metrics.setdefault(result["benchmark"], {}).update(result["metrics"])
            targets.setdefault(result["benchmark"], {}).update(result["config"].get("targets", {}))
            limits.setdefault(result["benchmark"], {}).update(result["config"].get("limits", {}))
            processors.setdefault(result["benchmark"], set()).add(_processor(result["hardware"]))
            if not _is_of_this_code(result):
                older.add(result["benchmark"])
    matter = [
        (text.format(processor=", ".join(sorted(processors[name]))), name, metric, form)
        for text, name, metric, form in MATTER
    ]
    rows = ["| what | figure |", "| --- | ---: |"]
    rows += [
        f"| {text} | {form.format(metrics[name][metric])}{_OLDER if name in older else ''} |"
        for text, name, metric, form in matter
    ]
    note = f"{_OLDER} measured with an earlier version of the code"
    _replace_figures(readme, [*rows, *(["", note] if older & {name for _, name, _, _ in MATTER} else [])])
    ratios = [
        (text, metrics[name][metric])
        for text, name, metric, _ in matter
        if not metric.startswith(("auc", "mean_rank"))
    ]
    write_picture(picture, ratios)
    rows_of = {
        result["benchmark"]: result.get("samples", {}).get("rows", [])
        for result in results_read
        if not result["quick"]
    }
    _draw_figures(rows_of, picture)
    for result in results_read:
        if result["benchmark"] == "simulator" and not result["quick"] and _is_of_this_code(result):
            _draw_cluster(result, picture.with_name("cluster_speed.svg"))
    rows = ["| benchmark | metric | value | target |", "| --- | --- | ---: | --- |"]
    rows += [
        f"| {name} | `{key}` | {value:.4g} | "
        f"{_target_text(value, targets[name].get(key), limits[name].get(key))} |"
        for name, each in metrics.items()
        for key, value in each.items()
    ]
    note = f"Measured with earlier versions of the code: {', '.join(sorted(older))}."
    measured_on = [
        f"- On {processor}: "
        f"{', '.join(sorted(name for name in processors if processor in processors[name]))}."
        for processor in sorted(set[str]().union(*processors.values()))
    ]
    _replace_figures(page, [*rows, "", *measured_on, *(["", note] if older else [])])


def _draw_figures(samples: Mapping[str, list[dict[str, Any]]], picture: Path) -> None:
    """Draw the figures of single benchmarks."""
    if ladder := samples.get("hot_published"):
        write_picture(
            picture.with_name("hot_ladder.svg"),
            [(f"{row['data']}: {row['rung']}", row["ratio"]) for row in ladder],
        )
    if towers := samples.get("tower_quality"):
        panels = []
        for data in dict.fromkeys(row["data"] for row in towers):
            mine = [row for row in towers if row["data"] == data]
            curves = []
            for model in dict.fromkeys(row["model"] for row in mine):
                points = [
                    (row["bytes_a_sample"], row["delta"], row.get("error") or 0.0)
                    for row in mine
                    if row["model"] == model
                ]
                curves.append((model, points))
            panels.append((data, curves))
        write_curves(
            picture.with_name("tower_curve.svg"),
            panels,
            "bytes that towers send for a sample",
            "AUC minus AUC without towers",
            0,
        )
    if growth := samples.get("growth"):
        write_curves(
            picture.with_name("growth.svg"),
            panels_of(growth),
            "size",
            "cost, relative to the least size",
            1,
            up_by_log=True,
        )
    if counts := samples.get("host_counts"):
        curves = [
            (
                "DRAM alone",
                [
                    (row["terabytes"], row["hosts_dram"], 0.0)
                    for row in counts
                    if row["share_of_speed"] == 1
                ],
            )
        ]
        curves += [
            (
                f"with SSDs, {share:g} of its speed",
                [
                    (row["terabytes"], row["hosts_ssd"], 0.0)
                    for row in counts
                    if row["share_of_speed"] == share
                ],
            )
            for share in dict.fromkeys(row["share_of_speed"] for row in counts)
        ]
        write_curves(picture.with_name("hosts.svg"), [("", curves)], "terabytes of rows", "hosts")


def _draw_cluster(result: Mapping[str, Any], path: Path) -> None:
    """Draw the predicted speed of towers by number of GPUs; bars are errors of the predictions in
    measured cells.
    """
    metrics, rows = result["metrics"], [row for row in result["samples"]["rows"] if row["ratio"] == 2]
    missed = sorted(speed_errors(result["samples"]["cells"]))
    half = (missed[-1 - len(missed) // 10] - missed[len(missed) // 10]) / 2
    curves = [
        (
            gpu,
            [
                (row["gpus"], row["towers_speed"], half * row["towers_speed"])
                for row in rows
                if (row["gpu"], row["wire"]) == (gpu, "fp32")
            ],
        )
        for gpu in dict.fromkeys(row["gpu"] for row in rows)
    ]
    write_curves(
        path,
        [("", curves)],
        "GPUs, eight a host",
        "speed over the flat exchange",
        metrics["published_speed_up_to"],
    )


def _is_of_this_code(result: dict[str, Any]) -> bool:
    """Whether the measured modules have not changed since the result."""
    module = {**BENCHMARKS, **GPU_BENCHMARKS}.get(result["benchmark"])
    return module is not None and result.get("sources") == source_hash(module)


def _processor(hardware: Mapping[str, Any]) -> str:
    """Return the processor's name, and whether it has AVX-512, on which the speed of peers depends
    most.
    """
    name = hardware["processor"].replace("(R)", "").replace(" Processor", "")
    return f"{name} {'with' if hardware['avx512'] else 'without'} AVX-512"


def _target_text(value: float, target: float | None, limit: float | None) -> str:
    """Return the target of a metric (a lower bound, or the upper bound `limit`) and whether it was
    met.
    """
    if limit is not None:
        return f"at most {limit:.4g}, {'met' if value <= limit else 'missed'}"
    return "" if target is None else f"{target:.4g}, {'met' if value >= target else 'missed'}"


def _replace_figures(path: Path, lines: Sequence[str]) -> None:
    text = path.read_text()
    head, rest = text.split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}" + rest.split(END)[1])
