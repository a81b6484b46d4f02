"""The row optimizer in plain torch: one lookup and one row at a time.

All arithmetic is float32, in the order of the fast kernels. So results can be compared bit for bit,
unless they add numbers across the width of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stratarec.kernels.update import RowUpdate


def row_gradients(lookups: list[tuple[int, Tensor, float]]) -> dict[int, Tensor]:
    """Return for each row the sum of ``factor * gradient`` over its lookups, in the given order."""
    sums: dict[int, Tensor] = {}
    for row, gradient, factor in lookups:
        sums[row] = sums.get(row, torch.zeros_like(gradient)) + torch.tensor(factor) * gradient
    return sums


def update_row(rule: RowUpdate, weight: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
    """Apply one summed gradient ``[D]`` to one row ``[D]`` and its state, in place.

    Row-wise Adagrad (Gupta et al. 2014; FBGEMM's exact form) keeps one number per row, the running
    sum of the gradient's mean square. Adam (Kingma and Ba 2015, in the form of
    ``torch.optim.Adam``) keeps both moments per weight; row-wise Adam keeps the second moment per
    row. Decay is part of the gradient, or decoupled (Loshchilov and Hutter 2019), as in
    ``torch.optim.AdamW``.
    """
    gradient = rule.scale * gradient
    if rule.decoupled:
        weight *= 1 - rule.rate * rule.decay
    else:
        gradient = gradient + rule.decay * weight
    if rule.kind == "sgd":
        weight -= rule.rate * gradient
    elif rule.kind == "rowwise_adagrad":
        state["sum"] += gradient.square().mean()
        weight -= rule.rate / (state["sum"].sqrt() + rule.eps) * gradient
    elif rule.kind == "adagrad":
        state["sum"] += gradient.square()
        weight -= rule.rate * gradient / (state["sum"].sqrt() + rule.eps)
    elif rule.kind in ("adam", "rowwise_adam"):
        square = gradient.square() if rule.kind == "adam" else gradient.square().mean()
        state["exp_avg"].mul_(rule.beta1).add_(gradient, alpha=1 - rule.beta1)
        state["exp_avg_sq"].mul_(rule.beta2).add_(square, alpha=1 - rule.beta2)
        mean = state["exp_avg"] / (1 - rule.beta1**rule.step)
        scale = (state["exp_avg_sq"] / (1 - rule.beta2**rule.step)).sqrt() + rule.eps
        weight -= rule.rate * mean / scale
    else:
        raise AssertionError(f"no reference for {rule.kind!r}")
