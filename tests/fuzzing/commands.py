"""Run the commands of users on an artifact of an attacker, in this process.

Each command either gives a finite, valid result or is refused in one line. The content differs from
the original, so results are compared with nothing.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml
from fuzzing.artefacts import STEPS, TIERS, Use, make_recipe, memories, place_tables, score

from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.splits import SPLITS
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.errors import StrataError
from stratarec.recipe import Recipe
from stratarec.serving.scorer import Scorer
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

_REFUSED = 2
_NUMBER = re.compile(r"(?<![\w/.-])-?(nan|inf)(?![\w/.-])")


def make_more(root: Path) -> None:
    """Create more artifacts than `artefacts.make`, with numbers of other types."""
    with open_run(root / "cached") as trained:
        export(trained, root / "coded")
    # Two state values per weight, and clocks.
    for name, tiers in (("clocked", None), ("clocked-log", memories(root)["log"])):
        recipe = _all_rows(make_recipe(root, root / name, memory=tiers))
        Trainer(
            recipe, Dataset.open(recipe.data.path), plan=place_tables("log", recipe) if tiers else None
        ).train()
    (root / "towers").mkdir()
    (root / "towers" / "towers.yaml").write_text("# Towers\n- [item, seen]\n- [city, tags]\n")


def _all_rows(recipe: Recipe) -> Recipe:
    rows = RowOptimizerConfig(kind="adam", rows="all", learning_rate=0.01)
    return replace(recipe, train=replace(recipe.train, embedding=rows))


def uses_of(root: Path) -> dict[str, list[Use]]:
    """Return the uses of each artifact below `root`."""
    data = (_check, _read, _train_on(root, None), _train_on(root, TIERS), _base(root))
    runs: dict[str, Any] = {**memories(root), "clocked": None, "clocked-log": memories(root)["log"]}
    results: dict[str, list[Use]] = {
        name: [
            _check,
            _command("evaluate"),
            _predict,
            _export,
            _resume(root, memory, name),
            _begin(root, name),
        ]
        for name, memory in runs.items()
    }
    results |= {
        "data": [*data, _profile, _towers_of(root)],
        "plain": [*data],
        "plan": [_check, _plan(root)],
    }
    results |= {"export": [_check, _score], "coded": [_check, _score]}
    results |= {"towers": [_towers(root)]}
    return {name: uses for name, uses in results.items() if (root / name).exists()}


def run(*arguments: str | Path) -> str:
    """Return the output of a command. A refusal in one line raises `StrataError`, other failures
    `AssertionError`.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(part) for part in arguments])
    errors = err.getvalue()
    assert code in (0, _REFUSED), f"{arguments} ended with {code}: {errors}{_trace(errors)}"
    assert "out of memory" not in errors, errors
    if code == _REFUSED:
        lines = [line for line in errors.splitlines() if "Warning" not in line]
        assert len(lines) == 1, f"{arguments} said {errors}"
        raise StrataError(lines[0])
    wrong = _NUMBER.search(out.getvalue())
    assert wrong is None, f"{arguments} printed {out.getvalue()}"
    return out.getvalue()


def _trace(errors: str) -> str:
    """Return the traceback that a defect wrote to a file."""
    result = re.search(r"/\S*stratarec-error-\S*\.txt", errors)
    if result is None:
        return ""
    text = Path(result[0]).read_text()
    Path(result[0]).unlink()
    return f"\n{text[-3000:]}"


def _command(name: str) -> Use:
    def use(path: Path, _: Path) -> None:
        run(name, "-q", path)

    return use


def _check(path: Path, _: Path) -> None:
    run("check", "-q", path / "plan.json" if path.name == "plan" else path)


def _write(
    recipe: Recipe, out: Path, change: Callable[[dict[str, Any]], object] = lambda content: None
) -> Path:
    content = recipe.to_dict()
    change(content)
    file = out / "recipe.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def _read(path: Path, _: Path) -> None:
    """Check that every batch has ids within their tables and finite numbers."""
    dataset = Dataset.open(path)
    rows = {
        feature.name: dataset.vocabularies[feature.vocabulary].rows for feature in dataset.schema.sparse
    }
    for split in SPLITS:
        for batch in Loader(dataset, split, LoaderConfig(batch_size=64)).epoch(0):
            assert np.isin(batch.label.numpy(), (0, 1)).all()
            assert np.isfinite(batch.dense.numpy()).all()
            sparse = batch.expanded().sparse
            for name in sparse.keys:
                ids = sparse[name].values.numpy()
                assert ((ids >= 0) & (ids < rows[name])).all()
            for group in batch.groups:
                inverse = group.inverse.numpy()
                assert ((inverse >= 0) & (inverse < max(len(inverse), 1))).all()
        for shard, found_shard in enumerate(dataset.shards(split)):
            for group_number in range(len(found_shard.row_groups)):
                dataset.read_row_group(split, shard, group_number)
    for name in dataset.vocabularies:
        dataset.access_counts(name)
        dataset.vocabulary(name)


def _train_on(root: Path, memory: dict[str, Any] | None) -> Use:
    def use(path: Path, out: Path) -> None:
        """Train two steps and check the results."""
        recipe = make_recipe(root, out / "run", steps=2, memory=memory)
        groups = "none" if path.name == "plain" else recipe.data.groups
        run(
            "train",
            "-q",
            _write(replace(recipe, data=replace(recipe.data, path=str(path), groups=groups)), out),
        )
        run("check", "-q", out / "run")
        _predict(out / "run", out)

    return use


def _base(root: Path) -> Use:
    def use(path: Path, out: Path) -> None:
        """Prepare a new data set that has this one as its base."""
        recipe = make_recipe(root, out / "run")
        vocabulary = replace(recipe.data.vocabulary, base=str(path))
        groups = "none" if path.name == "plain" else recipe.data.groups
        recipe = replace(
            recipe, data=replace(recipe.data, path=str(out / "next"), vocabulary=vocabulary, groups=groups)
        )
        run("prepare", "-q", _write(recipe, out))
        run("check", "-q", out / "next")

    return use


def _profile(path: Path, out: Path) -> None:
    run("profile", "-q", path, "--batch-size", "64")


def _towers_of(root: Path) -> Use:
    def use(path: Path, out: Path) -> None:
        recipe = make_recipe(root, out / "run", steps=2)
        recipe = replace(recipe, data=replace(recipe.data, path=str(path)))
        run("plan", "-q", _write(recipe, out), "--towers", "2", "--steps", "2", "--json")

    return use


def _score(path: Path, out: Path) -> None:
    """Score a few rows, cell by cell, and many rows, column by column."""
    score(path, out)
    few = {
        "item": [0, 199, 10**9, None], "city": [0, 8, -1, 2], "tags": [["t1"], [], ["t39"] * 9, None],
        "seen": [[1, 2], [], [10**12], [3] * 100], "price": [0.5, -1e30, None, 0.0],
    }  # fmt: skip
    scorer = Scorer.open(path)
    for frame in (pl.DataFrame(few), pl.concat([pl.DataFrame(few)] * 30)):
        scores = scorer.score(frame)
        assert ((scores >= 0) & (scores <= 1)).all()  # not checked for NaN


def _predict(path: Path, out: Path) -> None:
    run("predict", "-q", path, "-o", out / "scores.parquet")
    actual = pl.read_parquet(out / "scores.parquet")["score"].to_numpy()
    assert ((actual >= 0) & (actual <= 1)).all(), f"scores of {actual.min()} to {actual.max()}"


def _export(path: Path, out: Path) -> None:
    run("export", "-q", path, "-o", out / "export")
    run("check", "-q", out / "export")
    _score(out / "export", out)


def _resume(root: Path, memory: dict[str, Any] | None, kind: str) -> Use:
    def use(path: Path, out: Path) -> None:
        recipe = make_recipe(root, path, steps=STEPS + 2, memory=memory)
        recipe = _all_rows(recipe) if kind.startswith("clocked") else recipe
        run("train", "-q", _write(recipe, out), "--resume")
        _finite(json.loads((path / "result.json").read_text()))
        run("evaluate", "-q", path)

    return use


def _begin(root: Path, kind: str) -> Use:
    def use(path: Path, out: Path) -> None:
        """Start a new run, with all rows in memory, from this one."""
        recipe = make_recipe(root, out / "next", steps=2)
        recipe = _all_rows(recipe) if kind.startswith("clocked") else recipe
        run("train", "-q", _write(recipe, out), "--from", path)
        _finite(json.loads((out / "next" / "result.json").read_text()))
        _predict(out / "next", out)

    return use


def _plan(root: Path) -> Use:
    def use(path: Path, out: Path) -> None:
        recipe = make_recipe(root, out / "run", steps=2, memory=memories(root)["log"])
        run("train", "-q", _write(recipe, out), "--plan", path / "plan.json")
        run("check", "-q", out / "run")

    return use


def _towers(root: Path) -> Use:
    def use(path: Path, out: Path) -> None:
        recipe = make_recipe(root, out / "run", steps=2)
        file = _write(recipe, path, lambda content: content["model"].update(towers={"plan": "towers.yaml"}))
        run("train", "-q", file)
        run("check", "-q", out / "run")

    return use


def _finite(value: Any) -> None:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _finite(part)
    assert not isinstance(value, float) or np.isfinite(value), value
