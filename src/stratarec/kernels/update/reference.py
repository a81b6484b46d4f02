"""The row optimizer in plain torch: one lookup and one row at a time.

Everything is float32, in the order that the fast kernels keep, so the two can be compared bit for bit where no
reduction over the width is involved.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
