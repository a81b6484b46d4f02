"""Test that an ensemble is the weighted mean of its members' formulas and that each member has its
own loss.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from models.test_models import batch_of, schema
from torch import Tensor, nn
from torch.nn import functional

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.kernels import members
from stratarec.models import build_network
from stratarec.models.base import Network
from stratarec.models.layers import BatchNorm, dropouts, seed_dropout
from stratarec.models.request import Segments
from stratarec.models.zoo.config import EnsembleConfig
from stratarec.models.zoo.ensemble import EnsembleScore, MemberMean, PiecewiseLinear
from stratarec.models.zoo.trees import TreeMembers, TreeSizes
from stratarec.training.steps.loss import Objective

D, K, Q = 3, 10, 5
CONFIG = EnsembleConfig(embedding_dim=D, members=K, member_mlp=(6, 5), bins=Q)
NAMES = ("item", "tags", "place")


def score(dense: int) -> Any:
    """Return a network in float64 and evaluation mode with random weights and quantiles, two of
    which are equal.
    """
    torch.manual_seed(1)
    network = build_network(CONFIG, schema(dense, history=False), NAMES).score.double().eval()
    for weight in network.parameters():
        nn.init.normal_(weight, 0.3, 0.5)
    network.out.weights.copy_(torch.rand(K).softmax(0))
    if dense:
        edges = torch.tensor([[-2.0, -1.0, -1.0, 0.5, 1.0, 2.0]]).repeat(dense, 1) + torch.arange(
            dense
        ).unsqueeze(1)
        network.set_quantiles(edges)
    return network


def bins(x: float, edges: list[float]) -> list[float]:
    """Compute formula 1 of Gorishniy et al. 2022 with constant ends."""
    results = []
    for low, high in pairwise(edges):
        results.append(0.0 if low == high or x <= low else 1.0 if x >= high else (x - low) / (high - low))
    return results


def member(network: Any, k: int, x: Tensor, rows: Tensor) -> Tensor:
    """Compute the logit of one member for one sample by its formula."""
    parts, logit = [], network.out.bias[k : k + 1].clone()
    for i in range(len(x)):
        z = torch.tensor(bins(float(x[i]), network.numbers.encode.edges[i].tolist()), dtype=torch.float64)
        vectors = (z @ network.numbers.weight[i] + network.numbers.bias[i, 0]).relu()
        parts.append(vectors[k * D : (k + 1) * D])
        logit = logit + x[i].clamp(-8, 8) * network.numbers.first[i, k]
    for row in rows:
        own = row[k * (D + 1) : (k + 1) * (D + 1)]
        parts.append(own[:D])
        logit = logit + own[D]
    hidden = torch.cat(parts)
    for place, layer in enumerate(network.layers):
        hidden = hidden @ layer.weight[k] + layer.bias[k, 0]
        hidden = hidden.relu() if place < len(network.layers) - 1 else hidden
    return logit + hidden


@pytest.mark.parametrize("dense", [0, 2])
def test_a_score_is_the_weighted_mean_of_its_members_and_training_returns_each(dense: int) -> None:
    ensemble = score(dense)
    numbers = torch.randn(5, dense, dtype=torch.float64) * 4
    vectors = torch.randn(5, len(NAMES), CONFIG.vector_width, dtype=torch.float64)
    each = torch.stack(
        [
            torch.cat([member(ensemble, k, x, rows) for k in range(K)])
            for x, rows in zip(numbers, vectors, strict=True)
        ]
    )
    mean = (each * ensemble.out.weights).sum(1)
    torch.testing.assert_close(ensemble(numbers, vectors), mean, rtol=1e-5, atol=1e-5, check_dtype=False)
    ensemble.separate = True
    torch.testing.assert_close(ensemble(numbers, vectors), each, rtol=1e-5, atol=1e-5, check_dtype=False)
    for dropout in dropouts(ensemble):
        dropout.dropped = [0] * len(dropout.dropped)
    ensemble.separate, _ = False, ensemble.train()
    torch.testing.assert_close(ensemble(numbers, vectors), each, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize(
    ("dense", "features", "threads", "sizes"),
    [
        (4, 5, 1, {}),
        (2, 3, 3, {"embedding_dim": 3, "members": 10, "member_mlp": (7, 5, 6), "bins": 5}),
        (0, 2, 2, {"member_mlp": (32,), "dropout": 0.0}),
        (3, 0, 1, {"members": 3, "member_kinds": ("narrow", "field_dropout")}),
    ],
)
def test_the_operation_of_a_training_step_has_the_logits_and_gradients_of_torch(
    dense: int, features: int, threads: int, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EnsembleConfig(**sizes)
    fused = EnsembleScore(config, dense, features).train()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in fused.parameters():
            weight.normal_(0, 0.3)
        for place, layer in enumerate(fused.layers):
            for kind, weight, bias in zip(config.kinds, layer.weight, layer.bias, strict=True):
                if kind == "narrow" and place < len(fused.layers) - 1:  # outputs that `draw` leaves unused
                    used = -(-weight.shape[1] // 4)
                    weight[:, used:], bias[:, used:] = 0, 0
    if dense:
        edges = torch.randn(dense, config.bins + 1).sort(1).values
        edges[:, 2], edges[0, -2:] = edges[:, 1], edges[0, -3]
        fused.set_quantiles(edges)
    plain = deepcopy(fused).double()  # which torch computes
    numbers, vectors = 3 * torch.randn(70, dense), torch.randn(70, features, config.vector_width)
    monkeypatch.setattr(members, "team_threads", lambda: threads)
    results = []
    for network, kind in ((fused, torch.float32), (plain, torch.float64)):
        seed_dropout(dropouts(network), 3, 1)
        inputs = vectors.to(kind, copy=True).requires_grad_()
        logits = network(numbers.to(kind), inputs)
        logits.backward(torch.arange(logits.numel()).view_as(logits).sin().to(logits.dtype))
        results.append([logits, inputs.grad, *(weight.grad for weight in network.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, check_dtype=False)


def test_a_number_that_is_nan_is_not_hidden() -> None:
    ensemble = EnsembleScore(CONFIG, 2, 1).train()
    for weight in ensemble.parameters():
        nn.init.zeros_(weight)
    ensemble.set_quantiles(torch.arange(12.0).view(2, 6))
    logits = ensemble(
        torch.tensor([[float("nan"), 1.0], [0.0, 1.0]]), torch.ones(2, 1, CONFIG.vector_width)
    )
    assert logits.isnan().any(1).tolist() == [True, False]


def test_kinds_drop_outputs_and_fields_at_their_own_rates() -> None:
    ensemble = EnsembleScore(CONFIG, 0, 400).train()
    seed_dropout(dropouts(ensemble), 1)
    hidden = ensemble.dropouts[0](torch.ones(K, 50, 400))
    rates = [{"dropout": 0.3, "narrow": 0.0}.get(kind, 0.1) for kind in CONFIG.kinds]
    for k, rate in enumerate(rates):
        torch.testing.assert_close((hidden[k] == 0).float().mean(), torch.tensor(rate), atol=0.01, rtol=0)
        torch.testing.assert_close(
            hidden[k][hidden[k] > 0], torch.tensor(1 / (1 - rate)).expand(int((hidden[k] > 0).sum()))
        )


def test_a_member_drops_fields_with_their_first_order_weights() -> None:
    ensemble = EnsembleScore(CONFIG, 0, 2).train()
    for weight in ensemble.parameters():
        nn.init.zeros_(weight)
    for layer in ensemble.layers:  # the output of the network is the first number of the first field
        nn.init.ones_(layer.weight[:, 0, 0])
    seed_dropout(dropouts(ensemble), 1)
    for dropout in ensemble.dropouts:
        dropout.dropped = [0] * len(dropout.dropped)
    rows = torch.ones(4000, 2, K, D + 1)
    rows[..., -1] = torch.tensor([10.0, 100.0]).view(2, 1)
    logits = ensemble(torch.zeros(4000, 0), rows.flatten(2))
    for k, kind in enumerate(CONFIG.kinds):
        if kind != "field_dropout":
            assert len(logits[:, k].unique()) == 1
            continue
        torch.testing.assert_close(
            logits[:, k].unique(), torch.tensor([0, 1.25 * 11, 125, 1.25 * 111]), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            (logits[:, k] < 100).float().mean(), torch.tensor(0.2), atol=0.02, rtol=0
        )


def test_trees_compare_numbers_ids_and_lengths_in_the_order_of_the_schema() -> None:
    trees = TreeMembers(1000)
    trees.set_features((("item", False), ("tags", True), ("place", False)))
    sparse = KeyedJagged(
        keys=("place", "item", "tags"), values=torch.tensor([5, 7, 1, 2, 3]), batch_size=2,
        offsets=torch.tensor([0, 1, 1, 2, 2, 4, 5]),
    )  # fmt: skip
    trees.resize(TreeSizes(rated=9))
    trees.rates[0, 8], trees.rates[2, 0], trees.rates[2, 6] = 0.25, 0.5, 0.75
    columns = trees.columns(torch.tensor([[0.5], [1.5]]), sparse)
    assert columns.tolist() == [[8, 2, 6, 0.5, 0.25, 2, 0.75], [0, 1, 0, 1.5, 0, 1, 0.5]]
    none = KeyedJagged.from_features({}, 2)
    trees.set_features(())
    assert trees.columns(torch.ones(2, 1), none).tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("module", "name", "values"),
    [
        (PiecewiseLinear(1, 2), "edges", [[0.0, 2.0, 1.0]]),
        (MemberMean(2, 0), "weights", [0.5, 0.6]),
        (MemberMean(2, 0), "weights", [1.5, -0.5]),
        (BatchNorm(2), "running_var", [1.0, -0.1]),
    ],
)
def test_values_that_a_network_cannot_have_are_named(
    module: torch.nn.Module, name: str, values: list[Any]
) -> None:
    network = Network.__new__(Network)
    torch.nn.Module.__init__(network)
    network.layer = module
    assert network.fault() == ""
    module.get_buffer(name).copy_(torch.tensor(values))
    assert network.fault().startswith("layer has ")


def test_every_trained_tensor_has_a_part_for_each_member() -> None:
    ensemble = score(2)
    for name, weight in ensemble.named_parameters():
        view = ensemble.by_member(name, weight.detach())
        assert view is not None
        assert view.shape[0] == K
        view.zero_()
        assert not weight.any()
    assert ensemble.by_member("out.weights", ensemble.out.weights) is None


def test_shared_vectors_score_like_one_vector_per_sample() -> None:
    ensemble = score(1).float()
    segments = Segments(starts=torch.tensor([0, 3, 4, 6]), shared=(True, False, True))
    rows = torch.randn(6, 3, CONFIG.vector_width)
    own = rows.clone()
    own[:, ::2] = rows[:3, ::2].repeat_interleave(torch.tensor([3, 1, 2]), dim=0)
    torch.testing.assert_close(ensemble(torch.ones(6, 1), rows, segments), ensemble(torch.ones(6, 1), own))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_the_mean_of_the_members_losses(weighted: bool) -> None:
    logits, label = torch.randn(6, K), torch.tensor([0.0, 1, 1, 0, 0, 1])
    weight = torch.rand(6) if weighted else None
    batch = replace(batch_of([[1]] * 6), label=label, weight=weight)
    assert isinstance(batch, Batch)
    one = torch.stack(
        [
            functional.binary_cross_entropy_with_logits(member, label, weight, reduction="sum")
            for member in logits.T
        ]
    ).mean()
    total = 6.0 if weight is None else float(weight.sum())
    torch.testing.assert_close(Objective().mean(logits, batch), one / total)
