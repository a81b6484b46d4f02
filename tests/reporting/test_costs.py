"""Where rows live and where a step's time goes, as reports say it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.test_tiered_runs import content

from recipes import prepared, train
from stratarec.recipe import Recipe
from stratarec.reporting.plan_page import cached_tables, levels
from stratarec.reporting.step_time import StepTime


def position(**stages: float) -> dict[str, Any]:
    """Of 11 steps of 100 samples, the first of which was not timed; a step takes a second."""
    return {
        "step": 11, "trained_samples": 1100, "untimed_samples": 100, "train_seconds": 10.0,
        "stage_seconds": {name.replace("_", " "): 10 * share for name, share in stages.items()},
    }  # fmt: skip


USUAL = {
    "wait": 0.1, "look_up": 0.05, "forward": 0.25, "backward": 0.5, "update_rows": 0.1, "update_network": 0.1,
    "read": 0.2, "bring_in": 0.3,
}  # fmt: skip


def test_a_step_is_the_sum_of_its_stages() -> None:
    found = StepTime.of(position(**USUAL))
    assert found is not None
    assert found.seconds == pytest.approx(1.0)
    assert [stage.share for stage in found.stages] == pytest.approx([0.1, 0.05, 0.2, 0.4, 0.1, 0.1, 0.05])
    assert found.hidden == pytest.approx(0.8)
    slowest, memory = found.verdict(cached=True)
    assert slowest == "slowest part of a step: network, backward (400 ms, 40% of 1,000 ms); all steps took 10 s"
    assert "at most 30% of a step" in memory
    assert "more memory buys no speed" in list(found.verdict(cached=False))[1]
    assert StepTime.of(position()) is None


@pytest.mark.slow
def test_a_run_in_tiers_tells_what_it_measured(tmp_path: Path) -> None:
    """Hit rates against counting rows by hand, stages against the clock, bytes against the engine."""
    found = content(tmp_path, report=True, epochs=2, eval_every=0)
    found["memory"] = {"precision": "int8", "cache": {"fraction": 0.3, "ways": 8}, "lookahead": 1}
    recipe = Recipe.from_dict(found)
    prepared(recipe.data)
    trainer = train(recipe)
    assert trainer.plan is not None
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    stages, seconds = trainer.state.stage_seconds, trainer.state.train_seconds
    of_training = sum(stages[name] for name in ("wait", "forward", "backward", "update network"))
    assert 0.7 * seconds < of_training <= 1.01 * seconds
    assert stages["look up"] < stages["forward"]
    assert stages["update rows"] < stages["backward"]
    assert stages["bring in"] > 0
    # All batches, counted from what the loader gives.
    engine = trainer.model.embeddings.engine
    tables = {name: table for table in engine.configs for name in table.feature_names}
    sizes: dict[str, list[int]] = {}
    for batch in trainer.loader.batches(0, 0):
        features = trainer.model.request(batch).features
        offsets = features.bag_offsets().numpy()
        for place, key in enumerate(features.keys):
            size = features.batch_size
            ids = features.values[offsets[place * size] : offsets[(place + 1) * size]].numpy()
            sizes.setdefault(tables[key].name, []).append(len(np.unique(ids)))
    assert result["caches"]
    for each in result["caches"]:
        assert each["distinct"] == pytest.approx(np.mean(sizes[each["table"]]), rel=0.25)
        assert 0 <= each["missed"] <= each["distinct"]
    shown = levels(trainer.plan.to_dict(), result["parts"], result["caches"])
    assert sum(level.used or 0 for level in shown) == pytest.approx(result["table_bytes"], rel=0.01)
    assert len(cached_tables(trainer.plan.to_dict(), result["caches"]).rows) == len(result["caches"])
    text = (tmp_path / "run" / "report.html").read_text()
    for words in ("Where rows live", "Home, in DRAM", "Where a step's time goes", "network, backward"):
        assert words in text, words
    assert "were in level 0" in text
    assert re.search(r"What differs from the defaults.*train\.batch_size.*The whole recipe", text, re.DOTALL)
