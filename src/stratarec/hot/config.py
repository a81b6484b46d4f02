"""The ``hot:`` section of a recipe: whether popular rows stay in fast memory, and batches of them alone are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator

from stratarec.errors import ConfigError
from stratarec.sizes import parse_bytes

Batches: TypeAlias = Literal["proportional", "adaptive", "none"]
Copies: TypeAlias = Literal["auto", "always", "none"]


def _bytes(value: Any) -> int | None:
    return None if value is None else parse_bytes(value, "hot.budget")


@dataclass(frozen=True, kw_only=True)
class HotConfig:
    """Rows that never leave level 0, and how inputs that need no others are trained."""

    budget: Annotated[int | None, BeforeValidator(_bytes)] = None
    """Bytes of memory.dram for hot rows of tables that do not lie whole in it, weights and optimizer state; null for
    none."""
    batches: Batches = "none"
    """Whether inputs all of whose rows are hot or lie whole in DRAM make batches of their own. ``none`` leaves batches
    as they are; ``proportional`` trains those evenly among the others; ``adaptive`` in turns, whose length follows the
    validation loss from epoch to epoch (FAE, arXiv 2103.00686). Both cost quality where many inputs are hot. Several
    processes leave batches as they are."""
    copies: Copies = "none"
    """Where several processes share the tables: whether each has copies of hot rows, with their optimizer state, so
    that these do not travel. ``none``, as no step that was measured got shorter by them; ``auto``: where that is
    predicted, of which rows, by the network measured when the run starts; ``always``: of as many rows as `budget`
    holds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", _bytes(self.budget))
        if self.batches not in get_args(Batches):
            raise ConfigError(f"hot.batches is {self.batches!r}, expected one of {', '.join(get_args(Batches))}")
        if self.copies not in get_args(Copies):
            raise ConfigError(f"hot.copies is {self.copies!r}, expected one of {', '.join(get_args(Copies))}")

    @property
    def apart(self) -> bool:
        """Whether hot inputs have batches of their own."""
        return self.budget is not None and self.batches != "none"

    def leave(self, dram: int | None, ranks: int) -> int | None:
        """What is left of a budget of DRAM; all of it where several processes make no copies."""
        if dram is None or self.budget is None or (ranks > 1 and self.copies == "none"):
            return dram
        if self.budget >= dram:
            raise ConfigError(f"hot.budget is {self.budget:,} bytes of memory.dram, which is {dram:,}; give it less")
        return dram - self.budget
