"""The network on a device, rows where they are: on a device that is lazy, by the bits of the CPU.

What a real device would show besides (numerics of its kernels, its speed, errors in mid-run) nothing here does.
"""

from __future__ import annotations

import device_jobs
import pytest
from device_jobs import CASES
from lazy_device import SCHEDULES

# Products of pairs, and sums over runs, pairs and windows, are made in another order there.
OTHER_ORDERS = ("dlrm", "autoint", "din", "grouped windows, transformer", "runs", "rows", "towers")
FEW = ("dcnv2", "grouped windows, attention", "runs under a dlrm", "dropout and normalization", "rows in a cache")


def compared(names: tuple[str, ...], steps: int, **options: str) -> None:
    found = device_jobs.run(f"device_jobs.compare({names!r}, {steps})", **options)
    for name, (expected, got) in found.items():
        tolerance = 1e-6 if name.startswith(OTHER_ORDERS) else 0.0
        assert got == pytest.approx(expected, rel=0, abs=tolerance), name


def test_losses_are_those_of_the_cpu_and_a_step_waits_once() -> None:
    compared(FEW, 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_of_all_models_are_those_of_the_cpu_by_any_schedule(schedule: str) -> None:
    compared(tuple(CASES), 3, schedule=schedule)


def test_each_fault_is_found_by_some_schedule_and_none_where_there_is_none() -> None:
    found = device_jobs.run("device_jobs.find()")
    assert found.pop("") == []
    assert found.keys() == device_jobs.FAULTS.keys()
    assert all(found.values()), found
