"""Learning rates over time: warm-up, then constant, cosine or polynomial decay."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from stratarec.config.validate import check_finite
from stratarec.errors import ConfigError


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
        """`ConfigError` where it is not told in steps."""
        if self.follows_run or self.warmup_share:
            raise ConfigError(
                f"schedule.total_steps is {self.total_steps} and warmup_share {self.warmup_share}, but there is no run "
                "whose length is known here; give total_steps and warmup_steps, or take `of_run`"
            )

    def factor(self, step: int) -> float:
        """The factor at `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        done = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        shape = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else (1 - done) ** self.power
        return self.final_factor + (1 - self.final_factor) * shape
