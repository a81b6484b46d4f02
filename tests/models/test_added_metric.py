"""Test a metric of another package: runs are measured and chosen by it, and it is listed with the
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_recipe_pages import generate

from errors import refuses
from recipes import prepared, tiny
from stratarec.errors import ConfigError
from stratarec.models.metrics import METRICS, Metric, Samples
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, with_values
from stratarec.training.run.run_directory import REPORT
from stratarec.training.trainer import Trainer


def brier(samples: Samples) -> float:
    return float(np.average((1 / (1 + np.exp(-samples.score)) - samples.truth) ** 2, weights=samples.scale))


@pytest.fixture
def registered() -> Iterator[None]:
    """Register a metric as a package does."""
    about = "Mean squared distance of the label from its probability."
    METRICS.register(
        "brier", Metric(about=about, label="Brier score", measure=brier, better="lower", headline=True)
    )
    yield
    del METRICS["brier"]


@pytest.mark.usefixtures("registered")
def test_a_run_is_measured_and_chosen_by_a_metric_of_a_package(tmp_path: Path) -> None:
    stopping = {"patience": 2, "metric": "brier"}
    content = with_values(
        tiny(tmp_path, epochs=1), {"train.early_stopping": stopping, "train.report": True}
    )
    recipe = Recipe.from_dict(content)
    trainer = Trainer(recipe, prepared(recipe.data), SilentProgress())
    result = trainer.train()
    values = {entry["step"]: entry["brier"] for entry in trainer.state.evaluations}
    assert f"{min(values, key=values.__getitem__)}" in result["checkpoint"]
    assert 0.1 < result["test"]["brier"] < 0.25
    assert "Brier score" in (tmp_path / "run" / REPORT).read_text()


@pytest.mark.usefixtures("registered")
def test_a_registered_metric_is_listed_with_the_others(tmp_path: Path) -> None:
    with refuses(ConfigError, "train.early_stopping.metric briar auc log_loss brier"):
        Recipe.from_dict(tiny(tmp_path, early_stopping={"metric": "briar"}))
    with refuses(ConfigError, "train.plateau.metric calibration brier"):
        Recipe.from_dict(tiny(tmp_path, plateau={"metric": "calibration"}))
    tool = generate()
    assert "| `brier` | Brier score | lower | Mean squared distance" in tool.metrics()
    assert "mrr | brier" in tool.recipe()
