"""Row optimizers against those of torch over whole tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from errors import refuses
from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, ScheduleConfig, TieredEmbeddingBagCollection
from stratarec.embedding.engine import Engine
from stratarec.embedding.optimizers import ROW_OPTIMIZERS
from stratarec.errors import TrainingError

ROWS, WIDTH, STEPS = 12, 4, 60


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


# Steps that change all rows


DENSE: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
WARMING = ScheduleConfig(kind="cosine", warmup_steps=5, total_steps=50, final_factor=0.1)


def rare(step: int) -> Tensor:
    """Ids of a batch: of the last rows only now and then."""
    draws = torch.rand(6, generator=torch.Generator().manual_seed(2000 + step))
    return (draws**3 * ROWS).long()


@pytest.mark.parametrize("kind", DENSE)
def test_a_step_of_all_rows_is_that_of_torch_on_the_whole_table(kind: str) -> None:
    """The gradient of ``weight_decay / 2 * sum of squares`` on every row at every step, and a rate that changes."""
    module = made(kind=kind, weight_decay=0.05, rows="all", schedule=WARMING)
    weight = module.table("t")["weight"].clone().requires_grad_()
    dense = DENSE[kind]([weight], lr=0.02, **({"eps": 1e-8} if kind != "sgd" else {}))
    for step in range(STEPS):
        if step == 30:
            module.engine.step_clock.rate_factor = 0.3
        dense.param_groups[0]["lr"] = 0.02 * WARMING.factor(step) * (0.3 if step >= 30 else 1)
        found = module(looked_up(rare(step))).pooled
        torch.testing.assert_close(found, weight[rare(step)].detach(), rtol=1e-5, atol=2e-6)
        (found - targets(step, 6)).square().sum().backward()
        dense.zero_grad()
        ((weight[rare(step)] - targets(step, 6)).square().sum() + 0.05 / 2 * weight.square().sum()).backward()
        dense.step()
        assert module.learning_rate == pytest.approx(0.02 * WARMING.factor(step + 1) * (0.3 if step >= 30 else 1))
    found = module.table("t")
    assert (found["clock"] == STEPS).all()
    torch.testing.assert_close(found["weight"], weight.detach(), rtol=2e-5, atol=5e-6)
    if kind == "adam":
        assert_alike(module, weight.detach(), dense.state[weight])


@pytest.mark.parametrize("kind", ROW_OPTIMIZERS)
@pytest.mark.parametrize("decay", ["l2", "decoupled"])
def test_who_looks_at_rows_in_between_changes_no_bit(kind: str, decay: str) -> None:
    """Rows that catch up at every step have the bits of rows that catch up once."""
    found = []
    for every in (1, 7, STEPS):
        module = made(kind=kind, weight_decay=0.05, decay=decay, rows="all", schedule=WARMING)
        for step in range(STEPS):
            (module(looked_up(rare(step))).pooled - targets(step, 6)).square().sum().backward()
            if step % every == 3:
                with torch.no_grad():
                    module(looked_up(torch.arange(ROWS)))
                module.rows("t", 2, 5)
        found.append({name: view.clone() for name, view in module.table("t").items()})
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)


def test_rows_that_a_second_batch_lacks_take_the_step_of_the_first() -> None:
    """Two look-ups before two backwards: the second's gradient is of rows that the first did not change yet."""
    module = made(kind="sgd", weight_decay=0.5, rows="all")
    start = module.table("t")["weight"].clone()
    one, other = (module(looked_up(torch.tensor([row]))).pooled for row in (0, 1))
    one.sum().backward()
    other.sum().backward()
    weight = module.table("t")["weight"]
    keep = 1 - 0.02 * 0.5
    torch.testing.assert_close(weight[0], (start[0] * keep - 0.02) * keep)
    torch.testing.assert_close(weight[1], start[1] * keep * keep - 0.02)
    torch.testing.assert_close(weight[2:], start[2:] * keep * keep)


def test_state_of_all_rows_resumes_elsewhere() -> None:
    one, other = (made(kind="adam", weight_decay=0.05, rows="all") for _ in range(2))
    for step in range(9):
        one(looked_up(rare(step))).pooled.square().sum().backward()
        if step == 4:
            other.load_state_dict(one.state_dict())
        elif step > 4:
            other(looked_up(rare(step))).pooled.square().sum().backward()
    assert all(torch.equal(view, other.table("t")[name]) for name, view in one.table("t").items())


# Gradients that are scaled before they are applied


@pytest.mark.parametrize("mean", [False, True])
def test_buffered_gradients_have_their_norm_and_are_applied_scaled(mean: bool) -> None:
    lengths, ids = torch.tensor([2, 0, 3, 1]), torch.tensor([1, 3, 3, 3, 5, 0, 4, 4, 1])
    features = KeyedJagged(
        keys=("x", "s"), values=ids, offsets=torch.tensor([0, 2, 2, 5, 6, 7, 7, 8, 9]), batch_size=len(lengths)
    )
    module = TieredEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="t", num_embeddings=ROWS, embedding_dim=WIDTH, feature_names=("x",), sequence_features=("s",),
                pooling="mean" if mean else "sum",
            )
        ],
        optimizer=RowOptimizerConfig(kind="sgd", learning_rate=0.1),
    )  # fmt: skip
    start = module.table("t")["weight"].clone()
    weight = start.clone().requires_grad_()
    mode = "mean" if mean else "sum"
    bags = torch.nn.functional.embedding_bag(ids[:6], weight, torch.tensor([0, 2, 2, 5]), mode=mode)
    (bags * targets(0, 4)).sum().backward()
    (weight[ids[6:]] * targets(1, 3)).sum().backward()
    assert weight.grad is not None
    engine = module.engine
    assert isinstance(engine, Engine)
    engine.hold_updates()
    found = module(features)
    ((found.pooled * targets(0, 4)).sum() + (found.sequences["s"].values * targets(1, 3)).sum()).backward()
    assert torch.equal(module.table("t")["weight"], start)
    assert engine.gradient_norm() == pytest.approx(float(weight.grad.norm()), rel=1e-6)
    with refuses(TrainingError, "gradients rows"):
        engine.load(Path(), {})
    engine.apply(0.25)
    torch.testing.assert_close(module.table("t")["weight"], start - 0.1 * 0.25 * weight.grad)
    assert module.step == 1
    assert engine.gradient_norm() == 0


@pytest.mark.parametrize("rows", [40, 200_000])
def test_the_norm_has_the_same_bits_at_any_number_of_threads_and_in_any_row(rows: int) -> None:
    draws, before, norms = torch.Generator().manual_seed(3), torch.get_num_threads(), []
    ids = torch.randint(0, 40, (3000,), generator=draws)
    gradient = torch.randn(3000, WIDTH, generator=draws)
    try:
        for threads, shift in ((1, 0), (2, 0), (2, rows - 40)):
            torch.set_num_threads(threads)
            module = TieredEmbeddingBagCollection(
                [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=WIDTH, feature_names=("x",))]
            )
            assert isinstance(module.engine, Engine)
            module.engine.hold_updates()
            module(looked_up(ids + shift)).pooled.backward(gradient)
            norms.append(module.engine.gradient_norm())
    finally:
        torch.set_num_threads(before)
    assert norms[0] > 0
    assert len(set(norms)) == 1
