"""Check a `Score`, the part of a network that a package of a model defines."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from stratarec.models.base import Score
from stratarec.models.config import VectorsConfig
from stratarec.models.request import Segments

_FEATURES = 3


def check_score(kind: type[Score], config: VectorsConfig, *, dense: int = 1, seed: int = 0) -> None:
    """Check the logits and gradients of a model on random numbers and the vectors of three
    features.

    The logits must be ``[B]``, finite and the same in every call, every weight must get a finite
    gradient, and no sample may change the logit of another one. Vectors that the samples of a
    segment share must give the logits and gradients of one vector per sample; the rows of a shared
    feature behind those of the segments are arbitrary.

    Parameters
    ----------
    kind : subclass of Score
        Class to check.
    config : VectorsConfig
        Settings of the model, without dropout and batch normalization, which depend on other
        samples.
    dense : int
        Number of dense features.
    seed : int
        Seed of weights, numbers and vectors.

    Raises
    ------
    AssertionError
        The message names the contract.

    Examples
    --------
    >>> from stratarec.models.zoo.config import FMConfig
    >>> from stratarec.models.zoo.first_order import FMScore
    >>> check_score(FMScore, FMConfig(embedding_dim=3))
    """
    for name, off in (("dropout", 0.0), ("batch_norm", False)):
        value = getattr(config, name)
        advice = f"by which logits depend on chance or on other samples; check the model with {name}={off}"
        assert value == off, f"the config has {name}={value}, {advice}"
    _check_signature(kind, "__init__", "self, config, dense, features")
    _check_signature(kind, "forward", "self, dense, vectors, segments=None")
    torch.manual_seed(seed)
    score = kind(config, dense, _FEATURES)
    for weight in score.parameters():
        torch.nn.init.normal_(weight, 0.3, 0.5)
    numbers, vectors = torch.randn(6, dense), torch.randn(6, _FEATURES, config.vector_width)
    logits = score(numbers, vectors.clone())
    assert logits.shape == (6,), f"logits of 6 samples have the shape {tuple(logits.shape)}, expected (6,)"
    assert logits.isfinite().all(), "a logit is not finite"
    _assert_close(
        score(numbers, vectors.clone()), logits, "two calls give other logits, as with dropout in a layer"
    )
    check_shared_vectors(score, config.vector_width, dense)
    alone = torch.cat([score(numbers[i : i + 1], vectors[i : i + 1].clone()) for i in range(6)])
    _assert_close(alone, logits, "a sample changes the logit of another one")
    score.zero_grad()
    logits.sigmoid().sum().backward()
    for name, weight in score.named_parameters():
        assert weight.grad is not None, f"the weight {name} gets no gradient"
        assert weight.grad.isfinite().all(), f"the gradient of the weight {name} is not finite"


def _check_signature(kind: type[Score], name: str, expected: str) -> None:
    """Check that a method takes the positional arguments `expected`, of which those with a default
    may be left out.
    """
    signature, names = inspect.signature(getattr(kind, name)), expected.split(", ")
    try:
        signature.bind(*names)
        signature.bind(*(name for name in names if "=" not in name))
    except TypeError:
        raise AssertionError(f"{kind.__name__}.{name}{signature} must take ({expected})") from None


def check_shared_vectors(score: Any, width: int, dense: int) -> None:
    """Check that vectors that samples share give the logits and gradients of one vector per sample.

    Parameters
    ----------
    score : Score
        Score of three features.
    width : int
        Width of a vector.
    dense : int
        Number of dense features.
    """
    samples = [3, 1, 2]
    segments = Segments(starts=torch.tensor([0, 3, 4, 6]), shared=(True, False, True))
    rows = torch.randn(6, _FEATURES, width)
    rows[3:, ::2] = torch.nan
    expanded = rows.clone()
    expanded[:, ::2] = rows[:3, ::2].repeat_interleave(torch.tensor(samples), dim=0)
    results = []
    for vectors, layout in ((rows, segments), (expanded, None)):
        vectors.requires_grad_()
        # Segments may overwrite their inputs.
        logits = score(torch.ones(6, dense), vectors.clone(), layout)
        logits.sigmoid().sum().backward()
        assert vectors.grad is not None, "vectors get no gradient"
        results.append((logits.detach(), vectors.grad))
    (one, gradient), (other, expected) = results
    assert other.isfinite().all(), "a logit is not finite"
    assert not one.isnan().any(), "forward reads the rows of a shared feature behind those of the segments"
    _assert_close(one, other, "shared vectors give other logits than one vector per sample")
    summed = torch.stack([part[:, ::2].sum(0) for part in torch.split(expected, samples)])
    for mine, theirs in ((gradient[:, 1], expected[:, 1]), (gradient[:3, ::2], summed)):
        _assert_close(mine, theirs, "shared vectors get other gradients than one vector per sample")


def _assert_close(actual: Tensor, expected: Tensor, fault: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{fault}: {text}")
