"""Imports point one way, and every module opens by saying what it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import stratarec

ROOT = Path(stratarec.__file__).parent

# Rooms from the front door down: a module may import from its own room and from rooms below it, never from above.
ROOMS = [
    ("testing",),
    ("__main__",),
    ("cli", "cli.main"),
    (
        "cli.check_command",
        "cli.compare_command",
        "cli.evaluate_command",
        "cli.export_command",
        "cli.init_command",
        "cli.plan_command",
        "cli.predict_command",
        "cli.prepare_command",
        "cli.profile_command",
        "cli.train_command",
        "cli.tune_command",
    ),
    ("cli.arguments", "cli.check", "cli.init", "cli.tune"),
    ("training",),
    ("recipe",),
    ("training.config",),
    ("training.checkpoint", "training.dense"),
    ("training.state",),
    ("planning",),
    ("serving",),
    ("models",),
    ("reporting",),
    ("profiling", "hot"),
    ("distributed",),
    ("cluster",),
    ("embedding.module", "embedding.torchrec", "embedding"),
    ("embedding.prefetch",),
    ("embedding.engine",),
    ("embedding.prepared", "embedding.validation", "embedding.saving"),
    ("embedding.taking",),
    ("embedding.manifest",),
    ("embedding.homes",),
    ("embedding.cached", "embedding.resident"),
    ("embedding.tables",),
    ("embedding.cache",),
    ("embedding.health",),
    ("embedding.slots",),
    ("embedding.stores",),
    ("embedding.tiers",),
    ("embedding.config",),
    ("embedding.codecs",),
    ("embedding.rows",),
    ("embedding.course",),
    ("embedding.optimizers",),
    ("embedding.schedules",),
    ("data",),
    ("batch",),
    ("inverse",),
    ("jagged",),
    ("kernels",),
    ("tensors",),
    ("hashes", "replacing"),
    ("holding",),
    ("artifacts", "ownership"),
    ("checks", "files", "finite", "progress", "sizes", "comparing", "explaining", "limited_yaml"),
    ("naming", "opening"),
    ("errors",),
]


def rank(module: str) -> int:
    """Index of the room of `module`, the longest matching name winning."""
    matches = [
        (len(name), index)
        for index, names in enumerate(ROOMS)
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    if not matches:
        raise AssertionError(f"stratarec.{module} is in no room: add it to ROOMS")
    return max(matches)[1]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(tree: ast.AST) -> set[str]:
    """Modules of the project that `tree` imports when it is loaded or called, type checking aside."""
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("stratarec."):
            found.add(node.module.removeprefix("stratarec."))
        elif isinstance(node, ast.Import):
            found.update(
                alias.name.removeprefix("stratarec.") for alias in node.names if alias.name.startswith("stratarec.")
            )
    return found


MODULES = sorted(path for path in ROOT.rglob("*.py") if module_name(path))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    module = module_name(path)
    above = [name for name in imports(ast.parse(path.read_text())) if rank(name) < rank(module)]
    assert not above, f"{module} imports {above}, which stand above it"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path.name} has no docstring"


def test_kernels_and_errors_import_nothing_of_the_project_above_them() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        strangers = {
            name for name in imports(ast.parse(path.read_text())) if not name.startswith(("kernels", "errors"))
        }
        assert not strangers, f"{path} imports {strangers}"


# Where tensors become arrays: kernels, which are chosen by device, and what makes or reads tensors of the host.
HOST = {
    "data": "reads files",
    "profiling": "reads batches of the loader",
    "embedding": "rows, ids and slots of the host, which its kernels are for (`SlotMemory` is the seam)",
    "distributed": "what travels, which gloo takes from the host",
    "serving.tables": "features of raw columns, tables in mapped files",
}


def test_nothing_takes_a_tensor_for_an_array_of_the_host_that_may_lie_elsewhere() -> None:
    """Other modules say so: ``.cpu().numpy()``."""
    for path in MODULES:
        module = module_name(path)
        if module.startswith("kernels") or any(module == name or module.startswith(f"{name}.") for name in HOST):
            continue
        calls = [
            node.func.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "numpy"
        ]
        bare = [ast.unparse(given) for given in calls if ".cpu()" not in ast.unparse(given)]
        assert not bare, f"{module} calls .numpy() on {bare}"


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def test_faces_of_kernels_take_eight_arguments_at_most() -> None:
    faces = [*(ROOT / "kernels").glob("*/__init__.py"), *(ROOT / "kernels").glob("*.py")]
    assert len(faces) > 20
    for path in faces:
        for found in functions(path):
            count = len(found.args.posonlyargs) + len(found.args.args) + len(found.args.kwonlyargs)
            assert count <= 8, f"{module_name(path)}.{found.name} takes {count} arguments: bundle some"


def test_modules_stay_small() -> None:
    assert max(len(path.read_text().splitlines()) for path in MODULES) <= 600


def test_benchmarks_import_one_another_in_no_circle() -> None:
    folder = ROOT.parents[1] / "benchmarks"
    if not folder.is_dir():
        pytest.skip("an installed package has no benchmarks")
    graph = {
        path.stem: {
            node.module.removeprefix("benchmarks.")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("benchmarks.")
        }
        for path in folder.glob("*.py")
    }
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {name for name, needs in graph.items() if name not in done and not (needs & graph.keys()) - done}
        assert ready, f"a circle among {sorted(graph.keys() - done)}"
        done |= ready
