"""Test jagged batches: joining, accessing one feature, selecting, and validation."""

from __future__ import annotations

import torch

from errors import refuses
from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.errors import ConfigError


def feature(bags: list[list[int]], weighted: bool = False) -> JaggedTensor:
    offsets = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    values = torch.tensor([i for bag in bags for i in bag])
    return JaggedTensor(values=values, offsets=offsets, weights=values.float() / 10 if weighted else None)


def test_features_are_joined_and_split_again() -> None:
    parts = {
        "a": feature([[1, 2], [], [3]], True),
        "b": feature([[], [], [9]], True),
        "c": feature([[], [], []], True),
    }
    joined = KeyedJagged.from_features(parts)
    for key, part in parts.items():
        assert joined[key].to_list() == part.to_list()
        assert torch.equal(joined[key].weights, part.weights)  # type: ignore[arg-type]
    swapped = joined.select(["b", "a"])
    assert swapped.keys == ("b", "a")
    assert swapped["a"].to_list() == [[1, 2], [], [3]]


def test_invalid_batches_are_refused() -> None:
    with refuses(ConfigError, "batch sizes"):
        KeyedJagged.from_features({"a": feature([[1]]), "b": feature([[1], [2]])})
    with refuses(ConfigError, "feature weights"):
        KeyedJagged.from_features({"a": feature([[1]]), "b": feature([[1]], True)})
    with refuses(ConfigError, "feature"):
        KeyedJagged.from_features({})
    with refuses(ConfigError, "4"):
        KeyedJagged(keys=("a", "b"), values=torch.arange(3), offsets=None, batch_size=2)
    with refuses(ConfigError, "F B 3"):
        KeyedJagged(keys=("a",), values=torch.arange(3), offsets=torch.tensor([0, 3]), batch_size=2)
    with refuses(ConfigError, "feature batch 'z'"):
        KeyedJagged.from_features({"a": feature([[1]])})["z"]
