"""Compare the layer whose inputs are shared by segments with a layer on concatenated inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stratarec.models.layers import segment_linear

SIZE = 50
COLUMNS = (torch.tensor([0, 3, 5, 6]), torch.tensor([1, 2, 4]))
SEGMENTS = [[0, SIZE], list(range(SIZE + 1)), [0, 1, 9, 20, 21, 49, 50]]


def reference_segment_linear(
    unshared: Tensor,
    shared: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: tuple[Tensor, Tensor],
    starts: Tensor,
    *,
    relu: bool,
) -> Tensor:
    """Compute `segment_linear` by concatenating the inputs of each sample."""
    segment = torch.repeat_interleave(torch.arange(starts.numel() - 1), starts.diff())
    inputs = unshared.new_zeros(len(unshared), weight.shape[1])
    for part, places in zip((unshared, shared[segment]), columns, strict=True):
        inputs = inputs.index_copy(1, places, part[:, : len(places)])
    out = functional.linear(inputs, weight, bias)
    return out.relu() if relu else out


def inputs_of(width: int, segments: int, padding: int = 1) -> list[Tensor]:
    """Return inputs of samples and of segments with zeros behind them, weight and bias."""
    draws = torch.Generator().manual_seed(width)
    tensors = [
        torch.randn(*shape, generator=draws) for shape in ((SIZE, 4), (segments, 3), (width, 7), (width,))
    ]
    tensors[:2] = [functional.pad(part, (0, padding)) for part in tensors[:2]]
    return [part.requires_grad_() for part in tensors]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [3, 16])
@pytest.mark.parametrize("starts", SEGMENTS)
@pytest.mark.parametrize("relu", [False, True])
def test_layer_and_gradients_match_the_reference(
    threads: int, width: int, starts: list[int], relu: bool
) -> None:
    inputs, places = inputs_of(width, len(starts) - 1), torch.tensor(starts)
    gradient = torch.randn(SIZE, width, generator=torch.Generator().manual_seed(1))
    expected = reference_segment_linear(*inputs, COLUMNS, places, relu=relu)
    theirs = torch.autograd.grad(expected, inputs, gradient)
    torch.set_num_threads(threads)
    actual = segment_linear(*inputs, COLUMNS, places, relu=relu)
    mine = torch.autograd.grad(actual, inputs, gradient)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    # A sum that is zero up to rounding may be positive on one side only, and then the gradients
    # differ.
    assert bool(((actual > 0) == (expected > 0)).all())
    for one, other, name in zip(mine, theirs, ("own", "common", "weight", "bias"), strict=True):
        used = {"own": 4, "common": 3}.get(name)
        torch.testing.assert_close(one[..., :used], other[..., :used], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [3, 16])
def test_bfloat16_is_the_sum_rounded_once_more(width: int) -> None:
    inputs, starts = inputs_of(width, 6), SEGMENTS[2]
    gradient = torch.randn(SIZE, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = segment_linear(*inputs, COLUMNS, torch.tensor(starts), relu=True)
    assert actual.dtype == torch.bfloat16
    own, common, weight, bias = (part.detach().bfloat16() for part in inputs)
    samples = (own[:, :4] @ weight[:, COLUMNS[0]].t()).float()
    segments = torch.addmm(bias, common[:, :3], weight[:, COLUMNS[1]].t()).float()
    expected = (
        (samples + torch.repeat_interleave(segments, torch.tensor(starts).diff(), dim=0)).relu().bfloat16()
    )
    assert torch.equal(actual, expected)
    mine = torch.autograd.grad(actual, inputs, gradient)
    # Use the layer's own sign, because rounding may move a sum near zero to either side.
    passed = gradient.float() * (actual > 0)
    sums = torch.stack([part.sum(0) for part in passed.split(torch.tensor(starts).diff().tolist())])
    exact = (
        passed @ weight[:, COLUMNS[0]].float(),
        sums @ weight[:, COLUMNS[1]].float(),
        torch.zeros(width, 7)
        .index_copy(1, COLUMNS[0], passed.t() @ own[:, :4].float())
        .index_copy(1, COLUMNS[1], sums.t() @ common[:, :3].float()),
        passed.sum(0),
    )
    for one, other in zip(mine, exact, strict=True):
        assert one.dtype == torch.float32
        used = one[:, : other.shape[1]] if one.dim() == 2 else one
        assert float((used - other).norm() / other.norm()) < 0.01


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_nan_is_not_rectified_to_zero(kind: torch.dtype) -> None:
    own = torch.tensor([[1.0, float("nan")], [-1.0, 2.0]])
    weight = torch.eye(2)
    bias = torch.zeros(2)
    columns = (torch.tensor([0, 1]), torch.tensor([], dtype=torch.int64))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == torch.bfloat16):
        result = segment_linear(
            own, torch.zeros(1, 0), weight, bias, columns, torch.tensor([0, 2]), relu=True
        )
    # nan * 0 is nan, so the first sample has no finite output.
    assert result.isnan().tolist() == [[True, True], [False, False]]
    assert result[1].tolist() == [0.0, 2.0]
