"""How many hosts a model needs, with memories below DRAM and without: by its bytes, and by samples a second.

The question of MTrainS (arXiv 2305.01515): hosts that are there for their bytes alone compute little, and an SSD in
each holds what they were for, as long as its reads keep up. All hosts are taken to be like the one that was measured,
and loads to be even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from stratarec.errors import ConfigError
from stratarec.planning.candidates import TableSpec, candidates
from stratarec.planning.config import MemoryConfig
from stratarec.planning.memories import Tiers
from stratarec.planning.placement import place
from stratarec.planning.plan import Plan

MOST_HOSTS = 4096


@dataclass(frozen=True, kw_only=True)
class HostCount:
    """Hosts that do for a model."""

    memories: str
    hosts: int
    for_bytes: int
    """Hosts that hold the rows, however fast they are."""
    samples_per_second: float
    """Of all hosts together, predicted."""
    waits_for: str
    """What most of a step is: ``tables``, ``block reads``, or ``network`` of the model with its exchange."""


def fewest_hosts(
    tables: Sequence[TableSpec], memory: MemoryConfig, tiers: Tiers, *, batch_size: int, rate: float,
    beside: Callable[[int], float],
) -> HostCount:  # fmt: skip
    """The fewest hosts that hold `tables` and train `rate` samples a second.

    Parameters
    ----------
    memory : MemoryConfig
        Budgets of a host; what is free here, where a path has none.
    batch_size : int
        Samples of a step of all hosts, of which `tables` have the lookups.
    beside : callable
        Hosts -> seconds of a step that are not the tables': network and exchange.

    Raises
    ------
    ConfigError
        Where no budget of DRAM is given, or as many hosts as a step has samples, at most `MOST_HOSTS`, do not do.
    """
    if memory.dram is None:
        raise ConfigError("memory.dram is null, expected the bytes of a host for tables, such as memory.dram=256GiB")
    memory, most = _with_budgets(memory, tiers), min(batch_size, MOST_HOSTS)
    name = " + ".join(["dram", *(name for name in ("mapped", "block") if getattr(memory, name) is not None)])
    choices = [candidates(table, memory, tiers) for table in tables]

    @cache
    def plan(hosts: int) -> Plan | ConfigError:
        try:
            return place(tables, memory, tiers, batch_size=batch_size, ranks=hosts, choices=choices)
        except ConfigError as error:  # the tables do not fit
            return error

    def fast(hosts: int) -> bool:
        made = plan(hosts)
        return isinstance(made, Plan) and batch_size / _step(made, hosts, beside)[0] >= rate

    hold = _least(lambda hosts: isinstance(plan(hosts), Plan), 1, most)
    if hold is None:
        raise ConfigError(f"{most:,} hosts with {name} are not enough: {plan(most)}")
    enough = _least(fast, hold, most)
    if enough is None:
        raise ConfigError(
            f"{most:,} hosts with {name} do not train {rate:,.0f} samples a second: lower --samples or raise "
            "train.batch_size"
        )
    made = plan(enough)
    assert isinstance(made, Plan)
    seconds, longest = _step(made, enough, beside)
    return HostCount(
        memories=name, hosts=enough, for_bytes=hold, samples_per_second=batch_size / seconds, waits_for=longest
    )


def _with_budgets(memory: MemoryConfig, tiers: Tiers) -> MemoryConfig:
    """What is free here is what each host has, where a path has no budget."""
    block, mapped = memory.block, memory.mapped
    if block is not None and block.budget is None and tiers.block is not None:
        block = replace(block, budget=tiers.block.free_bytes)
    if mapped is not None and mapped.budget is None and tiers.mapped is not None:
        mapped = replace(mapped, budget=tiers.mapped.free_bytes)
    return replace(memory, block=block, mapped=mapped)


def _step(plan: Plan, hosts: int, beside: Callable[[int], float]) -> tuple[float, str]:
    """Seconds of a step, and what most of them are: the device works beside the rest where batches are staged ahead."""
    tables, device = (plan.seconds.compute + plan.seconds.staging) / hosts, plan.seconds.device / hosts
    parts = {"tables": tables, "network": beside(hosts), "block reads": device}
    busy = tables + parts["network"]
    seconds = max(busy, device) if plan.lookahead else busy + device
    if plan.lookahead and device > busy:
        return seconds, "block reads"
    return seconds, max(parts, key=parts.__getitem__)


def _least(fine: Callable[[int], bool], first: int, most: int) -> int | None:
    """The first number from `first` on that is fine, where all after it are; None where none up to `most` is."""
    high = first
    while not fine(high):
        if high == most:
            return None
        first, high = high + 1, min(2 * high, most)
    while first < high:
        middle = (first + high) // 2
        first, high = (first, middle) if fine(middle) else (middle + 1, high)
    return high
