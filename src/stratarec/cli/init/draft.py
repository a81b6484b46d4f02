"""Write a recipe for a log as commented YAML: guessed roles with reasons, and the settings that
users change first.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pydantic
import yaml

from stratarec.cli.init.dates import choose_dates
from stratarec.cli.init.features import Guess, Role, with_number
from stratarec.cli.init.guess import Guesses, guess
from stratarec.cli.init.history import choose_history, validate_history
from stratarec.cli.init.label import positives
from stratarec.cli.init.sample import CODEC_NAMES, LogSample, read_sample
from stratarec.config.units import format_bytes
from stratarec.config.validate import first_mistake
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.schema import DateColumn, LabelRule
from stratarec.data.sources.files import expand
from stratarec.errors import ConfigError
from stratarec.io.atomic import check_absent, write_text
from stratarec.io.names import shell_word, visible

_DAY, _MAX_NAME = 86_400, 100
# Number of floats of optimizer state per row, and the share of memory that tables may take.
_STATE_FLOATS, _SHARE = 1, 0.25
_WIDTHS = (16, 8)
# Maximum numbers of samples and of values for which an ensemble is best. Above, its wide rows cost
# more than they gain.
_ENSEMBLE_ROWS, _ENSEMBLE_VALUES = 2_000_000, 200_000
# If more future rows than this share have new values, values that occur once share a row, which
# trains the row of new values.
_MOST_NEW = 0.1


def draft(
    paths: tuple[str, ...],
    output: Path | None,
    label: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, LogSample, Guesses]:
    """Write a recipe for the log in `paths` to `output`, by default a file in this directory named
    after the log.

    `say` receives a line before work that takes longer.

    Raises
    ------
    DataError
        If the log cannot be read, or has no label.
    StorageError
        If `output` exists, or cannot be written.
    """
    name = _name(paths[0] if Path(paths[0]).is_dir() else expand(paths)[0].path)
    path = output or Path(f"{name}.yaml")
    check_absent(path, ".yaml", ".yml")
    text, sample, guesses = _drafted(paths, name, path, label, say)
    write_text(path, text)
    return path, sample, guesses


def _drafted(
    paths: tuple[str, ...], name: str, path: Path, label: str, say: Callable[[str], None] | None
) -> tuple[str, LogSample, Guesses]:
    sample = read_sample(paths)
    guesses = guess(sample, label)
    positive = positives(sample.frame, guesses.label)
    guesses = _for_model(choose_dates(guesses, sample, positive), sample)
    choice = choose_history(guesses, sample, positive)
    text = _text(name, path, sample, replace(guesses, history=choice))
    content = yaml.safe_load(text)
    _check_data(content["data"], path)
    if choice is not None and say is not None:
        choice = validate_history(choice, sample, content, say)
    guesses = replace(guesses, history=choice)
    return _text(name, path, sample, guesses), sample, guesses


def _check_data(content: dict[str, Any], path: Path) -> None:
    """Refuse a data section that `prepare` would refuse.

    The other sections have fixed fields. Reading them as a `Recipe` would import torch, which takes
    seconds.
    """
    try:
        pydantic.TypeAdapter(PrepareConfig).validate_python(content)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{path}: data.{first_mistake(error, content, PrepareConfig)}") from error


def content_of(paths: tuple[str, ...], label: str = "") -> dict[str, Any]:
    """Return the recipe that `draft` would write for a log, as plain data. No trainings decide
    about a history.
    """
    text, _, _ = _drafted(paths, _name(paths[0]), Path("drafted.yaml"), label, None)
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def _for_model(guesses: Guesses, sample: LogSample) -> Guesses:
    """If the recipe will use an ensemble, make dense features of columns with few whole numbers,
    and of other columns of whole numbers both a category and a number; else make categories of
    parts of dates.

    An ensemble encodes numbers in a way that does not rely on their order.
    """
    if not _is_small(sample, guesses):
        parts = [choice.column.part_features for choice in guesses.dates]
        names = tuple(name for features in parts for part, name in features.items() if part != "days")
        return replace(guesses, date_categories=names)
    columns = (
        _as_number(column)
        if column.ordered and column.role == "sparse"
        else with_number(column, sample.frame)
        for column in guesses.columns
    )
    return replace(guesses, columns=tuple(columns))


def _as_number(column: Guess) -> Guess:
    reason, semicolon, advice = column.reason.partition("; ")
    return replace(column, role="dense", integer=False, reason=f"{reason}, in order{semicolon}{advice}")


def _is_small(sample: LogSample, guesses: Guesses) -> bool:
    return sample.total <= _ENSEMBLE_ROWS and _values(guesses) <= _ENSEMBLE_VALUES


def _values(guesses: Guesses) -> int:
    """Return the approximate number of rows of all tables."""
    return sum(
        column.values for column in (*guesses.of("sparse"), *guesses.of("list"), *guesses.of("user"))
    )


def _name(path: str) -> str:
    """Return the log's file name without its extensions, as a name for the recipe and its
    directories.
    """
    bare = Path(path).name or Path(path).resolve().name  # the path `.` has an empty name
    while (ending := Path(bare).suffix.lower()) in CODEC_NAMES:
        bare = bare[: -len(ending)]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", bare).strip("-")[:_MAX_NAME] or "log"


def _text(name: str, path: Path, sample: LogSample, guesses: Guesses) -> str:
    # A reason may contain any text of the log. Escaped line ends keep it inside its comment.
    return "".join(f"{visible(line)}\n" for line in _recipe(name, path, sample, guesses))


def _recipe(name: str, path: Path, sample: LogSample, guesses: Guesses) -> Iterator[str]:
    rows = "all rows" if sample.is_complete else f"{sample.frame.height:,} of about {sample.total:,} rows"
    yield f"# Drafted by `stratarec init` from {rows}. Comments give reasons; check label, time and user first."
    yield f"#   stratarec prepare {shell_word(path)}"
    yield f"#   stratarec train {shell_word(path)}"
    yield f"name: {_yaml(name)}"
    yield "data:"
    yield f"  path: data/{name}"
    yield "  source:"
    yield f"    kind: {sample.kind}"
    yield f"    paths: {_yaml(list(sample.paths))}"
    for key, value in sample.options.items():
        note = (
            "  # the log is not UTF-8; check that names and values look right" if key == "encoding" else ""
        )
        yield f"    {key}: {_yaml(value)}{note}"
    missing = {word for column in guesses.columns for word in sample.missing.get(column.name, ())}
    missing |= {
        word for column in guesses.of("date") if column.dates is not None for word in column.dates.words
    }
    nulls = sorted(missing)
    if nulls:
        yield f"    nulls: {_yaml(nulls)}  # mean a missing value, in every column"
    yield "    schema:"
    yield from _schema(guesses)
    yield from _split(guesses)
    if guesses.bad_rows:
        yield f"  on_bad_row: skip  # {guesses.bad_rows}"
    yield from _vocabulary(sample, guesses)
    yield from _training(sample, guesses)


def _vocabulary(sample: LogSample, guesses: Guesses) -> Iterator[str]:
    if _is_small(sample, guesses) and sample.is_complete and _new_values(sample, guesses) < _MOST_NEW:
        yield "  vocabulary: {min_count: 1, tail_buckets: 1}  # each value has a row, and new values share one"
        return
    least, buckets = (2, 1) if sample.total < 100_000 else (2 if sample.total < 1_000_000 else 5, 64)
    shared = "share a row" if buckets == 1 else f"share {buckets} rows"
    yield f"  vocabulary: {{min_count: {least}, tail_buckets: {buckets}}}  # values seen less often {shared}"


def _new_values(sample: LogSample, guesses: Guesses) -> float:
    """Estimate the share of future rows whose value is new, for the category in which it is
    largest.

    The estimate is the share of rows with a value that occurs once (Good, Biometrika 40, 1953).
    """
    columns = [sample.frame[column.name] for column in (*guesses.of("sparse"), *guesses.known_users)]
    return max((float(column.is_unique().mean() or 0) for column in columns), default=0.0)  # type: ignore[arg-type]


def _schema(guesses: Guesses) -> Iterator[str]:
    reasons = {column.name: column.reason for column in guesses.columns}
    rule = guesses.label
    if isinstance(rule, LabelRule):
        test = (
            f"at_least: {_yaml(rule.at_least)}"
            if rule.at_least is not None
            else f"equals: {_yaml(rule.equals)}"
        )
        yield f"      label: {{column: {_yaml(rule.column)}, {test}}}  # {reasons[rule.column]}"
    else:
        yield f"      label: {_yaml(rule)}  # {reasons[rule]}"
    for column in guesses.of("weight"):
        yield "      # Weights apply to the loss, metrics and calibration: scores are rates of the log before negatives"
        yield "      # were sampled. Without the next line, scores are rates of the rows in this log."
        yield f"      weight: {_yaml(column.name)}  # {column.reason}"
    for column in guesses.of("time"):
        assert guesses.time is not None
        yield f"      time: {_yaml(column.name)}  # {column.reason}"
        yield f"      time_unit: {guesses.time.unit}"
        if guesses.time.form:
            yield f"      time_format: {_yaml(guesses.time.form)}"
    keys: tuple[Role, ...] = ("user", "session")
    for role in keys:
        for column in guesses.of(role):
            yield f"      {role}: {_yaml(column.name)}  # {column.reason}"
    if guesses.dates:
        yield "      dates:"
        yield from (f"        - {{{_date(choice.column)}}}  # {choice.reason}" for choice in guesses.dates)
    dense = [f"        - {{{_feature(column)}}}  # {column.reason}" for column in guesses.of("dense")]
    dense += [
        f"        - {{name: {_yaml(column.number)}, column: {_yaml(column.name)}}}  "
        "# also a category, below"
        for column in guesses.of("sparse")
        if column.number
    ]
    yield from ["      dense:", *dense] if dense else []
    sparse = list(_sparse(guesses))
    yield from ["      sparse:", *sparse] if sparse else []
    ignored = [(column.name, column.reason) for column in guesses.of("ignored") if column.leak is None]
    if guesses.history is not None and not guesses.history.drafted:
        ignored.append((guesses.history.name, f"a history of the user; {guesses.history.reason}"))
    if ignored:
        yield "      # Ignored:"
        yield from (f"      #   {_yaml(name)}: {reason}" for name, reason in ignored)
    leaks = [column for column in guesses.columns if column.leak is not None]
    if leaks:
        yield "      # Ignored because they seem to reveal the label; to use one, add its braces to the list it names:"
    for column in leaks:
        assert column.leak is not None
        where = {"dense": "dense", "date": "dates"}.get(column.leak.role, "sparse")
        yield f"      #   {where}: - {{{_feature(column.leak)}}}  # {column.reason}"


def _sparse(guesses: Guesses) -> Iterator[str]:
    features = [*guesses.of("sparse"), *guesses.of("list")]
    for column in features:
        yield f"        - {{{_feature(column)}}}  # {column.reason}"
    for name in guesses.date_categories:
        yield f"        - {{name: {_yaml(name)}}}  # a category, because its effect is no straight line"
    choice = guesses.history
    if choice is not None and choice.drafted:
        yield (
            f"        - {{name: {_yaml(choice.name)}, kind: history, of: {_yaml(choice.of)}, max_length: "
            f"50}}  # {choice.reason}"
        )
    for column in guesses.known_users:
        yield f"        - {{name: {_yaml(column.name)}}}  # learns the taste of each user"


_MULTI = ["kind: multi", "max_length: 20"]


def _date(column: DateColumn) -> str:
    fields = [field for field in dataclasses.fields(column) if getattr(column, field.name) != field.default]
    return ", ".join(f"{field.name}: {_yaml(_plain(getattr(column, field.name)))}" for field in fields)


def _plain(value: Any) -> Any:
    """Return a tuple as a list, which YAML writes in brackets; other values unchanged."""
    return list(value) if isinstance(value, tuple) else value


def _feature(column: Guess) -> str:
    if column.dates is not None:
        return _date(
            DateColumn(
                name=column.name,
                parts=("month",),
                time_unit=column.dates.unit,
                time_format=column.dates.form,
            )
        )
    parts = [f"name: {_yaml(column.name)}"]
    if column.role == "list":
        parts += ["kind: sequence", f"of: {_yaml(column.of)}", "max_length: 50"] if column.of else _MULTI
    if column.decimal:
        parts.append(f"decimal: {_yaml(column.decimal)}")
    if column.separator:
        parts.append(f"separator: {_yaml(column.separator)}")
    if column.integer and column.role != "dense":
        parts.append("type: integer")
    return ", ".join(parts)


def _split(guesses: Guesses) -> Iterator[str]:
    if (column := guesses.split) is not None:
        why, rows = f"the column {column.reason}", ""
        if not isinstance(column.valid, tuple):
            why += "; validation has a share of the other rows"
            rows = ", of: rows" if guesses.users_return else ""
        values = f"valid: {_yaml(_plain(column.valid))}, test: {_yaml(_plain(column.test))}"
        yield f"  split: {{by: column, column: {_yaml(column.name)}{rows}, {values}}}  # {why}"
        return
    if not guesses.is_split_by_time:
        unit = "users" if guesses.of("user") else "sessions" if guesses.of("session") else "rows"
        times = guesses.time
        why = f"; not by time, because {times.odd}" if times is not None and times.ends_early else ""
        if guesses.users_return:
            yield f"  # random rows, because users return; without `of`, the test would be on new users{why}"
            yield "  split: {by: fraction, of: rows, valid: 0.1, test: 0.1}"
            return
        yield f"  split: {{by: fraction, valid: 0.1, test: 0.1}}  # random {unit}{why}"
        return
    valid, test = (
        f"{seconds // 3600}h" if seconds % _DAY else f"{seconds // _DAY}d"
        for seconds in guesses.split_seconds
    )
    reason = f"test on the last {test} of the log, validation on the {valid} before, as in production"
    last = ""
    if guesses.time is not None and guesses.time.ends_early:
        last = f", last: {guesses.time.end!r}"
        reason = f"{reason}; later rows are left out, because they are far later"
    yield f"  split: {{by: time, valid: {valid}, test: {test}{last}}}  # {reason}"


_REFIT = (
    "train:",
    "  # Metrics are of a model that has not seen validation and test rows. The model that is "
    "used is that model after",
    "  # training on these rows, too; set this to false to use the tested model.",
    "  refit: true",
)


def _training(sample: LogSample, guesses: Guesses) -> Iterator[str]:
    rows = _values(guesses)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = int(memory * _SHARE)
    yield "model:"
    if _is_small(sample, guesses):
        yield "  kind: ensemble  # of small networks and boosted trees, which need few samples"
        yield "  # sizes, batch_size, epochs and rates are chosen by the number of samples unless they are set"
        yield from _REFIT
        return
    fitting = [width for width in _WIDTHS if _table_bytes(rows, width) <= budget]
    width = fitting[0] if fitting else _WIDTHS[-1]
    size = format_bytes(_table_bytes(rows, width))
    yield "  kind: dlrm"
    yield f"  embedding_dim: {width}  # about {rows:,} values: at most {size} of tables"
    yield "  bottom_mlp: [64]"
    yield "  top_mlp: [128, 64]"
    if len(list(_sparse(guesses))) + bool(guesses.of("dense")) < 2:
        yield "  interaction: cat  # a single vector has no pairs"
    yield from _REFIT
    yield "  # batch_size, epochs, rates and early_stopping are chosen by kind and samples unless they are set"
    if not fitting:
        yield "memory:"
        yield f"  dram: {format_bytes(budget).replace(' ', '')}  # a quarter of this machine; other rows are on disk"
        yield f"  block: {{path: data/{_name(sample.paths[0])}-rows}}  # on a fast disk"


def _table_bytes(rows: int, width: int) -> int:
    return rows * 4 * (width + _STATE_FLOATS)


def _yaml(value: Any) -> str:
    """Write a value as one line of YAML; text with line ends or hidden characters is double-quoted
    and escaped.
    """
    # The value is dumped inside a list, because text such as `0?` needs quotes between braces, but
    # not alone on a line.
    dump = partial(yaml.safe_dump, [value], default_flow_style=True, allow_unicode=True, width=float("inf"))
    text = str(dump()).removesuffix("\n")[1:-1]
    return text if visible(text) == text else visible(str(dump(default_style='"')).removesuffix("\n")[1:-1])
