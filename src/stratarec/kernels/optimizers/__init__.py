"""Registry of row optimizers: the state of a row, and the arithmetic of a step. It is read without
Numba.

One compiled body has the arithmetic of the five kinds of StrataRec (`update.rules`); an added kind
has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from stratarec.registry import Registry


class RowOptimizer(NamedTuple):
    """An entry of `ROW_OPTIMIZERS`."""

    row: str = ""
    """Name of the state with one float per row, or empty."""
    full: tuple[str, ...] = ()
    """Names of the states with one float per weight, at most two."""
    lingers: bool = False
    """Whether a trained row continues to change in batches that lack it, as with Adam's moments."""
    update: Callable[..., Any] | None = None
    """``update(rule, numbers, slots, row, D, gradient, start)``, which the kernels compile. It
    applies the summed gradient ``gradient[start : start + D]`` to row `row` of ``slots.weights``
    and its state; `rules.Rule`, `rules.StepNumbers` and `rules.Slots` describe the arguments. None
    for a kind of `update.rules` and `update.gpu`."""

    @property
    def about(self) -> str:
        """Bytes of the state, as text."""
        sizes = [
            f"{4 * count} bytes per {what}"
            for count, what in ((bool(self.row), "row"), (len(self.full), "weight"))
        ]
        return f"state of {' and '.join(size for size in sizes if size[0] != '0') or '0 bytes'}"


ROW_OPTIMIZERS = Registry(
    "row optimizer",
    {
        "sgd": RowOptimizer(),
        "rowwise_adagrad": RowOptimizer(row="sum"),
        "adagrad": RowOptimizer(full=("sum",)),
        "rowwise_adam": RowOptimizer(row="exp_avg_sq", full=("exp_avg",), lingers=True),
        "adam": RowOptimizer(full=("exp_avg", "exp_avg_sq"), lingers=True),
    },
)
"""All kinds. Kernels number the kinds in this order."""
