"""Run the demo and the tests on several versions of Python.

The lowest Python has everything that pyproject.toml names at its lower bound, including the build
backend; the others have the newest versions within the ranges. Interpreters are those that
``--python`` names, then `python3.X` of PATH, of pyenv and of uv; a version without one is named and
skipped. Each version has its own environment. An existing one is updated, so a second run installs
little. Compiled kernels are cached inside the environment.

Arguments after `--` replace the whole suite: `test_versions.py --only 3.10 -- tests/kernels -n 2`.

On Linux, torch from the registry is built for CUDA and needs some 3 GB of libraries. `--torch`
takes another requirement or the path of a wheel. The settings of pip (an index, a folder of wheels)
apply.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = {"3.10": "lowest", "3.13": "highest", "3.14": "highest"}
"""Side of the ranges by version of Python."""
DEMO = "import sys; from stratarec.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Environment:
    """Virtual environment for one version of Python."""

    version: str
    folder: Path

    @property
    def side(self) -> str:
        """Which ends of the ranges are installed."""
        return VERSIONS[self.version]

    @property
    def python(self) -> Path:
        """Path of the interpreter."""
        return self.folder / "bin" / "python"

    def run(self, *arguments: object, cwd: Path = ROOT, **variables: str) -> int:
        """Run ``python arguments`` in the folder `cwd`, by default the project's root; return the
        exit code.
        """
        words = [str(word) for word in (self.python, *arguments)]
        print(f"\n[{self.version}, {self.side}] {' '.join(words)}", flush=True)
        # With PYTHONPATH, another checkout could be tested instead of this one.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        kernels = {"NUMBA_CACHE_DIR": str(self.folder / "kernels")}
        return subprocess.run(words, check=False, env=inherited | kernels | variables, cwd=cwd).returncode


def version_of(python: str | Path) -> str:
    """Return the version of an interpreter, such as 3.13.0; empty if it does not run."""
    command = [python, "-c", "import platform; print(platform.python_version())"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def find_interpreter(version: str, given: Sequence[str]) -> str | None:
    """Return an interpreter of `version`, such as 3.13; None if this machine has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates = [
        *given,
        f"python{version}",
        *map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)),
    ]
    if uv := shutil.which("uv"):
        found = subprocess.run([uv, "python", "find", version], check=False, capture_output=True, text=True)
        candidates += found.stdout.split("\n")[:1] if found.returncode == 0 else []
    return next((each for each in candidates if version_of(each).startswith(f"{version}.")), None)


def requirements() -> list[Requirement]:
    """Return the requirements of the build, the library and the tests."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    lines = [
        *content["build-system"]["requires"],
        *project["dependencies"],
        *project["optional-dependencies"]["test"],
    ]
    return [Requirement(line) for line in lines]


def lowest(requirement: Requirement) -> str:
    """Return `requirement` with its lower bound as the only version."""
    bounds = [clause.version for clause in requirement.specifier if clause.operator == ">="]
    if len(bounds) != 1:
        raise SystemExit(
            f"pyproject.toml: '{requirement}' must have one lower bound (>=); it has {len(bounds)}"
        )
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}=={bounds[0]}{marker}"


def create(version: str, folder: Path, python: str) -> Environment:
    """Create the environment of `version` for the interpreter `python`, unless it exists."""
    environment = Environment(version, folder / version_of(python))
    if not environment.python.exists():
        subprocess.run([python, "-m", "venv", environment.folder], check=True)
    return environment


def install(environment: Environment, torch: str | None) -> bool:
    """Install the project with the requirements of its tests; `torch` replaces the bound of torch's
    range.
    """
    packages = ["--editable", f"{ROOT}[test]", *([torch] if torch else [])]
    command = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    claimed = SpecifierSet(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    )
    if environment.version not in claimed:
        print(f"{environment.version} is not in requires-python ({claimed}): pip does not check it")
        command.append("--ignore-requires-python")
    if environment.side == "highest":
        return environment.run(*command, "--upgrade", "--upgrade-strategy", "eager", *packages) == 0
    pins = environment.folder / "constraints.txt"
    pinned = [each for each in requirements() if not (torch and each.name == "torch")]
    pins.write_text("".join(f"{lowest(each)}\n" for each in pinned))
    # Before pip 25.3 the first variable applies to the build environment, from then on the second
    # one.
    return (
        environment.run(*command, *packages, PIP_CONSTRAINT=str(pins), PIP_BUILD_CONSTRAINT=str(pins)) == 0
    )


def run_demo(environment: Environment) -> tuple[bool, str]:
    """Run the main job of `make demo`; return whether it succeeded, and the AUC of its test
    split.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for line in ("init --recipe demo", "prepare -q demo.yaml", "train -q demo.yaml"):
            if code := environment.run("-c", DEMO, *line.split(), cwd=folder):
                return False, f"stratarec {line} ended with code {code}"
        result = json.loads((folder / "runs" / "demo" / "result.json").read_text())
        return True, f"AUC {result['test']['auc']:.6f}"


def versions(environment: Environment) -> dict[str, str]:
    """Return the installed versions by canonical name."""
    command = [
        str(environment.python),
        "-m",
        "pip",
        "list",
        "--format",
        "json",
        "--disable-pip-version-check",
    ]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {canonicalize_name(each["name"]): each["version"] for each in listed}


def test(environment: Environment, arguments: Sequence[str]) -> tuple[bool, str]:
    """Run pytest; return whether it passed, and a summary of the counts."""
    report = environment.folder / "tests.xml"
    report.unlink(missing_ok=True)
    # Old libraries raise deprecation warnings of their newer dependencies, which are not about this
    # project.
    warnings = ["-W", "ignore::DeprecationWarning"] if environment.side == "lowest" else []
    code = environment.run("-m", "pytest", f"--junitxml={report}", *warnings, *arguments)
    if not report.exists():
        return False, f"pytest ended with code {code}"
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
    passed = int(suite.get("tests", 0)) - sum(counts.values())
    return code == 0, ", ".join(
        [f"{passed} passed", *(f"{count} {name}" for name, count in counts.items() if count)]
    )


def check(
    environment: Environment, torch: str | None, arguments: Sequence[str]
) -> tuple[bool, dict[str, str]]:
    """Install, run the demo and test; return whether all passed, and the column of the table."""
    column = {"python": environment.folder.name}

    def timed(name: str, phase: Callable[[], tuple[bool, str]]) -> bool:
        start = time.monotonic()
        well, outcome = phase()
        column[name] = f"{outcome}, {time.monotonic() - start:,.0f} s"
        return well

    def installation() -> tuple[bool, str]:
        well = install(environment, torch)
        return well, "ok" if well else "failed"

    if not timed("install", installation):
        return False, column
    installed = versions(environment)
    names = [canonicalize_name(each.name) for each in requirements()]
    column |= {name: installed[name] for name in names if name in installed}
    well = timed("demo", lambda: run_demo(environment))
    return timed("tests", lambda: test(environment, arguments)) and well, column


def table(columns: dict[str, dict[str, str]]) -> str:
    """Return a table with a column for each side; missing values are dashes."""
    last = ("install", "demo", "tests")
    names = sorted(
        dict.fromkeys(name for column in columns.values() for name in column), key=last.__contains__
    )
    rows = [
        ["", *columns],
        *([name, *(column.get(name, "-") for column in columns.values())] for name in names),
    ]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    """Run the command line; the exit code is 0 if every version with an interpreter passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=VERSIONS, help="test only this version (default: all)")
    parser.add_argument(
        "--python", action="append", default=[], help="use this interpreter for its version (repeat)"
    )
    parser.add_argument(
        "--torch", help="install this requirement or wheel instead of the bounds of torch's range"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / "build" / "versions",
        help="create the environments in this directory",
    )
    parser.add_argument(
        "pytest", nargs="*", help="arguments of pytest, after -- (default: the whole suite)"
    )
    options = parser.parse_args()
    for python in options.python:
        if not version_of(python).startswith(tuple(f"{version}." for version in VERSIONS)):
            parser.error(f"--python {python} must be an interpreter of {', '.join(VERSIONS)}")

    columns, failed, absent = {}, False, []
    for version in [options.only] if options.only else VERSIONS:
        python = find_interpreter(version, options.python)
        if python is None:
            absent.append(version)
            continue
        environment = create(version, options.dir.resolve(), python)
        well, columns[f"{version} {environment.side}"] = check(environment, options.torch, options.pytest)
        failed |= not well
    if columns:
        print(f"\n{table(columns)}")
    for version in absent:
        print(
            f"Python {version}: skipped, because this machine has no such "
            "interpreter; name one with --python"
        )
    return int(failed or not columns)


if __name__ == "__main__":
    raise SystemExit(main())
