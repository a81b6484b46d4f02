"""Test that a trace shows the threads in the requested steps and does not change the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes import assert_same_model, last, prepared, tiny, train
from stratarec.cli import main
from stratarec.recipe import Recipe


def make_recipe(root: Path, run: str, **changes: Any) -> Recipe:
    """Return the recipe of a short run with caches and a log behind them."""
    content = tiny(
        root, run=str(root / run), batch_size=64, epochs=1, eval_every=0, checkpoint={}, **changes
    )
    content["data"]["source"]["scale"] = 0.05
    content["data"]["vocabulary"] = {"min_count": 1, "tail_buckets": 4}
    content["model"]["embedding_dim"] = 16
    content["memory"] = {"precision": "int8", "cache": {"fraction": 0.1, "ways": 8}}
    recipe = Recipe.from_dict(content)
    prepared(recipe.data)
    return recipe


def test_traced_steps_train_like_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(make_recipe(tmp_path, "traced", trace="5-8"))
    train(make_recipe(tmp_path, "plain"))
    assert_same_model(last(tmp_path / "traced"), last(tmp_path / "plain"))
    assert not (tmp_path / "plain" / "trace.json").exists()
    events = json.loads((tmp_path / "traced" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    steps = {span["args"]["step"]: span for span in spans if "args" in span}
    assert sorted(steps) == [5, 6, 7, 8]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    by_thread = {
        name: {span["name"] for span in spans if threads[span["tid"]] == name} for name in threads.values()
    }
    assert {"step", "forward", "backward", "update", "look up rows", "update rows"} <= by_thread[
        "MainThread"
    ]
    assert {"stage ahead", "stage", "assign slots", "fetch rows", "place rows"} <= by_thread["prefetch"]
    for name in ("forward", "backward", "update"):
        own = [span for span in spans if span["name"] == name]
        assert len(own) == len(steps)
        for span, step in zip(own, steps.values(), strict=True):
            assert step["ts"] <= span["ts"] <= span["ts"] + span["dur"] <= step["ts"] + step["dur"]
    assert main(["check", str(tmp_path / "traced")]) == 0


def test_a_run_that_resumes_within_the_traced_steps_is_traced_from_there(tmp_path: Path) -> None:
    train(make_recipe(tmp_path, "traced", max_steps=6))
    train(make_recipe(tmp_path, "traced", trace="5-8"), resume=True)
    events = json.loads((tmp_path / "traced" / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert [names.count(name) for name in ("step", "forward", "backward", "update")] == [3, 3, 3, 3]
