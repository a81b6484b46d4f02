"""Test helper threads of a kernel: the kernel does not wait for a helper that has not started, but
for one that is working.
"""

from __future__ import annotations

import os
from typing import Any

import forked
import numpy as np
import pytest
from numba import njit

from stratarec.kernels.runtime import atomics, workers
from stratarec.kernels.runtime.helpers import AVAILABLE, HELPERS, Helpers
from stratarec.kernels.runtime.team import BODY, Team, run_team, take

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="helpers need a POSIX system")


@njit(**BODY)
def count_tasks(member, counter, done, members):
    members[member] += 1
    while True:
        task = take(counter)
        if task >= len(done):
            break
        done[task] += 1


@njit(nogil=True)
def count(team: Any, done: Any, members: Any) -> None:
    run_team(team, count_tasks, (np.zeros(1, np.int64), done, members))


@njit(**BODY)
def meet(member, work, met, result):
    """Wait until two members have started. The second one continues to compute after the first has
    returned.
    """
    atomics.add(met, 0, 1)
    while atomics.read(met, 0) < 2:
        atomics.pause()
    if member == 1:
        value = np.uint64(1)
        for _ in range(work):
            value = value * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        result[0] = value


@njit(nogil=True)
def meeting(team: Any, work: Any, result: Any) -> None:
    run_team(team, meet, (work, np.zeros(1, np.int64), result))


def member_counts(team: Team, tasks: int = 500) -> Any:
    """Check that every task was done once, and return how often each member took part."""
    done, members = np.zeros(tasks, dtype=np.int64), np.zeros(team.threads, dtype=np.int64)
    count(team, done, members)
    assert done.tolist() == [1] * tasks
    assert members[0] == 1
    assert members.max() == 1
    return members


def own(threads: int, helpers: Helpers = HELPERS) -> Team:
    launch, board = helpers.ready(threads - 1)
    return Team(launch, threads, board)


def on(board: Any) -> Team:
    return Team(workers.leader().address, 2, board.ctypes.data)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_every_task_is_done_once_by_any_members(threads: int) -> None:
    for _ in range(300):
        member_counts(own(threads))


def test_a_helper_that_does_not_start_is_not_waited_for() -> None:
    """The leader wakes a helper that never starts. OpenMP would wait for it forever."""
    board = np.zeros(workers.WORDS, dtype=np.int64)
    listen, ring = os.pipe()
    board[workers.HELPERS] = 1
    board[workers.FIRST_HELPER + workers.ASLEEP], board[workers.FIRST_HELPER + workers.RING] = 1, ring
    board[workers.FIRST_HELPER + workers.THREAD] = 2**30
    assert member_counts(on(board)).tolist() == [1, 0]
    assert os.read(listen, 100) == np.ones(1, dtype=np.int64).tobytes(), "the helper was rung for"
    os.close(listen)
    os.close(ring)


@njit
def help_with(board: Any, job: int) -> Any:
    return workers.help_with(board, job)


def test_a_late_helper_finds_the_job_closed() -> None:
    board = np.zeros(workers.WORDS, dtype=np.int64)
    member_counts(on(board))
    job = workers.FIRST_JOB
    assert board[job + workers.FUNCTION] != 0, "what the leader wrote is still there"
    for state in (board[job], workers.TAKEN, workers.TAKEN | workers.PLACE, workers.TAKEN | workers.OPEN):
        board[job] = state
        assert not help_with(board, job)
        assert board[job] == state


@pytest.mark.parametrize("work", [0, 1000, 30_000_000])
def test_a_working_helper_is_waited_for(work: int) -> None:
    """With much work the leader stops spinning, sleeps, and is woken."""
    seed = 1
    for _ in range(work if work <= 1000 else 0):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
    for _ in range(20 if work <= 1000 else 3):
        result = np.zeros(1, dtype=np.uint64)
        meeting(own(2), work, result)
        assert result[0] == seed if work <= 1000 else result[0] != 0
    assert not HELPERS.board[workers.FIRST_JOB : workers.FIRST_HELPER : workers.LINE].any(), (
        "every line was given back"
    )


def test_no_kernel_is_loaded_to_stop_helpers_that_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(board: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(workers, "stop", stop)
    Helpers().stop()


def test_the_kernel_completes_without_stopped_helpers() -> None:
    helpers = Helpers()
    assert member_counts(own(3, helpers)).sum() >= 1
    helpers.stop()
    assert member_counts(own(3, helpers)).tolist() == [1, 0, 0]


TRAIN = """
import hashlib, os, sys, threading, time
import torch
torch.set_num_threads(2)
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.kernels.runtime import helpers

def train(threads=(2,), rest=0.0):
    table = EmbeddingBagConfig(name="a", num_embeddings=5000, embedding_dim=16, feature_names=("f",))
    tables = TieredEmbeddingBagCollection([table], seed=3)
    draws = torch.Generator().manual_seed(1)
    for step in range(6):
        torch.set_num_threads(threads[step % len(threads)])
        bag = JaggedTensor(values=torch.randint(5000, (6000,), generator=draws), offsets=torch.arange(0, 6001, 3))
        tables(KeyedJagged.from_features({"f": bag})).pooled.square().sum().backward()
        time.sleep(rest)
    torch.set_num_threads(2)
    return hashlib.sha256(tables.table("a")["weight"].numpy().tobytes()).hexdigest()
"""


def script(body: str) -> str:
    """Return the output of a process, which must exit with code 0."""
    done = forked.python(TRAIN + body)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_pauses_and_other_numbers_of_threads_give_the_same_bits() -> None:
    output = script(
        "print(len({train(), train((1,)), train((2, 1, 3)), train(rest=0.03), train((2, 4), 0.03)}))"
    )
    assert output == "1"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_its_own_helpers() -> None:
    """A child that is forked while other threads run kernels has neither its parent's helpers nor
    torch's threads.
    """
    output = script("""
before = train(rest=0.02)
other = threading.Thread(target=lambda: [train() for _ in range(5)])
other.start()
reading, writing = os.pipe()
child = os.fork()
if not child:
    bits = train(rest=0.02)
    os.write(writing, f"{bits} {len(helpers.HELPERS._threads)}".encode())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
other.join()
helpers_of_two = min(len(os.sched_getaffinity(0)) - 1, 1)
print(os.read(reading, 200).decode() == f"{before} {helpers_of_two}", train() == before)
""")
    assert output == "True True"
