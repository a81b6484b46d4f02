"""Test that the installed Numba can run teams of threads."""

from __future__ import annotations

import sys

import numpy as np
from numba import njit

from stratarec.kernels.runtime import helpers, openmp, team


@njit(**team.BODY)
def record(member, counter, numbers):
    numbers[member] = team.take(counter)


@njit(nogil=True)
def run(members, counter, numbers):
    team.run_team(members, record, (counter, numbers))


def numbers_of(members: team.Team) -> list[int]:
    """Return the number that each member took from a counter that starts at 1, or 0 if the member did not run."""
    counter, numbers = np.ones(1, dtype=np.int64), np.zeros(members.threads, dtype=np.int64)
    run(members, counter, numbers)
    return [int(number) for number in numbers]


def test_every_member_of_a_team_runs_once_and_takes_a_unique_number() -> None:
    assert numbers_of(team.team_of(1)) == [1]
    if sys.platform == "linux":
        assert openmp.launcher(), "torch for Linux brings GNU's OpenMP"
        borrowed = team.Team(openmp.launcher(), 2, helpers.HELPERS.board)
        assert sorted(numbers_of(borrowed)) == [1, 2]
