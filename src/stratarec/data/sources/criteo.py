"""Criteo display advertising logs (Kaggle and Terabyte): tab-separated label, 13 integers, 26 hashed categories.

Copies that went through tools which trim lines have lost the tabs behind their last value, so the last three categories
may be absent from a line; they are then missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polars as pl

from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.base import Chunk, OnBadRow
from stratarec.data.sources.files import expand, fingerprint
from stratarec.data.sources.text import BLOCK_BYTES, RowChecks, TextFormat, estimate_rows, text_chunks

DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))


@dataclass(frozen=True, kw_only=True)
class CriteoConfig:
    """Where the Criteo log lies."""

    kind: Literal["criteo"] = "criteo"
    paths: tuple[str, ...] = ()
    """Files, globs or URLs; .gz and .zst are decompressed."""


class CriteoSource:
    """Rows of a Criteo log in file order; it has no sessions, users or times."""

    def __init__(self, config: CriteoConfig, on_bad_row: OnBadRow, block_bytes: int = BLOCK_BYTES) -> None:
        self._files = expand(config.paths)
        self._on_bad_row = on_bad_row
        self._block_bytes = block_bytes
        self.files = tuple(file.path for file in self._files)
        self.total_bytes = sum(file.size for file in self._files)
        self.schema = Schema(
            label="label",
            dense=tuple(DenseFeature(name=name) for name in DENSE),
            sparse=tuple(SparseFeature(name=name) for name in SPARSE),
        )

    def estimate_rows(self) -> int:
        return estimate_rows(self._files)

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "criteo", "files": fingerprint(self._files), "block_bytes": self._block_bytes}

    def chunks(self, workspace: Path, start: int = 0) -> Iterator[Chunk]:
        layout = TextFormat(columns=("label", *DENSE, *SPARSE), delimiter="\t", header=False, optional=3)
        return text_chunks(self._files, layout, self._on_bad_row, _convert, start, self._block_bytes)


def _convert(frame: pl.DataFrame, checks: RowChecks) -> pl.DataFrame:
    label = checks.label(frame["label"])
    return frame.with_columns(label, *(checks.number(frame[name]) for name in DENSE))
