"""Run the examples in the docstrings of the public names, and test that each public name has one.

The examples run in a temporary directory that has the files of the tutorial, with fewer rows and a
smaller model: the log `clicks.csv`, the recipe `clicks.yaml`, the data set `data/clicks`, the run
`runs/clicks`, its export `exported`, and the delta `exported-today.delta`. An example of a method
may use the names that the example of its class defines.
"""

from __future__ import annotations

import doctest
import inspect
import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import stratarec
from stratarec.data.prepare.prepare import prepare
from stratarec.recipe import Recipe
from stratarec.serving.exported_model import ExportedModel
from stratarec.training.export.export import export
from stratarec.training.export.write_delta import write_delta
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "examples")]
try:
    from generate import public_members
    from make_log import make_log
finally:
    del sys.path[:2]

RECIPE = """
name: clicks
data:
  path: data/clicks
  source:
    kind: csv
    paths: [clicks.csv]
    schema:
      label: clicked
      time: time
      user: user
      dense: [{name: price}]
      sparse: [{name: item}, {name: country}, {name: device}, {name: user}]
  split: {by: time, valid: 12h, test: 12h}
model: {kind: dlrm, embedding_dim: 4, bottom_mlp: [8], top_mlp: [8]}
train: {batch_size: 64, epochs: 1, report: false}
"""


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the files of the tutorial."""
    folder = tmp_path_factory.mktemp("tutorial")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_log(folder, 2400)
        Path("clicks.yaml").write_text(RECIPE)
        recipe = Recipe.load("clicks.yaml")
        dataset = prepare(recipe.data)
        Trainer(recipe, dataset).train()
        before = export_run(recipe.run, "exported")
        later = recipe.with_fields({"train.run": "runs/later", "train.batch_size": 8, "train.max_steps": 1})
        Trainer(later, dataset).train(earlier=recipe.run)
        assert write_delta(
            ExportedModel.open(before), export_run(later.run, "later"), Path("exported-today.delta")
        )
        shutil.rmtree("runs/later")
        shutil.rmtree("later")
    return folder


def export_run(run: Path, name: str) -> Path:
    with open_run(run) as trained:
        return export(trained, Path(name))


def docstrings(name: str) -> dict[str, str]:
    """Return the docstrings of a public name and of its members, by their names."""
    public = getattr(stratarec, name)
    members = {f"{name}.{member}": value for member, value in public_members(public).items()}
    return {place: inspect.getdoc(value) or "" for place, value in {name: public, **members}.items()}


@pytest.mark.parametrize("name", stratarec.__all__)
def test_examples_show_what_their_code_prints(
    name: str, tutorial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numpy", minversion="2.4")  # earlier versions draw another log
    shutil.copytree(tutorial, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    runner, report, names = doctest.DocTestRunner(), io.StringIO(), dict[str, Any]()
    for place, text in docstrings(name).items():
        test = doctest.DocTestParser().get_doctest(text, names, place, None, 0)
        runner.run(test, out=report.write, clear_globs=False)
        names = names or test.globs
    assert not runner.failures, report.getvalue()


@pytest.mark.parametrize("name", stratarec.__all__)
def test_every_public_name_has_an_example(name: str) -> None:
    """Test that a method has its own example, and that a property occurs in an example of its
    class.
    """
    examples = {
        place: doctest.DocTestParser().get_examples(text) for place, text in docstrings(name).items()
    }
    code = "".join(each.source for parts in examples.values() for each in parts)
    members = public_members(getattr(stratarec, name))
    properties = {f"{name}.{member}" for member, value in members.items() if isinstance(value, property)}
    missing = [place for place in properties if f".{place.partition('.')[2]}" not in code]
    assert not missing + [
        place for place, parts in examples.items() if place not in properties and not parts
    ]
