from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import (
    EmbeddingBagConfig,
    RowOptimizerConfig,
    TieredEmbeddingBagCollection,
    compilation,
)
from stratarec.kernels.simd.vector import blocks
from stratarec.kernels.update.cpu import kernels

ADAM = RowOptimizerConfig(kind="adam", rows="all", decay="decoupled", weight_decay=0.1)


@pytest.mark.parametrize("optimizer", [ADAM, RowOptimizerConfig()])
def test_updates_call_the_selected_kernel_variant(optimizer: RowOptimizerConfig) -> None:
    kernels.cache_clear()  # signatures of other tests
    kernel = kernels(*blocks(4)).update
    if not hasattr(kernel, "signatures"):
        pytest.skip("kernels are not compiled")
    compilation.use_one_row(4, optimizer)
    compiled = kernel.signatures
    table = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=("f",))
    collection = TieredEmbeddingBagCollection([table], optimizer=optimizer)
    ids = torch.tensor([3, 1, 3], dtype=torch.int32)
    collection(
        KeyedJagged(keys=("f",), values=ids, offsets=torch.arange(4), batch_size=3)
    ).pooled.sum().backward()
    assert kernel.signatures == compiled


def test_child_process_compiles_until_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def use(width: int, optimizer: RowOptimizerConfig) -> None:
        (tmp_path / f"{width} {os.getpid() == parent}").touch()
        raise OSError  # an error in the child process ends only the child

    parent = os.getpid()
    monkeypatch.setattr(compilation, "is_compiled", lambda width: False)
    monkeypatch.setattr(compilation, "cores", lambda: 2)
    monkeypatch.setattr(compilation, "use_one_row", use)
    wait = compilation.compile_kernels([16], ADAM)
    wait()
    wait()
    assert [path.name for path in tmp_path.iterdir()] == ["16 False"]


@pytest.mark.parametrize(("compiled", "cores"), [(True, 2), (False, 1)])
def test_no_child_process_is_forked_without_need(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, cores: int
) -> None:
    def fork() -> Any:
        raise AssertionError

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(compilation, "is_compiled", lambda width: compiled)
    monkeypatch.setattr(compilation, "cores", lambda: cores)
    compilation.compile_kernels([16], ADAM)()
