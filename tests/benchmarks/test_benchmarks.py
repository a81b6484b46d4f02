"""Test that benchmarks train once, mark figures of other code, and print tables of 80 columns."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.init.test_public_recipes import ROWS, frame

from benchmarks import growth, quality, report, trees
from benchmarks.registry import BENCHMARKS, PeerMissing
from benchmarks.sources import source_hash
from errors import missing, refuses
from stratarec.data.schema import Schema
from stratarec.recipe import Recipe


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write files with the columns of `frappe_x1`, and return them with a directory for their data
    sets.
    """
    schema: Schema = Recipe.load(quality.ROOT / "src/stratarec/recipes/frappe_x1.yaml").data.source.schema  # type: ignore[union-attr]
    (tmp_path / "frappe_x1").mkdir()
    for split, rows in ROWS.items():
        frame(schema, rows, split != "train").write_parquet(tmp_path / "frappe_x1" / f"{split}.parquet")
    monkeypatch.setattr(quality, "LOGS", tmp_path)
    monkeypatch.setattr(quality, "WORK", tmp_path / "work")
    monkeypatch.setattr(quality, "DATA", tmp_path / "data")
    monkeypatch.delenv("STRATAREC_FUXICTR", raising=False)
    return tmp_path


def evaluations(*aucs: float, seconds: float) -> dict[str, Any]:
    return {
        "auc": max(aucs),
        "log_loss": 0.1,
        "evaluations": [
            {
                "step": place,
                "auc": auc,
                "seconds": 2 * seconds * place,
                "processor_seconds": seconds * place,
            }
            for place, auc in enumerate(aucs, 1)
        ],
    }


@pytest.mark.slow
def test_a_run_is_trained_once_and_compared_with_published_figures(
    logs: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first = quality.run(quick=True)
    metrics, (row,) = first["metrics"], first["samples"]["rows"]
    assert capsys.readouterr().err.count("FuxiCTR left out: set STRATAREC_FUXICTR") == 1
    assert metrics["auc_best"] == metrics["auc_dcnv2"] == row["auc"]
    assert metrics["auc_delta_bars_min"] == row["auc"] - quality.PUBLISHED["dcnv2"].auc
    assert [each["step"] for each in row["evaluations"]] == [1, 2]
    assert 0 < row["seconds_to_best"] <= row["seconds"]
    assert row["rows_behind_caches"] == 0.0
    monkeypatch.setattr(quality, "Trainer", None)
    assert quality.run(quick=True)["metrics"] == metrics


def test_a_recipe_accepts_every_model(logs: Path) -> None:
    for name in quality.PUBLISHED:
        config = quality.recipe(name, 1, quality.Setting(precision="bf16", epochs=3))
        assert config.model.kind == name
        assert config.train.embedding.weight_decay == quality.PUBLISHED[name].decay


FILES = {
    "benchmarks/speed.py": "from benchmarks.tools import go\nfrom stratarec.kernels import pool\n",
    "benchmarks/tools.py": "import stratarec.more\n\ndef go():\n    import stratarec.late\n",
    "src/stratarec/__init__.py": "",
    "src/stratarec/kernels/__init__.py": "from stratarec.kernels.pool import f\n",
    "src/stratarec/kernels/pool.py": "# fast\nf = 1\n",
    "src/stratarec/more.py": "m = 1\n",
    "src/stratarec/late.py": "g = 1\n",
    "src/stratarec/other.py": "h = 1\n",
}
CHANGES = [
    ("src/stratarec/kernels/pool.py", "f = 2\n", True),
    ("src/stratarec/late.py", "g = 2\n", False),
    ("src/stratarec/more.py", "m = 2\n", True),
    ("src/stratarec/__init__.py", "x = 0\n", True),
    ("src/stratarec/kernels/pool.py", "# faster\n\nf = 1\n", False),
    ("src/stratarec/kernels/pool.py", '"""Says more."""\n\nf = (1)\n', False),
    ("src/stratarec/other.py", "h = 2\n", False),
    ("benchmarks/tools.py", "import stratarec.more\n", False),
]


@pytest.mark.parametrize(("name", "text", "differs"), CHANGES)
def test_the_hash_covers_the_imported_modules(tmp_path: Path, name: str, text: str, differs: bool) -> None:
    for file, content in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    before = source_hash("benchmarks.speed", tmp_path)
    (tmp_path / name).write_text(text)
    source_hash.cache_clear()
    assert (source_hash("benchmarks.speed", tmp_path) != before) == differs


@pytest.mark.parametrize("older", [False, True])
def test_a_figure_of_other_code_is_marked(
    tmp_path: Path, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MATTER", report.MATTER[:1])
    result = {
        "benchmark": "embedding", "quick": False, "config": {}, "metrics": {report.MATTER[0][2]: 2.0},
        "hardware": {"processor": "Intel(R) Xeon(R) Processor", "avx512": True},
        "sources": "0" if older else source_hash(BENCHMARKS["embedding"]),
    }  # fmt: skip
    (tmp_path / "embedding.json").write_text(json.dumps(result))
    pages = [tmp_path / "README.md", tmp_path / "page.md"]
    for page in pages:
        page.write_text(f"a\n{report.BEGIN}\n{report.END}\nb\n")
    for _ in range(2):
        report.update_documents(*pages, tmp_path / "figures.svg", tmp_path)
    assert ("2.00\\* |" in pages[0].read_text()) == older
    for page in pages:
        assert not missing("AVX-512", page.read_text())
        assert page.read_text().endswith(f"{report.END}\nb\n")


@pytest.mark.parametrize("module", BENCHMARKS.values())
def test_a_benchmark_can_be_imported_without_its_peers(module: str) -> None:
    assert callable(importlib.import_module(module).run)


ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_fit_80_columns_without_breaking_words(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    report.print_result(report.read_result(path))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    content = json.loads(path.read_text())
    for name in content["metrics"]:
        assert re.search(rf"^{name} +\S+$", text, re.MULTILINE)
    words = re.findall(r"[a-z]+", text)
    for row in content["samples"]["rows"]:
        for name, value in row.items():
            if isinstance(value, dict) or (
                isinstance(value, list) and any(isinstance(part, dict) for part in value)
            ):
                continue  # only in the file
            # Neither a word of a header nor a cell is broken.
            assert set(re.findall(r"[a-z]+", name.replace("_", " "))) <= set(words)
            assert not isinstance(value, str) or value in text


def test_growth_compares_the_cost_per_unit_with_smaller_sizes() -> None:
    rows = [
        {"part": "batch", "size": size, "step_ms": cost}
        for size, cost in ((64, 64.0), (512, 256.0), (4096, 4096.0))
    ]
    costs = growth.costs_of(rows, "batch")
    assert costs == {"step_ms": [1.0, 0.5, 1.0]}
    assert growth.grown(costs["step_ms"]) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("part", growth.COSTS)
def test_cells_of_growth_have_all_costs(part: str, tmp_path: Path) -> None:
    row = growth.PARTS[part](growth.QUICK[part][0], tmp_path, True)
    assert all(row[name] > 0 for name in growth.COSTS[part][0] if name != "peak_mib")


def tree_samples(samples: int, seed: int) -> trees.Samples:
    draws = np.random.default_rng(seed)
    ids = draws.integers(-1, 4, (samples, 2), np.int32)
    label = (draws.random(samples) < 0.1 + 0.2 * ids[:, 0].clip(0)).astype(np.float32)
    return trees.Samples(label, draws.random((samples, 2), dtype=np.float32), ids)


def test_trees_encode_values_by_training_samples_of_other_folds() -> None:
    train, other = tree_samples(200, 1), tree_samples(50, 2)
    encoder, rate = trees.Encoder(train, [4, 6], seed=0), train.label.mean()
    fold = np.random.default_rng(0).integers(0, trees.FOLDS, 200)
    for samples, own in ((other, False), (train, True)):
        columns = encoder.columns(samples)
        for sample, feature in itertools.product(range(50), range(2)):
            same = train.ids[:, feature] == samples.ids[sample, feature]
            counted = same & (fold != fold[sample]) if own else same
            clicks, strength = train.label[counted].sum(), trees.STRENGTH
            expected = (clicks + strength * rate) / (counted.sum() + strength), np.log1p(same.sum())
            assert columns[sample, 2 + 2 * feature :][:2] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_trees_on_encodings_rank_values_by_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightgbm")
    splits = {split: tree_samples(3000, number) for number, split in enumerate(("train", "valid", "test"))}
    grown = trees.grow(splits, [4, 6], seed=1, threads=1, quick=True)
    means = [grown.test[splits["test"].ids[:, 0].clip(0) == value].mean() for value in range(4)]
    assert sorted(means) == means
    assert means[3] - means[0] > 0.5
    assert 1 <= grown.trees <= 20
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with refuses(PeerMissing, "lightgbm"):
        trees.grow({}, [], seed=0, threads=1)
