"""Test a model that a program registers: it is trained, resumed, exported and scored like the
others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from errors import refuses
from recipes import prepared, tiny
from stratarec import Scorer
from stratarec.errors import ConfigError, ExportError
from stratarec.models.registry import MODELS, Model
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, _adapter
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register a model, whose settings and score are one file, as a program does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "package"))
    import stratarec_nfm

    MODELS.register("nfm", Model(stratarec_nfm.NFMConfig, stratarec_nfm.NFMScore))
    yield
    del MODELS["nfm"]
    del sys.modules["stratarec_nfm"]


@pytest.mark.usefixtures("registered")
def test_a_registered_model_is_trained_exported_and_scored(tmp_path: Path) -> None:
    content = tiny(tmp_path, epochs=1, eval_every=0, max_steps=30)
    content["model"] = {"kind": "nfm", "embedding_dim": 4, "deep_mlp": [8]}
    recipe = Recipe.from_dict(content)
    assert Recipe.from_dict(recipe.to_dict()).model == recipe.model
    assert recipe.chosen["model.deep_mlp"] == [8]
    Trainer(recipe, prepared(recipe.data), SilentProgress()).train()
    with open_run(tmp_path / "run") as trained:
        assert type(trained.model.network.score).__name__ == "NFMScore"
        export(trained, tmp_path / "export")
    scorer = Scorer.open(tmp_path / "export")
    columns = scorer.manifest.columns
    frame = {feature.name: [1, 2] for feature in (*columns.dense, *columns.sparse)}
    assert scorer.score(frame).shape == (2,)
    advice = "install or import the package that provides it"
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(MODELS, "nfm")  # in a program that does not register it
        with refuses(ExportError, f"manifest.json model 'nfm' {advice}") as refused:
            Scorer.open(tmp_path / "export")
        assert "export the model again" not in str(refused.value)
        with refuses(ConfigError, f"recipe.json model.kind 'nfm' {advice}"), open_run(tmp_path / "run"):
            pass


@pytest.mark.usefixtures("registered")
def test_a_registered_model_is_listed_with_the_others(tmp_path: Path) -> None:
    content = tiny(tmp_path)
    with refuses(ConfigError, "model.kind dlrm ensemble nfm did you mean nfm"):
        Recipe.from_dict({**content, "model": {"kind": "nfn"}})
    with refuses(ConfigError, "model.deep_mpl did you mean deep_mlp"):
        Recipe.from_dict({**content, "model": {"kind": "nfm", "deep_mpl": [8]}})
    assert "NFMConfig" in _adapter().json_schema()["$defs"]
