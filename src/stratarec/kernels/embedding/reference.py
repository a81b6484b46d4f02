"""The embedding engine in plain torch: one bag, one lookup and one row at a time.

Everything is float32, in the order that the fast kernels keep, so the two can be compared bit for bit where no
reduction over the width is involved.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pool(weight: Tensor, values: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
    """``[B, D]`` sum or mean of the rows of each bag; weight ``[R, D]``, values ``[N]``, offsets ``[B + 1]``."""
    out = torch.zeros(offsets.numel() - 1, weight.shape[1])
    for b in range(out.shape[0]):
        first, last = int(offsets[b]), int(offsets[b + 1])
        for i in range(first, last):
            row = weight[int(values[i])]
            out[b] += row if weights is None else weights[i] * row
        if mean and last > first + 1:
            out[b] *= torch.tensor(1.0) / (last - first)
    return out


def row_gradients(lookups: list[tuple[int, Tensor, float]]) -> dict[int, Tensor]:
    """Row -> sum of ``factor * gradient`` over its lookups, in the order given."""
    sums: dict[int, Tensor] = {}
    for row, gradient, factor in lookups:
        sums[row] = sums.get(row, torch.zeros_like(gradient)) + torch.tensor(factor) * gradient
    return sums


def update_row(
    kind: str,
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    rate: float,
    eps: float,
    decay: float,
    betas: tuple[float, float],
    step: int,
) -> None:
    """Apply one summed gradient ``[D]`` to one row ``[D]`` and its state, in place.

    Row-wise Adagrad (Gupta et al. 2014; FBGEMM's exact form) keeps the running sum of the mean squared gradient of a
    row. Row-wise Adam keeps the first moment per weight and the second per row; its weight decay is decoupled.
    """
    if decay and kind != "rowwise_adam":
        gradient = gradient + decay * weight
    if kind == "sgd":
        weight -= rate * gradient
    elif kind == "rowwise_adagrad":
        state["sum"] += gradient.square().mean()
        weight -= rate / (state["sum"].sqrt() + eps) * gradient
    elif kind == "adagrad":
        state["sum"] += gradient.square()
        weight -= rate * gradient / (state["sum"].sqrt() + eps)
    else:
        state["exp_avg"].mul_(betas[0]).add_(gradient, alpha=1 - betas[0])
        state["exp_avg_sq"].mul_(betas[1]).add_(gradient.square().mean(), alpha=1 - betas[1])
        moment = state["exp_avg"] / (1 - betas[0] ** step)
        scale = (state["exp_avg_sq"] / (1 - betas[1] ** step)).sqrt() + eps
        weight -= rate * (moment / scale + decay * weight)
