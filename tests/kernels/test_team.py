"""Test that the installed Numba can run teams of threads."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numba import njit

from stratarec.kernels.runtime import openmp, team
from stratarec.kernels.runtime.stack import stack_array


@njit(**team.BODY)
def record(member, counter, numbers):
    numbers[member] = team.take(counter)


@njit(nogil=True)
def run(members, counter, numbers):
    team.run_team(members, record, (counter, numbers))


def numbers_of(members: team.Team) -> list[int]:
    """Return the number that each member took from a counter that starts at 1, or 0 if the member
    did not run.
    """
    counter, numbers = np.ones(1, dtype=np.int64), np.zeros(members.threads, dtype=np.int64)
    run(members, counter, numbers)
    return [int(number) for number in numbers]


def test_every_member_of_a_team_runs_once_and_takes_a_unique_number() -> None:
    assert numbers_of(team.team_of(1)) == [1]
    if sys.platform == "linux":
        assert openmp.launcher(), "torch for Linux brings GNU's OpenMP"
        borrowed = team.Team(openmp.launcher(), 2, 0)
        assert sorted(numbers_of(borrowed)) == [1, 2]


@njit(nogil=True)
def sum_and_fill(rounds):
    """Return the sum of two arrays as they were in each round before they were filled, and the sum
    of their parts.
    """
    before, after = 0.0, 0.0
    for _ in range(rounds):
        words, floats = stack_array(19, np.int64), stack_array(3, np.float32)
        before += words.sum() + floats.sum()
        for place in range(len(words)):
            words[place] = -1
        floats[:] = 0.5
        after += words.sum() + floats[1:].sum()
    return before, after


@pytest.mark.parametrize("rounds", [1, 5])
def test_an_array_on_the_stack_is_zeros_and_overlaps_no_other(rounds: int) -> None:
    assert sum_and_fill(rounds) == (0.0, rounds * (1.0 - 19))
