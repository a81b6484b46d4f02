"""Compare row optimizers with torch's optimizers on full tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from errors import refuses
from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import (
    EmbeddingBagConfig,
    RowOptimizerConfig,
    ScheduleConfig,
    TieredEmbeddingBagCollection,
)
from stratarec.embedding.collection import LookedUp
from stratarec.embedding.engine import Engine
from stratarec.embedding.optimizers import ROW_OPTIMIZERS
from stratarec.errors import TrainingError

ROWS, WIDTH, STEPS = 12, 4, 60


def make_collection(**options: Any) -> TieredEmbeddingBagCollection:
    return TieredEmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=WIDTH, feature_names=("x",))],
        optimizer=RowOptimizerConfig(**{"learning_rate": 0.02, **options}),
        seed=1,
    )


def batch_of(ids: Tensor) -> KeyedJagged:
    return KeyedJagged(keys=("x",), values=ids, offsets=None, batch_size=len(ids))


def targets(step: int, count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(step))


def assert_alike(module: TieredEmbeddingBagCollection, weight: Tensor, state: dict[str, Tensor]) -> None:
    view = module.table("t")
    torch.testing.assert_close(view["weight"], weight, rtol=1e-5, atol=2e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(view[name], state[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("decay", "theirs"), [("l2", torch.optim.Adam), ("decoupled", torch.optim.AdamW)])
def test_adam_on_all_rows_matches_torch(decay: str, theirs: Any) -> None:
    module, ids = make_collection(kind="adam", weight_decay=0.05, decay=decay), torch.arange(ROWS)
    weight = module.table("t")["weight"].clone().requires_grad_()
    dense = theirs([weight], lr=0.02, weight_decay=0.05)
    for step in range(STEPS):
        (module(batch_of(ids)).pooled - targets(step, ROWS)).square().sum().backward()
        dense.zero_grad()
        (weight - targets(step, ROWS)).square().sum().backward()
        dense.step()
    assert_alike(module, weight.detach(), dense.state[weight])


def test_adam_on_some_rows_matches_torch_sparse_adam() -> None:
    # SparseAdam adds eps before it corrects the second moment. The two agree if eps is negligible.
    module = make_collection(kind="adam", eps=1e-20)
    weight = module.table("t")["weight"].clone().requires_grad_()
    sparse = torch.optim.SparseAdam([weight], lr=0.02, eps=1e-20)
    for step in range(STEPS):
        ids = torch.randint(0, ROWS - 1, (7,), generator=torch.Generator().manual_seed(1000 + step))
        (module(batch_of(ids)).pooled - targets(step, 7)).square().sum().backward()
        sparse.zero_grad()
        embeddings = torch.nn.functional.embedding(ids, weight, sparse=True)
        (embeddings - targets(step, 7)).square().sum().backward()
        sparse.step()
    assert_alike(module, weight.detach(), sparse.state[weight])
    assert (module.table("t")["exp_avg_sq"][-1] == 0).all()


# Steps that change all rows


DENSE: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
WARMING = ScheduleConfig(kind="cosine", warmup_steps=5, total_steps=50, final_factor=0.1)


def skewed_ids(step: int) -> Tensor:
    """Return ids of a batch. The last rows are rare."""
    draws = torch.rand(6, generator=torch.Generator().manual_seed(2000 + step))
    return (draws**3 * ROWS).long()


@pytest.mark.parametrize("kind", DENSE)
def test_a_step_of_all_rows_matches_torch_on_the_full_table(kind: str) -> None:
    """Every step adds the gradient of ``weight_decay / 2 * sum of squares`` to every row, and the
    rate changes.
    """
    module = make_collection(kind=kind, weight_decay=0.05, rows="all", schedule=WARMING)
    weight = module.table("t")["weight"].clone().requires_grad_()
    dense = DENSE[kind]([weight], lr=0.02, **({"eps": 1e-8} if kind != "sgd" else {}))
    for step in range(STEPS):
        if step == 30:
            module.engine.step_clock.rate_factor = 0.3
        dense.param_groups[0]["lr"] = 0.02 * WARMING.factor(step) * (0.3 if step >= 30 else 1)
        actual = module(batch_of(skewed_ids(step))).pooled
        torch.testing.assert_close(actual, weight[skewed_ids(step)].detach(), rtol=1e-5, atol=2e-6)
        (actual - targets(step, 6)).square().sum().backward()
        dense.zero_grad()
        (
            (weight[skewed_ids(step)] - targets(step, 6)).square().sum() + 0.05 / 2 * weight.square().sum()
        ).backward()
        dense.step()
        assert module.learning_rate == pytest.approx(
            0.02 * WARMING.factor(step + 1) * (0.3 if step >= 30 else 1)
        )
    actual = module.table("t")
    assert (actual["clock"] == STEPS).all()
    torch.testing.assert_close(actual["weight"], weight.detach(), rtol=2e-5, atol=5e-6)
    if kind == "adam":
        assert_alike(module, weight.detach(), dense.state[weight])


@pytest.mark.parametrize("kind", ROW_OPTIMIZERS)
@pytest.mark.parametrize("decay", ["l2", "decoupled"])
def test_reading_rows_between_steps_changes_no_bit(kind: str, decay: str) -> None:
    """Rows that apply missed steps at every step have the bits of rows that apply them once."""
    results = []
    for every in (1, 7, STEPS):
        module = make_collection(kind=kind, weight_decay=0.05, decay=decay, rows="all", schedule=WARMING)
        for step in range(STEPS):
            (module(batch_of(skewed_ids(step))).pooled - targets(step, 6)).square().sum().backward()
            if step % every == 3:
                with torch.no_grad():
                    module(batch_of(torch.arange(ROWS)))
                module.rows("t", 2, 5)
        results.append({name: view.clone() for name, view in module.table("t").items()})
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_rows_that_a_second_batch_lacks_take_the_step_of_the_first() -> None:
    """With two lookups before two backward passes, the second gradient belongs to rows that the
    first step did not change yet.
    """
    module = make_collection(kind="sgd", weight_decay=0.5, rows="all")
    start = module.table("t")["weight"].clone()
    one, other = (module(batch_of(torch.tensor([row]))).pooled for row in (0, 1))
    one.sum().backward()
    other.sum().backward()
    weight = module.table("t")["weight"]
    keep = 1 - 0.02 * 0.5
    torch.testing.assert_close(weight[0], (start[0] * keep - 0.02) * keep)
    torch.testing.assert_close(weight[1], start[1] * keep * keep - 0.02)
    torch.testing.assert_close(weight[2:], start[2:] * keep * keep)


def test_state_of_all_rows_resumes_in_another_collection() -> None:
    one, other = (make_collection(kind="adam", weight_decay=0.05, rows="all") for _ in range(2))
    for step in range(9):
        one(batch_of(skewed_ids(step))).pooled.square().sum().backward()
        if step == 4:
            other.load_state_dict(one.state_dict())
        elif step > 4:
            other(batch_of(skewed_ids(step))).pooled.square().sum().backward()
    assert all(torch.equal(view, other.table("t")[name]) for name, view in one.table("t").items())


# Gradients of looked-up rows

SEQUENCES = KeyedJagged(
    keys=("x", "s"), values=torch.tensor([1, 3, 3, 3, 5, 0, 4, 4, 1]),
    offsets=torch.tensor([0, 2, 2, 5, 6, 7, 7, 8, 9]), batch_size=4,
)  # fmt: skip


def with_sequence(pooling: Any, **optimizer: Any) -> TieredEmbeddingBagCollection:
    table = EmbeddingBagConfig(
        name="t",
        num_embeddings=ROWS,
        embedding_dim=WIDTH,
        feature_names=("x",),
        sequence_features=("s",),
        pooling=pooling,
    )
    return TieredEmbeddingBagCollection([table], optimizer=RowOptimizerConfig(**optimizer), seed=1)


@pytest.mark.parametrize("uses_sequence", [True, False])
def test_a_loop_that_updates_rows_itself_trains_the_bits_of_a_backward_pass(uses_sequence: bool) -> None:
    """Gradients are bfloat16, expanded, or missing."""
    fused, explicit = (with_sequence("mean", kind="adam", learning_rate=0.1) for _ in range(2))
    for step in range(5):
        rows = LookedUp(explicit.engine, explicit.stage(SEQUENCES))
        for output in (fused(SEQUENCES), explicit(rows)):
            loss = (output.pooled.bfloat16() * targets(step, 4).bfloat16()).sum().float()
            (loss + output.sequences["s"].values.sum() if uses_sequence else loss).backward()
        explicit.engine.update_rows(rows.handle, rows.gradients)
    assert fused.step == explicit.step == 5
    for name, part in fused.table("t").items():
        assert torch.equal(part, explicit.table("t")[name]), name


@pytest.mark.parametrize("mean", [False, True])
def test_gradients_have_a_norm_and_are_applied_scaled(mean: bool) -> None:
    ids = SEQUENCES.values
    module = with_sequence("mean" if mean else "sum", kind="sgd", learning_rate=0.1)
    start = module.table("t")["weight"].clone()
    weight = start.clone().requires_grad_()
    mode = "mean" if mean else "sum"
    bags = torch.nn.functional.embedding_bag(ids[:6], weight, torch.tensor([0, 2, 2, 5]), mode=mode)
    (bags * targets(0, 4)).sum().backward()
    (weight[ids[6:]] * targets(1, 3)).sum().backward()
    assert weight.grad is not None
    engine = module.engine
    assert isinstance(engine, Engine)
    rows = LookedUp(engine, engine.stage(SEQUENCES))
    output = module(rows)
    (
        (output.pooled * targets(0, 4)).sum() + (output.sequences["s"].values * targets(1, 3)).sum()
    ).backward()
    assert torch.equal(module.table("t")["weight"], start)
    norm = engine.gradient_norm(rows.handle, rows.gradients)
    assert norm == pytest.approx(float(weight.grad.norm()), rel=1e-6)
    engine.update_rows(rows.handle, rows.gradients, 0.25)
    torch.testing.assert_close(module.table("t")["weight"], start - 0.1 * 0.25 * weight.grad)
    assert module.step == 1
    with refuses(TrainingError, "batch 0 trained already"):
        engine.update_rows(rows.handle, rows.gradients)


@pytest.mark.parametrize("rows", [40, 200_000])
def test_the_norm_has_the_same_bits_for_any_number_of_threads_and_any_row(rows: int) -> None:
    draws, norms = torch.Generator().manual_seed(3), []
    ids = torch.randint(0, 40, (3000,), generator=draws)
    gradient = torch.randn(3000, WIDTH, generator=draws)
    for threads, shift in ((1, 0), (2, 0), (2, rows - 40)):
        torch.set_num_threads(threads)
        module = TieredEmbeddingBagCollection(
            [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=WIDTH, feature_names=("x",))]
        )
        assert isinstance(module.engine, Engine)
        looked_up = LookedUp(module.engine, module.stage(batch_of(ids + shift)))
        module(looked_up).pooled.backward(gradient)
        norms.append(module.engine.gradient_norm(looked_up.handle, looked_up.gradients))
    assert norms[0] > 0
    assert len(set(norms)) == 1
