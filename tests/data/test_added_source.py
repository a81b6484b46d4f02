"""Test a log format of another package: it is prepared, trained, scored and continued like the
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
from pyarrow import orc

from errors import refuses
from recipes import tiny
from stratarec.data.columns.converter import BadRows, Converter, OnBadRow
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema
from stratarec.data.sources import SOURCES, Chunk, LogKind, RowsConfig
from stratarec.data.sources.base import ALL_CHUNKS, ChunkShare, View, chunk_index
from stratarec.data.sources.files import expand, fingerprint
from stratarec.errors import ConfigError
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, with_values
from stratarec.training.continual.continual_run import continue_run
from stratarec.training.raw_logs import RawLogs, evaluate_logs
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class OrcConfig(RowsConfig):
    """Paths and columns of an ORC log."""

    kind: Literal["orc"] = "orc"
    schema: Schema = field(default_factory=Schema)


class OrcSource:
    """Rows of ORC files in file order."""

    divisible = True

    def __init__(self, config: OrcConfig, on_bad_row: OnBadRow, view: View | None) -> None:
        self._view = view or View(schema=config.schema)
        self._on_bad_row = on_bad_row
        self.schema = self._view.schema
        self._files = expand(config.paths)
        self.files = tuple(file.path for file in self._files)
        self.total_bytes = sum(file.size for file in self._files)

    def column_names(self) -> list[str]:
        return list(orc.ORCFile(self.files[0]).schema.names)

    def estimate_rows(self) -> int:
        return sum(orc.ORCFile(path).nrows for path in self.files)

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "orc", "files": fingerprint(self._files), "schema": repr(self.schema)}

    def chunks(self, workspace: Path, share: ChunkShare = ALL_CHUNKS) -> Iterator[Chunk]:
        done = 0
        for number, file in enumerate(self._files):
            reader, first = orc.ORCFile(file.path), 1
            for stripe in range(reader.nstripes):
                frame = pl.from_arrow(reader.read_stripe(stripe, columns=list(self._view.names)))
                assert isinstance(frame, pl.DataFrame)
                rows, bad = first + np.arange(frame.height, dtype=np.int64), BadRows(self._on_bad_row)
                first += frame.height
                done += file.size if stripe == reader.nstripes - 1 else 0
                if share.has(chunk_index(number, stripe), number, stripe):
                    converter = Converter(file.path, rows, bad, optional_user=self._view.optional_user)
                    yield Chunk(
                        index=chunk_index(number, stripe),
                        file=number,
                        frame=converter.convert(frame, self.schema),
                        rows=converter.rows,
                        bytes_done=done,
                        bad_rows=bad.count,
                        bad_examples=tuple(bad.examples),
                        passed_through=converter.passed_through(frame, self._view.pass_through),
                    )


@pytest.fixture
def registered() -> Iterator[None]:
    """Register a kind of log as a package does."""
    SOURCES.register("orc", LogKind(OrcConfig, OrcSource))
    yield
    del SOURCES["orc"]


def write_log(path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    item, shop = random.integers(0, 40, 2000), random.integers(0, 5, 2000)
    label = random.random(2000) < 1 / (1 + np.exp(-(item % 7 - 3 + shop / 5)))
    frame = pl.DataFrame(
        {"clicked": label.astype(np.int64), "item": item, "shop": shop.astype(str), "unused": item}
    )
    orc.write_table(frame.to_arrow(compat_level=pl.CompatLevel.oldest()), path)


def content(root: Path, kind: str) -> dict[str, Any]:
    schema = {"label": "clicked", "sparse": [{"name": "item"}, {"name": "shop"}]}
    source = {"kind": kind, "paths": [str(root / "log.orc")], "schema": schema}
    return with_values(
        tiny(root, epochs=2, eval_every=0), {"data.source": source, "data.vocabulary": {"min_count": 1}}
    )


@pytest.mark.usefixtures("registered")
def test_a_log_of_a_package_is_prepared_trained_scored_and_continued(tmp_path: Path) -> None:
    write_log(tmp_path / "log.orc", 1)
    write_log(tmp_path / "later.orc", 2)
    recipe = Recipe.from_dict(content(tmp_path, "orc"))
    assert Recipe.from_dict(recipe.to_dict()).data.source == recipe.data.source
    dataset = prepare(recipe.data)
    assert sum(dataset.samples(split) for split in dataset.splits) == 2000
    assert Trainer(recipe, dataset, SilentProgress()).train()["test"]["auc"] > 0.7
    with open_run(tmp_path / "run") as trained:
        logs = RawLogs(trained, [str(tmp_path / "later.orc")], labelled=True)
        assert evaluate_logs(logs, SilentProgress()).overall["clicked"]["auc"] > 0.7
    ((period, is_new),) = continue_run(tmp_path / "run", [str(tmp_path / "later.orc")], SilentProgress())
    assert (period.number, is_new) == (1, True)


@pytest.mark.usefixtures("registered")
def test_a_registered_kind_of_log_is_listed_with_the_others(tmp_path: Path) -> None:
    with refuses(ConfigError, "data.source.kind orcs clicks csv orc parquet synthetic"):
        Recipe.from_dict(content(tmp_path, "orcs"))
