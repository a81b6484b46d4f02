"""Row optimizers: which state a row has, the parameters of one step, learning-rate schedules, and the step clock.

The arithmetic is in `kernels.update`, fused into the backward pass.

If a step changes all rows (`RowOptimizerConfig.rows` is ``all``), rows that its batch lacks are changed lazily. Every
row stores how many steps it has taken (its *clock*). When a row is read, the steps that it missed are applied one by
one, each with the parameters of its own step. So a row has the same bits as if every step had been applied at once,
wherever it is stored and whoever reads it in between. Closed forms, which exist for SGD, would depend on where a gap is
cut. Nothing is swept before an evaluation or a checkpoint: reading applies missed steps, and rows at home may lag. The
work is proportional to the steps missed, in total at most that of a dense optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from stratarec.config.validate import check_finite
from stratarec.errors import ConfigError, TrainingError
from stratarec.kernels.update import Missed, RowUpdate, pace_of


class RowState(NamedTuple):
    """What a row optimizer keeps beside the weights."""

    row: str = ""
    """Name of the float kept for each row, or empty."""
    full: tuple[str, ...] = ()
    """Names of the floats kept for each weight."""
    lingers: bool = False
    """Whether a row that was trained once goes on moving in batches that lack it, as Adam's moments let it."""


ROW_OPTIMIZERS = {
    "sgd": RowState(),
    "rowwise_adagrad": RowState(row="sum"),
    "adagrad": RowState(full=("sum",)),
    "rowwise_adam": RowState(row="exp_avg_sq", full=("exp_avg",), lingers=True),
    "adam": RowState(full=("exp_avg", "exp_avg_sq"), lingers=True),
}
"""Every kind. A new one is an entry here and its rule in `kernels.update.rules`, which numbers the kinds."""

if TYPE_CHECKING:
    RowOptimizerKind: TypeAlias = str
else:
    RowOptimizerKind = Literal[tuple(ROW_OPTIMIZERS)]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """A factor on the learning rate, from 0 or 1 at the first step to `final_factor` at the last."""

    kind: Literal["constant", "cosine", "polynomial"] = "constant"
    """The decay after warm-up."""
    warmup_steps: int = 0
    """The factor rises linearly from 1 / warmup_steps to 1 over these steps."""
    warmup_share: float = 0.0
    """Instead of `warmup_steps`, the share of `total_steps`, or of a run's steps, that they are."""
    total_steps: int = 0
    """Where the decay ends; 0 for the end of the run."""
    final_factor: float = 0.0
    """The factor at `total_steps` and after."""
    power: float = 1.0
    """Exponent of the polynomial decay; 1 is linear."""

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine", "polynomial"):
            raise ConfigError(f"schedule.kind is {self.kind!r}, expected constant, cosine or polynomial")
        check_finite(self, "schedule.")
        if self.warmup_steps < 0:
            raise ConfigError(f"schedule.warmup_steps is {self.warmup_steps}, expected 0 or more")
        if not 0 <= self.warmup_share < 1:
            raise ConfigError(f"schedule.warmup_share is {self.warmup_share}, expected 0 or more and less than 1")
        if self.warmup_share and self.warmup_steps:
            raise ConfigError(
                f"schedule.warmup_share is {self.warmup_share} and warmup_steps {self.warmup_steps}: leave one of them "
                "out"
            )
        if self.total_steps < 0:
            raise ConfigError(f"schedule.total_steps is {self.total_steps}, expected 0 or more")
        if self.kind != "constant" and 0 < self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"schedule.total_steps is {self.total_steps}, expected more than warmup_steps "
                f"({self.warmup_steps}) for a {self.kind} schedule"
            )
        if not 0 <= self.final_factor <= 1:
            raise ConfigError(f"schedule.final_factor is {self.final_factor}, expected 0 to 1")
        if not self.power > 0:
            raise ConfigError(f"schedule.power is {self.power}, expected more than 0")

    @property
    def follows_run(self) -> bool:
        """Whether it is of no use without the length of a run."""
        return not self.total_steps and (self.kind != "constant" or self.warmup_share > 0)

    def of_run(self, steps: int) -> ScheduleConfig:
        """This schedule in a run of so many steps, told in steps alone."""
        if not self.follows_run and not self.warmup_share:
            return self
        total = self.total_steps or steps
        warmup = int(self.warmup_share * total) if self.warmup_share else self.warmup_steps
        return replace(self, total_steps=total, warmup_steps=warmup, warmup_share=0.0)

    def require_steps(self) -> None:
        """Refuse a schedule whose length is not a number of steps."""
        if self.follows_run or self.warmup_share:
            raise ConfigError(
                f"schedule.total_steps is {self.total_steps} and warmup_share is {self.warmup_share}, but the length "
                "of the run is not known here; set total_steps and warmup_steps, or call `of_run`"
            )

    def factor(self, step: int) -> float:
        """The factor at `step`, counted from 0."""
        if step < self.warmup_steps:
            # Never 0: a first step at a rate of nothing would only be counted.
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        done = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        shape = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else (1 - done) ** self.power
        return self.final_factor + (1 - self.final_factor) * shape


@dataclass(frozen=True, kw_only=True)
class RowOptimizerConfig:
    """How a row changes when its summed gradient is known."""

    kind: RowOptimizerKind = "rowwise_adagrad"
    """Row-wise Adagrad keeps 4 bytes a row, Adagrad 4 a weight, row-wise Adam 4 a weight and 4 a row, Adam 8 a weight,
    SGD none."""
    learning_rate: float = 0.02
    """Step size before the schedule."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.999
    """Decay of Adam's second moment."""
    weight_decay: float = 0.0
    """L2 on rows; 0 for none. lambda here is the gradient of lambda / 2 times the sum of their squares."""
    decay: Literal["l2", "decoupled"] = "l2"
    """Where it acts: ``l2`` adds weight_decay times the row to its gradient, ``decoupled`` shrinks the row by
    learning rate times weight_decay, whatever its gradient (AdamW)."""
    rows: Literal["batch", "all"] = "batch"
    """Which rows a step changes: those of its batch, or all, as an optimizer of whole tables would. ``all`` lets weight
    decay, and Adam's moments, go on in rows that a batch lacks; they do so when they are next looked at, with the
    same result. It keeps 4 bytes more a row."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Factor on the learning rate over steps."""

    def __post_init__(self) -> None:
        # Here and not by its type alone: who makes one in Python passes any text.
        if self.kind not in ROW_OPTIMIZERS:
            *others, last = ROW_OPTIMIZERS
            raise ConfigError(f"optimizer.kind is {self.kind!r}, expected {', '.join(others)} or {last}")
        if self.decay not in ("l2", "decoupled"):
            raise ConfigError(f"optimizer.decay is {self.decay!r}, expected l2 or decoupled")
        if self.rows not in ("batch", "all"):
            raise ConfigError(f"optimizer.rows is {self.rows!r}, expected batch or all")
        if self.rows == "all" and not (self.weight_decay or ROW_OPTIMIZERS[self.kind].lingers):
            raise ConfigError(
                f"optimizer.rows is all, but without optimizer.weight_decay {self.kind} leaves rows that a batch lacks "
                "as they are: set one, or rows to batch"
            )
        check_finite(self, "optimizer.")
        if not self.learning_rate >= 0:
            raise ConfigError(f"optimizer.learning_rate is {self.learning_rate}, expected 0 or more")
        if not self.eps > 0:
            raise ConfigError(f"optimizer.eps is {self.eps}, expected more than 0")
        if not self.weight_decay >= 0:
            raise ConfigError(f"optimizer.weight_decay is {self.weight_decay}, expected 0 or more")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ConfigError(f"optimizer.{name} is {beta}, expected 0 <= {name} < 1")

    @property
    def row_state(self) -> str:
        """Name of the float kept for each row, or empty."""
        return ROW_OPTIMIZERS[self.kind].row

    @property
    def full_state(self) -> tuple[str, ...]:
        """Names of the floats kept for each weight."""
        return ROW_OPTIMIZERS[self.kind].full

    @property
    def clocked(self) -> bool:
        """Whether a row knows how many steps it has taken."""
        return self.rows == "all"

    @property
    def kept(self) -> dict[str, int]:
        """What rows have beside their weights: floats a row, floats a weight, whether there are clocks."""
        return {"row_state": bool(self.row_state), "full_state": len(self.full_state), "clock": self.clocked}

    def rule(self, step: int, earlier: int = 0, factor: float = 1.0, scale: float = 1.0) -> RowUpdate:
        """The update at `step`, counted from 0.

        Parameters
        ----------
        earlier : int
            Steps of the runs before that state is of, too.
        factor : float
            On the rate, beside the schedule's.
        scale : float
            On summed gradients.
        """
        return RowUpdate(
            kind=self.kind,
            rate=self.learning_rate * self.schedule.factor(step) * factor,
            eps=self.eps,
            decay=self.weight_decay,
            decoupled=self.decay == "decoupled",
            beta1=self.beta1,
            beta2=self.beta2,
            # Adam's corrections go on where an earlier run ended; the schedule has begun anew.
            step=earlier + step + 1,
            scale=scale,
        )


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
