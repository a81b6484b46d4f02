"""Tensors in safetensors files, written one at a time.

The library's own writer first copies every tensor into one buffer, which would double the memory of a large model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors in the safetensors format: the same tensors give the same bytes, in whatever order they come.

    They lie as the library's own writer lays them: wide types first, which keeps each aligned, then by name.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, dict[str, object]] = {}
    place = 0
    for name, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.detach().contiguous().reshape(-1).numpy().data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file; `CheckpointError` when it is damaged or missing."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
