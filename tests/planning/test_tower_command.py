"""Test `stratarec plan --towers` and `--hosts` on a small data set: output, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from errors import check_refusal, missing
from recipes import prepared, tiny
from stratarec.cli import main
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a data set, its recipe, and a run of a few steps."""
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
def short(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Keep measurements for all tests of this file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


def plan(home: Path, *arguments: str) -> int:
    return main(["plan", str(home / "recipe.yaml"), "-q", *arguments])


def test_towers_are_printed_written_and_loaded(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, report = tmp_path / "recipe.yaml", tmp_path / "towers.html"
    before = (home / "recipe.yaml").read_text()
    path.write_text(before)
    options = ["--towers", "3", "--steps", "2", "--write", "--report", str(report), "-q"]
    assert main(["plan", str(path), *options]) == 0
    out = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert not missing("tower 2", out)
    assert not missing("no structure 128 samples", out)
    assert not missing("1,000,000 AUC without towers", out)
    assert path.read_text() == before
    recipe = Recipe.load(path, ["model.towers.plan=recipe.towers.yaml"])
    assert recipe.model.towers is not None
    assert len(recipe.model.towers.plan) == 3
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    text = report.read_text()
    assert text.count("<svg") == 1
    assert "towers of features" in text
    # For a recipe that names the file, the file is replaced, and its content does not matter.
    content = yaml.safe_load(before)
    content["model"]["towers"] = {"plan": "recipe.towers.yaml"}
    path.write_text(yaml.safe_dump(content))
    written = (tmp_path / "recipe.towers.yaml").read_text()
    assert main(["plan", str(path), *options[:-3], "-q"]) == 0
    assert (tmp_path / "recipe.towers.yaml").read_text() == written


def test_steps_on_a_cluster_are_a_table_with_its_assumptions(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        "even traffic",
        "towers would ",
    ):
        assert text in out
    assert plan(home, "--hosts", "32x1", "--network", "100Mbit") == 0
    assert not missing("towers 32 26", capsys.readouterr().out)
    assert plan(home, "--hosts", "4x2", "--network", "100Mbit", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["towers"].startswith("towers would pay: a step ")
    steps = content["steps"]
    flat = next(row for row in steps if (row["exchange"], row["wire"]) == ("flat", "fp32"))
    towers = next(row for row in steps if row["ratio"] == 4 and row["wire"] == "fp32")
    assert towers["between"] < flat["between"]
    assert flat["step"] == pytest.approx(
        sum(flat[part] for part in ("compute", "reduction", "inside", "between"))
    )


def test_steps_with_the_network_on_a_gpu_say_where_time_goes(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert plan(home, "--device", "h100", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    cpu, hybrid, gpu = content["steps"]
    assert [step["rows in"] for step in content["steps"]] == ["host memory", "host memory", "GPU memory"]
    parts = ("look up, update", "fetch rows", "up", "network", "down")
    for step in content["steps"]:
        assert step["step"] == pytest.approx(sum(step[part] for part in parts))
    assert cpu["look up, update"] == pytest.approx(hybrid["look up, update"])
    assert gpu["look up, update"] > 0
    plan_of_rows = content["plan"]
    assert {table["tier"] for table in plan_of_rows["tables"]} == {"level0"}
    # All memory of the card except the network, a batch and a reserve.
    assert 0.9 * 80e9 < plan_of_rows["budgets"]["hbm"] < 80e9 - (512 << 20)
    assert plan_of_rows["predicted"]["bytes"]["dram"] == 0
    # 128 samples of 26 vectors and 13 numbers over 80 % of 64 GB/s, and the gradients of the
    # vectors back.
    width = Recipe.load(home / "recipe.yaml").model.vector_width
    assert hybrid["up"] == pytest.approx(4 * 128 * (26 * width + 13) / 51.2e9)
    assert hybrid["down"] == pytest.approx(4 * 128 * 26 * width / 51.2e9)
    assert cpu["up"] == cpu["down"] == gpu["down"] == 0
    assert any("nothing was measured" in line for line in content["said"])
    file = tmp_path / "plan.json"
    wide = ("model.embedding_dim=64", "model.bottom_mlp=[64]", "memory.hbm=1520KiB")
    assert plan(home, "--device", "h100", *wide, "-o", str(file)) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert not missing("samples/s GPU memory twice", output)
    loaded = Plan.load(file)
    assert (loaded.level0, loaded.budgets["hbm"]) == ("hbm", 1520 << 10)
    assert any(placed.tier == "dram" for placed in loaded.tables)


def test_rows_in_host_memory_need_no_plan_of_gpu_memory(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (("--device", "a100", "memory.hbm=0"), ("--device", "t4")):  # too old for the kernels
        assert plan(home, *options, "--json") == 0
        content = json.loads(capsys.readouterr().out)
        assert content["plan"] is None
        assert len(content["steps"]) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (["--device", "l4", "memory.hbm=23GiB"], "memory.hbm 23.0 22.4 128"),
        (["--device", "l4", "train.batch_size=200000000"], "train.batch_size 200,000,000 22.4"),
        (["memory.hbm=1GiB"], "memory.hbm 1.0 train.device cpu cuda"),
        (["train.device=cuda"], "train.device cuda --device h100"),
    ],
)
def test_missing_gpu_memory_is_one_line(
    fields: list[str], words: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(home, *fields) == 2
    check_refusal(words, capsys.readouterr().err)
