"""`stratarec plan --towers` and `--hosts` on a small data set: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from errors import missing
from recipes import prepared, tiny
from stratarec.cli import main
from stratarec.planning import machine
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set, its recipe, and a run of a few steps."""
    root = tmp_path_factory.mktemp("towers")
    content = tiny(root, max_steps=3, epochs=1)
    (root / "recipe.yaml").write_text("# mine\n" + yaml.safe_dump(content))
    recipe = Recipe.from_dict(content)
    Trainer(recipe, prepared(recipe.data)).train()
    other = tiny(root)
    other["data"]["path"], other["data"]["source"]["seed"] = str(root / "other"), 4
    (root / "other.yaml").write_text(yaml.safe_dump(other))
    prepared(Recipe.from_dict(other).data)
    return root


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of our own, and measurements of moments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(machine, "_SECONDS", 0.02)
    monkeypatch.setattr(machine, "_DRAM_BYTES", 16 << 20)


def plan(home: Path, *arguments: str) -> int:
    return main(["plan", str(home / "recipe.yaml"), "-q", *arguments])


def test_towers_are_printed_written_and_loaded(home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, report = tmp_path / "recipe.yaml", tmp_path / "towers.html"
    before = (home / "recipe.yaml").read_text()
    path.write_text(before)
    options = ["--towers", "3", "--steps", "2", "--write", "--report", str(report), "-q"]
    assert main(["plan", str(path), *options]) == 0
    out = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert not missing("tower 2", out)
    assert "in a probe of 2 steps" in " ".join(out.split())
    assert path.read_text() == before
    recipe = Recipe.load(path, ["model.towers.plan=recipe.towers.yaml"])
    assert recipe.model.towers is not None
    assert len(recipe.model.towers.plan) == 3
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    text = report.read_text()
    assert text.count("<svg") == 1
    assert "towers of features" in text
    # Again, of a recipe that names the file: it is replaced, and what it said does not matter.
    content = yaml.safe_load(before)
    content["model"]["towers"] = {"plan": "recipe.towers.yaml"}
    path.write_text(yaml.safe_dump(content))
    written = (tmp_path / "recipe.towers.yaml").read_text()
    assert main(["plan", str(path), *options[:-3], "-q"]) == 0
    assert (tmp_path / "recipe.towers.yaml").read_text() == written


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--towers", "1"], "--towers is 1, expected at least 2"),
        (["--towers", "0"], "--towers is 0, expected at least 2"),
        (["--towers", "27"], "27 towers of 26 sparse features"),
        (["--towers", "2", "--balance", "0.5"], "--balance is 0.5, expected 1 to 1000"),
        (["--towers", "2", "--steps", "0"], "--steps is 0, expected 1"),
        (["--towers", "2", "--from", "nowhere"], "nowhere is no run"),
        (["--towers", "2", "memory.dram=1KiB"], "table 'C3' of C3 takes "),
        (["--towers", "2", "-o", "x.json"], "--output is of a plan of tables"),
        (["--steps", "2"], "--steps is of a plan of towers"),
        (["--network", "1Gbit"], "--network is of a plan of a cluster"),
        (["--hosts", "2x2"], "--hosts needs --network"),
        (["--hosts", "2x2", "--towers", "2"], "ask for one of them"),
        (["--hosts", "2x2", "--network", "1GB"], "--network is '1GB', expected a rate"),
        (["--device", "abacus"], "or name a card of t4"),
        (["--device", "cpu"], "which is what steps are compared with"),
        (["--device", "h100", "-o", "x.json"], "--output is of a plan of tables, and this is one of a device"),
        (["--device", "h100", "--hosts", "2x2", "--network", "1Gbit"], "ask for one of them"),
        (["--hosts", "2x2", "--network", "1Gbit", "--samples", "9"], "start with --hosts fewest"),
        (["--hosts", "fewest", "--network", "1Gbit"], "memory.dram is null, expected the bytes of a host"),
        (
            ["--hosts", "fewest", "--network", "1Gbit", "memory.dram=1KiB"],
            "it is 1.0 KiB) for each of 128 processes; or",
        ),
        (
            ["--hosts", "fewest", "--network", "1Gbit", "memory.dram=1GiB", "--samples", "99999999999"],
            "128 hosts with dram do not train 99,999,999,999 samples a second",
        ),
        (["model.towers={plan: [[x], [y]]}"], "model.towers.plan: the data has no sparse feature 'x'"),
        (["model.towers={plan: [[x], [x]]}"], "'x' is in tower 0 and in tower 1"),
        (["--hosts", "64x8", "--network", "1Gbit"], "train.batch_size is 128, expected at least a sample for each"),
    ],
)
def test_what_cannot_be_is_one_line(
    home: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(home, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("stratarec: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_steps_on_a_cluster_are_a_table_with_what_was_assumed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(home, "--hosts", "4x2", "--network", "100Mbit") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for text in (
        "flat",
        "sptt",
        "int8",
        "fastest, same results",
        "4 towers of ratio",
        "not measured",
        "even loads",
        "towers would ",
    ):
        assert text in out
    assert plan(home, "--hosts", "32x1", "--network", "100Mbit") == 0
    assert not missing("towers 32 26", capsys.readouterr().out)
    assert plan(home, "--hosts", "4x2", "--network", "100Mbit", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["towers"].startswith("towers would pay: a step ")
    steps = found["steps"]
    flat = next(row for row in steps if (row["exchange"], row["wire"]) == ("flat", "fp32"))
    towers = next(row for row in steps if row["ratio"] == 4 and row["wire"] == "fp32")
    assert towers["between"] < flat["between"]
    assert flat["step"] == pytest.approx(sum(flat[part] for part in ("compute", "reduction", "inside", "between")))


def test_steps_with_the_network_on_a_gpu_say_where_time_goes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(home, "--device", "h100", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    cpu, hybrid, whole = found["steps"]
    parts = ("look up, update", "up", "network", "down")
    for step in found["steps"]:
        assert step["step"] == pytest.approx(sum(step[part] for part in parts))
    assert cpu["look up, update"] == hybrid["look up, update"] > whole["look up, update"] > 0
    # 128 samples of 26 vectors and 13 numbers over 80 % of 64 GB/s, and the vectors' gradients back.
    width = Recipe.load(home / "recipe.yaml").model.vector_width
    assert hybrid["up"] == pytest.approx(4 * 128 * (26 * width + 13) / 51.2e9)
    assert hybrid["down"] == pytest.approx(4 * 128 * 26 * width / 51.2e9)
    assert cpu["up"] == cpu["down"] == whole["down"] == 0
    assert "nothing of it was measured" in found["said"][1]
    assert plan(home, "--device", "h100") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "samples/s" in said
    assert "fit its memory" in said
