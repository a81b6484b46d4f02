"""What must be the same wherever processes work on one thing: libraries, Python, and the code of StrataRec itself."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

from stratarec import errors

CODE, PYTHON = "code of stratarec with the hash", "Python"


@cache
def versions(*names: str) -> dict[str, str]:
    """Of each library, or of `PYTHON`, ``none`` where it is not installed; and a hash as that of `CODE`."""
    digest, root = xxhash.xxh3_64(), Path(errors.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return {**{name: _version(name) for name in names}, CODE: digest.hexdigest()}


def _version(name: str) -> str:
    if name == PYTHON:
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
