"""Corrections of logits fitted after training: one increasing map for each label, applied last.

A map is linear between knots and beyond them:

    f(x) = v_k + (x - k_k) (v_{k+1} - v_k) / (k_{k+1} - k_k)    between knots k_k and k_{k+1},
    f(x) = v_1 + (x - k_1) s_1  below the first,  v_K + (x - k_K) s_2  above the last,

so Platt's line is one knot with two equal slopes. A map is part of the network but has no weights:
it is not trained and not in a checkpoint's tensors. Evaluation, predictions, exported programs and
the scorer apply the same map.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import pydantic
import torch
from torch import Tensor, nn

from stratarec.io.sealed import Model

_Finite = Annotated[float, pydantic.Field(allow_inf_nan=False, ge=-1e30, le=1e30)]
_MOST_KNOTS = 1 << 14
# Least distance between two knots. If they were closer, the slope between them would be noise.
LEAST_GAP = 2.0**-6


class LogitMap(Model):
    """Increasing map of logits: ``[K]`` knots at least `LEAST_GAP` apart, their values, and both
    outer slopes.
    """

    knots: Annotated[tuple[_Finite, ...], pydantic.Field(min_length=1, max_length=_MOST_KNOTS)]
    values: tuple[_Finite, ...]
    slopes: tuple[_Finite, _Finite]

    @pydantic.model_validator(mode="after")
    def _check(self) -> LogitMap:
        if len(self.values) != len(self.knots):
            raise ValueError(f"{len(self.values)} values, expected one for each of {len(self.knots)} knots")
        if any(after - before < LEAST_GAP for before, after in pairwise(self.knots)):
            raise ValueError(f"knots must rise by at least {LEAST_GAP} each")
        if any(after < before for before, after in pairwise(self.values)) or min(self.slopes) < 0:
            raise ValueError("values must not fall, and slopes must not be negative")
        return self


class Calibration(nn.Module):
    """Module that applies the maps of all labels.

    Parameters
    ----------
    maps : sequence of LogitMap
        One for each label.
    """

    def __init__(self, maps: Sequence[LogitMap]) -> None:
        super().__init__()
        self.maps = tuple(maps)
        for number, curve in enumerate(self.maps):
            knots, values = (
                torch.tensor(part, dtype=torch.float64) for part in (curve.knots, curve.values)
            )
            low, high = curve.slopes
            slopes = torch.cat([torch.tensor([low]), values.diff() / knots.diff(), torch.tensor([high])])
            for name, tensor in (("knots", knots), ("values", values), ("slopes", slopes)):
                self.register_buffer(f"{name}_{number}", tensor.float(), persistent=False)

    @property
    def steepest(self) -> float:
        """Largest slope of all maps, by which they multiply the error of a logit."""
        return max(float(self.get_buffer(f"slopes_{number}").max()) for number in range(len(self.maps)))

    def forward(self, logits: Tensor) -> Tensor:
        """Map logits ``[B]``, or ``[B, T]`` of T labels."""
        if len(self.maps) == 1:
            return self._mapped(0, logits)
        return torch.stack(
            [self._mapped(number, logits[:, number]) for number in range(len(self.maps))], dim=1
        )

    def _mapped(self, number: int, logits: Tensor) -> Tensor:
        knots, values, slopes = (
            self.get_buffer(f"{name}_{number}") for name in ("knots", "values", "slopes")
        )
        # Comparisons are used because ONNX has no operation for a search.
        piece = (logits.unsqueeze(-1) >= knots).sum(-1)
        start = (piece - 1).clamp(min=0)
        return values[start] + slopes[piece] * (logits - knots[start])
