"""Test that deduplicated batches train like expanded ones: pooled vectors bitwise, gradients and
updates up to rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import InverseJagged, JaggedWindows, KeyedJagged
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.embedding import RowOptimizerConfig
from stratarec.models import DLRMConfig, HistoryConfig, ModelConfig, build_model
from stratarec.models import request as request_module
from stratarec.models.request import Request
from stratarec.models.zoo.config import DCNv2Config

ROWS = {"item": 60, "os": 5, "tags": 9}
KEYS = ("item", "os", "tags", "history")
POOLINGS = ("mean", "target_attention", "transformer")


def schema() -> Schema:
    sparse = (
        SparseFeature(name="item"),
        SparseFeature(name="os"),
        SparseFeature(name="tags", kind="multi"),
        SparseFeature(name="history", kind="history", of="item", max_length=25),
    )
    return Schema(dense=(DenseFeature(name="price"),), sparse=sparse, user="u", time="t")


def keyed(keys: tuple[str, ...], bags: list[list[int]]) -> KeyedJagged:
    lengths = torch.tensor([0, *(len(bag) for bag in bags)])
    values = torch.tensor([i for bag in bags for i in bag], dtype=torch.int32)
    return KeyedJagged(
        keys=keys, values=values, offsets=lengths.cumsum(0), batch_size=len(bags) // len(keys)
    )


def number_distinct(batch: Batch) -> Batch:
    """Return the batch as the loader does: distinct values numbered by first appearance, none
    unused.
    """
    return batch.replace(groups=tuple(group.compact() for group in batch.groups))


def batch(size: int = 40, seed: int = 0, spare: int = 0, scattered: bool = False) -> Batch:
    """Return samples of a few sessions: each sample has its own item, os and tags are in one group,
    and histories are overlapping windows.

    `spare` adds distinct values that no sample uses, so that there may be more of them than
    samples. With `scattered`, samples of a session are not adjacent.
    """
    draws = torch.Generator().manual_seed(seed)
    distinct, windows = 5 + spare, 7 + spare

    def ids(high: int, count: int) -> list[int]:
        return torch.randint(0, high, (count,), generator=draws).tolist()  # type: ignore[no-any-return]

    context = keyed(
        ("os", "tags"),
        [*([i] if i else [] for i in ids(5, distinct)), *(ids(9, n) for n in ids(4, distinct))],
    )
    length = torch.tensor(ids(25, windows))
    start = torch.tensor([int(30 * share) for share in torch.rand(windows, generator=draws)])
    history = JaggedWindows(
        key="history", values=torch.tensor(ids(60, 60), dtype=torch.int32), start=start, length=length
    )
    inverses = [torch.tensor(ids(most, size), dtype=torch.int32) for most in (5, 7)]
    if not scattered:
        inverses = [inverse.sort().values for inverse in inverses]
    return Batch(
        label=torch.tensor(ids(2, size)).float(),
        dense=torch.rand(size, 1, generator=draws),
        sparse=KeyedJagged(
            keys=("item",), values=torch.tensor(ids(60, size)), offsets=None, batch_size=size
        ),
        groups=(
            InverseJagged(unique=context, inverse=inverses[0]),
            InverseJagged(unique=history, inverse=inverses[1]),
        ),
    )


def models() -> list[ModelConfig]:
    histories = [HistoryConfig(pooling=pooling) for pooling in POOLINGS]  # type: ignore[arg-type]
    configs: list[ModelConfig] = [
        DLRMConfig(embedding_dim=8, bottom_mlp=(8,), top_mlp=(16,), history=history)
        for history in histories
    ]
    configs.append(DLRMConfig(embedding_dim=8, bottom_mlp=(8,), top_mlp=(16,), interaction="cat"))
    return [*configs, DCNv2Config(embedding_dim=8, deep_mlp=(8,), history=histories[2])]


def name(config: ModelConfig) -> str:
    return f"{config.kind}-{config.history.pooling}-{getattr(config, 'interaction', '')}"


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("spare", [0, 50, None])
@pytest.mark.parametrize("config", models(), ids=name)
def test_pooled_vectors_match_the_expanded_path_bit_for_bit(
    config: ModelConfig, spare: int | None, scattered: bool
) -> None:
    model = build_model(config, schema(), ROWS, seed=3)
    grouped = batch(spare=spare or 0, scattered=scattered)
    grouped = number_distinct(grouped) if spare is None else grouped
    request = Request.of(grouped, model.network.sequence_keys)
    with torch.no_grad():
        _, actual, _, segments = model.vectors(grouped, request)
        if segments is not None:
            actual = segments.expand(actual.view(grouped.size, -1, model.network.width)).flatten(1)
        expected = model.embeddings(grouped.expanded(KEYS).sparse).pooled
    assert torch.equal(actual, expected)
    fewer = request.features.values.numel() < grouped.expanded(KEYS).sparse.values.numel()
    assert fewer or spare or scattered, "nothing was looked up once for several samples"


@pytest.mark.parametrize("pooling", POOLINGS)
def test_groups_with_few_repetitions_are_looked_up_by_sample(
    pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(
        DLRMConfig(embedding_dim=4, history=HistoryConfig(pooling=pooling)), schema(), ROWS, seed=3
    )  # type: ignore[arg-type]
    grouped, keys = number_distinct(batch()), model.network.sequence_keys
    pooled = [group for group in grouped.groups if not set(group.keys) <= set(keys)]
    ids = [group.bags().values.numel() * (group.factor - 1) for group in pooled]
    for least, by_sample in ((sum(ids), False), (sum(ids) + 1, True)):
        monkeypatch.setattr(request_module, "_LEAST_SAVED", least)
        request = Request.of(grouped, keys)
        assert (request.starts is None) == by_sample
        with torch.no_grad():
            _, result, _, segments = model.vectors(grouped, request)
            result = (
                result if segments is None else segments.expand(result.view(grouped.size, -1, 4)).flatten(1)
            )
            assert torch.equal(result, model.embeddings(grouped.expanded(KEYS).sparse).pooled)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("config", models(), ids=name)
def test_training_on_distinct_values_matches_training_on_expanded_batches(
    config: ModelConfig, precision: str
) -> None:
    rule = RowOptimizerConfig(kind="sgd", learning_rate=0.5)
    pair = [build_model(config, schema(), ROWS, optimizer=rule, seed=3) for _ in range(2)]
    tolerance = 1e-5 if precision == "float32" else 2e-2
    for step in range(5):
        grouped = number_distinct(batch(seed=step)) if step % 2 else batch(seed=step, scattered=step == 2)
        losses, gradients = [], []
        for model, given in zip(pair, (grouped, grouped.expanded(KEYS)), strict=True):
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                logits = model(given)
            loss = functional.binary_cross_entropy_with_logits(logits, given.label)
            loss.backward()
            losses.append(loss.item())
            gradients.append([weight.grad for weight in model.network.parameters()])
        assert losses[0] == pytest.approx(losses[1], rel=tolerance)
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=tolerance)
    assert pair[0].embeddings.step == pair[1].embeddings.step == 5
    for table in ROWS:
        one, other = (model.embeddings.table(table)["weight"] for model in pair)
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_rows_shared_by_two_groups_get_one_update(pooling: str, scattered: bool) -> None:
    """Row-wise Adagrad uses the sum of a row's gradients once. Two updates with the parts would
    give another result.
    """
    config = DLRMConfig(
        embedding_dim=8, bottom_mlp=(8,), top_mlp=(16,), history=HistoryConfig(pooling=pooling)
    )  # type: ignore[arg-type]
    pair = [
        build_model(config, schema(), ROWS, optimizer=RowOptimizerConfig(learning_rate=0.1), seed=1)
        for _ in "ab"
    ]
    grouped = batch(seed=9, scattered=scattered)
    for model, given in zip(pair, (grouped, grouped.expanded(KEYS)), strict=True):
        functional.binary_cross_entropy_with_logits(model(given), given.label).backward()
    one, other = (dict(model.embeddings.engine.named_views()) for model in pair)
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_one_sample_and_empty_histories(pooling: str) -> None:
    config = DLRMConfig(
        embedding_dim=8, bottom_mlp=(8,), top_mlp=(16,), history=HistoryConfig(pooling=pooling)
    )  # type: ignore[arg-type]
    model = build_model(config, schema(), ROWS)
    grouped = batch(size=1)
    empty = JaggedWindows(
        key="history",
        values=torch.zeros(0, dtype=torch.int32),
        start=torch.zeros(1).long(),
        length=torch.zeros(1).long(),
    )
    history = InverseJagged(unique=empty, inverse=torch.zeros(1, dtype=torch.int32))
    grouped = grouped.replace(groups=(grouped.groups[0], history))
    torch.testing.assert_close(model(grouped), model(grouped.expanded(KEYS)))
    model(grouped).sum().backward()


@pytest.mark.parametrize(
    "config", [models()[1], DCNv2Config(embedding_dim=8, history=HistoryConfig(pooling="target_attention"))]
)
def test_an_item_that_samples_share(config: ModelConfig) -> None:
    """The item itself may be constant in a session. The network then needs it for every sample."""
    pair = [
        build_model(config, schema(), ROWS, optimizer=RowOptimizerConfig(kind="sgd"), seed=2) for _ in "ab"
    ]
    plain = batch(seed=4)
    item = keyed(("item",), [[7], [3], [3], []])
    own = KeyedJagged(
        keys=(), values=torch.zeros(0, dtype=torch.int32), offsets=torch.zeros(1).long(), batch_size=40
    )
    shared = InverseJagged(unique=item, inverse=torch.arange(40, dtype=torch.int32) // 10)
    grouped = plain.replace(sparse=own, groups=(shared, *plain.groups))
    losses = []
    for model, given in zip(pair, (grouped, grouped.expanded(KEYS)), strict=True):
        losses.append(functional.binary_cross_entropy_with_logits(model(given), given.label))
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1])
    for table in ROWS:
        one, other = (model.embeddings.table(table)["weight"] for model in pair)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
