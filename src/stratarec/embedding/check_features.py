"""What a batch must be before anything is looked up. Ids are checked where they are read, by the kernels that do."""

from __future__ import annotations

import torch

from stratarec.batch.jagged import KeyedJagged
from stratarec.errors import ConfigError
from stratarec.kernels.bags import first_falling

_ID_TYPES = (torch.int32, torch.int64)


class Validator:
    """Checks batches of one collection.

    Parameters
    ----------
    keys : tuple of str
        Features that every batch must have.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = keys
        # Batches have the same keys as a rule, which then are checked once.
        self._checked: tuple[str, ...] | None = None

    def check(self, features: KeyedJagged) -> None:
        """`ConfigError` for missing features, ids of a wrong type, offsets that fall or leave the ids, odd weights."""
        if features.keys != self._checked:
            self._check_keys(features.keys)
        values, offsets, weights = features.values, features.offsets, features.weights
        if values.dtype not in _ID_TYPES or values.dim() != 1 or not values.is_contiguous():
            raise ConfigError(
                f"ids are {_words(values.dtype)} of shape {tuple(values.shape)}, expected contiguous int32 or int64 of "
                "one dimension"
            )
        if offsets is not None:
            _check_offsets(features)
        # Kernels read them by address: what they are not would be read beyond its end.
        if weights is not None and (weights.dtype != torch.float32 or weights.shape != values.shape):
            raise ConfigError(
                f"weights are {_words(weights.dtype)} of shape {tuple(weights.shape)}, expected float32 of shape "
                f"{tuple(values.shape)}, one for each id"
            )

    def _check_keys(self, keys: tuple[str, ...]) -> None:
        missing = [key for key in self._keys if key not in keys]
        if missing:
            raise ConfigError(f"the batch lacks {', '.join(missing)}; it has {', '.join(keys)}")
        self._checked = keys


def _check_offsets(features: KeyedJagged) -> None:
    offsets = features.offsets
    assert offsets is not None
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.is_contiguous():
        raise ConfigError(
            f"offsets are {_words(offsets.dtype)} of shape {tuple(offsets.shape)}, expected contiguous int32 or int64 "
            "of one dimension"
        )
    total = features.values.numel()
    place = first_falling(offsets.numpy(), total)
    if place < 0:
        return
    size = max(features.batch_size, 1)
    key = features.keys[min(place // size, len(features.keys) - 1)] if features.keys else ""
    begin, end = int(offsets[place]), int(offsets[min(place + 1, offsets.numel() - 1)])
    raise ConfigError(
        f"feature {key!r}, sample {place % size}: its ids are {begin} to {end}, expected offsets that rise within 0 "
        f"to {total}"
    )


def _words(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
