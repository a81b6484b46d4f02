"""Sources of raw logs; a recipe names one by its `kind`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from stratarec.data.sources.base import Chunk, OnBadRow, Source
from stratarec.data.sources.clicks import ClicksSource
from stratarec.data.sources.clicks_config import ClicksConfig
from stratarec.data.sources.csv import CsvConfig, CsvSource
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource
from stratarec.data.sources.presets import AvazuConfig, AvazuSource, CriteoConfig, CriteoSource
from stratarec.data.sources.synthetic import SyntheticConfig, SyntheticSource
from stratarec.data.splits import SplitConfig

SourceConfig: TypeAlias = Annotated[
    AvazuConfig | ClicksConfig | CriteoConfig | CsvConfig | ParquetConfig | SyntheticConfig, Field(discriminator="kind")
]

__all__ = ["Chunk", "OnBadRow", "Source", "SourceConfig", "open_source"]


def open_source(config: SourceConfig, *, on_bad_row: OnBadRow, split: SplitConfig) -> Source:
    """The source that `config` describes; one that draws samples keeps the splits apart."""
    match config:
        case AvazuConfig():
            return AvazuSource(config, on_bad_row)
        case ClicksConfig():
            return ClicksSource(config, on_bad_row, split)
        case CriteoConfig():
            return CriteoSource(config, on_bad_row)
        case CsvConfig():
            return CsvSource(config, on_bad_row)
        case ParquetConfig():
            return ParquetSource(config, on_bad_row)
        case SyntheticConfig():
            return SyntheticSource(config, on_bad_row)
