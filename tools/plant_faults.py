"""Plant the same faults in two source trees and see which of them each tree's tests catch.

    python tools/plant_faults.py draw --old ../old --new . --count 60 --seed 1 -o faults.jsonl
    python tools/plant_faults.py run --tree ../old --side old --faults faults.jsonl -o old.jsonl
    python tools/plant_faults.py run --tree . --side new --faults faults.jsonl -o new.jsonl
    python tools/plant_faults.py compare old.jsonl new.jsonl

A fault is a changed operator, a bound or another constant that is off, or a line that is dropped. It is drawn from the
old tree and found again in the new one: by a function that is the same up to names, imports, annotations and its
docstring; else by a function of the same name in which the same statement stands once. What is in neither is drawn
anew, so every fault is in code that survives.

Each is planted in a copy of the tree. Tests run in one process, those first whose file is nearest by imports to the
changed module, up to the first that fails or a limit of processor seconds. That test must pass without the fault, else
it is left out and the rest are run. A run goes on where it was ended: faults that its output has are not run again.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST_OF_A_FILE = 2
"""Faults, so that they spread."""
NOT_COPIED = {".git", ".venv", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache", "build", "data", "runs"}
"""At the top of a tree."""
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Mod: ast.Mult,
}  # fmt: skip
PLUGIN = """
import json, os, time
import pytest

NEAREST = {path: place for place, path in enumerate(os.environ["PLANT_FILES"].split(os.pathsep))}
FOUND = {"failed": None, "limited": False, "ran": 0}


def spent():
    return sum(os.times()[:4])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (item.get_closest_marker("slow") is not None, NEAREST.get(str(item.path), 0)))


def pytest_collectreport(report):
    if report.failed:
        FOUND["failed"] = report.nodeid


def pytest_runtest_logreport(report):
    FOUND["ran"] += report.when == "call"
    if report.failed and FOUND["failed"] is None:
        FOUND["failed"] = report.nodeid


def pytest_runtest_teardown(item):
    if spent() > float(os.environ["PLANT_SECONDS"]):
        FOUND["limited"] = True
        item.session.shouldstop = "the limit"


def pytest_sessionfinish(session):
    with open(os.environ["PLANT_REPORT"], "w") as file:
        json.dump(FOUND | {"seconds": spent()}, file)
"""


@dataclass(frozen=True)
class Function:
    """A function or method of a tree."""

    path: str
    """From the tree's root."""
    name: str
    """With the classes around it."""
    node: ast.AST
    """Without docstring, annotations and imports; places in the file are kept."""

    @property
    def form(self) -> str:
        """The same for functions that differ in names alone."""
        renamed, numbers = copy.deepcopy(self.node), defaultdict[str, str](lambda: f"n{len(numbers)}")
        for node in ast.walk(renamed):
            for attribute in ("id", "attr", "arg", "name"):
                if isinstance(found := getattr(node, attribute, None), str):
                    setattr(node, attribute, numbers[found])
        return hashlib.sha256(ast.dump(renamed).encode()).hexdigest()


@dataclass(frozen=True)
class Change:
    """One way to spoil a function."""

    kind: str
    node: ast.AST
    text: str
    """What stands in its place."""
    place: int
    """Of the node in a walk of its function."""


class Strip(ast.NodeTransformer):
    """Takes away what says nothing about behaviour."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Annotated variables are plain ones."""
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign(targets=[node.target], value=self.visit(node.value)), node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Without its type."""
        node.annotation = None
        return node

    def visit_Import(self, node: ast.Import) -> None:
        """Modules move."""

    visit_ImportFrom = visit_Import  # type: ignore[assignment]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Without docstring and types."""
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)


def modules(tree: Path) -> list[Path]:
    """Source files that may be changed."""
    found = sorted((tree / "src").rglob("*.py"))
    return [path for path in found if "testing" not in path.parts]


def functions(tree: Path) -> Iterator[Function]:
    """All of a tree that are not inside another."""

    def inside(path: str, node: ast.AST, outer: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield Function(path, outer + child.name, Strip().visit(copy.deepcopy(child)))
            elif isinstance(child, ast.ClassDef):
                yield from inside(path, child, f"{outer}{child.name}.")

    for path in modules(tree):
        yield from inside(str(path.relative_to(tree)), ast.parse(path.read_text()), "")


def changes(function: Function) -> Iterator[Change]:
    """Every way to spoil it."""
    assert isinstance(function.node, ast.FunctionDef)
    skipped = {id(inner) for part in (*function.node.decorator_list, function.node.args) for inner in ast.walk(part)}
    for node in ast.walk(function.node):
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert)):  # words, and what never happens
            skipped |= {id(inner) for inner in ast.walk(node)}
    bounds = {
        id(inner)
        for node in ast.walk(function.node)
        if isinstance(node, (ast.Compare, ast.Subscript, ast.Slice))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("range", "min", "max"))
        for inner in ast.walk(node)
    }
    for place, node in enumerate(ast.walk(function.node)):
        if id(node) not in skipped:
            for kind, text in spoiled(node, bound=id(node) in bounds):
                yield Change(kind, node, text, place)


def spoiled(node: ast.AST, *, bound: bool) -> Iterator[tuple[str, str]]:
    """Kind and text of what may stand in place of a node."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in COMPARISONS:
        other.ops[0] = COMPARISONS[type(other.ops[0])]()
        yield "operator", f"({ast.unparse(other)})"
    elif isinstance(other, ast.BinOp) and type(other.op) in ARITHMETIC and not isinstance(other.left, ast.Constant):
        other.op = ARITHMETIC[type(other.op)]()
        yield "operator", f"({ast.unparse(other)})"
    elif isinstance(other, ast.BoolOp):
        other.op = ast.Or() if isinstance(other.op, ast.And) else ast.And()
        yield "operator", f"({ast.unparse(other)})"
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not):
        yield "operator", f"({ast.unparse(other.operand)})"
    elif isinstance(other, ast.Constant) and type(other.value) in (bool, int, float):
        value = (not other.value) if isinstance(other.value, bool) else other.value + 1
        yield ("bound" if bound and type(other.value) is int else "constant"), repr(value)
    elif isinstance(other, (ast.AugAssign, ast.Expr)) and not isinstance(getattr(other, "value", 0), ast.Constant):
        if not isinstance(other.value, (ast.Yield, ast.YieldFrom)):
            yield "dropped line", "pass"
    elif isinstance(other, ast.Assign) and isinstance(other.targets[0], (ast.Attribute, ast.Subscript)):
        yield "dropped line", "pass"


def statement(function: Function, node: ast.AST) -> ast.AST:
    """The innermost statement, or head of one, that a node is in."""
    best = function.node
    for each in ast.walk(function.node):
        plain = isinstance(each, ast.stmt) and not hasattr(each, "body")
        head = isinstance(each, (ast.If, ast.While, ast.For)) and (
            each.iter if isinstance(each, ast.For) else each.test
        )
        for part in ([each] if plain else []) + ([head] if head else []):
            if any(inner is node for inner in ast.walk(part)):
                best = part
    return best


class Tree:
    """The functions of a tree, to find one again that is known from another."""

    def __init__(self, root: Path) -> None:
        self.functions = list(functions(root))
        self.by_form, self.by_name = defaultdict[str, list[Function]](list), defaultdict[str, list[Function]](list)
        for each in self.functions:
            self.by_form[each.form].append(each)
            self.by_name[each.name.rpartition(".")[2]].append(each)

    def find(self, function: Function, change: Change) -> tuple[Function, ast.AST] | None:
        """Where the node of a change is here; None where it is not, or in two places."""
        last = function.name.rpartition(".")[2]
        same = self.by_form[function.form]
        named = [each for each in same if each.name.rpartition(".")[2] == last]
        for found in (same, named):
            if len(found) == 1:
                return found[0], list(ast.walk(found[0].node))[change.place]
        if same:
            return None
        around = statement(function, change.node)
        inside = next(place for place, node in enumerate(ast.walk(around)) if node is change.node)
        wanted, kind = ast.unparse(around), type(around)
        hits = [
            (each, list(ast.walk(node))[inside])
            for each in self.by_name[last]
            for node in ast.walk(each.node)
            if type(node) is kind and around is not function.node and ast.unparse(node) == wanted
        ]
        return hits[0] if len(hits) == 1 else None


def spot(function: Function, node: Any) -> dict[str, Any]:
    """Where a node is, as JSON."""
    return {
        "path": function.path,
        "function": function.name,
        "begin": [node.lineno, node.col_offset],
        "end": [node.end_lineno, node.end_col_offset],
        "before": ast.unparse(node),
    }


def draw(old: Path, new: Path, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Faults, kinds alike often."""
    draws, here, there = random.Random(seed), Tree(old), Tree(new)
    kinds = defaultdict[str, list[tuple[Function, Change]]](list)
    for function in here.functions:
        for change in changes(function):
            kinds[change.kind].append((function, change))
    taken: Counter[str] = Counter()
    number = 0
    while number < count:
        function, change = draws.choice(kinds[draws.choice(sorted(kinds))])
        found = there.find(function, change)
        if found is None or taken[function.path] >= MOST_OF_A_FILE:
            continue
        taken[function.path] += 1
        # In the names of either tree.
        texts = [text for kind, text in spoiled(found[1], bound=change.kind == "bound") if kind == change.kind]
        sides = {"old": spot(function, change.node) | {"after": change.text}, "new": spot(*found) | {"after": texts[0]}}
        yield {"number": number, "kind": change.kind, **sides}
        number += 1


def imports(path: Path, package: str) -> set[str]:
    """Names of modules that a file imports, functions and all."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*package.split(".")[: len(package.split(".")) - node.level + 1], base]))
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


@dataclass
class Nearness:
    """Which tests are near a module, by imports."""

    root: Path
    users: dict[Path, set[Path]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        names: dict[str, Path] = {}
        for top in (self.root / "src", self.root / "tests", self.root):
            folders = ("benchmarks",) if top == self.root else ("",)
            for path in (path for folder in folders for path in (top / folder).rglob("*.py")):
                dotted = ".".join(path.relative_to(top).with_suffix("").parts)
                names.setdefault(dotted.removesuffix(".__init__"), path)
        for name, path in names.items():
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            for imported in imports(path, package):
                if imported in names:
                    self.users[names[imported]].add(path)

    def tests(self, module: Path) -> list[tuple[int, Path]]:
        """Test files that reach a module, with the imports between; nearest first, those of its name before."""
        found, edge = {module: 0}, [module]
        while edge:
            edge = [user for known in edge for user in self.users[known] if user not in found]
            found |= {user: 1 + max(found.values()) for user in edge}
        words = set(
            "/".join(module.relative_to(self.root / "src").with_suffix("").parts[1:]).replace("_", "/").split("/")
        )

        def order(entry: tuple[Path, int]) -> tuple[int, int, int]:
            path, distance = entry
            own = set("/".join(path.relative_to(self.root).with_suffix("").parts).replace("_", "/").split("/"))
            return distance, -len(words & own), path.stat().st_size

        chosen = [entry for entry in sorted(found.items(), key=order) if entry[0].name.startswith("test_")]
        return [(distance, path) for path, distance in chosen]


class Planter:
    """A copy of a tree, in which one fault at a time is planted."""

    def __init__(self, tree: Path, scratch: Path, seconds: float, most_files: int) -> None:
        self.root, self.seconds, self.most_files = scratch / "tree", seconds, most_files
        self.kernels, self.scratch = scratch / "kernels", scratch
        if self.root.exists():
            shutil.rmtree(self.root)

        def left_out(folder: str, names: list[str]) -> set[str]:
            return {"__pycache__"} | (NOT_COPIED & set(names) if Path(folder) == tree else set())

        shutil.copytree(tree, self.root, symlinks=True, ignore=left_out)
        (scratch / "plugin").mkdir(parents=True, exist_ok=True)
        (scratch / "plugin" / "planted_order.py").write_text(PLUGIN)
        self.nearness = Nearness(self.root)
        self.unsound: list[str] = []

    def run(self, fault: dict[str, Any], side: str) -> dict[str, Any]:
        """What the tests say of a fault."""
        where = fault[side]
        path = self.root / where["path"]
        plain, times = path.read_bytes(), path.stat()
        files = [file for _, file in self.nearness.tests(path)][: self.most_files]
        while files:
            kernels = self.kernels_without(path)
            path.write_bytes(planted(plain, where))
            try:
                found = self.pytest(files, kernels)
            finally:
                path.write_bytes(plain)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # Numba's caches go by it
                if kernels != self.kernels:
                    shutil.rmtree(kernels)
            failed = found["failed"]
            if failed is None or self.pytest([failed], self.kernels)["failed"] is None:
                break
            self.unsound.append(failed)  # it fails without the fault as well
        else:
            found = {"outcome": "no tests"}
        return {"number": fault["number"], "kind": fault["kind"], "files": len(files), **where, **found}

    def kernels_without(self, path: Path) -> Path:
        """Compiled kernels of modules that the change of `path` does not reach: Numba itself looks only at the file of
        the outermost one. A copy of the folder where there is something to take out."""
        self.kernels.mkdir(exist_ok=True)
        found, edge = {path}, [path]
        while edge:
            edge = [user for known in edge for user in self.nearness.users[known] if user not in found]
            found |= set(edge)
        if "kernels" not in path.parts:
            return self.kernels
        stale = [hit for user in found for hit in self.kernels.glob(f"{user.parent.name}_*/{user.stem}.*")]
        copied = Path(tempfile.mkdtemp(dir=self.scratch)) / "kernels"
        shutil.copytree(self.kernels, copied)
        for hit in stale:
            (copied / hit.relative_to(self.kernels)).unlink(missing_ok=True)
        return copied

    def pytest(self, selection: list[Any], kernels: Path) -> dict[str, Any]:
        """Run tests up to the first that fails."""
        report = self.scratch / "report.json"
        report.unlink(missing_ok=True)
        data = os.environ.get("STRATAREC_TEST_DATA", str(ROOT.parent / "shared" / "data"))
        environment = os.environ | {
            "PYTHONPATH": f"{self.root / 'src'}{os.pathsep}{self.scratch / 'plugin'}",
            "NUMBA_CACHE_DIR": str(kernels),
            "PYTHONDONTWRITEBYTECODE": "1",
            "STRATAREC_TEST_DATA": data,
            "PLANT_FILES": os.pathsep.join(map(str, selection)),
            "PLANT_REPORT": str(report),
            "PLANT_SECONDS": str(self.seconds),
        }
        words = ["-x", "-q", "-n", "0", "-p", "planted_order", "-p", "no:cacheprovider", "--no-header", "--tb", "line"]
        words += [f"--deselect={test}" for test in self.unsound]
        began = time.monotonic()
        with (self.scratch / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *words, *map(str, selection)],
                cwd=self.root, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(10 * self.seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                return {"outcome": "hangs", "failed": None, "wall": time.monotonic() - began}
        if not report.exists():  # the interpreter itself died, which nobody overlooks
            return {"outcome": "caught", "failed": None, "died": process.returncode, "wall": time.monotonic() - began}
        found: dict[str, Any] = json.loads(report.read_text())
        outcome = "caught" if found["failed"] else "limit" if found.pop("limited") else "not caught"
        return {"outcome": outcome, **found, "wall": time.monotonic() - began}


def planted(content: bytes, where: dict[str, Any]) -> bytes:
    """A file with the fault."""
    lines = content.splitlines(keepends=True)
    (first, begin), (last, end) = where["begin"], where["end"]
    head = b"".join(lines[: first - 1]) + lines[first - 1][:begin]
    tail = lines[last - 1][end:] + b"".join(lines[last:])
    text = content[len(head) : len(content) - len(tail)].decode()
    if ast.unparse(ast.parse(f"({text}\n)" if where["after"] != "pass" else text.strip())) != where["before"]:
        raise SystemExit(f"{where['path']}:{first} has {text!r}, expected {where['before']!r}: draw the faults anew")
    return head + where["after"].encode() + tail


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines; none where it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compare(old: Path, new: Path) -> int:
    """Print counts, and every fault that only the old tests catch; how many these are."""
    sides = [{each["number"]: each for each in lines(path)} for path in (old, new)]
    for path, found in zip((old, new), sides, strict=True):
        print(f"{path}: {len(found)} faults, {dict(Counter(each['outcome'] for each in found.values()))}")
    caught = ("caught", "hangs")
    lost = [
        number
        for number in sides[0].keys() & sides[1].keys()
        if sides[0][number]["outcome"] in caught and sides[1][number]["outcome"] not in caught
    ]
    for number in sorted(lost):
        one, other = sides[0][number], sides[1][number]
        print(f"lost {number}: {other['path']}:{other['begin'][0]} {other['before']!r} -> {other['after']!r}")
        print(f"  old: {one['outcome']} by {one['failed']}; new: {other['outcome']} after {other.get('ran')} tests")
    return len(lost)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing, running, comparing = (commands.add_parser(name) for name in ("draw", "run", "compare"))
    for name in ("old", "new"):
        drawing.add_argument(f"--{name}", type=Path, required=True)
        comparing.add_argument(name, type=Path)
    drawing.add_argument("--count", type=int, default=60)
    drawing.add_argument("--seed", type=int, default=1)
    running.add_argument("--tree", type=Path, required=True)
    running.add_argument("--side", choices=("old", "new"), required=True)
    running.add_argument("--faults", type=Path, required=True)
    running.add_argument("--seconds", type=float, default=60, help="processor seconds of the tests of a fault")
    running.add_argument("--files", type=int, default=12, help="test files of a fault, nearest first")
    running.add_argument("--scratch", type=Path, help="for the copy and compiled kernels; kept")
    for each in (drawing, running):
        each.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "draw":
        found = draw(options.old.resolve(), options.new.resolve(), options.count, options.seed)
        options.output.write_text("".join(f"{json.dumps(fault)}\n" for fault in found))
    elif options.command == "compare":
        return 1 if compare(options.old, options.new) > 1 else 0
    else:
        with tempfile.TemporaryDirectory() as temporary:
            scratch = (options.scratch or Path(temporary)).resolve()
            planter = Planter(options.tree.resolve(), scratch, options.seconds, options.files)
            done = {each["number"] for each in lines(options.output)}
            for fault in lines(options.faults):
                if fault["number"] not in done:
                    found = planter.run(fault, options.side)
                    with options.output.open("a") as file:
                        file.write(f"{json.dumps(found)}\n")
                    print(f"{found['number']} {found['outcome']}: {found['path']}:{found['begin'][0]}", flush=True)
        print(dict(Counter(each["outcome"] for each in lines(options.output))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
