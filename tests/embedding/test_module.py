"""Compare the embedding collection with the plain reference: lookups bit for bit, updates within
float32 rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted import sized
from torch import Tensor

from errors import refuses
from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.embedding import (
    EmbeddingBagConfig,
    RowOptimizerConfig,
    ScheduleConfig,
    TieredEmbeddingBagCollection,
)
from stratarec.embedding.optimizers import ROW_OPTIMIZERS
from stratarec.errors import ConfigError
from stratarec.kernels.pooling import reference as pooling
from stratarec.kernels.update import reference as update

KINDS = tuple(ROW_OPTIMIZERS)


def jagged(
    draws: np.random.Generator, rows: int, batch: int, longest: int, dtype: torch.dtype
) -> JaggedTensor:
    lengths = torch.from_numpy(draws.integers(0, longest + 1, batch))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = (rows * draws.random(int(offsets[-1])) ** 3).astype(np.int64)
    return JaggedTensor(values=torch.from_numpy(ids).to(dtype), offsets=offsets)


def collection(
    width: int, kind: Any = "rowwise_adagrad", weight_decay: float = 0.0, decay: Any = "l2"
) -> TieredEmbeddingBagCollection:
    """Create two tables of one width and one of width 5. One table is shared by two features and
    one feature is also a sequence.

    Kernels are compiled for each width and each kind of batch, so tests of other kinds of batches
    use width 5.
    """
    return TieredEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="a",
                num_embeddings=50,
                embedding_dim=width,
                feature_names=("a1", "a2"),
                sequence_features=("as",),
            ),
            EmbeddingBagConfig(
                name="b", num_embeddings=1, embedding_dim=width, feature_names=("b1",), pooling="mean"
            ),
            EmbeddingBagConfig(
                name="c", num_embeddings=9, embedding_dim=5, feature_names=("c1",), pooling="mean"
            ),
        ],
        optimizer=RowOptimizerConfig(kind=kind, learning_rate=0.1, weight_decay=weight_decay, decay=decay),
        seed=4,
    )


SIZES = {"c1": 9, "a1": 50, "as": 50, "b1": 1, "a2": 50}  # not the order of the tables


def batch_of(draws: np.random.Generator, batch: int, dtype: torch.dtype = torch.int64) -> KeyedJagged:
    return KeyedJagged.from_features(
        {key: jagged(draws, rows, batch, 4, dtype) for key, rows in SIZES.items()}
    )


@pytest.mark.interpreted
def test_bags_behind_the_filled_ones_change_nothing() -> None:
    """Bags that a batch declares as empty are not written, and training has the same bits."""
    draws, size, filled = np.random.default_rng(1), *sized((200, 70), (20, 7))
    bags = {}
    for key, rows in SIZES.items():
        bag = jagged(draws, rows, filled, 4, torch.int64)
        behind = bag.offsets[-1:].expand(size - filled)
        bags[key] = JaggedTensor(values=bag.values, offsets=torch.cat([bag.offsets, behind]))
    plain = KeyedJagged.from_features(bags)
    declared = replace(plain, filled=(filled,) * len(SIZES))
    one, other = collection(5), collection(5)
    for _ in range(3):
        actual, expected = other(declared), one(plain)
        assert torch.equal(actual.pooled[:filled], expected.pooled[:filled])
        assert (expected.pooled[filled:] == 0).all()
        for pooled, sequences in ((actual.pooled, actual.sequences), (expected.pooled, expected.sequences)):
            (pooled[:filled].sum() + sequences["as"].values.square().sum()).backward()
    for name in "abc":
        for part, view in one.table(name).items():
            assert torch.equal(other.table(name)[part], view)
    with refuses(ConfigError, "1 5"):
        replace(plain, filled=(3,))


@pytest.mark.interpreted
def test_single_ids_behind_the_filled_bags_are_not_looked_up() -> None:
    """In a batch with one id per bag, the ids behind the filled bags may be out of range.

    A row of -0.0 keeps its sign.
    """
    draws, (size, filled) = np.random.default_rng(2), sized((200, 70), (20, 7))
    keys = tuple(SIZES)
    ids = np.stack([draws.integers(0, rows, size) for rows in SIZES.values()])
    module = collection(5)
    module.table("a")["weight"].fill_(-0.0)
    with torch.no_grad():
        expected = module(
            KeyedJagged(keys=keys, values=torch.from_numpy(ids.reshape(-1)), offsets=None, batch_size=size)
        )
        cut = ids.copy()
        cut[[key not in module.engine.sequence_keys for key in keys], filled:] = 10**9
        filled_bags = tuple(size if key in module.engine.sequence_keys else filled for key in keys)
        actual = module(
            KeyedJagged(
                keys=keys,
                values=torch.from_numpy(cut.reshape(-1)),
                offsets=None,
                batch_size=size,
                filled=filled_bags,
            )
        )
    assert torch.equal(actual.pooled[:filled].view(torch.int32), expected.pooled[:filled].view(torch.int32))
    assert bool(torch.signbit(expected.pooled[:, :5]).all())


@given(st.integers(0, 99), st.sampled_from([5, 8]), st.sampled_from([0, 1, 7]), st.booleans())
def test_lookups_match_the_reference_bit_for_bit(seed: int, width: int, batch: int, wide: bool) -> None:
    module = collection(width)
    features = batch_of(np.random.default_rng(seed), batch, torch.int64 if wide else torch.int32)
    actual = module(features)
    assert actual.pooled_keys == ("a1", "a2", "b1", "c1")
    for key, table, mean in (("a1", "a", False), ("a2", "a", False), ("b1", "b", True), ("c1", "c", True)):
        part = features[key]
        expected = pooling.pool(module.table(table)["weight"], part.values, part.offsets, None, mean)
        assert torch.equal(actual[key], expected)
    assert torch.equal(
        actual.sequences["as"].values, module.table("a")["weight"][features["as"].values.long()]
    )
    assert torch.equal(actual.sequences["as"].offsets, features["as"].offsets)


@pytest.mark.interpreted
def test_weights_scale_lookups_and_receive_gradients() -> None:
    module = TieredEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="t", num_embeddings=20, embedding_dim=5, feature_names=("x",), pooling="mean"
            )
        ],
        optimizer=RowOptimizerConfig(learning_rate=0.0),
    )
    part = jagged(np.random.default_rng(0), 20, 12, 4, torch.int64)
    weights = torch.rand(part.values.numel(), requires_grad=True)
    features = KeyedJagged(
        keys=("x",), values=part.values, offsets=part.offsets, batch_size=12, weights=weights
    )
    expected = pooling.pool(module.table("t")["weight"], part.values, part.offsets, weights, True)
    pooled = module(features).pooled
    assert torch.equal(pooled, expected.detach())
    target = torch.rand_like(pooled)
    (mine,) = torch.autograd.grad((pooled * target).sum(), weights)
    (plain,) = torch.autograd.grad((expected * target).sum(), weights)
    torch.testing.assert_close(mine, plain)


def reference_step(
    module: TieredEmbeddingBagCollection,
    features: KeyedJagged,
    outputs: dict[str, Tensor],
    state: dict[str, Any],
) -> None:
    """Update plain copies of the tables, one lookup at a time."""
    rule = module.engine.optimizer.rule(state["step"])
    for table in module.tables:
        lookups = []
        for name in (*table.feature_names, *table.sequence_features):
            part, gradient = features[name], outputs[name]
            for b in range(part.batch_size):
                first, last = int(part.offsets[b]), int(part.offsets[b + 1])
                for i in range(first, last):
                    if name in table.sequence_features:
                        lookups.append((int(part.values[i]), gradient[i], 1.0))
                    else:
                        factor = 1.0 if part.weights is None else float(part.weights[i])
                        share = last - first if table.pooling == "mean" else 1
                        lookups.append((int(part.values[i]), gradient[b], factor / share))
        for row, total in update.row_gradients(lookups).items():
            views = {name: view[row] for name, view in state[table.name].items()}
            update.update_row(rule, views.pop("weight"), total, views)
    state["step"] += 1


def test_weights_of_sequences_get_no_gradient() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=8, sequence_features=("x",))
    module = TieredEmbeddingBagCollection([table])
    weights = torch.rand(3, requires_grad=True)
    offsets = torch.tensor([0, 2, 3])
    result = module(
        KeyedJagged(
            keys=("x",), values=torch.tensor([1, 4, 4]), offsets=offsets, batch_size=2, weights=weights
        )
    )
    result.sequences["x"].values.sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("weighted", [False, True])
def test_int32_offsets_match_int64_offsets(weighted: bool) -> None:
    draws, modules = np.random.default_rng(3), [collection(5), collection(5)]
    for _ in range(3):
        features = batch_of(draws, 30, torch.int32)
        if weighted:
            features = replace(features, weights=torch.rand(features.values.numel()))
        narrow = replace(features, offsets=features.bag_offsets().int())
        for module, asked in zip(modules, (features, narrow), strict=True):
            result = module(asked)
            (result.pooled.square().sum() + result.sequences["as"].values.square().sum()).backward()
    assert features.offsets is replace(features).offsets, "int64 was copied"
    for name in "abc":
        assert torch.equal(modules[0].table(name)["weight"], modules[1].table(name)["weight"])
    bags = {key: replace(features[key], offsets=features[key].offsets.int()) for key in features.keys}
    assert torch.equal(KeyedJagged.from_features(bags).bag_offsets(), features.bag_offsets())


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["", "l2", "decoupled"])
@pytest.mark.parametrize("weighted", [False, True])
def test_updates_follow_the_reference(kind: str, decay: str, weighted: bool) -> None:
    module = collection(8, kind, 0.01, decay) if decay else collection(8, kind)
    state: dict[str, Any] = {
        table.name: {name: view.clone() for name, view in module.table(table.name).items()}
        for table in module.tables
    }
    state["step"] = 0
    draws = np.random.default_rng(1)
    steps = sized(6, 2)
    for step in range(steps):
        features = batch_of(draws, 9)
        if weighted:
            weights = torch.from_numpy(draws.normal(size=features.values.numel()).astype(np.float32))
            features = replace(features, weights=weights)
        result = module(features)
        generator = torch.Generator().manual_seed(step)
        pooled = torch.randn(result.pooled.shape, generator=generator)
        rows = torch.randn(result.sequences["as"].values.shape, generator=generator)
        torch.autograd.backward([result.pooled, result.sequences["as"].values], [pooled, rows])
        columns = dict(zip(result.pooled_keys, pooled.split(list(result.dims), dim=1), strict=True))
        reference_step(module, features, {**columns, "as": rows}, state)
    for table in module.tables:
        for name, view in module.table(table.name).items():
            torch.testing.assert_close(view, state[table.name][name], rtol=2e-5, atol=2e-6)
    assert module.step == steps


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_changes_no_bit(kind: str) -> None:
    states = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        module = collection(8, kind)
        draws = np.random.default_rng(2)
        for step in range(20):
            features = batch_of(draws, 300)
            result = module(features)
            scale = torch.randn(result.pooled.shape, generator=torch.Generator().manual_seed(step))
            ((result.pooled * scale).sum() + result.sequences["as"].values.square().sum()).backward()
        states.append(module.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_errors_for_bad_batches_name_the_feature() -> None:
    module = collection(4)
    features = batch_of(np.random.default_rng(0), 3)
    with refuses(ConfigError, "batch c1"):
        module(features.select(["a1", "a2", "as", "b1"]))
    for bad in (50, -1, 10**12):
        values = torch.zeros(len(SIZES) * 2, dtype=torch.int64)
        values[2 * list(SIZES).index("a1") + 1] = bad
        with refuses(ConfigError, f"'a1' id {bad} 'a' 0 49"):
            module(KeyedJagged(keys=tuple(SIZES), values=values, offsets=None, batch_size=2))


def test_schedules_follow_the_length_of_a_run() -> None:
    cosine = ScheduleConfig(kind="cosine", warmup_steps=10, final_factor=0.1)
    assert cosine.of_run(40) == ScheduleConfig(
        kind="cosine", warmup_steps=10, total_steps=40, final_factor=0.1
    )
    fixed = ScheduleConfig(kind="cosine", warmup_steps=4, total_steps=14)
    assert fixed.of_run(99) == fixed
    assert ScheduleConfig().of_run(99) == ScheduleConfig()
    assert [ScheduleConfig(warmup_steps=5).of_run(50).factor(step) for step in (0, 4, 49)] == [
        0.2,
        1.0,
        1.0,
    ]
    with refuses(ConfigError, "total_steps 40 warmup_steps 50"):
        ScheduleConfig(kind="cosine", warmup_steps=50).of_run(40)
    with refuses(ConfigError, "schedule.total_steps 0"):
        TieredEmbeddingBagCollection(
            [EmbeddingBagConfig(name="a", num_embeddings=5, embedding_dim=4, feature_names=("a",))],
            optimizer=RowOptimizerConfig(schedule=cosine),
        )


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_small_and_large_tables_sum_gradients_to_the_same_bits(kind: Any) -> None:
    """Small tables add gradients in place. Large tables sort their lookups first."""
    count = sized(300, 60)
    ids = torch.from_numpy((40 * np.random.default_rng(5).random(count) ** 3).astype(np.int64))
    results = []
    for rows in (40, sized(200_000, 5_000)):
        module = TieredEmbeddingBagCollection(
            [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=16, feature_names=("x",))],
            optimizer=RowOptimizerConfig(kind=kind, learning_rate=0.1, weight_decay=0.01),
        )
        module.table("t")["weight"][:40] = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
        for step in range(3):
            pooled = module(KeyedJagged(keys=("x",), values=ids, offsets=None, batch_size=count)).pooled
            pooled.backward(torch.randn(count, 16, generator=torch.Generator().manual_seed(step)))
        results.append({name: view[:40].clone() for name, view in module.table("t").items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
