"""Sum the gradients of every distinct row of one width group and apply the row optimizer in place.

Shapes: F features, B samples, N ids, D width, R rows of all the group's tables together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.runtime.backends import backend
from stratarec.kernels.update import cpu, rules, workspace
from stratarec.kernels.update import missed as _missed
from stratarec.kernels.update.rules import Slots as Slots

_BACKENDS = {"cpu": cpu}


class Gradients(NamedTuple):
    """Gradients of what a group of tables gave.

    Parameters
    ----------
    pooled : Tensor
        ``[B, columns]`` float32, contiguous, of all groups' pooled output.
    rows : sequence of Tensor
        ``[N_f, D]`` of each of the group's sequence features, in order.
    """

    pooled: Tensor
    rows: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class RowUpdate:
    """Which row optimizer, and its numbers at this step."""

    kind: str
    rate: float
    eps: float
    decay: float
    decoupled: bool
    """Whether decay shrinks the weights, or is in the gradient."""
    beta1: float
    beta2: float
    step: int
    scale: float = 1.0
    """What summed gradients are multiplied by."""


@dataclass(frozen=True, kw_only=True)
class Missed:
    """The steps that were taken so far, with which rows catch up."""

    rule: RowUpdate
    """Of any step: what does not change from one to the next."""
    steps: int
    paces: NDArray[np.float32]
    """``[steps or more, 3]`` what `pace_of` gives for each."""


class Scratchpad:
    """Memory that `update` works in, kept from step to step; it grows to the largest batch met.

    Tables that are never updated at the same time share one.
    """

    def __init__(self) -> None:
        self.kept: Any = None
        """What the device's kernels keep."""

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return 0 if self.kept is None else int(self.kept.nbytes)


class UpdateWorkspace:
    """What `update` keeps for one group of tables.

    Parameters
    ----------
    scratch : Scratchpad
        Where it works; one of its own by default.
    """

    def __init__(self, scratch: Scratchpad | None = None) -> None:
        self.scratch = scratch or Scratchpad()
        self.kept: Any = None
        """What the device's kernels keep."""


def scratch_bytes(lookups: int, width: int, threads: int) -> int:
    """Bytes of the scratchpad of tables up to `width` wide, with batches of up to `lookups` lookups of a table."""
    return workspace.scratch_bytes(lookups, width, threads)


def update(
    slots: Slots,
    group: GroupLayout,
    bags: BagBatch,
    gradients: Gradients,
    rule: RowUpdate,
    workspace: UpdateWorkspace,
    missed: Missed | None = None,
) -> None:
    """One step of the row optimizer, in place; gradients are summed in ascending order of lookup position.

    Parameters
    ----------
    missed : Missed or None
        The steps before this one, where rows have clocks.

    Notes
    -----
    The bits do not depend on the number of threads: every row is summed and updated by one thread.
    """
    backend(_BACKENDS, gradients.pooled).update(slots, group, bags, gradients, rule, missed, workspace)


def square_norms(
    group: GroupLayout, bags: BagBatch, gradients: Gradients, workspace: UpdateWorkspace
) -> NDArray[np.float64]:
    """``[tables]`` sum of squares of the summed gradients of a batch's rows, of each table.

    Notes
    -----
    The bits depend neither on the number of threads nor on where rows lie: a table's rows are added in the order of
    their first lookups, in float64.
    """
    found: NDArray[np.float64] = backend(_BACKENDS, gradients.pooled).square_norms(group, bags, gradients, workspace)
    return found


def pace_of(rule: RowUpdate) -> tuple[float, ...]:
    """What `Missed.paces` says of a step: its own numbers."""
    return tuple(rules.pace_of(rule))  # type: ignore[no-untyped-call]


def apply_missed_steps(
    slots: Slots, group: GroupLayout, bags: BagBatch, missed: Missed, workspace: UpdateWorkspace
) -> None:
    """Let the rows that a batch looks up take the steps that they missed; ids outside their table are passed over.

    Notes
    -----
    A row takes the same steps by the same numbers whenever it takes them, so its bits do not depend on how often it is
    looked at. Time is proportional to the steps that are missed, all rows' steps together at most.
    """
    _missed.batch_missed_steps(slots, group, bags, missed, workspace)  # type: ignore[no-untyped-call]


def apply_missed_steps_to_range(slots: Slots, width: int, first: int, last: int, missed: Missed) -> None:
    """As `apply_missed_steps` for the rows ``first:last``."""
    _missed.apply_missed_steps_to_range(slots, width, first, last, missed)  # type: ignore[no-untyped-call]
