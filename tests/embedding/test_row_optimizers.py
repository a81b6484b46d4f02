"""Row optimizers against those of torch over whole tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, TieredEmbeddingBagCollection
from stratarec.jagged import KeyedJagged

ROWS, WIDTH, STEPS = 12, 10, 60


def made(**options: Any) -> TieredEmbeddingBagCollection:
    return TieredEmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=WIDTH, feature_names=("x",))],
        optimizer=RowOptimizerConfig(**{"learning_rate": 0.02, **options}),
        seed=1,
    )


def looked_up(ids: Tensor) -> KeyedJagged:
    return KeyedJagged(keys=("x",), values=ids, offsets=None, batch_size=len(ids))


def targets(step: int, count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(step))


def assert_alike(module: TieredEmbeddingBagCollection, weight: Tensor, state: dict[str, Tensor]) -> None:
    found = module.table("t")
    torch.testing.assert_close(found["weight"], weight, rtol=1e-5, atol=2e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(found[name], state[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("decay", "theirs"), [("l2", torch.optim.Adam), ("decoupled", torch.optim.AdamW)])
def test_adam_on_all_rows_is_that_of_torch(decay: str, theirs: Any) -> None:
    module, ids = made(kind="adam", weight_decay=0.05, decay=decay), torch.arange(ROWS)
    weight = module.table("t")["weight"].clone().requires_grad_()
    dense = theirs([weight], lr=0.02, weight_decay=0.05)
    for step in range(STEPS):
        (module(looked_up(ids)).pooled - targets(step, ROWS)).square().sum().backward()
        dense.zero_grad()
        (weight - targets(step, ROWS)).square().sum().backward()
        dense.step()
    assert_alike(module, weight.detach(), dense.state[weight])


def test_adam_on_some_rows_is_that_of_torch_for_sparse_gradients() -> None:
    # SparseAdam adds eps before the second moment is corrected: where eps is next to nothing, both are alike.
    module = made(kind="adam", eps=1e-20)
    weight = module.table("t")["weight"].clone().requires_grad_()
    sparse = torch.optim.SparseAdam([weight], lr=0.02, eps=1e-20)
    for step in range(STEPS):
        ids = torch.randint(0, ROWS - 1, (7,), generator=torch.Generator().manual_seed(1000 + step))
        (module(looked_up(ids)).pooled - targets(step, 7)).square().sum().backward()
        sparse.zero_grad()
        found = torch.nn.functional.embedding(ids, weight, sparse=True)
        (found - targets(step, 7)).square().sum().backward()
        sparse.step()
    assert_alike(module, weight.detach(), sparse.state[weight])
    assert (module.table("t")["exp_avg_sq"][-1] == 0).all()
