"""Hash of the source code that a benchmark measures: the `stratarec` modules that it imports, also
indirectly.

Comments, docstrings and layout do not change the hash. Imports within functions are ignored; most
of them belong to the command line and to reports.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from xxhash import xxh3_64_hexdigest

ROOT = Path(__file__).parents[1]


@cache
def source_hash(benchmark: str, root: Path = ROOT) -> str:
    """Return the hash of the `stratarec` modules that a module of `benchmarks` imports."""
    texts, pending = {}, [benchmark]
    while pending:
        name = pending.pop()
        path = _file(name, root)
        if path is None or name in texts:
            continue
        texts[name] = path.read_text()
        pending += _imported(texts[name])
    lines = [
        line
        for name in sorted(texts)
        if name.startswith("stratarec")
        for line in (name, _code(texts[name]))
    ]
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
    """Return the names imported when a module is loaded, which may be modules, and their parent
    packages.
    """
    names, pending = set(), list[ast.AST](ast.parse(text).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.If | ast.Try | ast.With) and "TYPE_CHECKING" not in ast.dump(node)[:60]:
            pending += ast.iter_child_nodes(node)
    parts = [name.split(".") for name in names if name.startswith(("stratarec", "benchmarks"))]
    return frozenset(".".join(each[:size]) for each in parts for size in range(1, len(each) + 1))


@cache
def _code(text: str) -> str:
    return ast.unparse(_Bare().visit(ast.parse(text)))


class _Bare(ast.NodeTransformer):
    """Removes docstrings, also those of fields."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node
