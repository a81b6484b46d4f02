"""Test how the threads of a run wait, on a machine with simulated free cores."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
import yaml

from errors import missing
from recipes import assert_same_model, last, prepared, tiny, train
from stratarec.cli import main
from stratarec.recipe import Recipe
from stratarec.training.forecast import network_seconds
from stratarec.training.run.run_directory import read_result
from stratarec.training.steps import thread_tuner
from stratarec.training.steps.thread_tuner import CoreTime, ThreadTuner

BUSY, ASLEEP = False, True
# Share of time that threads wait for a core: alone, next to one busy process, and under a quota of
# 1.5 cores.
QUIET = {BUSY: 0.10, ASLEEP: 0.11}
BESIDE_ONE = {BUSY: 0.38, ASLEEP: 0.35}
QUOTA = {BUSY: 0.25, ASLEEP: 0.11}
Shares = dict[bool, float]
STEP = 0.02


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace `cores` with a function that returns the first number of this list."""
    numbers = [2]
    monkeypatch.setattr(thread_tuner, "cores", lambda: numbers[0])
    monkeypatch.setattr(thread_tuner, "quota", lambda: math.inf)
    monkeypatch.setattr(thread_tuner, "AVAILABLE", True)
    torch.set_num_threads(2)
    return numbers


class Machine:
    """Run a tuner for some time with a function from time to waiting shares."""

    def __init__(self, shares: Callable[[float], Shares], asked: int = 0) -> None:
        self._shares = shares
        self._now = 0.0
        self._ran = 0.0
        self._waited = 0.0
        self.used: list[bool] = []
        self.threads: set[int] = set()
        self.seconds: dict[bool, float] = {}
        self.tuner = ThreadTuner(
            asked, 1, self._use, lambda: self._now, lambda: CoreTime(self._ran, self._waited)
        )

    def _use(self, is_asleep: bool, threads: int) -> None:
        self.used.append(is_asleep)
        self.threads.add(threads)

    def run(self, until: float, first: bool = BUSY) -> Machine:
        with self.tuner:
            assert self.used[-1] == first
            for step in range(int(until / STEP)):
                is_asleep = self.used[-1]
                share = self._shares(self._now)[is_asleep]
                self._now += STEP
                self._ran = self._ran + STEP * (1 - share)
                self._waited = self._waited + STEP * share
                self.seconds[is_asleep] = self.seconds.get(is_asleep, 0.0) + STEP
                self.tuner.after_step(step + 1)
        assert self.used[-1] == BUSY
        return self


def test_threads_of_a_run_alone_on_a_machine_wait_busily() -> None:
    machine = Machine(lambda now: QUIET).run(300)
    assert machine.seconds.keys() == {BUSY}
    assert machine.tuner.remark == ""


@pytest.mark.parametrize("asked", [0, 2, 3])
def test_threads_that_wait_for_cores_sleep_and_their_number_stays_the_same(asked: int) -> None:
    machine = Machine(lambda now: BESIDE_ONE, asked).run(200)
    assert machine.seconds[ASLEEP] > 190
    assert machine.threads == {asked or 2}
    assert machine.tuner.remark.startswith("2 cores, shared: threads that wait are asleep from step ")


def test_a_single_thread_waits_for_nobody() -> None:
    assert Machine(lambda now: BESIDE_ONE, asked=1).run(100).used == [BUSY, BUSY]


def test_the_second_phase_of_a_run_begins_as_the_first_one_ended() -> None:
    machine = Machine(lambda now: BESIDE_ONE).run(60)
    machine.seconds.clear()
    machine.run(60, first=ASLEEP)
    assert machine.seconds[ASLEEP] > 50


def test_threads_wait_busily_when_the_machine_is_idle_again() -> None:
    machine = Machine(lambda now: BESIDE_ONE if 30 < now < 80 else QUIET).run(200)
    assert machine.seconds[ASLEEP] > 40
    assert machine.seconds[BUSY] > 100


def test_unsuccessful_changes_become_rare() -> None:
    machine = Machine(lambda now: QUOTA).run(600)
    assert machine.used.count(BUSY) < 20
    assert "changes before" in machine.tuner.remark


def test_running_and_waiting_time_is_read_from_the_system() -> None:
    before = CoreTime.now()
    sum(range(3_000_000))
    after = CoreTime.now()
    assert after.ran > before.ran or before == (0, 0)
    assert after.waited >= before.waited


def test_ranks_on_a_machine_divide_its_cores(two_cores: list[int]) -> None:
    two_cores[0] = 8
    torch.set_num_threads(8)
    assert [ThreadTuner(0, ranks).threads for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert ThreadTuner(3, 8).threads == 3


def test_a_run_whose_threads_sleep_has_the_same_bits_and_reports_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and threads are real, the shares are synthetic."""

    def make_recipe(name: str) -> Recipe:
        return Recipe.from_dict(tiny(home, run=str(tmp_path / name), threads=2))

    def measured(self: ThreadTuner, step: int) -> None:
        self._decide(BESIDE_ONE[self._is_asleep], 10.0 * step, step)

    train(make_recipe("plain"))
    monkeypatch.setattr(ThreadTuner, "after_step", measured)
    train(make_recipe("shared"))
    result = read_result(tmp_path / "shared")
    assert result is not None
    assert "asleep from step" in result.sharing
    assert_same_model(last(tmp_path / "shared"), last(tmp_path / "plain"))


def test_a_run_resumed_with_other_threads_reports_it(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(tiny(home, run=str(tmp_path / "run"), report=True)))
    assert main(["train", str(recipe), "train.max_steps=4", "train.threads=2", "-q"]) == 0
    assert "may differ" not in (tmp_path / "run" / "report.html").read_text()
    assert main(["train", str(recipe), "train.max_steps=8", "train.threads=1", "--resume"]) == 0
    message = "threads change from 2 to 1: from step 4 on another run may differ in its last bits"
    assert message in " ".join("".join(capsys.readouterr()).split())
    page = (tmp_path / "run" / "report.html").read_text()
    assert not missing("step 4 2 1", page)
    # A run that is resumed again keeps the statement.
    assert main(["train", str(recipe), "train.max_steps=9", "train.threads=1", "--resume", "-q"]) == 0
    assert "may differ in its last bits from step 4" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_plan_times_the_network_with_threads_that_wait_as_in_training(
    tmp_path: Path, is_shared: bool
) -> None:
    recipe = Recipe.from_dict(tiny(tmp_path))
    dataset, used, now = prepared(recipe.data), list[bool](), 0.0

    def core_time() -> CoreTime:
        """Return times of threads that wait for a core most of the time, or never; half a second
        each call.
        """
        nonlocal now
        now += 0.5
        return CoreTime(now * (1 - 0.7 * is_shared), now * 0.7 * is_shared)

    with ThreadTuner(
        0, 1, lambda is_asleep, threads: used.append(is_asleep), lambda: now + 0.5, core_time
    ) as tuner:
        batches = cycle([object()])
        assert network_seconds(recipe, dataset, 128, batches=batches, tuner=tuner) > 0
    assert used == [BUSY, *[ASLEEP] * is_shared, BUSY]
