"""Tensors in safetensors files, written one at a time.

The safetensors library would first copy all tensors into one buffer, which would double the memory
of a large model.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stratarec.errors import CheckpointError

_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Spec(NamedTuple):
    """Type and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor | ChunkedTensor) -> Spec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ChunkedTensor:
    """Tensor that is computed in chunks of rows, so that it is never in memory as a whole.

    Parameters
    ----------
    dtype, shape
        Type and shape of the whole tensor.
    parts : callable
        Returns the chunks in order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Tensor]]


def header(specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file, and the byte offset of each tensor in the order in which tensors
    are stored.

    The order is the same as in the safetensors library: wide types first, so that each tensor is
    aligned, then by name.
    """
    content: dict[str, dict[str, object]] = {}
    offset = 0
    for name, spec in sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        content[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + entry["data_offsets"][0] for name, entry in content.items()}  # type: ignore[index]


def write_tensors(path: Path, tensors: Mapping[str, Tensor | ChunkedTensor]) -> None:
    """Write named tensors to a safetensors file; the bytes do not depend on the order of
    `tensors`.
    """
    head, offsets = header({name: Spec.of(tensor) for name, tensor in tensors.items()})
    with path.open("wb") as file:
        file.write(head)
        for name in offsets:
            tensor = tensors[name]
            for part in tensor.parts() if isinstance(tensor, ChunkedTensor) else (tensor,):
                if part.numel():
                    file.write(part.detach().cpu().contiguous().reshape(-1).numpy().data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file. Raises `CheckpointError` if it is damaged or
    missing.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
