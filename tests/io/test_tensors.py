"""Tensor files: equal tensors are equal bytes, and the library reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from stratarec.io.tensors import read_tensors, write_tensors

TENSORS = {
    "z": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a": torch.arange(3, dtype=torch.uint8),
    "m": torch.tensor(7, dtype=torch.int64),
    "b": torch.zeros(0, 4),
}


def test_files_are_what_the_library_writes_and_reads(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ours", TENSORS)
    save_file(TENSORS, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    found = read_tensors(tmp_path / "ours")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
