"""Test the online probe of pairs: it matches its reference, its statistics have mean 0 and variance
1, and it detects pairs that interact.
"""

from __future__ import annotations

import numpy as np
import pytest

from stratarec.kernels.pair_probe import new_state, observe, reference_observe


def draw(
    samples: int, features: int, codes: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, numbers (the second column belongs to the bias) and labels of equal
    probability.
    """
    draws = np.random.default_rng(seed)
    numbers = np.stack([draws.normal(size=samples), np.ones(samples)], axis=1)
    return (
        draws.integers(0, codes, (samples, features)),
        numbers,
        draws.integers(0, 2, samples).astype(float),
    )


@pytest.mark.interpreted
@pytest.mark.parametrize(("features", "codes"), [(1, 4), (2, 3), (5, 8)])
def test_observe_matches_its_reference(features: int, codes: int) -> None:
    state, reference = (new_state(features, codes, 2) for _ in range(2))
    batch = draw(200, features, codes)
    assert observe(state, *batch) == pytest.approx(reference_observe(reference, *batch))
    for name, actual, expected in zip(state._fields, state, reference, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-6, err_msg=name)


def test_only_pairs_that_interact_have_large_statistics() -> None:
    codes, numbers, labels = draw(40_000, 4, 4)
    # Features 0 and 2 have no effect alone, only in combination.
    odds = np.where((codes[:, 0] + codes[:, 2]) % 2, 0.4, -0.4) + 0.5 * (codes[:, 1] - 1.5)
    labels = (np.random.default_rng(1).random(len(odds)) < 1 / (1 + np.exp(-odds))).astype(float)
    state = new_state(4, 4, 2)
    observe(state, codes, numbers, labels, pairs=False)
    assert not state.tests.any()
    observe(state, codes, numbers, labels)
    score, information = state.tests.sum(0)
    z = score / np.sqrt(information)
    assert z.argmax() == 1  # the pair (0, 2)
    assert z[1] > 20
    assert np.abs(np.delete(z, 1)).max() < 4


def test_codes_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="4"):
        observe(new_state(2, 4, 2), np.full((1, 2), 4), np.ones((1, 2)), np.ones(1))
