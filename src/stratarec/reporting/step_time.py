"""Where the time of a step goes, by stage, and what of it stays hidden behind others; for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratarec.config.units import milliseconds, readable_seconds
from stratarec.reporting.html import ShownTable

Position = Mapping[str, Any]
Plan = Mapping[str, Any]
# Below this share of a step a wait is not worth a sentence of its own.
_LITTLE = 0.02


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a step."""

    name: str
    seconds: float
    """Of a step."""
    share: float
    """Of a step, from 0 to 1."""

    @property
    def figure(self) -> str:
        """Milliseconds and per cent."""
        return f"{milliseconds(self.seconds)}, {self.share:.0%}"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What a step of a run was."""

    seconds: float
    whole: float
    """Seconds of all steps that were timed."""
    stages: Sequence[Stage]
    """Of the thread that trains, in order; together the step."""
    ahead: Sequence[Stage]
    """What other threads do meanwhile for steps to come."""

    @classmethod
    def of(cls, position: Position) -> StepTime | None:
        """By the seconds that a run counted; None where it has no step but first ones, which are not timed."""
        timed = position["trained_samples"] - position["untimed_samples"]
        steps = position["step"] * timed / max(position["trained_samples"], 1)
        if not steps or not position["stage_seconds"]:
            return None
        step = position["train_seconds"] / steps
        each = {name: seconds / steps for name, seconds in position["stage_seconds"].items()}

        def stage(name: str, seconds: float) -> Stage:
            return Stage(name=name, seconds=max(seconds, 0.0), share=max(seconds, 0.0) / step)

        def took(name: str) -> float:
            return float(each.get(name, 0.0))

        stages = [
            stage("waiting for the next batch and its rows", took("wait")),
            stage("looking up rows", took("look up")),
            stage("network, forward", took("forward") - took("look up")),
            stage("network, backward", took("backward") - took("update rows")),
            stage("updating rows", took("update rows")),
            stage("updating the network", took("update network")),
        ]
        stages.append(stage("the rest", step - sum(each.seconds for each in stages)))
        ahead = [
            stage("reading batches", took("read")),
            stage("bringing rows into level 0", took("bring in")),
        ]
        return cls(seconds=step, whole=position["train_seconds"], stages=stages, ahead=ahead)

    @property
    def wait(self) -> Stage:
        """What the thread that trains waits for others."""
        return self.stages[0]

    @property
    def hidden(self) -> float:
        """Share of what is done for coming steps that no step waits for."""
        ahead = sum(stage.seconds for stage in self.ahead)
        return 1 - min(self.wait.seconds, ahead) / ahead if ahead else 1.0

    @property
    def lead(self) -> str:
        """In a sentence."""
        return (
            f"a step takes {milliseconds(self.seconds)}, and all of them {readable_seconds(self.whole)}; "
            f"{self.hidden:.0%} of reading batches and bringing in rows is hidden behind the steps before"
        )

    def verdict(self, cached: bool, sharing: str = "") -> Iterator[str]:
        """What is slow, and what more memory would buy.

        Parameters
        ----------
        cached : bool
            Whether rows come and go between level 0 and a home.
        sharing : str
            How the run shared the machine's cores, where it did.
        """
        slowest = max(self.stages, key=lambda stage: stage.seconds)
        yield (
            f"slowest part of a step: {slowest.name} ({slowest.figure} of {milliseconds(self.seconds)}); all steps "
            f"took {readable_seconds(self.whole)}" + (f"; {sharing}" if sharing else "")
        )
        if not cached:
            yield "more memory buys no speed: all rows are in DRAM as float32 already"
            return
        bring_in = self.ahead[1].share
        if bring_in < _LITTLE:
            yield f"more memory buys next to no speed: bringing in rows is {bring_in:.1%} of a step"
            return
        yield (
            "more memory for level 0 (memory.dram, memory.cache.fraction) would save at most "
            f"{bring_in:.0%} of a step, the time in which another thread brings rows in; steps themselves wait "
            f"{self.wait.share:.0%} of their time, for rows and for batches"
        )


def predicted_times(plan: Plan | None, found: StepTime | None) -> ShownTable:
    """The embedding part of a step, as planned and as measured."""
    heads = ("embedding work of a step", "planned", "measured", "measured / planned")
    if plan is None or found is None:
        return ShownTable(heads=heads, rows=[])
    parts = plan["predicted"]["seconds"]
    measured = {stage.name: stage.seconds for stage in (*found.stages, *found.ahead)}
    pairs = (
        ("looking up and updating rows", parts["compute"], measured["looking up rows"] + measured["updating rows"]),
        ("bringing rows into level 0", parts["staging"] + parts["device"], measured["bringing rows into level 0"]),
    )
    rows = [
        (name, milliseconds(planned), milliseconds(took), f"{took / planned:.2f}" if planned else "-")
        for name, planned, took in pairs
    ]
    return ShownTable(heads=heads, rows=rows)
