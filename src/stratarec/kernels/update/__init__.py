"""Sum the gradients of every distinct row of one width group and apply the row optimizer in place.

Shapes: F features, B samples, N ids, D width, R rows of all tables of the group together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.runtime.accelerator import backend
from stratarec.kernels.update import cpu, rules
from stratarec.kernels.update.rules import Slots as Slots
from stratarec.kernels.update.workspace import scratch_bytes as scratch_bytes

_BACKENDS = {"cpu": cpu}


class Gradients(NamedTuple):
    """Gradients of the outputs of a group of tables.

    Parameters
    ----------
    pooled : Tensor
        ``[B, columns]`` float32, contiguous: gradient of the pooled output of all groups.
    rows : sequence of Tensor
        ``[N_f, D]`` for each sequence feature of the group, in order.
    """

    pooled: Tensor
    rows: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class RowUpdate:
    """Kind of a row optimizer, and its parameters at one step.

    Parameters
    ----------
    kind : str
        A key of `rules.KINDS`.
    rate : float
        Learning rate of this step.
    eps : float
        Added to the square root of the second moment.
    decay : float
        Strength of weight decay.
    decoupled : bool
        Whether decay shrinks the weights. If false, it is added to the gradient.
    beta1, beta2 : float
        Decay of Adam's moments.
    step : int
        Number of this step, from 1, for Adam's bias correction.
    scale : float
        Factor on summed gradients.
    """

    kind: str
    rate: float
    eps: float
    decay: float
    decoupled: bool
    beta1: float
    beta2: float
    step: int
    scale: float = 1.0


def row_numbers(rule: RowUpdate) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the numbers of a rule that change from step to step (`rules.StepNumbers`), and its
    constants.
    """
    constants, numbers = rules.compiled(rule)  # type: ignore[no-untyped-call]
    return numbers, constants[1:]


@dataclass(frozen=True, kw_only=True)
class Missed:
    """Steps taken so far; each row may have missed some of them.

    Parameters
    ----------
    rule : RowUpdate
        Rule of any one of these steps. Only what does not change with the step is used: the kind,
        eps, decay and betas.
    steps : int
        Number of steps.
    numbers : ndarray
        ``[M, 3]`` float32, M >= `steps`: the `step_numbers` of each step; later rows are unused.
    """

    rule: RowUpdate
    steps: int
    numbers: NDArray[np.float32]


class Scratchpad:
    """Scratch memory of `update`, reused from step to step; it grows to the largest batch so far.

    Tables that are never updated at the same time share one scratchpad.
    """

    def __init__(self) -> None:
        # Set by the kernels of the device.
        self.state: Any = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return 0 if self.state is None else int(self.state.nbytes)


class UpdateWorkspace:
    """State of `update` for one group of tables.

    Parameters
    ----------
    scratch : Scratchpad
        Scratch memory; by default a new one.
    """

    def __init__(self, scratch: Scratchpad | None = None) -> None:
        self.scratch = scratch or Scratchpad()
        # Set by the kernels of the device.
        self.state: Any = None


def update(
    slots: Slots,
    group: GroupLayout,
    bags: BagBatch,
    gradients: Gradients,
    rule: RowUpdate,
    workspace: UpdateWorkspace,
    missed: Missed | None = None,
) -> None:
    """Apply one step of the row optimizer in place; gradients are summed in ascending order of
    lookup position.

    Parameters
    ----------
    slots : Slots
        Weights, optimizer state and clocks of the group's rows.
    group : GroupLayout
        Features of the tables.
    bags : BagBatch
        Lookups of the batch.
    gradients : Gradients
        Gradients of the pooled and the gathered rows; their device determines the kernel.
    rule : RowUpdate
        Parameters of this step.
    workspace : UpdateWorkspace
        Scratch memory of the group.
    missed : Missed or None
        The steps before this one; None if rows have no clocks.

    Notes
    -----
    The bits do not depend on the number of threads: one thread sums and updates each row.
    """
    backend(_BACKENDS, gradients.pooled).update(slots, group, bags, gradients, rule, missed, workspace)


def square_norms(
    group: GroupLayout, bags: BagBatch, gradients: Gradients, workspace: UpdateWorkspace
) -> NDArray[np.float64]:
    """Return for each table the sum of squares of the summed gradients of the batch's rows,
    ``[tables]``.

    The arguments are those of `update`.

    Notes
    -----
    The bits depend neither on the number of threads nor on the slots of rows: the squares of a
    table's rows are added in the order of their first lookups, in float64.
    """
    norms: NDArray[np.float64] = backend(_BACKENDS, gradients.pooled).square_norms(
        group, bags, gradients, workspace
    )
    return norms


def step_numbers(rule: RowUpdate) -> tuple[float, ...]:
    """Return the numbers of the step with this `rule`, one row of `Missed.numbers`."""
    return tuple(rules.step_numbers(rule))  # type: ignore[no-untyped-call]


def apply_missed_steps(
    slots: Slots, group: GroupLayout, bags: BagBatch, missed: Missed, workspace: UpdateWorkspace
) -> None:
    """Apply missed steps to the rows that a batch looks up; ids outside their table are skipped.

    The arguments are those of `update`.

    Notes
    -----
    The steps of a row have the same numbers whenever they are applied, so the bits of the row do
    not depend on how often it is looked up. The time is proportional to the number of missed steps.
    """
    cpu.apply_missed_steps(slots, group, bags, missed, workspace)  # type: ignore[no-untyped-call]


def apply_missed_steps_to_range(slots: Slots, width: int, first: int, last: int, missed: Missed) -> None:
    """Apply missed steps to rows ``first:last`` of `slots`, which have `width` floats each."""
    cpu.apply_missed_steps_to_range(slots, width, first, last, missed)  # type: ignore[no-untyped-call]
