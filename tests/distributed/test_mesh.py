"""Test meshes: collectives, errors that reach all ranks, and ranks that have ended."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import Ranks
from torch.distributed import HashStore  # type: ignore[attr-defined]

from errors import refuses
from stratarec.distributed.collectives import reduce_gradients
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.failures import Heartbeat, RollCall
from stratarec.distributed.mesh import Mesh, difference, joined
from stratarec.errors import ConfigError, DataError, RankError

SAME: dict[str, Any] = {"versions": {"torch": "2.13.0"}, "recipe": {"name": "a"}}
ROLLS: dict[str, tuple[list[Any], str]] = {
    "alike": ([SAME, SAME, SAME], ""),
    "another torch": (
        [SAME, SAME, {**SAME, "versions": {"torch": "2.12.1"}}],
        "rank 2 has torch 2.12.1, rank 0 has 2.13.0: ",
    ),
    "another recipe": (
        [SAME, {**SAME, "recipe": {"name": "b"}}, SAME],
        "rank 1 was started with recipe.name 'b', rank 0 with 'a': ",
    ),
    "gone again": ([SAME, None, SAME], "rank 1 does not answer: no heartbeat for 0.3 s; "),
    "never there": ([SAME, ..., SAME], "rank 1 did not start within 1 s (distributed.timeout): "),
}


@pytest.mark.parametrize("case", ROLLS)
def test_ranks_check_each_other_before_they_connect(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are threads with a store in memory.

    All report the same error, even if one rank was killed after it had answered.
    """
    monkeypatch.setattr("stratarec.distributed.failures._GRACE_SECONDS", 0.3)
    store, (abouts, message) = HashStore(), ROLLS[case]

    def answer(rank: int) -> str:
        if abouts[rank] is ...:
            return message
        roll = RollCall(store, rank, 3, holds_store=False)
        if abouts[rank] is None:
            store.set(f"beat/{rank}", "1")
            store.set(f"stratarec/answered/{rank}", json.dumps(SAME))
            store.add("stratarec/answered", 1)
            return message
        with Heartbeat(store, rank, 3, 0.5) as heart:
            try:
                roll.answer(abouts[rank], heart, 1.0, difference)
            except RankError as error:
                roll.leave(str(error))
                return str(error)
        return ""

    with ThreadPoolExecutor(3) as threads:
        for report in threads.map(answer, range(3)):
            assert report.startswith(message)
            assert bool(report) == bool(message)


def values(rank: int, size: int = 1001) -> torch.Tensor:
    """Return numbers of very different magnitudes, whose sum depends on the order."""
    draws = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=draws) * 10 ** torch.randint(-6, 7, (size,), generator=draws)


def sum_values(mesh: Mesh) -> torch.Tensor:
    return mesh.rows.sum(values(mesh.rank))


def test_sums_are_computed_in_rank_order(ranks: Ranks) -> None:
    parts = [values(rank) for rank in range(4)]
    for total in ranks.run(4, sum_values):
        assert torch.equal(total, functools.reduce(torch.add, parts))
    assert not torch.equal(functools.reduce(torch.add, parts), functools.reduce(torch.add, parts[::-1]))


def reduce_weights(mesh: Mesh) -> list[torch.Tensor]:
    weights = [torch.zeros(3, 2), torch.zeros(5), torch.zeros(0)]
    for place, weight in enumerate(weights):
        if place != mesh.rank:  # a rank without samples may have no gradient
            weight.grad = torch.full_like(weight, 10.0**mesh.rank)
    reduce_gradients(mesh.rows, weights)
    return [weight.grad for weight in weights]  # type: ignore[misc]


def test_gradients_are_reduced_in_their_shapes(ranks: Ranks) -> None:
    for gradients in ranks.run(2, reduce_weights):
        assert torch.equal(gradients[0], torch.full((3, 2), 10.0))
        assert torch.equal(gradients[1], torch.full((5,), 1.0))
        assert gradients[2].shape == (0,)


def check_different_recipes(mesh: Mesh) -> None:
    mesh.check_same({"recipe": {"train": {"seed": 4 if mesh.rank == 1 else 3}}, "version": "1"})


def fails(mesh: Mesh) -> None:
    mesh.rows.agree(DataError("file x, row 3: no number") if mesh.rank == 2 else None)


def work_fails(mesh: Mesh, first: int) -> None:
    def work() -> None:
        if mesh.rank == first:
            raise DataError("file z is gone")

    (mesh.first if first == 0 else mesh.first_then_others)(work)


@pytest.mark.parametrize(
    ("job", "arguments", "message"),
    [
        (check_different_recipes, (), "rank 1 was started with recipe.train.seed 4, rank 0 with 3: "),
        (fails, (), "rank 2: file x, row 3: no number"),
        (work_fails, (0,), "rank 0: file z is gone"),
        (work_fails, (1,), "rank 1: file z is gone"),
    ],
    ids=["other settings", "agree", "first", "first then others"],
)
def test_an_error_on_one_rank_is_raised_on_all_ranks(
    ranks: Ranks, job: Any, arguments: tuple[Any, ...], message: str
) -> None:
    ranks.begin(3, job, [arguments] * 3)
    for error in ranks.end(3):
        assert isinstance(error, RankError)
        assert str(error).startswith(message)


def leaves(mesh: Mesh) -> None:
    if mesh.rank == 1:
        raise DataError("file y is gone")
    mesh.rows.agree(None)


@pytest.mark.slow
def test_a_rank_that_leaves_sends_the_reason_to_the_others(ranks: Ranks) -> None:
    ranks.begin(3, leaves, [()] * 3)
    answers = ranks.end(3)
    assert isinstance(answers.pop(1), DataError)
    assert {str(error) for error in answers} == {"rank 1: file y is gone"}


def forever(mesh: Mesh, started: Path) -> None:
    mesh.rows.agree(None)
    if mesh.is_first:
        started.touch()
    while True:
        mesh.rows.agree(None)
        mesh.ids.agree(None)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 2])
def test_when_a_rank_is_killed_the_others_stop_and_name_it(ranks: Ranks, dead: int, tmp_path: Path) -> None:
    started = tmp_path / "started"
    ranks.begin(3, forever, [(started,)] * 3)
    while not started.exists():
        time.sleep(0.05)
    ranks.kill(dead)
    began = time.monotonic()
    answers = ranks.end(3)
    assert time.monotonic() - began < 12
    assert answers.pop(dead) is None
    for error in answers:
        assert isinstance(error, RankError)
        assert str(error).startswith(f"rank {dead}")
        assert "ended" in str(error)


def sleeps(mesh: Mesh) -> None:
    if mesh.rank == 1:
        time.sleep(15)
    mesh.rows.agree(None)


@pytest.mark.slow
def test_an_unresponsive_rank_is_named_after_the_timeout(ranks: Ranks) -> None:
    ranks.run(2, sum_values)  # starting processes take longer than the timeout to connect
    ranks.begin(2, sleeps, [()] * 2, timeout=3.0)
    answers = ranks.end(2)
    assert str(answers[0]).startswith("rank 1 ended")


def stops(mesh: Mesh) -> None:
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    mesh.files.agree(None)


@pytest.mark.slow
def test_a_stopped_rank_is_named_while_others_wait_for_its_files(ranks: Ranks) -> None:
    """The connections of a stopped rank stay open, so other ranks cannot rely on them being
    closed.
    """
    ranks.run(2, sum_values)
    ranks.begin(2, stops, [()] * 2, timeout=2.0)
    try:
        (answer,) = ranks.end(1)
        assert str(answer).startswith("rank 1 does not answer: no heartbeat for 2 s")
    finally:
        for rank in range(2):  # the first rank still waits in this group
            ranks.kill(rank)


@pytest.mark.slow
def test_a_terminated_rank_reports_the_signal_and_the_others_repeat_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    ranks.begin(2, forever, [(started,)] * 2)
    while not started.exists():
        time.sleep(0.05)
    ranks.kill(1, signal.SIGTERM)
    assert [str(error) for error in ranks.end(2)] == ["rank 1 received SIGTERM"] * 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE 'x'"),
        ({"WORLD_SIZE": "2"}, "RANK -1 WORLD_SIZE 2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR MASTER_PORT"),
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE 3 4"),
    ],
)
def test_invalid_environments_are_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with refuses(ConfigError, message), joined():
        pass


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_unreachable_ranks_are_an_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with refuses(RankError, f"rank 1 2 {address}:1"), joined(DistributedConfig(timeout=1)):
        pass


def test_a_port_in_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, value)
        with refuses(RankError, f"rank 0 2 127.0.0.1:{port}"), joined(DistributedConfig(timeout=1)):
            pass
