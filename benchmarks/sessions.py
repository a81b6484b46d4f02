"""Logs with sessions that the deduplication benchmarks share, prepared with and without groups.

Both data sets contain the same samples: clicks with L = 50 and 4 negatives (Globo), or real
impressions (Trivago). The recipe of Globo adds 17 numbers about each candidate, counted from
earlier clicks, none of which repeats; ``globo_bare`` has only the columns of the log. The sessions
of ``trivago_slates`` are its slates. Rows of the log are not stored (``data.keep_rows``), so that
only the bytes that training reads are compared. Data sets are stored in ``data/benchmarks`` and
reused while logs and settings are the same.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from benchmarks.registry import PeerMissing
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dedup_groups import GroupMode
from stratarec.data.prepare.prepare import prepare
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.errors import DatasetError
from stratarec.recipe import Recipe

ROOT = Path(__file__).parents[1]
LOGS = Path(os.environ.get("STRATAREC_TEST_DATA", ROOT.parent / "shared" / "data"))
FILES = {"globo": "globo_clicks.parquet", "trivago": "trivago_impressions.parquet"}
VARIANTS = {
    "globo_bare": ("globo", ["data.source.dense=[]"]),
    "trivago_slates": ("trivago", ["data.source.schema.session=slate_id"]),
}


def recipe(name: str, groups: GroupMode, *overrides: str) -> Recipe:
    """Return the recipe of a log, with its data set in ``data/benchmarks``."""
    base, changes = VARIANTS.get(name, (name, []))
    log = LOGS / FILES[base]
    if not log.is_file():
        raise PeerMissing(f"no {log}; set STRATAREC_TEST_DATA to the directory of the logs")
    fields = [
        f"data.source.paths=[{log}]",
        f"data.path={ROOT}/data/benchmarks/{name}-{groups}",
        f"data.groups={groups}",
        "data.keep_rows=false",
        *changes,
    ]
    return Recipe.load(ROOT / "src" / "stratarec" / "recipes" / f"{base}.yaml", [*fields, *overrides])


def prepared(name: str, groups: GroupMode, *overrides: str) -> Dataset:
    """Prepare a log, or prepare it again if logs or settings have changed."""
    config = recipe(name, groups, *overrides).data
    try:
        return prepare(config, name=name)
    except DatasetError:
        return prepare(config, name=name, overwrite=True)


def pair(name: str) -> tuple[Dataset, Dataset]:
    """Return the data sets of a log with and without groups."""
    return prepared(name, "auto"), prepared(name, "none")


def with_run(recipe: Recipe, run: Path) -> Recipe:
    """Return the recipe with another run directory."""
    return replace(recipe, train=replace(recipe.train, run=str(run)))


def row_bytes_of(dataset: Dataset, width: int, optimizer: RowOptimizerConfig) -> dict[str, int]:
    """Return the bytes of a row of float32 weights and optimizer state, by vocabulary."""
    return dict.fromkeys(dataset.vocabularies, RecordCodec.of(CodecConfig(), width, optimizer).record_bytes)
