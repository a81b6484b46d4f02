"""Run the tests with the lowest and with the highest versions that pyproject.toml allows.

Each side has its own environment. `lowest` has everything that pyproject.toml names at its lower bound, including the
build backend; `highest` has the newest versions within the ranges. An existing environment is updated, so a second run
installs little. Compiled kernels are cached inside the environment.

Arguments after `--` replace the whole suite: `test_versions.py --only lowest -- tests/kernels -n 2`.

On Linux, torch from the registry is built for CUDA and needs some 3 GB of libraries. `--torch` takes another
requirement or the path of a wheel. The settings of pip (an index, a folder of wheels) apply.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("lowest", "highest")


@dataclass(frozen=True)
class Environment:
    """Virtual environment of one side."""

    side: str
    folder: Path

    @property
    def python(self) -> Path:
        """Path of the interpreter."""
        return self.folder / "bin" / "python"

    def run(self, *command: object, **variables: str) -> int:
        """Run ``python -m command`` at the root of the project and return the exit code."""
        words = [str(word) for word in (self.python, "-m", *command)]
        print(f"\n[{self.side}] {' '.join(words)}", flush=True)
        # With PYTHONPATH, another checkout could be tested instead of this one.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(words, check=False, env=inherited | variables, cwd=ROOT).returncode


def requirements() -> list[Requirement]:
    """Return the requirements of the build, the library and the tests."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    lines = [*content["build-system"]["requires"], *project["dependencies"], *project["optional-dependencies"]["test"]]
    return [Requirement(line) for line in lines]


def lowest(requirement: Requirement) -> str:
    """Return `requirement` with its lower bound as the only version."""
    bounds = [clause.version for clause in requirement.specifier if clause.operator == ">="]
    if len(bounds) != 1:
        raise SystemExit(f"pyproject.toml: '{requirement}' must have one lower bound (>=); it has {len(bounds)}")
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}=={bounds[0]}{marker}"


def create(side: str, folder: Path, python: str) -> Environment:
    """Create the environment of `side` for the interpreter `python`, unless it exists."""
    command = [python, "-c", "import platform; print(platform.python_version())"]
    version = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    environment = Environment(side, folder / f"{side}-{version}")
    if not environment.python.exists():
        subprocess.run([python, "-m", "venv", environment.folder], check=True)
    return environment


def install(environment: Environment, torch: str | None) -> bool:
    """Install the project with the requirements of its tests; `torch` replaces the bound of torch's range."""
    packages = ["--editable", f"{ROOT}[test]", *([torch] if torch else [])]
    command = ["pip", "install", "--quiet", "--disable-pip-version-check"]
    if environment.side == "highest":
        return environment.run(*command, "--upgrade", "--upgrade-strategy", "eager", *packages) == 0
    pins = environment.folder / "constraints.txt"
    pinned = [each for each in requirements() if not (torch and each.name == "torch")]
    pins.write_text("".join(f"{lowest(each)}\n" for each in pinned))
    # Before pip 25.3 the first variable applies to the build environment, from then on the second one.
    return environment.run(*command, *packages, PIP_CONSTRAINT=str(pins), PIP_BUILD_CONSTRAINT=str(pins)) == 0


def versions(environment: Environment) -> dict[str, str]:
    """Return the installed versions by canonical name."""
    command = [str(environment.python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {canonicalize_name(each["name"]): each["version"] for each in listed}


def test(environment: Environment, arguments: Sequence[str]) -> tuple[bool, str]:
    """Run pytest; return whether it passed, and a summary of the counts."""
    report = environment.folder / "tests.xml"
    report.unlink(missing_ok=True)
    kernels = str(environment.folder / "kernels")
    # Old libraries raise deprecation warnings of their newer dependencies, which are not about this project.
    warnings = ["-W", "ignore::DeprecationWarning"] if environment.side == "lowest" else []
    code = environment.run("pytest", f"--junitxml={report}", *warnings, *arguments, NUMBA_CACHE_DIR=kernels)
    if not report.exists():
        return False, f"pytest ended with code {code}"
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
    passed = int(suite.get("tests", 0)) - sum(counts.values())
    return code == 0, ", ".join([f"{passed} passed", *(f"{count} {name}" for name, count in counts.items() if count)])


def check(environment: Environment, torch: str | None, arguments: Sequence[str]) -> tuple[bool, dict[str, str]]:
    """Install and test; return whether all passed, and the column of the table."""
    column = {"python": environment.folder.name.rpartition("-")[2]}
    if not install(environment, torch):
        return False, column | {"tests": "could not be installed"}
    installed = versions(environment)
    names = [canonicalize_name(each.name) for each in requirements()]
    well, outcome = test(environment, arguments)
    return well, column | {name: installed[name] for name in names if name in installed} | {"tests": outcome}


def table(columns: dict[str, dict[str, str]]) -> str:
    """Return a table with a column for each side; missing values are dashes."""
    names = sorted(dict.fromkeys(name for column in columns.values() for name in column), key="tests".__eq__)
    rows = [["", *columns], *([name, *(column.get(name, "-") for column in columns.values())] for name in names)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    """Run the command line; the exit code is 0 if every side passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SIDES, help="test only this side (default: both)")
    parser.add_argument(
        "--python", default=sys.executable, help="test with this interpreter (default: the current one)"
    )
    parser.add_argument("--torch", help="install this requirement or wheel instead of the bounds of torch's range")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build" / "versions", help="create the environments in this directory"
    )
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after -- (default: the whole suite)")
    options = parser.parse_args()

    columns, failed = {}, False
    for side in [options.only] if options.only else SIDES:
        environment = create(side, options.dir.resolve(), options.python)
        well, columns[side] = check(environment, options.torch, options.pytest)
        failed |= not well
    print(f"\n{table(columns)}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
