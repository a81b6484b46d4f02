"""Test a model of another package: an entry point offers it, and it is trained, exported and scored
like any other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from errors import refuses
from recipes import prepared, tiny
from stratarec import Scorer
from stratarec.errors import ConfigError
from stratarec.models import registry
from stratarec.recipe import Recipe
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(__file__).parent / "package"
DOCS = Path(__file__).parents[2] / "docs"


def install(target: Path, name: str, offers: dict[str, str], code: str) -> None:
    """Write the files that an installer leaves for a package with one module."""
    about = target / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{kind} = {place}\n" for kind, place in offers.items())
    (about / "entry_points.txt").write_text(f"[stratarec.models]\n{lines}")
    (target / f"{next(iter(offers.values())).partition(':')[0]}.py").write_text(code)


def install_example(target: Path) -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    code = (PACKAGE / "stratarec_nfm.py").read_text()
    install(target, project["name"], project["entry-points"]["stratarec.models"], code)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that packages are imported from."""
    folder, modules = tmp_path / "site", set(sys.modules)
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    registry._offers.cache_clear()
    yield folder
    monkeypatch.undo()
    registry._offers.cache_clear()
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]


def content(root: Path, **model: Any) -> dict[str, Any]:
    config = tiny(root, epochs=1, max_steps=20, eval_every=0)
    return config | {"model": {"kind": "nfm", "embedding_dim": 4, "deep_mlp": [8], **model}}


def test_the_documentation_shows_the_package() -> None:
    code = (PACKAGE / "stratarec_nfm.py").read_text()
    assert f"```python\n{code}```" in (DOCS / "how-to" / "own-model.md").read_text()
    assert len(code.splitlines()) <= 45


@pytest.mark.slow
def test_a_model_of_a_package_is_trained_by_the_command_line_and_exported(
    site: Path, tmp_path: Path
) -> None:
    install_example(site)
    config = content(tmp_path, dropout=0.1)
    prepared(Recipe.from_dict(config).data)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(config))
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "stratarec", "train", "r.yaml"],
        cwd=tmp_path,
        check=True,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
    )
    with open_run(tmp_path / "run") as trained:
        assert type(trained.model.network.score).__name__ == "NFMScore"
        assert trained.recipe.to_dict()["model"]["deep_mlp"] == [8]
        export(trained, tmp_path / "export")
    scorer = Scorer.open(tmp_path / "export")
    columns = scorer.manifest.columns
    frame = {feature.name: [1, 2] for feature in (*columns.dense, *columns.sparse)}
    assert scorer.score(frame).shape == (2,)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("broken", "lame lame:Model ValueError"),
        ("absent", "empty empty:Absent AttributeError"),
        ("number", "number number:Model Score"),
        ("other", "nfm"),
        ("twice", "one two"),
        ("dlrm", "StrataRec shadow"),
    ],
)
def test_packages_that_offer_no_model_are_refused(
    site: Path, tmp_path: Path, kind: str, message: str
) -> None:
    install_example(site)
    install(site, "lame", {"broken": "lame:Model"}, 'raise ValueError("no luck")\n')
    install(site, "empty", {"absent": "empty:Absent"}, "")
    install(site, "number", {"number": "number:Model"}, "Model = 3\n")
    install(site, "alias", {"other": "alias:NFMScore"}, "from stratarec_nfm import NFMScore\n")
    install(site, "one", {"twice": "one:NFMScore"}, "from stratarec_nfm import NFMScore\n")
    install(site, "two", {"twice": "two:NFMScore"}, "from stratarec_nfm import NFMScore\n")
    install(site, "shadow", {"dlrm": "shadow:NFMScore"}, "from stratarec_nfm import NFMScore\n")
    with refuses(ConfigError, f"r.yaml model.kind {kind} {message}"):
        Recipe.from_dict(content(tmp_path, kind=kind), "r.yaml")
    # Recipes with another model are not affected.
    Recipe.from_dict(content(tmp_path, kind="dcnv2"))
