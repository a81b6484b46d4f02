"""Measured time of the parts of a step, the work that runs in parallel, and the comparison with the
plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratarec.config.units import format_milliseconds, format_seconds
from stratarec.embedding.tiers import MEMORY_NAMES
from stratarec.reporting.html import ShownTable

Position = Mapping[str, Any]
Plan = Mapping[str, Any]
# Share of a step below which fetching rows is negligible.
_LITTLE = 0.02


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of a step."""

    name: str
    seconds: float
    share: float
    """Share of the step, 0 to 1."""

    @property
    def figure(self) -> str:
        """Time as text, in milliseconds and per cent of a step."""
        return f"{format_milliseconds(self.seconds)}, {self.share:.0%}"


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Mean time of a step of a run, and of its parts."""

    seconds: float
    total: float
    """Total seconds of all timed steps."""
    parts: Sequence[StepPart]
    """Parts on the training thread, in order; they add up to the step."""
    ahead: Sequence[StepPart]
    """Work of other threads for later steps, at the same time."""

    @classmethod
    def of(cls, position: Position) -> MeasuredStep | None:
        """Compute the mean times from the totals of a run; None if no step was timed."""
        timed = position["trained_samples"] - position["untimed_samples"]
        steps = position["step"] * timed / max(position["trained_samples"], 1)
        if not steps or not position["stage_seconds"]:
            return None
        step = position["train_seconds"] / steps
        per_step = {name: seconds / steps for name, seconds in position["stage_seconds"].items()}

        def part(name: str, seconds: float) -> StepPart:
            return StepPart(name=name, seconds=max(seconds, 0.0), share=max(seconds, 0.0) / step)

        def took(name: str) -> float:
            return float(per_step.get(name, 0.0))

        parts = [
            part("waiting for the next batch and its rows", took("wait")),
            part("looking up rows", took("look up")),
            part("network, forward", took("forward") - took("look up")),
            part("network, backward", took("backward") - took("update rows")),
            part("updating rows", took("update rows")),
            part("updating the network", took("update network")),
        ]
        if took("replay"):
            parts.append(part("queueing the CUDA graph of a step", took("replay")))
        parts.append(part("other", step - sum(measured.seconds for measured in parts)))
        ahead = [
            part("reading batches", took("read")),
            part("fetching rows into level 0", took("bring in")),
        ]
        return cls(seconds=step, total=position["train_seconds"], parts=parts, ahead=ahead)

    @property
    def wait(self) -> StepPart:
        """Time in which the training thread waits for other threads."""
        return self.parts[0]

    @property
    def hidden(self) -> float:
        """Share of the work for later steps during which no step waits."""
        ahead = sum(part.seconds for part in self.ahead)
        return 1 - min(self.wait.seconds, ahead) / ahead if ahead else 1.0

    @property
    def lead(self) -> str:
        """Return a sentence with the time of a step, of all steps, and the share of parallel work
        that is hidden.
        """
        return (
            f"a step takes {format_milliseconds(self.seconds)}, and all of them "
            f"{format_seconds(self.total)}; {self.hidden:.0%} of reading batches and fetching rows runs in "
            "parallel with earlier steps"
        )

    def verdict(self, cached: bool, sharing: str = "", level0: str = "dram") -> Iterator[str]:
        """Yield findings: the slowest part, and the time that more memory would save.

        Parameters
        ----------
        cached : bool
            Whether any table is cached.
        sharing : str
            Text about how the run shared the machine's cores with other processes; empty if it did
            not.
        level0 : str
            Memory in which rows are trained.
        """
        slowest = max(self.parts, key=lambda part: part.seconds)
        yield (
            f"slowest part of a step: {slowest.name} ({slowest.figure} of "
            f"{format_milliseconds(self.seconds)}); all steps took {format_seconds(self.total)}"
            + (f"; {sharing}" if sharing else "")
        )
        if not cached:
            yield f"more memory saves no time: all rows are in {MEMORY_NAMES[level0]} as float32"
            return
        bring_in = self.ahead[1].share
        if bring_in < _LITTLE:
            yield f"more memory saves hardly any time: fetching rows is {bring_in:.1%} of a step"
            return
        yield (
            f"more memory for level 0 (memory.{level0}, memory.cache.fraction) would save at most "
            f"{bring_in:.0%} of a step, the time in which another thread fetches rows; steps wait "
            f"{self.wait.share:.0%} of their time for rows and batches"
        )


def predicted_times(plan: Plan | None, time: MeasuredStep | None) -> ShownTable:
    """Return a table that compares the planned and the measured time of the embedding part of a
    step.
    """
    heads = ("embedding work of a step", "planned", "measured", "measured / planned")
    if plan is None or time is None:
        return ShownTable(heads=heads, rows=[])
    parts = plan["predicted"]["seconds"]
    measured = {part.name: part.seconds for part in (*time.parts, *time.ahead)}
    pairs = [
        (
            "looking up and updating rows",
            parts["compute"],
            measured["looking up rows"] + measured["updating rows"],
        ),
        (
            "fetching rows into level 0",
            parts["staging"] + parts["device"],
            measured["fetching rows into level 0"],
        ),
    ]
    if "hbm" in plan["budgets"]:  # kernels of a GPU are queued: the times of the host do not include them
        pairs.pop(0)
    rows = [
        (
            name,
            format_milliseconds(planned),
            format_milliseconds(took),
            f"{took / planned:.2f}" if planned else "-",
        )
        for name, planned, took in pairs
    ]
    return ShownTable(heads=heads, rows=rows)
