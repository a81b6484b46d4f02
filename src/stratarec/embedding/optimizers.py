"""Row optimizers: which state a row has, the parameters of one step, learning-rate schedules, and
the step clock.

The arithmetic is in `kernels.update`, fused into the backward pass.

If a step changes all rows (`RowOptimizerConfig.rows` is ``all``), rows that its batch lacks are
changed lazily. Every row stores how many steps it has taken (its *clock*). When a row is read, the
steps that it missed are applied one by one, each with that step's parameters. So a row has the same
bits as if every step had been applied at once, wherever it is stored and however often it is read
in between. SGD has a closed form for several missed steps, but its result would depend on how often
the row is read. Evaluations and checkpoints need no pass over all rows: reading a row applies the
steps that it missed, and rows at home may lag behind. The work is proportional to the number of
missed steps, and in total at most the work of a dense optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np

from stratarec.config.choices import OneOf
from stratarec.config.validate import check_choice, check_ranges
from stratarec.errors import ConfigError, TrainingError
from stratarec.kernels.optimizers import ROW_OPTIMIZERS

if TYPE_CHECKING:  # recipes are read without torch and Numba
    from stratarec.kernels.update import Missed, RowUpdate


RowOptimizerKind: TypeAlias = Annotated[
    str, OneOf(lambda: {name: kind.about for name, kind in ROW_OPTIMIZERS.items()})
]
"""A key of `ROW_OPTIMIZERS`."""


SCHEDULES: Mapping[str, Callable[[float, float], float]] = {
    "constant": lambda done, power: 1.0,
    "cosine": lambda done, power: (1 + math.cos(math.pi * done)) / 2,
    "polynomial": lambda done, power: (1 - done) ** power,
}
"""Kind of schedule -> factor after warm-up, from 1 to 0, as a function of the completed share of
steps and `power`.
"""
ScheduleKind: TypeAlias = Annotated[str, OneOf(lambda: SCHEDULES)]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """A factor on the learning rate that rises during warm-up and then decays to `final_factor`."""

    kind: ScheduleKind = "constant"
    """Kind of the decay after warm-up, a key of `SCHEDULES`."""
    warmup_steps: int = 0
    """Number of warm-up steps; the factor rises linearly in them from ``1 / warmup_steps`` to 1."""
    total_steps: int = 0
    """Step at which the decay ends; 0 means the end of the run."""
    final_factor: float = 0.0
    """The factor at `total_steps` and later."""
    power: float = 1.0
    """Exponent of the polynomial decay; 1 is linear."""

    def __post_init__(self) -> None:
        check_choice(self.kind, "schedule.kind", SCHEDULES)
        check_ranges(self, "schedule.", warmup_steps="[0, inf)", total_steps="[0, inf)")
        check_ranges(self, "schedule.", final_factor="[0, 1]", power="(0, inf)")
        if self.kind != "constant" and 0 < self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"schedule.total_steps is {self.total_steps}, expected more than warmup_steps "
                f"({self.warmup_steps}) for a {self.kind} schedule"
            )

    @property
    def follows_run(self) -> bool:
        """Whether the schedule depends on the length of the run."""
        return not self.total_steps and self.kind != "constant"

    def of_run(self, steps: int) -> ScheduleConfig:
        """Return the schedule for a run of `steps`, which sets `total_steps` if it is 0."""
        return replace(self, total_steps=steps) if self.follows_run else self

    def require_steps(self) -> None:
        """Raise a `ConfigError` if the length of the schedule is not given in steps."""
        if self.follows_run:
            raise ConfigError(
                "schedule.total_steps is 0, but the length of the run is not known here; "
                "set it, or call `of_run`"
            )

    def factor(self, step: int) -> float:
        """Return the factor at `step`, counted from 0."""
        if step < self.warmup_steps:
            # Never 0: a first step with learning rate 0 would have no effect.
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        done = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        return self.final_factor + (1 - self.final_factor) * SCHEDULES[self.kind](done, self.power)


@dataclass(frozen=True, kw_only=True)
class RowOptimizerConfig:
    """Optimizer of embedding rows.

    Examples
    --------
    >>> from stratarec import RowOptimizerConfig
    >>> optimizer = RowOptimizerConfig(kind="rowwise_adam", learning_rate=0.001)
    >>> optimizer.row_state, optimizer.full_state
    ('exp_avg_sq', ('exp_avg',))
    """

    kind: RowOptimizerKind = "rowwise_adagrad"
    """Kind of the optimizer. More state takes more memory."""
    learning_rate: float = 0.02
    """Step size before the schedule."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.999
    """Decay of Adam's second moment."""
    weight_decay: float = 0.0
    """Strength lambda of weight decay on rows, for a penalty of lambda / 2 times the sum of
    squares; 0 means none.
    """
    decay: Literal["l2", "decoupled"] = "l2"
    """``l2`` adds `weight_decay` times the row to its gradient; ``decoupled`` shrinks the row by
    the learning rate times `weight_decay`, independent of its gradient (AdamW)."""
    rows: Literal["batch", "all"] = "batch"
    """Rows that a step changes: rows of its ``batch``, or ``all``, as an optimizer of complete
    tables does. With ``all``, weight decay and Adam's moments also act on rows that a batch lacks;
    these steps are applied when the row is next read, with the same result. ``all`` takes 4 more
    bytes per row."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Factor on the learning rate over steps."""

    def __post_init__(self) -> None:
        check_choice(self.kind, "optimizer.kind", ROW_OPTIMIZERS)
        check_choice(self.decay, "optimizer.decay", ("l2", "decoupled"))
        check_choice(self.rows, "optimizer.rows", ("batch", "all"))
        if self.rows == "all" and not (self.weight_decay or ROW_OPTIMIZERS[self.kind].lingers):
            raise ConfigError(
                f"optimizer.rows is all, but {self.kind} without optimizer.weight_decay does not change "
                "rows that a batch lacks: set optimizer.weight_decay, or set optimizer.rows to batch"
            )
        check_ranges(
            self,
            "optimizer.",
            learning_rate="[0, inf)",
            eps="(0, inf)",
            weight_decay="[0, inf)",
            beta1="[0, 1)",
            beta2="[0, 1)",
        )

    @property
    def row_state(self) -> str:
        """Name of the state with one float per row, or empty."""
        return ROW_OPTIMIZERS[self.kind].row

    @property
    def full_state(self) -> tuple[str, ...]:
        """Names of the states with one float per weight."""
        return ROW_OPTIMIZERS[self.kind].full

    @property
    def clocked(self) -> bool:
        """Whether each row stores how many steps it has taken."""
        return self.rows == "all"

    @property
    def state_shape(self) -> dict[str, int]:
        """Optimizer state: floats per row, floats per weight, and whether rows have clocks."""
        return {
            "row_state": bool(self.row_state),
            "full_state": len(self.full_state),
            "clock": self.clocked,
        }

    def rule(self, step: int, earlier: int = 0, factor: float = 1.0, scale: float = 1.0) -> RowUpdate:
        """Return the parameters of the update at `step`, counted from 0.

        Parameters
        ----------
        earlier : int
            Steps of earlier runs that the optimizer state includes.
        factor : float
            Factor on the learning rate, in addition to the schedule's factor.
        scale : float
            Factor on summed gradients.
        """
        from stratarec.kernels.update import RowUpdate

        return RowUpdate(
            kind=self.kind,
            rate=self.learning_rate * self.schedule.factor(step) * factor,
            eps=self.eps,
            decay=self.weight_decay,
            decoupled=self.decay == "decoupled",
            beta1=self.beta1,
            beta2=self.beta2,
            # Adam's bias correction continues from the earlier runs; the schedule starts at 0.
            step=earlier + step + 1,
            scale=scale,
        )


Change = tuple[int, float]
"""A step, and the factor on the learning rate from that step on."""


class StepClock:
    """Counter of a collection's steps, with the parameters of each step.

    Parameters
    ----------
    optimizer : RowOptimizerConfig
        Row optimizer, with the schedule of its learning rate.

    Notes
    -----
    If steps change all rows, the parameters of past steps take 12 bytes per step in memory.
    Checkpoints contain only the few changes of the learning rate, from which the parameters are
    computed again.
    """

    def __init__(self, optimizer: RowOptimizerConfig) -> None:
        self.optimizer = optimizer
        self.step = 0
        self.earlier = 0
        """Steps of earlier runs that initialized these tables: schedules restart at 0, the
        optimizer state does not.
        """
        self.changes: tuple[Change, ...] = ()
        self._paces = np.empty((0, 3), dtype=np.float32)
        self._computed = 0
        # The last result of `rule_of`, which a step asks for up to four times, and what it depends
        # on.
        self._last: tuple[tuple[Any, ...], RowUpdate | None] = (), None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.rule.rate

    @property
    def rule(self) -> RowUpdate:
        """Parameters of the row optimizer in the next step."""
        return self.rule_of(self.step)

    def rule_of(self, step: int, scale: float = 1.0) -> RowUpdate:
        """Return the parameters of a step, for gradients multiplied by `scale`.

        A later step has the current factor on the learning rate.
        """
        key = step, scale, self.earlier, self.changes
        last_key, rule = self._last
        if rule is None or key != last_key:
            rule = self.optimizer.rule(step, self.earlier, self._factor(step), scale)
            self._last = key, rule
        return rule

    @property
    def rate_factor(self) -> float:
        """Factor on the learning rate from the next step on, in addition to the schedule's factor;
        1 at first.

        Checkpoints contain it, with all earlier factors.
        """
        return self._factor(self.step)

    @rate_factor.setter
    def rate_factor(self, factor: float) -> None:
        if not factor > 0:
            raise TrainingError(f"the factor on the learning rate is {factor}, expected more than 0")
        if factor != self.rate_factor:
            self.changes += ((self.step, factor),)

    def load_position(self, step: int, earlier: int, changes: Sequence[Change]) -> None:
        """Set the step, the number of earlier steps and the changes of the learning rate, as a
        checkpoint has them.
        """
        self.step = step
        self.earlier = earlier
        self.changes = tuple((first, factor) for first, factor in changes)
        # A new array is needed: a device has a copy of the old one and would only copy steps that
        # are new.
        self._paces = np.empty((0, 3), dtype=np.float32)
        self._computed = 0

    @property
    def missed(self) -> Missed | None:
        """Steps that rows may have missed; None if a step changes only the rows of its batch."""
        if not self.optimizer.clocked:
            return None
        from stratarec.kernels.update import Missed, step_numbers

        if self.step > len(self._paces):
            # Doubled: a run appends one step at a time, and kernels need one array.
            room = np.empty((max(2 * len(self._paces), self.step, 1024), 3), dtype=np.float32)
            room[: self._computed] = self._paces[: self._computed]
            self._paces = room
        for step in range(self._computed, self.step):
            self._paces[step] = step_numbers(self.rule_of(step))
        self._computed = max(self._computed, self.step)
        return Missed(rule=self.rule, steps=self.step, numbers=self._paces)

    def _factor(self, step: int) -> float:
        return next((factor for first, factor in reversed(self.changes) if first <= step), 1.0)
