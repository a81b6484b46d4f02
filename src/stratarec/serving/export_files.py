"""Open and check the files of an export. Each is opened once, so the bytes that are hashed are the
bytes that are read.

Files are opened without following links. A process that may write to an open file can still change
the scores, or crash this process by truncating the file. So do not use an export to which others
can write while it is open.
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

# Number of bytes that are hashed at a time.
_HASH_BYTES = 1 << 22
# Maximum size in bytes of a header that the safetensors library accepts.
_MAX_HEADER = 100_000_000
# Maximum number of characters of a name that an error message shows.
_MAX_NAME = 80

_TYPES = {torch.float32: np.float32, torch.int64: np.int64, torch.uint8: np.uint8}

Floats = NDArray[np.float32]


def map_file(folder: Path, name: str, expected: ExportedFile) -> mmap.mmap:
    """Map a file of an export into memory. The file may be larger than memory: pages are read when
    they are used.

    Raises
    ------
    ExportError
        If the size or hash is not the expected one.
    """
    content = _map(folder, name, expected)
    _check_hash(folder / name, content, expected)
    return content


@dataclass(frozen=True, kw_only=True)
class MappedTensors:
    """Tensors in a mapped safetensors file."""

    content: mmap.mmap
    places: Mapping[str, int]
    specs: Mapping[str, Spec]

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return the tensor `name`, flattened."""
        spec = self.specs[name]
        kind = _TYPES[spec.dtype]
        return np.frombuffer(self.content, kind, spec.nbytes // spec.dtype.itemsize, self.places[name])

    def all_floats(self) -> tuple[Floats, dict[str, int]]:
        """Return all float32 tensors, which are adjacent in the file, as one array, and the
        position of each in it.
        """
        names = [name for name, spec in self.specs.items() if spec.dtype == torch.float32]
        if not names:
            return np.zeros(0, dtype=np.float32), {}
        first = min(self.places[name] for name in names)
        last = max(self.places[name] + self.specs[name].nbytes for name in names)
        flat = np.frombuffer(self.content, np.float32, (last - first) // 4, first)
        return flat, {name: (self.places[name] - first) // 4 for name in names}


def map_tensors(
    folder: Path, name: str, expected: ExportedFile, specs: Mapping[str, Spec]
) -> MappedTensors:
    """Map the tensors of a safetensors file of an export.

    The header is not trusted: it must be equal to the header that safetensors writes for `specs`.

    Raises
    ------
    ExportError
        If the file is damaged, has tensors other than `specs`, or has a float32 number that is not
        finite.
    """
    content, path = _map(folder, name, expected), folder / name
    front, places = header(specs)
    if content[: len(front)] != front or len(content) != len(front) + sum(
        spec.nbytes for spec in specs.values()
    ):
        raise ExportError(f"{path}: {_difference(content, specs)}; {ADVICE}")
    _check_hash(path, content, expected)
    tensors = MappedTensors(content=content, places=places, specs=specs)
    for key, spec in specs.items():
        if spec.dtype == torch.float32 and not _is_finite(tensors[key]):
            raise ExportError(f"{path}: {key!r} has a number that is not finite; {ADVICE}")
    return tensors


def check_files(folder: Path, files: Mapping[str, ExportedFile]) -> None:
    """Read and check every file that a manifest lists, including files that scoring never opens."""
    for name, expected in files.items():
        map_file(folder, name, expected).close()


def _map(folder: Path, name: str, expected: ExportedFile) -> mmap.mmap:
    try:
        path = regular_file_below(folder, name)
        # Without O_NONBLOCK, a pipe that replaces the file would wait for its writer.
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
        for first in range(0, len(view), _HASH_BYTES):
            digest.update(view[first : first + _HASH_BYTES])
    if digest.hexdigest() != expected.hash:
        raise ExportError(f"{path} is damaged or of another export: its hash does not match; {ADVICE}")


def _is_finite(values: Floats) -> bool:
    step = _HASH_BYTES // 4
    return all(np.isfinite(values[first : first + step]).all() for first in range(0, len(values), step))


def _difference(content: mmap.mmap, specs: Mapping[str, Spec]) -> str:
    """Describe how the header of a file differs from the header that the expected tensors would
    have.
    """
    entries = _header_entries(content)
    if entries is None:
        return "it is not a safetensors file"
    for name in sorted({*specs, *entries}):
        expected = (
            None if name not in specs else _describe(json.loads(header({name: specs[name]})[0][8:])[name])
        )
        actual = None if name not in entries else _describe(entries[name])
        if expected != actual:
            return f"{name[:_MAX_NAME]!r} is {actual or 'missing'}, expected {expected or 'no such tensor'}"
    return "its tensors are in another order"


def _header_entries(content: mmap.mmap) -> dict[str, Any] | None:
    size = int.from_bytes(content[:8], "little")
    if size > min(len(content), _MAX_HEADER):
        return None
    try:
        entries = json.loads(content[8 : 8 + size])
    except (ValueError, RecursionError):
        return None
    return entries if isinstance(entries, dict) else None


def _describe(entry: Any) -> str:
    kind, shape = (entry.get(key) if isinstance(entry, dict) else None for key in ("dtype", "shape"))
    return f"{kind} {shape}"[:_MAX_NAME]
