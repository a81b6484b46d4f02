"""Test pairs of samples and events: values and gradients match the reference, with the same bits
for any number of threads.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from stratarec.kernels.attention import (
    Pairs,
    pair_pool,
    pair_products,
    pair_sums,
    reference_pair_pool,
    reference_pair_products,
    reference_pair_sums,
)

pytestmark = pytest.mark.interpreted


def pairs_of(samples: int, events: int, seed: int = 0) -> Pairs:
    """Return windows of up to 6 events that overlap; some are empty."""
    draws = torch.Generator().manual_seed(seed)
    length = torch.randint(0, min(6, events) + 1, (samples,), generator=draws)
    first = (torch.rand(samples, generator=draws) * (events - length + 1)).long()
    return Pairs(first=first, offsets=torch.cat([torch.zeros(1).long(), length.cumsum(0)]))


def run_both(name: str, left: Tensor, events: Tensor, pairs: Pairs) -> list[list[Tensor]]:
    """Return output and gradients of the kernel and of the reference."""
    kernel = {"sums": pair_sums, "products": pair_products, "pool": pair_pool}[name]
    pool = partial(reference_pair_pool, samples=pairs.samples)
    plain = {"sums": reference_pair_sums, "products": reference_pair_products, "pool": pool}[name]
    results, inputs = [], [left.requires_grad_(), events.requires_grad_()]
    for out in (kernel(left, events, pairs), plain(left, events, *pairs.places)):
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        results.append([out.detach(), *torch.autograd.grad(out, inputs, gradient)])
    return results


@pytest.mark.parametrize("name", ["sums", "products", "pool"])
# kernels are compiled for each width; the other tests use width 8
@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize(("samples", "events"), [(1, 1), (40, 9), (300, 150), (3, 0)])
def test_pairs_and_their_gradients_match_the_reference(
    name: str, width: int, samples: int, events: int
) -> None:
    pairs = pairs_of(samples, events)
    draws = torch.Generator().manual_seed(2)
    left = torch.randn(len(pairs) if name == "pool" else (samples, width), generator=draws)  # type: ignore[arg-type]
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        rows = torch.randn(events, width, generator=torch.Generator().manual_seed(3))
        actual, expected = run_both(name, left.clone(), rows, pairs)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        runs.append(actual)
    for one, two in zip(*runs, strict=True):
        assert torch.equal(one, two)
