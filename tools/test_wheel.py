"""Build a wheel, install it into an empty environment, and run the demo from there, outside the
checkout.

The environment sees the packages of the current one, so that only the build backend is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Enough to run every command.
SMALL = ("data.source.samples=20000", "data.shard_samples=10000")


def main() -> None:
    """Build, install and run; raise an error if a step fails."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        subprocess.run(
            [*_pip(sys.executable), "wheel", "--no-deps", "-w", place / "dist", ROOT], check=True
        )
        python = _environment(place / "venv")
        (wheel,) = (place / "dist").glob("*.whl")
        subprocess.run([*_pip(python), "install", "--no-deps", "--no-index", wheel], check=True)
        command = Path(python).with_name("stratarec")
        work = place / "work"
        work.mkdir()
        for arguments in (
            ["init", "--recipe", "demo"],
            ["prepare", "demo.yaml", *SMALL],
            ["train", "demo.yaml", *SMALL],
            ["predict", "runs/demo", "-o", "scores.parquet"],
        ):
            subprocess.run(
                [command, *arguments, *(["-q"] if arguments[0] != "init" else [])], check=True, cwd=work
            )
        where = subprocess.run(
            [python, "-c", "import stratarec; print(stratarec.__file__)"],
            check=True,
            cwd=work,
            capture_output=True,
            text=True,
        ).stdout.strip()
        assert Path(where).is_relative_to(place), f"{where} is not the installed wheel"
    print("the wheel works")


def _pip(python: str | Path) -> list[str | Path]:
    return [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def _environment(place: Path) -> Path:
    """Create an empty environment that falls back to the packages of the current one."""
    venv.create(place, with_pip=True)
    (site,) = (place / "lib").glob("python*/site-packages")
    (site / "behind.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return place / "bin" / "python"


if __name__ == "__main__":
    main()
