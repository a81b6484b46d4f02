"""What code a figure is of: a hash of the modules of `stratarec` that a benchmark imports, and those that they import.

Comments, docstrings and layout do not count, nor do modules that are imported within functions: most of those are of
the command line and of reports.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from xxhash import xxh3_64_hexdigest

ROOT = Path(__file__).parents[1]


@cache
def source_hash(benchmark: str, root: Path = ROOT) -> str:
    """Of the modules that a module of `benchmarks` measures."""
    found, left = {}, [benchmark]
    while left:
        name = left.pop()
        path = _file(name, root)
        if path is None or name in found:
            continue
        found[name] = path.read_text()
        left += _imported(found[name])
    lines = [line for name in sorted(found) if name.startswith("stratarec") for line in (name, _code(found[name]))]
    return xxh3_64_hexdigest("\n".join(lines).encode())


def _file(name: str, root: Path) -> Path | None:
    for base in (root / "src", root):
        path = base.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@cache
def _imported(text: str) -> frozenset[str]:
    """Names that may be modules, and the packages that they are in: of what runs when a module is loaded."""
    found, left = set(), list[ast.AST](ast.parse(text).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.If | ast.Try | ast.With) and "TYPE_CHECKING" not in ast.dump(node)[:60]:
            left += ast.iter_child_nodes(node)
    parts = [name.split(".") for name in found if name.startswith(("stratarec", "benchmarks"))]
    return frozenset(".".join(each[:size]) for each in parts for size in range(1, len(each) + 1))


@cache
def _code(text: str) -> str:
    return ast.unparse(_Bare().visit(ast.parse(text)))


class _Bare(ast.NodeTransformer):
    """Leaves out strings that are nobody's value: docstrings, of fields too."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node
