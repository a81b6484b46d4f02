"""Importance of features: tables on the terminal, sections of pages, curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratarec.io.names import visible
from stratarec.reporting.terminal_tables import make_console, print_table

Content = Mapping[str, Any]
"""Output of ``stratarec explain --json``."""
# Maximum numbers of table rows on the terminal and in a report, curves on a page, and characters of
# a name or value.
_ROWS = 30
_FEW_ROWS = 15
_CURVES = 40
_WIDEST = 30
_CAVEAT = "each feature is permuted by itself: features with the same information share their importance"


def print_explanation(content: Content) -> None:
    """Print the importance of features, and the lowest and highest points of prediction curves."""
    console = make_console()
    for line in _about(content):
        console.print(line)
    for label, figures in content["labels"].items():
        console.print("")
        if len(content["labels"]) > 1:
            console.print(_short(label))
        console.print(_measured(figures))
        rows = [(_short(column["feature"]), *_figures(column)) for column in figures["columns"]]
        print_table(console, ("feature", "AUC drop", "log loss rise"), rows[:_ROWS], text=("feature",))
        if len(rows) > _ROWS:
            console.print(f"and {len(rows) - _ROWS:,} more: --json has all")
        numbers = [row for curve in content["numbers"] for row in _ends(curve, label)]
        if numbers:
            heads = ("number", "where", "lowest", "where", "highest", "at median")
            console.print("")
            console.print("mean prediction when all samples get one value of a numeric feature")
            print_table(console, heads, numbers, text=heads[:1])
    console.print("")
    console.print(f"({_CAVEAT})")


def print_row(content: Content) -> None:
    """Print the contribution of each feature to the score of one row."""
    console = make_console()
    console.print(f"model: {content['model']}")
    for name, figures in content["labels"].items():
        console.print("")
        of = (
            f"{_short(name)} of row {content['row']}"
            if len(content["labels"]) > 1
            else f"row {content['row']}"
        )
        label = "" if figures["label"] is None else f"; the label is {figures['label']:.0f}"
        console.print(f"{of}: score {_probability(figures['logit'])}, logit {figures['logit']:+.4f}{label}")
        rows = [
            (_short(column), _short(content["values"][column]), f"{part:+.4f}")
            for column, part in figures["parts"].items()
        ]
        rows += [
            ("(together)", "interactions of several features", f"{figures['together']:+.4f}"),
            ("(base)", f"no feature known: {_probability(figures['base'])}", f"{figures['base']:+.4f}"),
        ]
        print_table(console, ("feature", "value", "logit"), rows, text=("feature", "value"))


def _probability(logit: float) -> str:
    return f"{1 / (1 + np.exp(-np.clip(logit, -700, 700))):.5f}"


def write_explanation(path: Path, title: str, content: Content) -> None:
    """Write a page with the importance of every feature and the prediction curves of dense
    features.
    """
    # matplotlib is imported only for a page.
    from stratarec.reporting.html import write_html

    several = len(content["labels"]) > 1
    write_html(
        path,
        "explain.html.jinja",
        title=title,
        lead=f"Importance of features: {content['model']}",
        notes=[*_about(content)[1:], f"{_CAVEAT[0].upper()}{_CAVEAT[1:]}."],
        sections=[
            (
                f"Importance, {label}" if several else "Importance",
                importance_rows(figures),
                _measured(figures),
            )
            for label, figures in content["labels"].items()
        ],
        charts=list(_charts(content)),
    )


def importance_sections(content: Content) -> list[tuple[str, list[tuple[str, ...]], str]]:
    """Return a section for each label: a heading, the first rows of `importance_rows`, and a
    note.
    """
    several = len(content["labels"]) > 1
    sections = []
    for label, column in content["labels"].items():
        rows, columns = importance_rows(column)[:_FEW_ROWS], len(column["columns"])
        left_out = f"; {columns - len(rows):,} features are less important" if columns > len(rows) else ""
        note = (
            f"Of {column['samples']:,} samples of the split {content['split']}, permuted "
            f"{content['repeats']} times: "
            f"{_CAVEAT}{left_out}. The number after ± is half of a 95 % interval: a smaller drop may be by "
            "chance. Run `stratarec explain` for more."
        )
        sections.append((f"Importance, {label}" if several else "Importance", rows, note))
    return sections


def importance_rows(figures: Content) -> list[tuple[str, ...]]:
    """Return a row for each feature: name, relative drop of AUC, drop of AUC, and rise of log loss.

    The relative drop is in per cent of the largest drop.
    """
    drops = [column["auc_drop"]["value"] or 0.0 for column in figures["columns"]]
    most = max([*drops, 1e-12])
    return [
        (_short(column["feature"]), f"{max(100 * drop / most, 0):.1f}", *_figures(column))
        for column, drop in zip(figures["columns"], drops, strict=True)
    ]


def _about(content: Content) -> list[str]:
    return [
        f"model: {content['model']}",
        f"{content['samples']:,} of {content['of']:,} samples of the split {content['split']}, each "
        f"feature permuted {content['repeats']} times among them",
    ]


def _measured(figures: Content) -> str:
    auc, loss = (_or_dash(figures[name], ".6f") for name in ("auc", "log_loss"))
    return f"AUC {auc} and log loss {loss} of {figures['samples']:,} samples; intervals of 95 %"


def _figures(column: Content) -> tuple[str, str]:
    cells = []
    for name in ("auc_drop", "log_loss_rise"):
        value, margin = column[name]["value"], column[name]["margin"]
        cells.append("-" if value is None else f"{value:.5f} ±{margin:.5f}")
    return cells[0], cells[1]


def _ends(curve: Content, label: str) -> Iterator[tuple[str, ...]]:
    """Yield the lowest and highest points of a curve, and its value in the middle."""
    values, predictions = curve["values"], curve["predictions"][label]
    low, high = int(np.argmin(predictions)), int(np.argmax(predictions))
    ends = [text for place in (low, high) for text in (_number(values[place]), f"{predictions[place]:.4f}")]
    yield (_short(curve["feature"]), *ends, f"{predictions[len(predictions) // 2]:.4f}")


def _charts(content: Content) -> Iterator[Any]:
    """Draw, for each label, the curves with the largest range of predictions."""
    from stratarec.reporting.html import ACCENT, LINE, Chart, new_axes

    several = len(content["labels"]) > 1
    for label in content["labels"]:
        curves = [curve for curve in content["numbers"] if _drawable(curve)]
        curves = sorted(curves, key=lambda curve: -float(np.ptp(curve["predictions"][label])))
        for curve in curves[: _CURVES // len(content["labels"]) or 1]:
            figure, axes = new_axes(3.6, 2.3)
            spread = axes.twinx()
            spread.stairs(curve["shares"], curve["edges"], fill=True, color=LINE)
            spread.set_ylim(0, 2.5 * max(curve["shares"]))
            spread.set_axis_off()
            axes.set_zorder(spread.get_zorder() + 1)
            axes.plot(
                curve["values"],
                curve["predictions"][label],
                label="mean prediction",
                color=ACCENT,
                marker="o",
                markersize=2,
                linewidth=1.5,
            )
            if curve["log_scale"]:
                axes.set_xscale("symlog", linthresh=1.0)
                axes.xaxis.set_major_formatter("{x:g}")
            name = _short(curve["feature"])
            axes.set_ylabel("mean prediction")
            yield Chart(
                title=f"{name}, {_short(label)}" if several else name,
                note="over its quantiles; shaded: how its values are spread",
                figure=figure,
            )


def _drawable(curve: Content) -> bool:
    """Whether a curve has at least two points and all its values are finite."""
    numbers: Sequence[float | None] = [*curve["values"], *curve["edges"]]
    return len(curve["values"]) > 1 and all(number is not None and abs(number) < 1e30 for number in numbers)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _number(value: float | None) -> str:
    return _or_dash(value, ".5g")


def _short(text: str) -> str:
    text = visible(text)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
