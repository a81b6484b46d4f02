"""Where training is: how many steps the tables have taken, and the numbers of the optimizer at each of them.

Where a step changes all rows (`RowOptimizerConfig.rows`), it changes those that its batch lacks only when they are
asked for: every row knows how many steps it has taken (its *clock*), and the steps it missed are taken then, one by
one, each with the numbers that it had. A row so has the bits that taking every step at once would give it, wherever
it lies and whoever looks at it in between. Products in closed form, which SGD has, would depend on where a gap is cut.
Nothing is swept before an evaluation or a checkpoint: reading brings rows up to date, and rows at home may lag. The
work is proportional to the steps missed, in total at most that of a dense optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.errors import TrainingError
from stratarec.kernels.update import Missed, RowUpdate, pace_of

Change = tuple[int, float]
"""A step, and what the rate of it and later ones is multiplied by."""


class StepClock:
    """The steps of a collection's tables.

    Parameters
    ----------
    optimizer : RowOptimizerConfig

    Notes
    -----
    The numbers of past steps take 12 bytes a step, where all rows take it. They follow from the optimizer's settings
    and the few changes of rate, which checkpoints have.
    """

    def __init__(self, optimizer: RowOptimizerConfig) -> None:
        self.optimizer = optimizer
        self.step = 0
        self.earlier = 0
        """Steps of the runs that these tables began with: schedules begin anew, the optimizer's state does not."""
        self.changes: tuple[Change, ...] = ()
        self._paces = np.empty((0, 3), dtype=np.float32)
        self._known = 0

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self.rule.rate

    @property
    def rule(self) -> RowUpdate:
        """What the next step does to the rows of its batch."""
        return self._rule(self.step)

    def scaled_rule(self, scale: float) -> RowUpdate:
        """As `rule` with gradients that are multiplied by `scale`."""
        return self._rule(self.step, scale)

    @property
    def rate_factor(self) -> float:
        """What the rate of the next step, and of later ones, is multiplied by, beside the schedule's factor."""
        return self._factor(self.step)

    @rate_factor.setter
    def rate_factor(self, factor: float) -> None:
        if not factor > 0:
            raise TrainingError(f"a learning rate cannot be multiplied by {factor}, expected more than 0")
        if factor != self.rate_factor:
            self.changes += ((self.step, factor),)

    def load_position(self, step: int, earlier: int, changes: Sequence[Change]) -> None:
        """Be where another step_clock was."""
        self.step, self.earlier, self.changes = step, earlier, tuple((first, factor) for first, factor in changes)
        self._known = 0

    @property
    def missed(self) -> Missed | None:
        """What rows are to catch up with; None where a step changes the rows of its batch alone."""
        if not self.optimizer.clocked:
            return None
        if self.step > len(self._paces):
            # Doubled: a run appends a step at a time, and kernels take one array.
            room = np.empty((max(2 * len(self._paces), self.step, 1024), 3), dtype=np.float32)
            room[: self._known] = self._paces[: self._known]
            self._paces = room
        for step in range(self._known, self.step):
            self._paces[step] = pace_of(self._rule(step))
        self._known = max(self._known, self.step)
        return Missed(rule=self.rule, steps=self.step, paces=self._paces)

    def _factor(self, step: int) -> float:
        return next((factor for first, factor in reversed(self.changes) if first <= step), 1.0)

    def _rule(self, step: int, scale: float = 1.0) -> RowUpdate:
        return self.optimizer.rule(step, self.earlier, self._factor(step), scale)
