"""Test packages and their layers, the direction of imports, and limits of sizes.

Only maxima are limited, because limits of means lead to modules that contain little except a
header.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import stratarec

ROOT = Path(stratarec.__file__).parent

# The layers, from the top. A package imports only from itself and from lower layers.
LAYERS = (
    ("__main__",),
    ("estimator", "testing"),
    ("cli",),
    ("training",),
    ("recipe",),
    ("planning",),
    ("distributed", "serving", "reporting"),
    ("models", "hot"),
    ("data",),
    ("embedding",),
    ("batch",),
    ("kernels",),
    ("io", "config", "progress"),
    ("registry",),
    ("errors",),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
LOOSE = {"__init__.py", "__main__.py", "errors.py", "progress.py", "registry.py"}
"""Modules that belong to no package."""
MODULE_LINES, FILES, PARAMETERS = 800, 16, 10
"""Maximum lines of a module outside `kernels`, files of a folder, and parameters of a function."""
BUDGETS = {
    "__main__": 6,
    "estimator": 580,
    "cli": 6_180,
    "training": 9_135,
    "recipe": 385,
    "planning": 2_515,
    "distributed": 2_230,
    "serving": 1_450,
    "reporting": 2_125,
    "models": 2_955,
    "hot": 515,
    "data": 9_000,
    "embedding": 5_725,
    "batch": 355,
    "kernels": 9_455,
    "io": 1_045,
    "config": 410,
    "progress": 50,
    "registry": 30,
    "errors": 30,
    "testing": 185,
}
"""Maximum lines of code of each package; blank lines, docstrings and comments are not counted.

Each is 3 % above the size at which it was last set, so that a small repair needs no change here.
"""
MODULES = sorted(ROOT.rglob("*.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the parsed modules."""
    return {path: ast.parse(path.read_text()) for path in MODULES}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


INNER = [path for path in MODULES if module_name(path)]
"""All modules except `stratarec/__init__.py`, which lists the public names."""


NAMES = {f"stratarec.{module_name(path)}" for path in INNER}


def package(module: str) -> str:
    return module.partition(".")[0]


def imports(tree: ast.AST) -> set[str]:
    """Return the modules of the project that a module imports: at its top, inside functions, and
    for types only.
    """
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from stratarec.kernels import cache` names a module too.
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            names.update(name if name in NAMES else node.module for name in inner)
    return {
        name.removeprefix("stratarec").removeprefix(".")
        for name in names
        if name.split(".")[0] == "stratarec"
    }


def circle(graph: Mapping[str, set[str]]) -> str:
    """Return a circle of imports, each module before one that it imports; empty if there is
    none.
    """
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def calls(tree: ast.AST, name: str) -> bool:
    result = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(each, ast.Name) and each.id == name for each in result)


def test_text_is_written_to_a_terminal_only_where_control_characters_are_escaped() -> None:
    """Values of logs and names in untrusted files must be escaped before they are printed."""
    results = {
        name: {module_name(path) for path, tree in trees().items() if calls(tree, name)}
        for name in PRINTING
    }
    assert results == PRINTING


PRINTING = {
    "print": {"cli.arguments", "cli.run_command", "reporting.progress"},
    "Console": {"reporting.progress"},
    "_Console": {"reporting.terminal_tables"},
}


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def count_code_lines(text: str, tree: ast.AST) -> int:
    """Count the lines of a module that contain code. Docstrings and texts under fields are
    documentation.
    """
    lines: set[int] = set()
    spaces = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in spaces:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def test_packages_keep_within_their_budgets_of_code() -> None:
    sizes: Counter[str] = Counter()
    for path in INNER:
        sizes[package(module_name(path))] += count_code_lines(path.read_text(), trees()[path])
    over = {name: (lines, BUDGETS[name]) for name, lines in sizes.items() if lines > BUDGETS[name]}
    assert not over, (
        "packages with more lines of code than their budget; give a reason in the commit that raises one"
    )


def test_every_module_is_in_a_package() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == LOOSE
    packages = {path.relative_to(ROOT).parts[0] for path in MODULES if path.parent != ROOT}
    assert packages == LAYER.keys() - {Path(name).stem for name in LOOSE}


def test_imports_point_down() -> None:
    wrong = {}
    for path in INNER:
        own = package(module_name(path))
        refused = [
            name
            for name in imports(trees()[path])
            if package(name) != own and LAYER[package(name)] <= LAYER[own]
        ]
        if refused:
            wrong[module_name(path)] = refused
    assert not wrong, "imports from other packages of the same layer, or from a higher layer"


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circle({module_name(path): imports(tree) for path, tree in trees().items()})


def test_kernels_import_only_kernels_registries_and_errors() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        refused = {
            name
            for name in imports(trees()[path])
            if package(name) not in ("kernels", "registry", "errors")
        }
        assert not refused, f"{module_name(path)} imports {refused}"


def test_one_module_imports_private_interfaces_of_numba() -> None:
    """A new version of Numba may move them. Public are `numba` and `numba.extending`."""
    named = {
        module_name(path): {
            node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
        }
        | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        for path, tree in trees().items()
    }
    private = {
        module
        for module, names in named.items()
        if any(name.startswith("numba.") and name != "numba.extending" for name in names)
    }
    assert private == {"kernels.runtime.numba_private"}


def test_modules_have_docstrings() -> None:
    silent = [
        module_name(path)
        for path in MODULES
        if path.read_text().strip() and not ast.get_docstring(trees()[path])
    ]
    assert not silent, "modules without a docstring"


def test_modules_folders_and_parameter_lists_stay_small() -> None:
    long = {
        module_name(path): lines
        for path in MODULES
        if path.relative_to(ROOT).parts[0] != "kernels"
        and (lines := len(path.read_text().splitlines())) > MODULE_LINES
    }
    assert not long, f"over {MODULE_LINES} lines"
    folders = Counter(path.parent for path in MODULES)
    full = {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > FILES}
    assert not full, f"over {FILES} files"
    many = {
        f"{module_name(path)}.{function.name}": count
        for path in MODULES
        for function in functions(trees()[path])
        if (count := parameters(function)) > PARAMETERS and not is_triton(function)
    }
    assert not many, f"over {PARAMETERS} parameters; combine some of them in a dataclass"


def is_triton(function: ast.FunctionDef) -> bool:
    """Return whether a function is a Triton kernel, whose addresses, sizes and constants are
    separate parameters.
    """
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def parameters(function: ast.FunctionDef) -> int:
    names = [
        each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    ]
    return len(names) - (names[:1] in (["self"], ["cls"]))


# Modules whose tensors are in host memory, and the reason. Kernels are selected by device and need
# no entry.
HOST = {
    "data": "reads files into host memory",
    "embedding": "ids are in host memory, and so are rows except in `slots.device`",
    "distributed": "gloo sends and receives host memory",
    "hot": "reads row groups into host memory",
    "serving.exported_model": "raw columns, and tables in mapped files",
}


def test_only_modules_for_host_tensors_use_numpy_without_cpu() -> None:
    """Other modules must write ``.cpu().numpy()``."""
    for path in MODULES:
        module = module_name(path)
        if package(module) == "kernels" or any(
            module == name or module.startswith(f"{name}.") for name in HOST
        ):
            continue
        calls = [
            node.func.value
            for node in ast.walk(trees()[path])
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "numpy"
        ]
        bare = [ast.unparse(given) for given in calls if ".cpu()" not in ast.unparse(given)]
        assert not bare, f"{module} calls .numpy() on {bare}"


def test_benchmarks_have_no_circular_imports() -> None:
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
    assert not circle(graph)
