"""Check that the tree can be released as the version in pyproject.toml. `make release-check` runs
it.

- CHANGELOG.md and CITATION.cff have the version.
- Wheel and source archive are built twice, with equal bytes; the wheel contains only the package
  and is small.
- Every dependency, direct or not, names a license that is compatible with Apache-2.0.
- Links between pages lead to files and headings that exist, and the pages are built without a
  warning.
- Every intrinsic of the kernels compiles for 64-bit ARM.
- The wheel is installed into an empty environment of each interpreter in ``--python``, by default
  the current one. The commands and the Python code of README.md run there, in a folder that has
  only the log.

All faults are printed; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LARGEST_WHEEL = 2 << 20
"""Maximum size of the wheel in bytes."""
ALLOWED = re.compile(
    r"apache|\bmit\b|\bbsd|\bpsf|python "
    r"software|\bisc\b|mpl|mozilla|zlib|unlicense|hpnd|cmu|public domain|\b0bsd|lgpl",
    re.IGNORECASE,
)
"""Licenses that a program under Apache-2.0 may depend on."""
BLOCK = re.DOTALL | re.MULTILINE
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def project() -> dict[str, object]:
    """Return the project table of pyproject.toml."""
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def version_faults(version: str) -> Iterator[str]:
    """Yield files that do not have the version."""
    if not re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        yield f"CHANGELOG.md has no section '## {version}'"
    if f"version: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        yield f"CITATION.cff has another version than {version}"


def build(folder: Path) -> list[Path]:
    """Build wheel and source archive into `folder`, and return their paths."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1577836800"}
    for target in ("wheel", "sdist"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    return sorted(folder.iterdir())


def archive_faults(first: list[Path], second: list[Path]) -> Iterator[str]:
    """Yield differences between two builds, and what does not belong into the wheel."""
    for one, other in zip(first, second, strict=True):
        print(f"{one.name}: {one.stat().st_size:,} bytes")
        if one.read_bytes() != other.read_bytes():
            yield f"{one.name}: two builds differ"
    (wheel,) = (path for path in first if path.suffix == ".whl")
    if wheel.stat().st_size > LARGEST_WHEEL:
        yield f"{wheel.name} has {wheel.stat().st_size:,} bytes, expected at most {LARGEST_WHEEL:,}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    foreign = [name for name in names if not re.match(r"stratarec(/|-[^/]+\.dist-info/)", name)]
    compiled = [name for name in names if name.endswith((".pyc", ".nbi", ".nbc", ".so"))]
    print(f"{wheel.name}: {len(names)} files")
    if foreign or compiled:
        yield f"{wheel.name} contains {(foreign + compiled)[0]}"


def licenses() -> dict[str, str]:
    """Return name -> license of all installed dependencies, direct or not.

    NVIDIA's libraries are left out: only torch's build for CUDA brings them, and everything runs
    without it.
    """
    waiting = [Requirement(str(line)) for line in project()["dependencies"]]  # type: ignore[attr-defined]
    found: dict[str, str] = {}
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or name.startswith(("cuda-", "nvidia-")):
            continue
        if not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = license_of(package)
        waiting += [Requirement(line) for line in package.requires or ()]
    return dict(sorted(found.items()))


def license_of(package: Distribution) -> str:
    """Return the license that a package names in its metadata."""
    data = package.metadata
    classifiers = [
        line.split(" :: ")[-1] for line in data.get_all("Classifier") or () if line.startswith("License ::")
    ]
    text = data.get("License-Expression") or "; ".join(classifiers) or (data.get("License") or "").strip()
    return text.splitlines()[0][:80] if text else "unknown"


def link_faults() -> Iterator[str]:
    """Yield relative links of pages that lead nowhere."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for target in LINK.findall(page.read_text()):
            file, _, heading = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            path = (page.parent / file).resolve() if file else page
            generated = path.parent.name == "reference" and path.stem in (
                "recipe",
                "command-line",
                "metrics",
                "api",
            )
            if not path.exists() and not generated:
                yield f"{page.relative_to(ROOT)}: {target} does not exist"
            elif heading and path.suffix == ".md" and path.exists() and heading not in headings(path):
                yield f"{page.relative_to(ROOT)}: {target} names a heading that does not exist"


def headings(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def command_faults(name: str, *command: object) -> Iterator[str]:
    """Yield the end of a command's output if it fails."""
    done = subprocess.run(
        [str(word) for word in command], check=False, cwd=ROOT, capture_output=True, text=True
    )
    print(f"{name}: exit code {done.returncode}", flush=True)
    if done.returncode:
        yield f"{name}: {(done.stdout + done.stderr)[-500:]}"


def readme_faults(python: str, wheel: Path, torch: str) -> Iterator[str]:
    """Install the wheel for an interpreter, and run the commands and the code of README.md."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        inside = folder / "venv" / "bin" / "python"
        pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        if subprocess.run([*pip, torch, f"{wheel}[onnx]"], check=False).returncode:
            yield f"{python}: the wheel cannot be installed"
            return
        work = folder / "work"
        work.mkdir()
        # With PYTHONPATH, the checkout could be tested instead of the wheel.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for command in (["python", str(ROOT / "examples" / "make_log.py")], *readme_commands()):
            start = time.monotonic()
            words = [inside.with_name(command[0]), *command[1:]]
            done = subprocess.run(
                words, check=False, cwd=work, env=environment, capture_output=True, text=True
            )
            shown = " ".join(command[:3]).partition("\n")[0]
            print(
                f"{python}: {shown}: exit code {done.returncode}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
            if done.returncode:
                print(done.stderr[-2000:], flush=True)
                yield f"{python}: {shown}: {done.stderr[-500:]}"
                return


def readme_commands() -> Iterator[list[str]]:
    """Yield the words of each command of README.md in order; Python code is a command of
    `python`.
    """
    for language, text in re.findall(
        r"^```(shell|python)\n(.*?)^```", (ROOT / "README.md").read_text(), BLOCK
    ):
        if language == "python":
            yield [language, "-c", text]
        else:
            yield from (words for line in text.splitlines() if (words := shlex.split(line, comments=True)))


def main() -> int:
    """Run all checks; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", action="append", default=[], help="install and run with this interpreter (repeat)"
    )
    parser.add_argument("--torch", default="torch", help="install this requirement or wheel of torch first")
    options = parser.parse_args()
    version = str(project()["version"])
    faults = [*version_faults(version), *link_faults()]
    for name, text in licenses().items():
        print(f"{name:28} {text}")
        if not ALLOWED.search(text):
            faults.append(f"{name}: license {text}; check that it may be used")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        archives = build(Path(first))
        faults += archive_faults(archives, build(Path(second)))
        wheel = next(path for path in archives if path.suffix == ".whl")
        faults += command_faults(
            "pages", sys.executable, "-m", "sphinx", "-W", "-q", "docs", f"{first}/pages"
        )
        faults += command_faults("64-bit ARM", sys.executable, "tools/compile_aarch64.py")
        for python in options.python or [sys.executable]:
            faults += readme_faults(python, wheel, options.torch)
    print(*(f"fault: {fault}" for fault in faults), sep="\n")
    print(f"{version}: {len(faults)} faults" if faults else f"{version} can be released")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
