"""The ``hot:`` section of a recipe: whether popular rows stay in fast memory, and batches of them alone are trained.

Batches of their own are not the default: on Globo's first days that order of samples cost 0.003 test AUC, and gave no
speed beyond what resident rows give, which spare the moves whichever batch looks them up. A cache spares nearly as
many by itself, so leave both off unless `stratarec train` with ``hot.budget`` is measurably faster on your log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator

from stratarec.config.units import parse_bytes
from stratarec.errors import ConfigError

Batches: TypeAlias = Literal["proportional", "adaptive", "none"]


def _bytes(value: Any, field: str) -> int | None:
    return None if value is None else parse_bytes(value, f"hot.{field}")


def _budget(value: Any) -> int | None:
    return _bytes(value, "budget")


def _copies(value: Any) -> int | None:
    return _bytes(value, "copies")


@dataclass(frozen=True, kw_only=True)
class HotConfig:
    """Rows that never leave level 0, and how inputs that need no others are trained."""

    budget: Annotated[int | None, BeforeValidator(_budget)] = None
    """Bytes of memory.dram for hot rows of tables that do not lie whole in it, weights and optimizer state; null for
    none. Several processes have `copies` in its place."""
    batches: Batches = "none"
    """Whether inputs all of whose rows are hot or lie whole in DRAM make batches of their own. ``none`` leaves batches
    as they are; ``proportional`` trains those evenly among the others; ``adaptive`` in turns, whose length follows the
    validation loss from epoch to epoch (FAE, arXiv 2103.00686). Both cost quality where many inputs are hot. Several
    processes leave batches as they are."""
    copies: Annotated[int | None, BeforeValidator(_copies)] = None
    """Where several processes share the tables: bytes of memory.dram of each for copies of hot rows with their
    optimizer state, so that these do not travel; null for none, as no step that was measured got shorter by them. Their
    gradients are added with those of the network, in ``distributed.dense_wire``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", _budget(self.budget))
        object.__setattr__(self, "copies", _copies(self.copies))
        if self.batches not in get_args(Batches):
            raise ConfigError(f"hot.batches is {self.batches!r}, expected one of {', '.join(get_args(Batches))}")

    @property
    def apart(self) -> bool:
        """Whether hot inputs have batches of their own."""
        return self.budget is not None and self.batches != "none"

    def leave(self, dram: int | None, ranks: int) -> int | None:
        """What is left of a budget of DRAM beside hot rows, of one process or of each of several."""
        name, taken = ("budget", self.budget) if ranks == 1 else ("copies", self.copies)
        if dram is None or taken is None:
            return dram
        if taken >= dram:
            raise ConfigError(f"hot.{name} is {taken:,} bytes of memory.dram, which is {dram:,}; give it less")
        return dram - taken
