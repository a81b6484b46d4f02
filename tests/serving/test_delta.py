"""Test deltas between exports: a scorer that applies a delta matches the newer export bit for bit,
and any other delta is refused.
"""

from __future__ import annotations

import copy
import pickle
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import load_file, save_file
from training.test_continual import begin, continue_run

from errors import missing, refuses
from stratarec import Scorer
from stratarec.cli import main
from stratarec.errors import ExportError
from stratarec.io.atomic import file_hash
from stratarec.io.sealed import read_unvalidated, write_sealed
from stratarec.serving.export_manifest import CHANGED, DELTA, DELTA_FORMAT, DELTA_ROWS
from stratarec.serving.exported_model import ExportedModel
from stratarec.training.export import write_delta

SLOW = pytest.mark.slow
CODECS = ["fp32", *(pytest.param(name, marks=SLOW) for name in ("int8", "int4"))]


def make_exports(root: Path, codec: str) -> Path:
    """Train a run on three days. Write an export of each day (0 to 2) and deltas 1 and 2."""
    changes: dict[str, Any] = {}
    if codec != "fp32":
        # The tables are large and the batches small enough that some tables do not fit their cache.
        changes["memory"] = {"precision": codec, "lookahead": 1, "cache": {"fraction": 0.05, "ways": 4}}
        changes["vocabulary"] = {"min_count": 1, "overrides": {"place": {"kind": "hash", "buckets": 2000}}}
        changes["train"] = {"batch_size": 16}
    with pytest.MonkeyPatch.context() as patch:
        # In a log this small nearly all rows change in a day.
        patch.setattr(write_delta, "_MOST", 1.0)
        run = begin(root, **changes)
        assert main(["export", "-q", str(run), "-o", str(root / "0")]) == 0
        for day in (1, 2):
            continue_run(run, root / f"day-{day}.parquet")
            since = ["--since", str(root / str(day - 1))]
            assert main(["export", "-q", str(run), "-o", str(root / str(day)), *since]) == 0
    return root


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_exports(tmp_path_factory.mktemp("chain"), "fp32")


def frame(root: Path, day: int = 2) -> pl.DataFrame:
    """Return the rows of a day, with histories of earlier rows."""
    log = pl.read_parquet(root / f"day-{day}.parquet")
    return log.with_columns(pl.concat_list("item", pl.col("item") + 1).alias("seen"))


@pytest.mark.parametrize("codec", CODECS)
def test_an_export_with_its_deltas_matches_the_last_export_bit_for_bit(
    codec: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue("home") if codec == "fp32" else make_exports(tmp_path, codec)
    scorer, rows = Scorer.open(root / "0"), frame(root)
    assert codec in {table.codec for table in scorer.manifest.tables.values()}
    first = scorer.score(rows)
    for day in (1, 2):
        scorer.update(root / f"{day}.delta")
        current = Scorer.open(root / str(day))
        assert scorer.manifest == current.manifest
        assert np.array_equal(scorer.score(rows), current.score(rows))
        assert not np.array_equal(scorer.score(rows), first)
    # Single rows take another path of the encoder.
    assert scorer.score(rows[:1].to_dict(as_series=False)) == current.score(
        rows[:1].to_dict(as_series=False)
    )
    grown = Scorer.open(root / "0").manifest.tables["item"].rows
    assert current.manifest.tables["item"].rows > grown


def test_a_delta_contains_only_the_rows_that_differ(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = (load_file(home / name / "tables.safetensors") for name in ("1", "2"))
    delta = load_file(home / "2.delta" / DELTA_ROWS)
    for name, table in after.items():
        same = np.zeros(len(table), dtype=bool)
        same[: len(before[name])] = (table[: len(before[name])] == before[name]).all(axis=1)
        assert delta[CHANGED + name].tolist() == np.flatnonzero(~same).tolist()
    assert main(["check", "-q", str(home / "2.delta")]) == 0
    assert not missing("complete", capsys.readouterr().out)
    # Another export of the same model differs in no row.
    shutil.copytree(home / "2", tmp_path / "2")
    assert write_delta.write_delta(ExportedModel.open(home / "2"), tmp_path / "2", tmp_path / "none") == 0.0
    scorer, rows = Scorer.open(home / "2"), frame(home)
    expected = scorer.score(rows)
    scorer.update(tmp_path / "none")
    assert np.array_equal(scorer.score(rows), expected)
    # If more than a quarter of the rows changed, no delta is written.
    run = ["export", "-q", str(home / "run"), "-o", str(tmp_path / "whole"), "--since", str(home / "1")]
    assert main(run) == 0
    assert "no delta: more than a quarter of the rows" in capsys.readouterr().out
    assert (tmp_path / "whole").is_dir()
    assert not (tmp_path / "whole.delta").exists()


def test_concurrent_scores_come_from_one_model_while_deltas_are_applied_or_refused(
    home: Path, tmp_path: Path
) -> None:
    scorer, rows = Scorer.open(home / "0"), frame(home)[:50]
    damages = [
        flipped_byte("network.safetensors"),
        flipped_byte(DELTA_ROWS),
        changed_value("item", 0, np.inf),
    ]
    known = [Scorer.open(home / str(day)).score(rows).tobytes() for day in range(3)]
    with ThreadPoolExecutor(2) as threads:
        done = [
            threads.submit(lambda: [scorer.score(rows).tobytes() for _ in range(100)]) for _ in range(2)
        ]
        for day in (1, 2):
            for number, damage in enumerate(damages):
                delta = Path(shutil.copytree(home / f"{day}.delta", tmp_path / f"{day}-{number}"))
                damage(delta)
                with pytest.raises(ExportError):
                    scorer.update(delta)
                assert scorer.score(rows).tobytes() == known[day - 1]
            scorer.update(home / f"{day}.delta")
        scores = [each for part in done for each in part.result()]
    assert set(scores) <= set(known)
    assert scorer.score(rows).tobytes() == known[2]


def test_a_pickled_scorer_opens_its_export_and_deltas_again(home: Path, tmp_path: Path) -> None:
    export, rows = Path(shutil.copytree(home / "0", tmp_path / "export")), frame(home)[:50]
    scorer = Scorer.open(export, runtime="torch")
    scorer.update(home / "1.delta")
    content = pickle.dumps(scorer)
    assert len(content) < 1000
    again = pickle.loads(content)
    assert again.runtime == "torch"
    assert (
        again.score(rows).tobytes()
        == copy.deepcopy(scorer).score(rows).tobytes()
        == scorer.score(rows).tobytes()
    )
    again.update(home / "2.delta")
    content = pickle.dumps(Scorer.open(export))
    shutil.rmtree(export)
    shutil.copytree(home / "1", export)
    with refuses(ExportError, "export pickled"):
        pickle.loads(content)


def changed_tensors(change: Callable[[dict[str, np.ndarray[Any, Any]]], None]) -> Callable[[Path], None]:
    """Change the tensors of a delta and seal the manifest again."""

    def craft(delta: Path) -> None:
        tensors = load_file(delta / DELTA_ROWS)
        change(tensors)
        save_file(tensors, delta / DELTA_ROWS)
        content = read_unvalidated(delta / DELTA, DELTA_FORMAT, "")
        content["files"][DELTA_ROWS] = {
            "bytes": (delta / DELTA_ROWS).stat().st_size,
            "hash": file_hash(delta / DELTA_ROWS),
        }
        write_sealed(delta / DELTA, content)

    return craft


def changed_manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def craft(delta: Path) -> None:
        content = read_unvalidated(delta / DELTA, DELTA_FORMAT, "")
        change(content)
        write_sealed(delta / DELTA, content)

    return craft


def flipped_byte(name: str) -> Callable[[Path], None]:
    def damage(delta: Path) -> None:
        path = next(delta.glob(name))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    return damage


def changed_value(key: str, place: int, value: float) -> Callable[[Path], None]:
    return changed_tensors(lambda tensors: tensors[key].reshape(-1).__setitem__(place, value))


REFUSED: list[tuple[str, Callable[[Path], None], str]] = [
    ("0", lambda delta: None, "delta model"),
    ("2", lambda delta: None, "delta model"),
    ("1", shutil.rmtree, "delta"),
    ("1", lambda delta: (delta / DELTA).unlink(), "delta.json"),
    ("1", flipped_byte("network.safetensors"), "hash"),
    ("1", flipped_byte(DELTA_ROWS), "hash"),
    ("1", flipped_byte("vocabulary/*item*"), "hash"),
    ("1", lambda delta: (delta / DELTA_ROWS).unlink(), "missing"),
    ("1", changed_value(CHANGED + "item", 0, -1), "rows"),
    ("1", changed_value(CHANGED + "item", -1, 10**6), "rows"),
    ("1", changed_value(CHANGED + "item", 1, 0), "rows"),
    ("1", changed_value("item", 0, np.inf), "number finite"),
    ("1", changed_tensors(lambda tensors: tensors.pop("item")), "item"),
    ("1", changed_manifest(lambda content: content["changed"].update(item=1)), "changed"),
    ("1", changed_manifest(lambda content: content["changed"].pop("item")), "changed"),
    ("1", changed_manifest(lambda content: content["files"].update({"../x": content["files"][DELTA_ROWS]})), "files"),
    ("1", changed_manifest(lambda content: content["manifest"]["model"].update(embedding_dim=4)), ""),
    ("1", changed_manifest(lambda content: content["manifest"]["vocabularies"]["item"].update(digest="0" * 32)), ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("of", "change", "message"), REFUSED, ids=[f"{k}-{m[:30]}" for k, (*_, m) in enumerate(REFUSED)]
)
def test_an_invalid_delta_is_refused_and_the_model_stays(
    home: Path, tmp_path: Path, of: str, change: Callable[[Path], None], message: str
) -> None:
    delta = Path(shutil.copytree(home / "2.delta", tmp_path / "delta"))
    change(delta)
    scorer, rows = Scorer.open(home / of), frame(home)[:20]
    before = scorer.score(rows)
    with refuses(ExportError, message) as caught:
        scorer.update(delta)
    assert "\n" not in str(caught.value)
    assert re.search("; ?|: ", str(caught.value))
    assert np.array_equal(scorer.score(rows), before)
    assert scorer.manifest == Scorer.open(home / of).manifest


def test_a_delta_between_unrelated_exports_is_refused_in_one_line(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with refuses(ExportError, "vocabulary export"):
        write_delta.write_delta(ExportedModel.open(home / "2"), home / "1", tmp_path / "back")
    # The command fails before it writes a full export.
    for since in (home / "1.delta", tmp_path / "none"):
        command = ["export", "-q", str(home / "run"), "-o", str(tmp_path / "out"), "--since", str(since)]
        assert main(command) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())
