"""What code a figure is of: a hash of the modules of `stratarec` that a benchmark imports, and those that they import.

Comments and empty lines don't count. A module that is imported within a function does, as do packages on the way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    lines = [line for name in sorted(found) if name.startswith("stratarec") for line in (name, *_code(found[name]))]
    return xxh3_64_hexdigest("\n".join(lines).encode())


def _file(name: str, root: Path) -> Path | None:
    for base in (root / "src", root):
        path = base.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _imported(text: str) -> Iterator[str]:
    """Names that may be modules, and the packages that they are in."""
    for node in ast.walk(ast.parse(text)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] in ("stratarec", "benchmarks"):
                yield from (".".join(parts[:size]) for size in range(1, len(parts) + 1))


def _code(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
