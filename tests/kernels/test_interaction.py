"""Compare the fused interaction and the noise with their references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreted import sized

from errors import refuses
from stratarec.errors import ConfigError
from stratarec.kernels.interaction import PairProducts, dot_interaction, segment_interaction, split_columns
from stratarec.kernels.interaction.reference import dot_interaction as plain
from stratarec.kernels.interaction.reference import segment_interaction as plain_segments
from stratarec.kernels.random import RandomWords, fill_uniform, mix_array, reference, table_key
from stratarec.kernels.random.reference import mix, uniform_row


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("batch", "features"), sized([(0, 2), (1, 1), (17, 3), (17, 27)], [(3, 1), (3, 3)])
)
# kernels are compiled for each width; the other tests use width 16
@pytest.mark.parametrize("width", [3, 16])
@pytest.mark.parametrize("dense", [True, False])
def test_interaction_and_gradients_match_the_reference(
    batch: int, features: int, width: int, dense: bool
) -> None:
    torch.manual_seed(0)
    front = torch.randn(batch, width, requires_grad=True) if dense else None
    pooled = torch.randn(batch, features, width, requires_grad=True)
    inputs = [part for part in (front, pooled) if part is not None]
    expected = plain(front, pooled)
    actual, padding = dot_interaction(front, pooled).split_with_sizes(
        [expected.shape[1], -expected.shape[1] % 8], dim=1
    )
    assert not padding.any()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    gradient = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(actual, inputs, gradient),
        torch.autograd.grad(expected, inputs, gradient),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.interpreted
@pytest.mark.parametrize("width", [3, 16])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(
    ("shared", "starts"),
    sized(
        [
            ("01", [0, 1]),
            ("1", [0, 5, 6, 20]),
            ("0", list(range(21))),
            ("0110", [0, 5, 6, 20]),
            ("0110", list(range(21))),
            ("101111011", [0, *range(2, 300, 3), 300]),
            ("111111", [0, 1]),
        ],
        [("0", [0, 5, 6, 9]), ("0110", [0, 5, 6, 9])],
    ),
)
def test_products_of_segments_match_the_reference_for_any_number_of_threads(
    shared: str, width: int, dense: bool, starts: list[int]
) -> None:
    torch.manual_seed(0)
    flags, segments = [flag == "1" for flag in shared], torch.tensor(starts)
    front = torch.randn(starts[-1], width, requires_grad=True) if dense else None
    pooled = torch.randn(starts[-1], len(flags), width, requires_grad=True)
    inputs = [part for part in (front, pooled) if part is not None]
    columns = split_columns(tuple(flags), dense=dense, width=width)
    expected = plain_segments(front, pooled, flags, segments, columns)
    gradients = [torch.randn_like(part) for part in expected]
    theirs = torch.autograd.grad(expected, inputs, gradients)
    outcomes = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        padded = segment_interaction(front, pooled, flags, segments)
        assert all(
            part.shape[1] % 8 == 0 and not part[:, len(own) :].any()
            for part, own in zip(padded, columns, strict=True)
        )
        actual = [part[:, : len(own)] for part, own in zip(padded, columns, strict=True)]
        mine = torch.autograd.grad(actual, inputs, gradients)
        mine[-1][len(starts) - 1 :, flags] = 0  # not written
        outcomes.append((*actual, *mine))
    for one, two in zip(*outcomes, strict=True):
        assert torch.equal(one, two)
    for one, other in zip(outcomes[0], (*expected, *theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_products_of_segments_refuse_other_shapes() -> None:
    with refuses(ConfigError, "4 3 8 2 segments"):
        segment_interaction(None, torch.randn(4, 3, 8), [True, False], torch.tensor([0, 4]))
    with refuses(ConfigError, "3 segments 5"):
        segment_interaction(None, torch.randn(4, 3, 8), [True, False, True], torch.tensor([0, 5]))


@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("front_type", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("pooled_type", [torch.float32, torch.bfloat16])
def test_interaction_accepts_bfloat16_and_computes_in_float32(
    features: int, front_type: torch.dtype | None, pooled_type: torch.dtype
) -> None:
    torch.manual_seed(1)
    front = None if front_type is None else torch.randn(4, 8).to(front_type).requires_grad_()
    pooled = torch.randn(4, features, 8).to(pooled_type).requires_grad_()
    exact = [None if part is None else part.detach().float().requires_grad_() for part in (front, pooled)]
    expected = plain(exact[0], exact[1])  # type: ignore[arg-type]
    actual = dot_interaction(front, pooled)[:, : expected.shape[1]]
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    gradient = torch.randn_like(expected)
    torch.autograd.backward([actual, expected], [gradient, gradient])
    for mine, theirs in zip((front, pooled), exact, strict=True):
        if mine is not None and theirs is not None:
            assert mine.grad is not None
            assert theirs.grad is not None
            assert mine.grad.dtype == mine.dtype
            torch.testing.assert_close(mine.grad, theirs.grad.to(mine.dtype), rtol=1e-2, atol=1e-4)


def test_noise_is_a_function_of_seed_table_and_row() -> None:
    key = table_key(3, "a")
    table, part = np.empty((9, 5), np.float32), np.empty((4, 5), np.float32)
    fill_uniform(table, key=key, low=-0.5, high=0.5)
    fill_uniform(part, key=key, first_row=5, low=-0.5, high=0.5)
    np.testing.assert_array_equal(table[5:], part)
    for row in range(9):
        np.testing.assert_array_equal(table[row], uniform_row(key, row, 5, -0.5, 0.5))
    assert len({key, table_key(3, "b"), table_key(4, "a")}) == 3
    words = RandomWords()
    words.key = key
    for number in range(2):
        assert words.draw(9).tolist() == reference.random_words(key + number, 9).tolist()
    values = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    assert mix_array(values).tolist() == [mix(int(value)) for value in values]


@pytest.mark.parametrize("features", [1, 2, 7])
def test_pairs_on_a_device_and_their_gradients_match_the_reference(features: int) -> None:
    vectors = torch.randn(5, features, 6, dtype=torch.float64)
    one, other = (vectors.clone().requires_grad_() for _ in range(2))
    pairs, expected = PairProducts.apply(one), plain(None, other)
    factors = torch.randn_like(expected)
    for output in (pairs, expected):
        (output * factors).sum().backward()
    torch.testing.assert_close(pairs, expected)
    torch.testing.assert_close(one.grad, other.grad)
