"""Compare every model with the formula of its paper, in any precision, deduplicated or not, and for
several labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from models.test_deduplicated import KEYS, number_distinct
from models.test_deduplicated import ROWS as GROUPED_ROWS
from models.test_deduplicated import batch as grouped_batch
from models.test_deduplicated import schema as grouped_schema
from models.test_models import HISTORIES, ROWS, batch_of, schema
from torch import Tensor, nn
from torch.nn import functional

from stratarec.embedding import RowOptimizerConfig
from stratarec.models import HistoryConfig, ModelConfig, build_model, build_network
from stratarec.models.zoo.config import (
    DeepFMConfig,
    DINConfig,
    FinalMLPConfig,
    FMConfig,
    LRConfig,
    WideDeepConfig,
)
from stratarec.testing.models import check_shared_vectors

D = 4
# for models with a first-order weight behind each vector, because kernels are compiled for rows of
# four
NARROW = D - 1
CONFIGS: dict[str, ModelConfig] = {
    "lr": LRConfig(),
    "fm": FMConfig(embedding_dim=NARROW),
    "wide_deep": WideDeepConfig(embedding_dim=NARROW, deep_mlp=(6, 5)),
    "deepfm": DeepFMConfig(embedding_dim=NARROW, deep_mlp=(6, 5)),
    "finalmlp": FinalMLPConfig(embedding_dim=D, first_mlp=(8, 4), second_mlp=(6,), fusion_heads=2),
    "finalmlp gated": FinalMLPConfig(
        embedding_dim=D, first_mlp=(8, 4), second_mlp=(6,), gate_features=(("place",), ("item", "tags")), gate_mlp=(3,)
    ),
    "finalmlp gated by vectors of its own": FinalMLPConfig(
        embedding_dim=D, first_mlp=(4,), second_mlp=(6,), gate_features=(("item",), ("tags",)), gate_mlp=(3,),
        gate_vectors="own",
    ),
    "din": DINConfig(embedding_dim=D, deep_mlp=(6, 5)),
}  # fmt: skip
NAMES = ("item", "tags", "place")
each = pytest.mark.parametrize("name", CONFIGS)


def mlp(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = (layer.weight @ x + layer.bias).relu() if isinstance(layer, nn.Linear) else x
    return x


def pairs(vectors: list[Tensor]) -> Tensor:
    return torch.stack([one @ other for one, other in combinations(vectors, 2)]).sum()


def lr(score: Any, config: Any, rows: Tensor) -> Tensor:
    return rows.sum() + score.out.bias


def fm(score: Any, config: Any, rows: Tensor) -> Tensor:
    return score.out.bias + rows[:, -1].sum() + pairs(list(rows[:, :-1]))


def wide_deep(score: Any, config: Any, rows: Tensor) -> Tensor:
    deep = mlp(score.deep, rows[:, :-1].flatten())
    return score.out.bias + rows[:, -1].sum() + score.out.linear.weight @ deep


def deepfm(score: Any, config: Any, rows: Tensor) -> Tensor:
    return wide_deep(score, config, rows) + pairs(list(rows[:, :-1]))


def finalmlp(score: Any, config: Any, rows: Tensor) -> Tensor:
    outputs, width = [], len(rows) - len(NAMES)
    for number, stream in enumerate(score.streams):
        flat = rows[:, :D].flatten()
        if config.gate_features:
            context = torch.cat(
                [rows[width + NAMES.index(key), -D:] for key in config.gate_features[number]]
            )
            body, last = stream.gate
            flat = flat * 2 / (1 + torch.exp(-(last.weight @ mlp(body, context) + last.bias)))
        outputs.append(mlp(stream.deep, flat))
    x, y = outputs
    logit = score.out.linear.weight @ torch.cat(outputs) + score.out.bias
    heads = config.fusion_heads
    left, right = x.view(heads, -1), y.view(heads, -1)
    forms = score.forms.weight.view(heads, left.shape[1], right.shape[1])
    return logit + sum(left[k] @ forms[k] @ right[k] for k in range(heads))


def din(score: Any, config: Any, rows: Tensor) -> Tensor:
    return score.out.weight @ mlp(score.deep, rows.flatten()) + score.out.bias


NAIVE: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "lr": lr, "fm": fm, "wide_deep": wide_deep, "deepfm": deepfm, "finalmlp": finalmlp, "din": din,
}  # fmt: skip


def score_of(name: str, dense: int) -> Any:
    """Return a score network in float64 with random weights."""
    torch.manual_seed(1)
    score = build_network(CONFIGS[name], schema(dense, history=False), NAMES).score.double()
    for weight in score.parameters():
        nn.init.normal_(weight, 0.3, 0.5)
    return score


@pytest.mark.parametrize("dense", [0, 2])
@each
def test_a_score_and_its_gradient_match_the_formula(name: str, dense: int) -> None:
    config, score = CONFIGS[name], score_of(name, dense)
    numbers = torch.randn(3, dense, dtype=torch.float64, requires_grad=True)
    vectors = torch.randn(3, len(NAMES), config.vector_width, dtype=torch.float64, requires_grad=True)
    actual = score(numbers, vectors)
    expected = []
    for x, own in zip(numbers, vectors, strict=True):
        scaled = [x[i : i + 1] * score.fields.numbers.weight[:, i] for i in range(dense)]
        expected.append(NAIVE[config.kind](score, config, torch.stack([*scaled, *own])).squeeze())
    torch.testing.assert_close(actual, torch.stack(expected))
    inputs = [numbers, vectors] if dense else [vectors]
    weights = [*inputs, *score.parameters()]
    for one, other in zip(
        torch.autograd.grad(actual.sum(), weights),
        torch.autograd.grad(sum(expected), weights),
        strict=True,  # type: ignore[arg-type]
    ):
        torch.testing.assert_close(one, other)


@each
def test_shared_vectors_score_like_one_vector_per_sample(name: str) -> None:
    """The values behind the rows of segments are arbitrary and get no gradient."""
    check_shared_vectors(score_of(name, 1).float(), CONFIGS[name].vector_width, 1)


@pytest.mark.parametrize(
    ("precision", "labels"), [("float32", ("click", "like")), ("bf16", ())], ids=["float32", "bf16"]
)
@each
def test_the_loss_trains_every_weight_and_every_table(name: str, precision: str, labels: Any) -> None:
    columns = replace(schema(), label="label", labels=labels)
    config = replace(CONFIGS[name], history=HistoryConfig(pooling="target_attention"))
    model = build_model(config, columns, ROWS, click_rates=[0.3] * max(len(labels), 1))
    before = {key: view.clone() for key, view in model.embeddings.engine.named_views()}
    batch = batch_of(HISTORIES)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits = model(batch)
    assert logits.dtype == torch.float32
    assert logits.shape == ((batch.size, len(labels)) if labels else (batch.size,))
    logits.sigmoid().square().sum().backward()
    for key, weight in model.network.named_parameters():
        assert weight.grad is not None, key
        assert weight.grad.isfinite().all(), key
    idle = [key for key, weight in model.network.named_parameters() if not weight.grad.abs().sum()]  # type: ignore[union-attr]
    assert len(idle) <= 2, f"more than a ReLU that is dead: {idle}"
    for key, view in model.embeddings.engine.named_views():
        assert not torch.equal(view, before[key]), key


@each
def test_training_on_distinct_values_matches_training_on_expanded_batches(name: str) -> None:
    rule = RowOptimizerConfig(kind="sgd", learning_rate=0.1)
    config = (
        replace(CONFIGS[name], gate_features=(("os",), ("item",))) if "gated" in name else CONFIGS[name]
    )
    pair = [build_model(config, grouped_schema(), GROUPED_ROWS, optimizer=rule, seed=3) for _ in "ab"]
    for step in range(2):
        grouped = number_distinct(grouped_batch(seed=step))
        for model, given in zip(pair, (grouped, grouped.expanded(KEYS)), strict=True):
            model.zero_grad()
            functional.binary_cross_entropy_with_logits(model(given), given.label).backward()
    for one, other in zip(*(model.network.parameters() for model in pair), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    for table in GROUPED_ROWS:
        torch.testing.assert_close(
            *(model.embeddings.table(table)["weight"] for model in pair), rtol=1e-4, atol=1e-5
        )
