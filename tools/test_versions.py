"""Run the tests with the lowest and with the highest versions that pyproject.toml allows.

Each side gets an environment of its own. `lowest` holds everything that pyproject.toml names at its lower bound, the
build backend included, `highest` the newest of everything within the ranges. An environment that is already there is
brought up to date, so a second run installs little; compiled kernels are cached inside it.

What follows `--` goes to pytest in place of the whole suite: `test_versions.py --only lowest -- tests/kernels -n 2`.

On Linux torch from the registry is built for CUDA and brings some 3 GB of libraries. `--torch` takes any other
requirement or the path of a wheel, and pip's own settings (an index, a folder of wheels) are heeded.
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
    """One side's virtual environment."""

    side: str
    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def run(self, *command: object, **variables: str) -> int:
        """Run ``python -m command`` at the root of the project; returns the exit code."""
        words = [str(word) for word in (self.python, "-m", *command)]
        print(f"\n[{self.side}] {' '.join(words)}", flush=True)
        # Another checkout on the path would be tested in place of this one.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(words, check=False, env=inherited | variables, cwd=ROOT).returncode


def requirements() -> list[Requirement]:
    """What the build, the library and the tests ask for."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = found["project"]
    lines = [*found["build-system"]["requires"], *project["dependencies"], *project["optional-dependencies"]["test"]]
    return [Requirement(line) for line in lines]


def lowest(requirement: Requirement) -> str:
    """`requirement` with its lower bound as the only version."""
    bounds = [clause.version for clause in requirement.specifier if clause.operator == ">="]
    if len(bounds) != 1:
        raise SystemExit(f"pyproject.toml: '{requirement}' has {len(bounds)} lower bounds (>=), expected one")
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}=={bounds[0]}{marker}"


def create(side: str, folder: Path, python: str) -> Environment:
    """The environment of `side` for the interpreter `python`, made where it is not there."""
    command = [python, "-c", "import platform; print(platform.python_version())"]
    version = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    environment = Environment(side, folder / f"{side}-{version}")
    if not environment.python.exists():
        subprocess.run([python, "-m", "venv", environment.folder], check=True)
    return environment


def install(environment: Environment, torch: str | None) -> bool:
    """Install the project with what its tests need; `torch` stands in for that end of torch's range."""
    wanted = ["--editable", f"{ROOT}[test]", *([torch] if torch else [])]
    command = ["pip", "install", "--quiet", "--disable-pip-version-check"]
    if environment.side == "highest":
        return environment.run(*command, "--upgrade", "--upgrade-strategy", "eager", *wanted) == 0
    pins = environment.folder / "constraints.txt"
    kept = [each for each in requirements() if not (torch and each.name == "torch")]
    pins.write_text("".join(f"{lowest(each)}\n" for each in kept))
    # The first variable reaches the environment that the project is built in before pip 25.3, the second from then on.
    return environment.run(*command, *wanted, PIP_CONSTRAINT=str(pins), PIP_BUILD_CONSTRAINT=str(pins)) == 0


def versions(environment: Environment) -> dict[str, str]:
    """What is installed, by canonical name."""
    command = [str(environment.python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {canonicalize_name(each["name"]): each["version"] for each in listed}


def test(environment: Environment, arguments: Sequence[str]) -> tuple[bool, str]:
    """Run pytest: whether all is well, and the counts in words."""
    report = environment.folder / "tests.xml"
    report.unlink(missing_ok=True)
    kernels = str(environment.folder / "kernels")
    # What an old library is told by a newer one beneath it says nothing about this project.
    warnings = ["-W", "ignore::DeprecationWarning"] if environment.side == "lowest" else []
    code = environment.run("pytest", f"--junitxml={report}", *warnings, *arguments, NUMBA_CACHE_DIR=kernels)
    if not report.exists():
        return False, f"pytest ended with code {code}"
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
    passed = int(suite.get("tests", 0)) - sum(counts.values())
    return code == 0, ", ".join([f"{passed} passed", *(f"{count} {name}" for name, count in counts.items() if count)])


def check(environment: Environment, torch: str | None, arguments: Sequence[str]) -> tuple[bool, dict[str, str]]:
    """Install, test: whether all is well, and the side's column of the table."""
    column = {"python": environment.folder.name.rpartition("-")[2]}
    if not install(environment, torch):
        return False, column | {"tests": "could not be installed"}
    found = versions(environment)
    names = [canonicalize_name(each.name) for each in requirements()]
    well, outcome = test(environment, arguments)
    return well, column | {name: found[name] for name in names if name in found} | {"tests": outcome}


def table(columns: dict[str, dict[str, str]]) -> str:
    """The columns side by side under their names; what a side lacks is a dash."""
    names = sorted(dict.fromkeys(name for column in columns.values() for name in column), key="tests".__eq__)
    rows = [["", *columns], *([name, *(column.get(name, "-") for column in columns.values())] for name in names)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    """The command line; the exit code is 0 when every side passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SIDES, help="one side instead of both")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to test with (default: this one)")
    parser.add_argument("--torch", help="a requirement or a wheel to install in place of either end of torch's range")
    parser.add_argument("--dir", type=Path, default=ROOT / "build" / "versions", help="where the environments go")
    parser.add_argument("pytest", nargs="*", help="after --: what pytest is given (default: the whole suite)")
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
