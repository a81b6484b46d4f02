"""A run that finds out how many threads are fastest, by steps whose seconds are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from recipes import assert_same_model, last, tiny, train
from stratarec.recipe import Recipe
from stratarec.training.run.run_directory import read_result
from stratarec.training.steps import sharing
from stratarec.training.steps.sharing import Sharing, Way

TURN, SLEEP, ONE = Way(2, sleep=False), Way(2, sleep=True), Way(1, sleep=False)
QUIET = {TURN: 0.012, SLEEP: 0.021, ONE: 0.023}
BESIDE_ONE = {TURN: 0.042, SLEEP: 0.031, ONE: 0.022}
BESIDE_FOUR = {TURN: 0.180, SLEEP: 0.044, ONE: 0.058}
Seconds = dict[Way, float]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What `cores` gives: its first number."""
    found, before = [2], torch.get_num_threads()
    monkeypatch.setattr(sharing, "cores", lambda: found[0])
    monkeypatch.setattr(sharing, "AVAILABLE", True)
    torch.set_num_threads(2)
    yield found
    torch.set_num_threads(before)


def trained(
    at: Callable[[float], Seconds], until: float, asked: int = 0
) -> tuple[Sharing, dict[Way, float], list[str]]:
    """A run whose steps take at a time what is said of each way; its seconds in each way, and what it says."""
    used: list[Way] = []
    said: list[str] = []
    spent: dict[Way, float] = {}
    run, now, step = Sharing(asked, 1, said.append, used.append), 0.0, 0
    with run:
        while now < until:
            way, step = used[-1], step + 1
            taken = at(now)[way]
            now += taken
            spent[way] = spent.get(way, 0.0) + taken
            run.stepped(taken, step)
    assert used[-1] == Way(run.threads, sleep=False)
    return run, spent, said


def test_a_run_on_a_machine_for_itself_keeps_its_threads_and_tries_no_other_number() -> None:
    run, spent, said = trained(lambda now: QUIET, 300)
    assert spent.keys() == {TURN, SLEEP}
    assert spent[SLEEP] < 3
    assert run.remark == ""
    assert said == []


@pytest.mark.parametrize(
    ("seconds", "asked", "best"),
    [(BESIDE_ONE, 0, ONE), (BESIDE_FOUR, 0, SLEEP), (BESIDE_ONE, 2, SLEEP)],
    ids=["fewer threads", "threads that sleep", "threads that are given"],
)
def test_the_fastest_way_is_kept_and_told(seconds: Seconds, asked: int, best: Way) -> None:
    run, spent, said = trained(lambda now: seconds, 100, asked)
    assert spent[best] > 90
    assert "2 cores, shared: " in run.remark
    assert run.remark.endswith("on")
    assert bool(said) == (best is ONE)
    assert not asked or ONE not in spent


def test_a_run_goes_back_when_the_machine_is_quiet_again() -> None:
    run, spent, _ = trained(lambda now: BESIDE_FOUR if 30 < now < 80 else QUIET, 200)
    assert spent[TURN] > 145
    assert spent[SLEEP] > 40
    assert run.remark.count("from step") == 2


def test_a_quota_that_changes_is_followed_within_a_minute(two_cores: list[int]) -> None:
    def at(now: float) -> Seconds:
        two_cores[0] = 1 if now > 100 else 2
        return QUIET

    run, spent, said = trained(at, 200)
    assert run.threads == 1
    assert spent[ONE] > 35
    assert "unless train.threads is set" in said[0]


def test_ranks_of_a_machine_divide_its_cores(two_cores: list[int]) -> None:
    two_cores[0] = 8
    torch.set_num_threads(8)
    assert [Sharing(0, ranks, print).threads for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert Sharing(3, 8, print).threads == 3


def test_a_run_whose_threads_change_has_the_same_tables_and_says_so(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real steps, whose seconds are made up."""

    def made(name: str, **options: int) -> Recipe:
        return Recipe.from_dict(tiny(home, run=str(tmp_path / name), **options))

    def told(name: str) -> str:
        found = read_result(tmp_path / name)
        assert found is not None
        return found.sharing

    def now(run: Sharing) -> Way:
        return run._left[0] if run._trying else run._way

    stepped = Sharing.stepped
    monkeypatch.setattr(Sharing, "stepped", lambda self, seconds, step: stepped(self, BESIDE_ONE[now(self)] * 9, step))
    train(made("free"))
    assert "1 thread from step" in told("free")
    train(made("given", threads=2))
    assert "asleep" in told("given")
    assert torch.get_num_threads() == 2
    monkeypatch.undo()
    train(made("plain", threads=2))
    for name in ("free", "given"):
        assert_same_model(last(tmp_path / name), last(tmp_path / "plain"))
