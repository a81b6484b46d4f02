"""Sources of raw logs; a recipe names one by its `kind`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

from stratarec.config.choices import Sections
from stratarec.data.columns.converter import OnBadRow
from stratarec.data.sources.base import Chunk, LogConfig, RowsConfig, RowsSource, Source, View
from stratarec.data.sources.clicks import ClicksConfig, ClicksSource
from stratarec.data.sources.csv import CsvConfig, CsvSource
from stratarec.data.sources.files import expand
from stratarec.data.sources.formats import compression_of, is_text, table_format
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource
from stratarec.data.sources.synthetic import SyntheticConfig, SyntheticSource
from stratarec.data.splits import SplitConfig
from stratarec.errors import ConfigError
from stratarec.registry import Registry

__all__ = [
    "SOURCES",
    "Chunk",
    "LogKind",
    "OnBadRow",
    "RowsConfig",
    "RowsSource",
    "Source",
    "SourceConfig",
    "open_rows",
    "open_source",
]


class LogKind(NamedTuple):
    """An entry of `SOURCES`."""

    config: type[LogConfig]
    """Class of the section ``data.source`` of this kind."""
    open: Callable[..., Any]
    """Function that opens the source.

    For a `RowsConfig`: called with it, `OnBadRow` and a `View` or None, returns a `RowsSource`. For
    other settings: called with them, `OnBadRow` and the `SplitConfig` (negatives are drawn within a
    split), returns a `Source`.
    """


def _open_csv(config: CsvConfig, on_bad_row: OnBadRow | None, view: View | None) -> RowsSource:
    if _format(config.paths) == "table":
        return ParquetSource(ParquetConfig(paths=config.paths, schema=config.schema), on_bad_row, view)
    return CsvSource(config, on_bad_row, view=view)


def _open_parquet(config: ParquetConfig, on_bad_row: OnBadRow | None, view: View | None) -> RowsSource:
    if _format(config.paths) == "text":
        return CsvSource(CsvConfig(paths=config.paths, schema=config.schema), on_bad_row, view=view)
    return ParquetSource(config, on_bad_row, view)


SOURCES = Registry(
    "source",
    {
        "clicks": LogKind(ClicksConfig, ClicksSource),
        "csv": LogKind(CsvConfig, _open_csv),
        "parquet": LogKind(ParquetConfig, _open_parquet),
        "synthetic": LogKind(
            SyntheticConfig, lambda config, on_bad_row, split: SyntheticSource(config, on_bad_row)
        ),
    },
)


def _public_log(kind: str) -> None:
    """Raise `ConfigError` if the kind is the name of a recipe for a public log."""
    if kind in ("avazu", "criteo") and kind not in SOURCES:
        raise ConfigError(
            f"data.source.kind is {kind!r}, which is a recipe of the kind csv: `stratarec init --recipe "
            f"{kind}` writes it; copy its data.source"
        )


SourceConfig: TypeAlias = Annotated[
    LogConfig, Sections(lambda: {kind: log.config for kind, log in SOURCES.items()}, _public_log)
]
"""The section ``data.source`` of a recipe."""


def open_source(config: SourceConfig, *, on_bad_row: OnBadRow, split: SplitConfig) -> Source:
    """Open the source that `config` describes. `split` names a column to be read, or is used by
    sources that draw negatives, which draw them within a split.

    Raises
    ------
    ConfigError
        If the split is by a column, and samples are not rows of files.
    """
    if isinstance(config, RowsConfig):
        columns = (split.column,) if split.column else ()
        return open_rows(
            config, on_bad_row, View(schema=config.schema, pass_through=columns, is_scored=False)
        )
    if split.column:
        raise ConfigError(
            f"data.split.by is column, but data.source.kind is {config.kind}: its "
            "samples are not rows of files"
        )
    source: Source = SOURCES[config.kind].open(config, on_bad_row, split)
    return source


def open_rows(config: RowsConfig, on_bad_row: OnBadRow | None, view: View | None = None) -> RowsSource:
    """Open a log whose samples are rows of files.

    The first file determines whether it is text or a table, not the recipe: ``kind: csv`` also
    reads Parquet and Arrow files, and ``kind: parquet`` also reads text. If `on_bad_row` is None, a
    bad row is always an error.
    """
    source: RowsSource = SOURCES[config.kind].open(config, on_bad_row, view)
    return source


def _format(paths: Sequence[str]) -> str:
    """Return the format of the first file: ``table``, ``text``, or an empty string if it is
    neither.
    """
    first = expand(tuple(paths[:1]))[0]
    front = first.front()
    if table_format(front):
        return "table"
    return "text" if is_text(front) or compression_of(front, first.path) else ""
