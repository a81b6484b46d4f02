"""Learning rates over time: warm-up, then constant, cosine or polynomial decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from stratarec.errors import ConfigError
from stratarec.finite import check_finite


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """A factor on the learning rate, from 0 or 1 at the first step to `final_factor` at the last."""

    kind: Literal["constant", "cosine", "polynomial"] = "constant"
    """The decay after warm-up."""
    warmup_steps: int = 0
    """The factor rises linearly from 1 / warmup_steps to 1 over these steps."""
    total_steps: int = 0
    """Where the decay ends; needed unless constant."""
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
        if self.kind != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"schedule.total_steps is {self.total_steps}, expected more than warmup_steps "
                f"({self.warmup_steps}) for a {self.kind} schedule"
            )
        if not 0 <= self.final_factor <= 1:
            raise ConfigError(f"schedule.final_factor is {self.final_factor}, expected 0 to 1")
        if not self.power > 0:
            raise ConfigError(f"schedule.power is {self.power}, expected more than 0")

    def factor(self, step: int) -> float:
        """The factor at `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        done = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        shape = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else (1 - done) ** self.power
        return self.final_factor + (1 - self.final_factor) * shape
