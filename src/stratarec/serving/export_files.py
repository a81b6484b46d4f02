"""Files that a manifest names, opened once: what was hashed is what is read.

A file is opened without following links. Whoever can write it can still change it afterwards, and with it the scores,
or end the process by cutting it short: an export that others may write while it is open is not for use.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from stratarec.errors import ExportError
from stratarec.io.sealed import regular_file_below
from stratarec.io.tensors import Spec, header
from stratarec.serving.export_manifest import ADVICE, ExportedFile

# Bytes that are hashed at a time.
_PIECE = 1 << 22
# What the safetensors library takes for a header.
_MOST_HEADER = 100_000_000
# Characters of a name that a message repeats.
_LONGEST = 80

_TYPES = {torch.float32: np.float32, torch.int64: np.int64, torch.uint8: np.uint8}

Floats = NDArray[np.float32]


def map_file(folder: Path, name: str, expected: ExportedFile) -> mmap.mmap:
    """The bytes of a file of an export, which may be more than memory holds: pages are read when they are used.

    Raises
    ------
    ExportError
        Where they are not those that were written.
    """
    content = _map(folder, name, expected)
    _check_hash(folder / name, content, expected)
    return content


@dataclass(frozen=True, kw_only=True)
class MappedTensors:
    """Tensors of a safetensors file, where they lie in it."""

    content: mmap.mmap
    places: Mapping[str, int]
    specs: Mapping[str, Spec]

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A tensor, flat."""
        spec = self.specs[name]
        kind = _TYPES[spec.dtype]
        return np.frombuffer(self.content, kind, spec.nbytes // spec.dtype.itemsize, self.places[name])

    def all_floats(self) -> tuple[Floats, dict[str, int]]:
        """All float32 tensors as one array, and where each begins in it: they lie side by side."""
        names = [name for name, spec in self.specs.items() if spec.dtype == torch.float32]
        if not names:
            return np.zeros(0, dtype=np.float32), {}
        first = min(self.places[name] for name in names)
        last = max(self.places[name] + self.specs[name].nbytes for name in names)
        flat = np.frombuffer(self.content, np.float32, (last - first) // 4, first)
        return flat, {name: (self.places[name] - first) // 4 for name in names}


def map_tensors(folder: Path, name: str, expected: ExportedFile, specs: Mapping[str, Spec]) -> MappedTensors:
    """The tensors of a safetensors file of an export, mapped.

    The header is compared with the one that tensors of these names, types and shapes have, and never relied on.

    Raises
    ------
    ExportError
        Where the file is not what was written, has other tensors, or a float32 number in it is not finite.
    """
    content, path = _map(folder, name, expected), folder / name
    front, places = header(specs)
    if content[: len(front)] != front or len(content) != len(front) + sum(spec.nbytes for spec in specs.values()):
        raise ExportError(f"{path}: {_difference(content, specs)}; {ADVICE}")
    _check_hash(path, content, expected)
    found = MappedTensors(content=content, places=places, specs=specs)
    for key, spec in specs.items():
        if spec.dtype == torch.float32 and not _finite(found[key]):
            raise ExportError(f"{path}: {key!r} has a number that is not finite; {ADVICE}")
    return found


def check_files(folder: Path, files: Mapping[str, ExportedFile]) -> None:
    """Read every file that a manifest names, those too that scoring never opens; `ExportError` for the first fault."""
    for name, expected in files.items():
        map_file(folder, name, expected).close()


def _map(folder: Path, name: str, expected: ExportedFile) -> mmap.mmap:
    try:
        path = regular_file_below(folder, name)
        # A pipe that takes the file's place in between would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            if size != expected.bytes:
                raise ExportError(f"{path} has {size:,} bytes, expected {expected.bytes:,}; {ADVICE}")
            if not size:
                raise ExportError(f"{path} is empty; {ADVICE}")
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise ExportError(f"cannot read {folder / name}: {error.strerror or error}; {ADVICE}") from error
    except ValueError as error:
        raise ExportError(f"{error}; {ADVICE}") from error


def _check_hash(path: Path, content: mmap.mmap, expected: ExportedFile) -> None:
    digest = xxhash.xxh3_128()
    with memoryview(content) as view:
        for first in range(0, len(view), _PIECE):
            digest.update(view[first : first + _PIECE])
    if digest.hexdigest() != expected.hash:
        raise ExportError(f"{path} is damaged, or of another export: its hash does not match; {ADVICE}")


def _finite(values: Floats) -> bool:
    step = _PIECE // 4
    return all(np.isfinite(values[first : first + step]).all() for first in range(0, len(values), step))


def _difference(content: mmap.mmap, specs: Mapping[str, Spec]) -> str:
    """Why a file does not begin as one of such tensors does, in words."""
    found = _entries(content)
    if found is None:
        return "it is no safetensors file"
    for name in sorted({*specs, *found}):
        want = None if name not in specs else _words(json.loads(header({name: specs[name]})[0][8:])[name])
        have = None if name not in found else _words(found[name])
        if want != have:
            return f"{name[:_LONGEST]!r} is {have or 'missing'}, expected {want or 'no such tensor'}"
    return "its tensors lie otherwise than they are written"


def _entries(content: mmap.mmap) -> dict[str, Any] | None:
    size = int.from_bytes(content[:8], "little")
    if size > min(len(content), _MOST_HEADER):
        return None
    try:
        found = json.loads(content[8 : 8 + size])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _words(entry: Any) -> str:
    kind, shape = (entry.get(key) if isinstance(entry, dict) else None for key in ("dtype", "shape"))
    return f"{kind} {shape}"[:_LONGEST]
