"""Number of hosts that a model needs to store its tables and to reach a required number of samples
per second.

Comparing this number with and without memories below DRAM answers the question of MTrainS (arXiv
2305.01515). Hosts that are added only for their memory compute little; an SSD in each host can
replace them, as long as its reads are fast enough. All hosts are assumed to be like the measured
one, with even loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from stratarec.errors import ConfigError
from stratarec.planning.candidates import TableSpec, candidates, resolve_policy
from stratarec.planning.config import MemoryConfig
from stratarec.planning.machine import Machine, Tiers
from stratarec.planning.placement import place
from stratarec.planning.plan import Plan
from stratarec.planning.step_model import StepTime, StepWork, step_time

MOST_HOSTS = 4096


@dataclass(frozen=True, kw_only=True)
class HostCount:
    """Number of hosts that a model needs, by memory and by throughput."""

    memories: str
    hosts: int
    for_bytes: int
    """Minimum number of hosts on which the tables fit, for any throughput."""
    samples_per_second: float
    """Predicted throughput of all hosts together."""
    waits_for: str
    """Longest part of a step: ``tables``, ``block reads``, or ``network``, which includes the
    exchange.
    """


def fewest_hosts(
    tables: Sequence[TableSpec], memory: MemoryConfig, machine: Machine, work: StepWork, *, rate: float
) -> HostCount:
    """Return the smallest number of hosts that can store `tables` and train `rate` samples per
    second.

    Each host runs one process.

    Parameters
    ----------
    memory : MemoryConfig
        Budgets of one host. A path without a budget may use as many bytes as are free in it on this
        machine.
    machine : Machine
        Rates of a host, and of the links between hosts.
    work : StepWork
        Work of one step of all hosts together. The lookups of `tables` are also those of all hosts.

    Raises
    ------
    ConfigError
        If there is no budget for DRAM, or if the largest number of hosts is not enough. That number
        is `MOST_HOSTS`, or the number of samples per step if that is smaller.
    """
    if memory.dram is None:
        raise ConfigError(
            "memory.dram is null, expected the bytes of a host for tables, such as memory.dram=256GiB"
        )
    memory = resolve_policy(_with_budgets(memory, machine.tiers), tables)
    most = min(work.batch, MOST_HOSTS)
    name = " + ".join(
        ["dram", *(name for name in ("mapped", "block") if getattr(memory, name) is not None)]
    )
    choices = [candidates(table, memory, machine.tiers) for table in tables]

    @cache
    def plan(hosts: int) -> Plan | ConfigError:
        try:
            return place(tables, memory, machine.tiers, batch_size=work.batch, ranks=hosts, choices=choices)
        except ConfigError as error:  # the tables do not fit
            return error

    def step(plan: Plan, hosts: int) -> StepTime:
        return step_time(
            replace(work, batch=max(work.batch // hosts, 1)),
            replace(machine, cluster=replace(machine.cluster, hosts=hosts)),
            tables=plan.seconds.share(hosts),
            lookahead=plan.lookahead,
        )

    def is_fast(hosts: int) -> bool:
        placement = plan(hosts)
        return isinstance(placement, Plan) and work.batch / step(placement, hosts).total >= rate

    for_bytes = _least(lambda hosts: isinstance(plan(hosts), Plan), 1, most)
    if for_bytes is None:
        raise ConfigError(f"{most:,} hosts with {name} are not enough: {plan(most)}")
    hosts = _least(is_fast, for_bytes, most)
    if hosts is None:
        raise ConfigError(
            f"{most:,} hosts with {name} do not reach {rate:,.0f} samples per second: lower --samples or "
            "raise train.batch_size"
        )
    placement = plan(hosts)
    assert isinstance(placement, Plan)
    time = step(placement, hosts)
    parts = {
        "tables": time.tables.compute + time.tables.staging,
        "network": time.dense,
        "block reads": time.tables.device,
    }
    return HostCount(
        memories=name,
        hosts=hosts,
        for_bytes=for_bytes,
        samples_per_second=work.batch / time.total,
        waits_for=max(parts, key=parts.__getitem__),
    )


def _with_budgets(memory: MemoryConfig, tiers: Tiers) -> MemoryConfig:
    """Return `memory` with a budget for each path: if it has none, the bytes that are free there on
    this machine.
    """
    block, mapped = memory.block, memory.mapped
    if block is not None and block.budget is None and tiers.block is not None:
        block = replace(block, budget=tiers.block.free_bytes)
    if mapped is not None and mapped.budget is None and tiers.mapped is not None:
        mapped = replace(mapped, budget=tiers.mapped.free_bytes)
    return replace(memory, block=block, mapped=mapped)


def _least(is_enough: Callable[[int], bool], first: int, most: int) -> int | None:
    """Return the smallest number from `first` to `most` that is enough, or None if there is none.

    If a number is enough, every larger number must be enough, too.
    """
    high = first
    while not is_enough(high):
        if high == most:
            return None
        first, high = high + 1, min(2 * high, most)
    while first < high:
        middle = (first + high) // 2
        first, high = (first, middle) if is_enough(middle) else (middle + 1, high)
    return high
