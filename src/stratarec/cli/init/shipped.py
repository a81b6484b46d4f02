"""The recipes that come with StrataRec.

Their names stand in `stratarec --help`, which is quick: what writes files is loaded when it is needed.
"""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

from stratarec.errors import ConfigError, StorageError


def shipped() -> tuple[str, ...]:
    """Their names."""
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir()))


def copy_shipped(name: str, output: Path | None) -> Path:
    """Write the recipe `name` to `output`, by default a file of its name here; returns where it is.

    Raises
    ------
    ConfigError
        Where there is no such recipe.
    StorageError
        Where `output` is there already, or cannot be written.
    """
    from stratarec.io.atomic import write_text

    if name not in shipped():
        close = difflib.get_close_matches(name, shipped(), 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(shipped())}"
        raise ConfigError(f"--recipe is {name!r}, which does not come with StrataRec; {hint}")
    path = output or Path(f"{name}.yaml")
    check_absent(path)
    write_text(path, (_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    return path


def check_absent(path: Path) -> None:
    """Refuse a file that is there: somebody may have changed it since it was made."""
    from stratarec.io.atomic import check_output

    if path.is_symlink() or path.exists():
        raise StorageError(f"{path} exists; remove it, or name another --output")
    check_output(path, ".yaml", ".yml")


def _folder() -> resources.abc.Traversable:
    return resources.files("stratarec") / "recipes"
