"""Test that the checks of `stratarec.testing` pass for our models and codecs, and fail where a
contract is broken.
"""

from __future__ import annotations

import doctest
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stratarec.embedding.config import CodecConfig
from stratarec.models.zoo.config import FMConfig
from stratarec.models.zoo.first_order import FMScore
from stratarec.testing import check_codec, check_score, codecs, models

CONFIG = FMConfig(embedding_dim=3)


class SeesOthers(FMScore):
    """A model whose logits depend on the other samples, except where vectors are shared."""

    def forward(self, dense: Tensor, vectors: Tensor, segments: Any = None) -> Tensor:
        logits = super().forward(dense, vectors, segments)
        return logits + (logits.mean() if not bool((dense == 1).all()) else 0)


class ForgetsSegments(FMScore):
    """A model that reads one row for each sample, although vectors are shared."""

    def forward(self, dense: Tensor, vectors: Tensor, segments: Any = None) -> Tensor:
        return super().forward(dense, torch.nan_to_num(vectors))


class Columns(FMScore):
    """A model with a logit for each label that nobody asked for."""

    def forward(self, dense: Tensor, vectors: Tensor, segments: Any = None) -> Tensor:
        return super().forward(dense, vectors, segments).unsqueeze(1)


class Idle(FMScore):
    """A model with a weight that is not used."""

    def __init__(self, config: Any, dense: int, features: int) -> None:
        super().__init__(config, dense, features)
        self.idle = torch.nn.Parameter(torch.ones(1, 1))


@pytest.mark.parametrize(
    ("kind", "message"),
    [(SeesOthers, "another"), (ForgetsSegments, "shared vectors"), (Columns, "shape"), (Idle, "idle")],
)
def test_a_broken_model_is_found(kind: type[FMScore], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_score(kind, CONFIG)


class NoSegments(FMScore):
    """A model that takes no segments."""

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(dense, vectors)


class Dropped(FMScore):
    """A model with a random layer."""

    def forward(self, dense: Tensor, vectors: Tensor, segments: Any = None) -> Tensor:
        return super().forward(dense, torch.nn.functional.dropout(vectors), segments)


class Logarithm(FMScore):
    """A model whose logits may be NaN."""

    def forward(self, dense: Tensor, vectors: Tensor, segments: Any = None) -> Tensor:
        return super().forward(dense, vectors, segments).log()


class ReadsBehind(FMScore):
    """A model that uses the vectors of a shared feature behind those of the segments."""

    def forward(self, dense: Tensor, vectors: Tensor, segments: Any = None) -> Tensor:
        return super().forward(dense, vectors)


class NoFeatures(FMScore):
    """A model whose constructor lacks an argument."""

    def __init__(self, config: Any, dense: int) -> None:
        super().__init__(config, dense, 3)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (FMScore, {"dropout": 0.5}, "dropout=0.5, .* dropout=0.0"),
        (FMScore, {"batch_norm": True}, "batch_norm=True, .* batch_norm=False"),
        (NoSegments, {}, r"NoSegments.forward\(self, .* must take \(self, dense, vectors, segments=None\)"),
        (NoFeatures, {}, r"NoFeatures.__init__.* must take \(self, config, dense, features\)"),
        (Dropped, {}, "two calls"),
        (Logarithm, {}, "a logit is not finite"),
        (ReadsBehind, {}, "behind those of the segments"),
    ],
)
def test_a_model_that_cannot_be_checked_says_why(
    kind: type[FMScore], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        check_score(kind, replace(CONFIG, **changes))


@pytest.mark.parametrize("dense", [0, 2])
def test_the_models_of_the_documentation_pass(dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "package"))
    import stratarec_nfm

    check_score(
        stratarec_nfm.NFMScore, stratarec_nfm.NFMConfig(embedding_dim=4, deep_mlp=(8,)), dense=dense
    )
    check_score(FMScore, CONFIG, dense=dense)
    del sys.modules["stratarec_nfm"]


def test_a_codec_with_a_larger_error_is_found() -> None:
    with pytest.raises(AssertionError, match="bf16"):
        check_codec(CodecConfig(kind="bf16"), error=lambda rows: np.abs(rows) * 2.0**-12, widths=[5])


def test_the_name_of_a_codec_is_no_config() -> None:
    with pytest.raises(AssertionError, match=r"CodecConfig\(kind='bf16'\)"):
        check_codec("bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [codecs, models])
def test_the_examples_run(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
