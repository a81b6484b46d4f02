"""Compare ONNX Runtime with torch for every model that ONNX can represent. Torch computes the other
models.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import numpy as np
import polars as pl
import pytest
import torch
from serving.test_scorer import FIELDS, MODELS, SPARSE, content, write_log

import stratarec
from errors import missing, refuses
from recipes import prepared, tiny
from stratarec import Scorer
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.models import Network, build_network
from stratarec.models.base import build_tables
from stratarec.models.build import initialize
from stratarec.models.calibration import Calibration, LogitMap
from stratarec.recipe import Recipe
from stratarec.serving import onnx_graph, onnx_network
from stratarec.serving.onnx_graph import Unsupported, to_onnx
from stratarec.training.export import export as export_module
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

runtime = pytest.importorskip("onnxruntime")
POOLINGS = ("mean", "target_attention", "transformer")
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{name}-{pooling}": model | {"history": {"pooling": pooling}}
        for name, model in MODELS.items() for pooling in POOLINGS
    },
    **{name: {"kind": name, "embedding_dim": 4, **model} for name, model in FIELDS.items()},
    "ensemble": {
        "kind": "ensemble", "members": 5, "embedding_dim": 3, "member_mlp": [8, 6],
        "history": {"pooling": "target_attention"},
    },
    "widths": MODELS["dlrm"] | {"embedding_dims": {"city": 2, "item": 3}, "history": {"pooling": "target_attention"}},
    "shared_bottom": MODELS["dcnv2"],
    "mmoe": MODELS["dlrm"] | {"heads": {"kind": "mmoe", "experts": 3}},
    "towers": MODELS["dlrm"] | {
        "towers": {"plan": [["item", "twin", "history"], ["city", "tags", "words", "left", "right", "seen"]]}
    },
}  # fmt: skip
SEVERAL = ("shared_bottom", "mmoe")
"""Cases with several labels."""
CURVE = LogitMap(knots=(-1.0, 0.0, 1.0), values=(-2.0, 0.1, 1.0), slopes=(0.5, 2.0))


def make_network(name: str, tmp_path: Path) -> tuple[Network, dict[str, int]]:
    """Return a network with random weights and the widths of its inputs."""
    config = tiny(tmp_path)
    schema = {
        "time": "time",
        "user": "who",
        "label": "label",
        "dense": [{"name": "price"}, {"name": "age", "transform": "none"}],
        "sparse": SPARSE,
    }
    if name in SEVERAL:
        schema["labels"] = [schema.pop("label"), "bought"]
    config["data"]["source"] = {
        "kind": "parquet",
        "paths": [str(tmp_path / "log.parquet")],
        "schema": schema,
    }
    recipe = Recipe.from_dict(config | {"model": CASES[name]})
    columns: Schema = recipe.data.source.schema
    tables = build_tables(recipe.model, columns, dict.fromkeys(columns.vocabularies(), 50))
    network = build_network(
        recipe.model, columns, tuple(key for table in tables for key in table.feature_names)
    )
    initialize(network, 3)
    for edges in (buffer for key, buffer in network.named_buffers() if key.endswith("edges")):
        edges.copy_(torch.linspace(-2, 2, edges.shape[1]).expand_as(edges))
    widths = {feature: table.embedding_dim for table in tables for feature in table.sequence_features}
    widths[""] = sum(table.embedding_dim * len(table.feature_names) for table in tables)
    return network.eval().requires_grad_(False), widths


def inputs(network: Network, widths: Mapping[str, int], rows: int, length: int) -> dict[str, torch.Tensor]:
    given = {"dense": torch.randn(rows, 2), "pooled": torch.randn(rows, widths[""])}
    for number, name in enumerate(network.sequence_keys):
        given[f"rows_{number}"] = torch.randn(rows, length + number, widths[name])
        given[f"mask_{number}"] = torch.arange(length + number) < torch.randint(0, length + 1, (rows, 1))
    return given


@pytest.mark.parametrize("is_calibrated", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_graphs_compute_the_same_as_the_network(tmp_path: Path, name: str, is_calibrated: bool) -> None:
    torch.manual_seed(1)
    network, widths = make_network(name, tmp_path)
    if is_calibrated:
        network.calibration = Calibration([CURVE] * len(network.labels))
    content = to_onnx(network, inputs(network, widths, 2, 3), inputs(network, widths, 5, 7))
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for rows, length in ((1, 1), (1, 4), (3, 2), (64, 6)):
        given = inputs(network, widths, rows, length)
        actual = session.run(None, {key: value.numpy() for key, value in given.items()})[0]
        expected = network.padded(*given.values()).numpy()
        assert expected.shape == ((rows, 2) if name in SEVERAL else (rows,))
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        assert rows == 1 or len(np.unique(expected)) > 1


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an export with several labels and a calibration, and an export of a network in bf16."""
    root = tmp_path_factory.mktemp("onnx")
    for precision in ("float32", "bf16"):
        config = tiny(
            root, epochs=1, max_steps=20, eval_every=0, precision=precision, run=str(root / precision)
        )
        recipe = Recipe.from_dict(config)
        Trainer(recipe, prepared(recipe.data)).train()
        with open_run(root / precision) as trained:
            export(trained, root / f"export-{precision}", onnx=precision == "float32")
    return root


def frame(scorer: Scorer, rows: int) -> dict[str, list[Any]]:
    columns, draws = scorer.manifest.columns, np.random.default_rng(rows)
    return {
        feature.name: draws.integers(0, 90, rows).tolist() for feature in (*columns.dense, *columns.sparse)
    }


def test_scores_match_torch(exports: Path) -> None:
    scorer = Scorer.open(exports / "export-float32")
    other = Scorer.open(exports / "export-float32", runtime="torch")
    assert (scorer.runtime, other.runtime) == ("onnxruntime", "torch")
    assert "onnxruntime" in scorer._repr_html_()
    for rows in (1, 2, 100, 1500, 9000):
        given = frame(scorer, rows)
        np.testing.assert_allclose(scorer.score(given), other.score(given), rtol=0, atol=1e-6)


def test_torch_computes_histories_of_very_different_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime would pad all histories to the longest one."""
    write_log(tmp_path / "log.parquet", 300)
    model = MODELS["dlrm"] | {"history": {"pooling": "target_attention"}}
    config = content(tmp_path, model, "none", max_steps=5)
    config["data"]["source"]["schema"]["sparse"] = [*SPARSE[:-1], SPARSE[-1] | {"max_length": 100}]
    recipe = Recipe.from_dict(config)
    Trainer(recipe, prepare(recipe.data)).train()
    with open_run(tmp_path / "run") as trained:
        export(trained, tmp_path / "export")
    scorers = [Scorer.open(tmp_path / "export", runtime=name) for name in ("onnxruntime", "torch")]  # type: ignore[arg-type]
    log = pl.read_parquet(tmp_path / "log.parquet")[:50]
    calls: list[int] = []
    run = onnx_network.OnnxNetwork._run
    monkeypatch.setattr(onnx_network.OnnxNetwork, "_run", lambda *args: (calls.append(1), run(*args))[1])
    for longest, expected in ((4, 1), (90, 1)):
        histories = [list(range(longest if row == 7 else row % 3)) for row in range(50)]
        given = log.with_columns(pl.Series("history", histories, dtype=pl.List(pl.Int64)))
        one, other = (scorer.score(given) for scorer in scorers)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        assert len(calls) == expected


def test_several_threads_use_one_scorer(exports: Path) -> None:
    scorer = Scorer.open(exports / "export-float32", runtime="onnxruntime")
    frames = [frame(scorer, rows) for rows in range(1, 40)]
    expected = [scorer.score(given) for given in frames]
    torch.set_num_threads(1)
    with ThreadPoolExecutor(8) as pool:
        for one, other in zip(pool.map(scorer.score, frames * 5), expected * 5, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_torch_computes_networks_that_onnx_cannot_represent(
    exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Scorer.open(exports / "export-bf16").runtime == "torch"
    with refuses(ConfigError, "runtime bf16"):
        Scorer.open(exports / "export-bf16", runtime="onnxruntime")
    with refuses(ConfigError, "runtime 'tf'"):
        Scorer.open(exports / "export-float32", runtime="tf")  # type: ignore[arg-type]
    # The model of a plugin calls a function that the conversion does not support.
    known = {name: each for name, each in onnx_graph._OPERATIONS.items() if name != "linear"}
    with monkeypatch.context() as patch:
        patch.setattr(onnx_graph, "_OPERATIONS", known)
        assert Scorer.open(exports / "export-float32").runtime == "torch"
        with refuses(ConfigError, "runtime linear"):
            Scorer.open(exports / "export-float32", runtime="onnxruntime")
    # The graph computes another function.
    with monkeypatch.context() as patch:
        patch.setitem(known, "linear", onnx_graph._linear)
        patch.setitem(known, "relu", onnx_graph._OPERATIONS["sigmoid"])
        patch.setattr(onnx_graph, "_OPERATIONS", known)
        with refuses(ConfigError, "runtime differ"):
            Scorer.open(exports / "export-float32", runtime="onnxruntime")
    with monkeypatch.context() as patch:
        patch.setattr(onnx_network, "to_onnx", lambda *_: b"nothing")
        with refuses(ConfigError, "runtime ONNX"):
            Scorer.open(exports / "export-float32", runtime="onnxruntime")


def test_an_export_refuses_onnx_before_and_after_tables_are_written(
    exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(exports / "bf16") as trained, monkeypatch.context() as patch:
        patch.setattr(export_module, "TableWriter", None)
        with refuses(ConfigError, "--onnx bf16 float32"):
            export(trained, tmp_path / "out", onnx=True)
    with open_run(exports / "float32") as trained, monkeypatch.context() as patch:
        patch.setattr(onnx_graph, "_OPERATIONS", {})
        with refuses(ConfigError, "--onnx torch's function"):
            export(trained, tmp_path / "out", onnx=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        ("sys.modules['onnx'] = None", "stratarec[onnx]"),
        ("sys.modules['onnxruntime'] = None", "stratarec[onnx]"),
        ("sys.path.insert(0, sys.argv[2])", "load _ARRAY_API"),
    ],
)
def test_torch_computes_the_network_without_a_runtime_that_loads(
    exports: Path, tmp_path: Path, break_it: str, message: str
) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise AttributeError('_ARRAY_API not found')")
    script = (
        "import sys\n"
        f"{break_it}\n"
        "from stratarec import Scorer\n"
        "from stratarec.errors import ConfigError\n"
        "print(Scorer.open(sys.argv[1]).runtime)\n"
        "try:\n"
        "    Scorer.open(sys.argv[1], runtime='onnxruntime')\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    chosen, error = forked.python(
        script, [str(exports / "export-float32"), str(tmp_path)]
    ).stdout.splitlines()
    assert chosen == "torch"
    assert not missing(message, error)


@pytest.mark.parametrize("name", ["onnxruntime", "torch"])
def test_a_child_that_is_forked_after_scoring_scores(exports: Path, name: str) -> None:
    """The child has none of the threads with which its parent scored, and would wait for them."""
    script = (
        "import os, sys, time, torch\n"
        "from stratarec import Scorer\n"
        "torch.set_num_threads(2)\n"
        "scorer = Scorer.open(sys.argv[1], runtime=sys.argv[2])\n"
        "columns = scorer.manifest.columns\n"
        "rows = {feature.name: list(range(4000)) for feature in (*columns.dense, *columns.sparse)}\n"
        "before = scorer.score(rows)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(int(abs(scorer.score(rows) - before).max() > 1e-6))\n"
        "end = time.monotonic() + 60\n"
        "while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:\n"
        "    time.sleep(0.01)\n"
        "if not ended[0]:\n"
        "    os.kill(child, 9)\n"
        "print(ended[0] == child, ended[1])\n"
    )
    result = forked.python(script, [str(exports / "export-float32"), name])
    assert result.stdout.split() == ["True", "0"], result.stderr


@pytest.mark.parametrize("set_by_user", [False, True])
def test_the_runtime_does_not_report_to_its_maker(exports: Path, tmp_path: Path, set_by_user: bool) -> None:
    """Its telemetry writes the identifier of the device into the home directory."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    # It does not report in tests that it recognizes.
    own = ("CI", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME", *stratarec._SILENT)
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    if set_by_user:
        environment["ORT_DISABLE_TELEMETRY"] = "0"
    session = (
        "from stratarec.serving import onnx_network\n"
        "onnx_network.load_runtime('float32').InferenceSession(open(sys.argv[1], 'rb').read())\n"
    )
    script = (
        "import os, sys; import stratarec\n"
        + ("" if set_by_user else session)
        + "print(*(os.environ[name] for name in stratarec._SILENT))"
    )
    command = [sys.executable, "-c", script, str(exports / "export-float32" / "network.onnx")]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert output[1:] == ["true", "false", "1"]
    assert output[0] == ("0" if set_by_user else "1")
    files = [path.name for path in tmp_path.rglob("*") if path.name == ".ses" or "onnxruntime" in path.name]
    assert set_by_user or not files


class Branching(Network):
    """A network whose operations depend on the batch size."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def padded(self, dense: torch.Tensor, pooled: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.relu(dense.sum(1)) if len(dense) > 3 else dense.sum(1)


class Viewed(Branching):
    def padded(self, dense: torch.Tensor, pooled: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(dense)) * dense[:, 0]


@pytest.mark.parametrize("kind", [Branching, Viewed])
def test_networks_that_depend_on_the_batch_size_are_refused(kind: type[Network]) -> None:
    one, other = ({"dense": torch.randn(rows, 2), "pooled": torch.randn(rows, 2)} for rows in (2, 5))
    with pytest.raises(Unsupported):
        to_onnx(kind(), one, other)
