"""The logs with sessions that the deduplication benchmarks share: prepared with groups, and without.

Both are made of the same samples: clicks with L = 50 and 4 negatives (Globo), and real impressions (Trivago). The
recipe of Globo adds 17 numbers about each candidate, counted from earlier clicks, none of which repeats;
``globo_bare`` is what the log itself has; sessions of ``trivago_slates`` are its slates. Rows of the log are not
stored (``data.keep_rows``): what is compared is what training reads. They are kept in ``data/benchmarks`` and used
again while logs and settings are the same.
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
    """The recipe of a log, its data in ``data/benchmarks``."""
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
    """The prepared log; made anew where it is of other logs or settings."""
    config = recipe(name, groups, *overrides).data
    try:
        return prepare(config, name=name)
    except DatasetError:
        return prepare(config, name=name, overwrite=True)


def pair(name: str) -> tuple[Dataset, Dataset]:
    """A log with groups and without."""
    return prepared(name, "auto"), prepared(name, "none")


def with_run(made: Recipe, run: Path) -> Recipe:
    """The recipe with another run directory."""
    return replace(made, train=replace(made.train, run=str(run)))


def row_bytes_of(dataset: Dataset, width: int, optimizer: RowOptimizerConfig) -> dict[str, int]:
    """Bytes of a row of float32 weights and optimizer state, by vocabulary."""
    return dict.fromkeys(dataset.vocabularies, RecordCodec.of(CodecConfig(), width, optimizer).record_bytes)
