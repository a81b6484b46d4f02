"""Sources of raw logs; a recipe names one by its `kind`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from pydantic import Field

from stratarec.data.columns.converter import OnBadRow
from stratarec.data.sources.base import Chunk, Source, View
from stratarec.data.sources.clicks import ClicksConfig, ClicksSource
from stratarec.data.sources.csv import (
    CRITEO,
    AvazuConfig,
    AvazuSource,
    CriteoConfig,
    CriteoSource,
    CsvConfig,
    CsvSource,
)
from stratarec.data.sources.files import expand
from stratarec.data.sources.formats import compression_of, is_text, table_format
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource
from stratarec.data.sources.synthetic import SyntheticConfig, SyntheticSource
from stratarec.data.splits import SplitConfig

SourceConfig: TypeAlias = Annotated[
    AvazuConfig | ClicksConfig | CriteoConfig | CsvConfig | ParquetConfig | SyntheticConfig, Field(discriminator="kind")
]
RowsConfig: TypeAlias = AvazuConfig | CriteoConfig | CsvConfig | ParquetConfig
"""Sources whose samples are rows of files."""

__all__ = ["Chunk", "OnBadRow", "RowsConfig", "Source", "SourceConfig", "open_rows", "open_source"]


def open_source(config: SourceConfig, *, on_bad_row: OnBadRow, split: SplitConfig) -> Source:
    """Open the source that `config` describes. `split` is used by sources that draw negatives, which draw them within a
    split."""
    match config:
        case ClicksConfig():
            return ClicksSource(config, on_bad_row, split)
        case SyntheticConfig():
            return SyntheticSource(config, on_bad_row)
        case _:
            return open_rows(config, on_bad_row)


def open_rows(config: RowsConfig, on_bad_row: OnBadRow, view: View | None = None) -> CsvSource | ParquetSource:
    """Open a log whose samples are rows of files.

    The first file determines the format, not the recipe: ``kind: csv`` also reads Parquet and Arrow
    files, and ``kind: parquet`` also reads text.
    """
    match config, _format(config.paths):
        case AvazuConfig(), _:
            return AvazuSource(config, on_bad_row, view=view)
        case CriteoConfig(), "table":
            return ParquetSource(ParquetConfig(paths=config.paths, schema=CRITEO), on_bad_row, view)
        case CriteoConfig(), _:
            return CriteoSource(config, on_bad_row, view=view)
        case CsvConfig(), "table":
            return ParquetSource(ParquetConfig(paths=config.paths, schema=config.schema), on_bad_row, view)
        case ParquetConfig(), "text":
            return CsvSource(CsvConfig(paths=config.paths, schema=config.schema), on_bad_row, view=view)
        case CsvConfig(), _:
            return CsvSource(config, on_bad_row, view=view)
        case ParquetConfig(), _:
            return ParquetSource(config, on_bad_row, view)
    raise AssertionError(config)


def _format(paths: Sequence[str]) -> str:
    """Return the format of the first file: ``table``, ``text``, or an empty string if it is neither."""
    first = expand(tuple(paths[:1]))[0]
    front = first.front()
    if table_format(front):
        return "table"
    return "text" if is_text(front) or compression_of(front, first.path) else ""
