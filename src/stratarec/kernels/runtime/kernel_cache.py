"""Directory in which Numba caches compiled kernels.

Numba writes next to the source or into the user's home. In a container neither may be writable, and
Numba then refuses to compile. Kernels are cached in the directory of temporary files instead, or
not at all. Kernels that an image brings in a directory that cannot be written, the one of
NUMBA_CACHE_DIR, are linked from there.

Numba unpickles what it finds in its cache, so the directory must be the user's own: others must not
be able to write there.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path


def choose_cache() -> None:
    """Choose a cache for this process and its children if Numba cannot write into its own."""
    if any(map(_is_writable, _usual())):
        return
    folder = _private()
    if folder is not None:
        os.environ["NUMBA_CACHE_DIR"] = str(folder)
        if "numba" in sys.modules:
            sys.modules["numba"].config.CACHE_DIR = str(folder)
        return
    warnings.warn(
        "compiled kernels are not cached, so every process compiles them: neither the package, the home "
        "directory nor TMPDIR is writable; set NUMBA_CACHE_DIR to a directory",
        stacklevel=2,
    )
    from stratarec.kernels.runtime.numba_private import never_cache

    never_cache()


def _usual() -> list[Path]:
    """Return the directories that Numba tries."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    usual = [Path(__file__).parent / "__pycache__", Path(user, "numba")]
    return [Path(chosen), *usual] if (chosen := os.environ.get("NUMBA_CACHE_DIR")) else usual


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _private() -> Path | None:
    """Return a directory of temporary files that only this user can write, or None."""
    try:
        folder = Path(tempfile.gettempdir(), f"stratarec-kernels-{os.geteuid()}")
        is_new = not folder.exists()
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not is_own or not _is_writable(folder):
        return None
    if is_new and not _link_shipped(folder):
        warnings.warn(
            f"compiled kernels are cached in {folder}, because neither the package nor the home directory "
            "is writable; set NUMBA_CACHE_DIR to choose another directory",
            stacklevel=2,
        )
    return folder


def _link_shipped(folder: Path) -> bool:
    """Link the kernels of NUMBA_CACHE_DIR into `folder`; return whether there are any.

    Numba replaces files and never writes into them, so links serve as well as copies.
    """
    shipped = Path(os.environ.get("NUMBA_CACHE_DIR", os.devnull)).absolute()
    kernels = list(shipped.rglob("*.nb[ic]"))
    for kernel in kernels:
        link = folder / kernel.relative_to(shipped)
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process has compiled it in the meantime
            link.symlink_to(kernel)
    return bool(kernels)
