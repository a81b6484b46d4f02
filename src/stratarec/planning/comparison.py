"""What a plan said about memory, beside what a run used.

Parts that are upper bounds (a log's dead space and buffers, staging, workspace) may be left unused; any other part that
is off by more than 5 % is a defect of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stratarec.planning.bytes import MEMORIES, RESERVES, Memory, Parts
from stratarec.planning.plan import Plan

TOLERANCE = 0.05
"""A part whose used bytes are further than this from its predicted ones is a defect of the plan."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One part: what was planned and what a run used."""

    memory: Memory
    part: str
    predicted: int
    """Bytes."""
    used: int
    """Bytes."""
    reserve: int = 0
    """Bytes of the predicted ones that are upper bounds: leaving them unused is no defect."""

    @property
    def off(self) -> float:
        """Used over predicted, less one; infinite where nothing was predicted."""
        if not self.predicted:
            return float("inf") if self.used else 0.0
        return self.used / self.predicted - 1

    @property
    def defect(self) -> bool:
        """Whether the plan was wrong by more than `TOLERANCE`."""
        return self.off > TOLERANCE or self.used < (1 - TOLERANCE) * (self.predicted - self.reserve)


def compare(plan: Plan, measured: Parts) -> list[Comparison]:
    """Predicted and used bytes of every part that either names, in the order of the plan.

    Parameters
    ----------
    measured : mapping
        ``memory -> part -> bytes`` over all tables, with the part names of `planning.bytes`.
    """
    return [
        _comparison(memory, part, plan.bytes, measured)
        for memory in MEMORIES
        for part in dict.fromkeys((*plan.bytes.get(memory, {}), *measured.get(memory, {})))
    ]


def compare_totals(plan: Plan, measured: Mapping[Memory, int]) -> list[Comparison]:
    """As `compare`, for the sum of each memory that the plan may use; `measured` is ``memory -> bytes``."""
    parts = plan.bytes
    return [
        Comparison(
            memory=memory,
            part="total",
            predicted=plan.used(memory),
            used=measured.get(memory, 0),
            reserve=sum(size for part, size in parts.get(memory, {}).items() if part in RESERVES),
        )
        for memory in plan.budgets
    ]


def _comparison(memory: Memory, part: str, predicted: Parts, measured: Parts) -> Comparison:
    size = predicted.get(memory, {}).get(part, 0)
    return Comparison(
        memory=memory,
        part=part,
        predicted=size,
        used=measured.get(memory, {}).get(part, 0),
        reserve=size if part in RESERVES else 0,
    )
