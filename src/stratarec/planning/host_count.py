"""How many hosts a model needs, with memories below DRAM and without: by its bytes, and by samples a second.

The question of MTrainS (arXiv 2305.01515): hosts that are added for their memory alone compute little. An SSD in each
host replaces them as long as its reads keep up. All hosts are assumed to be like the measured one, with even loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from stratarec.errors import ConfigError
from stratarec.planning.candidates import TableSpec, candidates
from stratarec.planning.config import MemoryConfig
from stratarec.planning.machine import Machine, Tiers
from stratarec.planning.placement import place
from stratarec.planning.plan import Plan
from stratarec.planning.step_model import StepTime, StepWork, step_time

MOST_HOSTS = 4096


@dataclass(frozen=True, kw_only=True)
class HostCount:
    """Number of hosts that a model needs, and what limits them."""

    memories: str
    hosts: int
    for_bytes: int
    """Hosts that hold the rows, however fast they are."""
    samples_per_second: float
    """Predicted throughput of all hosts together."""
    waits_for: str
    """Largest part of a step: ``tables``, ``block reads``, or ``network``, which includes the exchange."""


def fewest_hosts(
    tables: Sequence[TableSpec], memory: MemoryConfig, machine: Machine, work: StepWork, *, rate: float
) -> HostCount:  # fmt: skip
    """Return the fewest hosts, of one process each, that hold `tables` and train `rate` samples a second.

    Parameters
    ----------
    memory : MemoryConfig
        Budgets of a host. A path without a budget has the bytes that are free here.
    machine : Machine
        Rates of a host, and of the network between hosts.
    work : StepWork
        Work of a step of all hosts; `tables` have its lookups.

    Raises
    ------
    ConfigError
        Without a budget of DRAM, or when no number of hosts is enough: at most one for each sample of a step, and at
        most `MOST_HOSTS`.
    """
    if memory.dram is None:
        raise ConfigError("memory.dram is null, expected the bytes of a host for tables, such as memory.dram=256GiB")
    memory, most = _with_budgets(memory, machine.tiers), min(work.batch, MOST_HOSTS)
    name = " + ".join(["dram", *(name for name in ("mapped", "block") if getattr(memory, name) is not None)])
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
            f"{most:,} hosts with {name} do not train {rate:,.0f} samples a second: lower --samples or raise "
            "train.batch_size"
        )
    placement = plan(hosts)
    assert isinstance(placement, Plan)
    time = step(placement, hosts)
    parts = {
        "tables": time.tables.compute + time.tables.staging, "network": time.dense, "block reads": time.tables.device,
    }  # fmt: skip
    return HostCount(
        memories=name, hosts=hosts, for_bytes=for_bytes, samples_per_second=work.batch / time.total,
        waits_for=max(parts, key=parts.__getitem__),
    )  # fmt: skip


def _with_budgets(memory: MemoryConfig, tiers: Tiers) -> MemoryConfig:
    """Set the budget of each path that has none to the bytes that are free here."""
    block, mapped = memory.block, memory.mapped
    if block is not None and block.budget is None and tiers.block is not None:
        block = replace(block, budget=tiers.block.free_bytes)
    if mapped is not None and mapped.budget is None and tiers.mapped is not None:
        mapped = replace(mapped, budget=tiers.mapped.free_bytes)
    return replace(memory, block=block, mapped=mapped)


def _least(is_enough: Callable[[int], bool], first: int, most: int) -> int | None:
    """Return the least number from `first` to `most` that is enough, where all after it are; None if there is none."""
    high = first
    while not is_enough(high):
        if high == most:
            return None
        first, high = high + 1, min(2 * high, most)
    while first < high:
        middle = (first + high) // 2
        first, high = (first, middle) if is_enough(middle) else (middle + 1, high)
    return high
