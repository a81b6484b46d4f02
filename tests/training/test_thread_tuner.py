"""Test a run that chooses its number of threads, on a machine with simulated free cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from errors import missing
from recipes import assert_same_model, last, tiny, train
from stratarec.cli import main
from stratarec.recipe import Recipe
from stratarec.training.run.run_directory import read_result
from stratarec.training.steps import thread_tuner
from stratarec.training.steps.thread_tuner import CoreTime, ThreadConfig, ThreadTuner

SPIN, SLEEP, ONE = ThreadConfig(2, sleep=False), ThreadConfig(2, sleep=True), ThreadConfig(1, sleep=False)
# Share of time that threads wait for a core: alone, with one other busy process, and under a quota of 1.5 cores.
QUIET = {SPIN: 0.10, SLEEP: 0.11, ONE: 0.07}
BESIDE_ONE = {SPIN: 0.38, SLEEP: 0.35, ONE: 0.16}
QUOTA = {SPIN: 0.25, SLEEP: 0.11, ONE: 0.05}
Shares = dict[ThreadConfig, float]
STEP = 0.02


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Replace `cores` with a function that returns the first number of this list."""
    numbers, before = [2], torch.get_num_threads()
    monkeypatch.setattr(thread_tuner, "cores", lambda: numbers[0])
    monkeypatch.setattr(thread_tuner, "quota", lambda: math.inf)
    monkeypatch.setattr(thread_tuner, "AVAILABLE", True)
    torch.set_num_threads(2)
    yield numbers
    torch.set_num_threads(before)


class Machine:
    """Run a tuner for some time with a function from time to waiting shares."""

    def __init__(self, shares: Callable[[float], Shares], asked: int = 0) -> None:
        self._shares, self._now, self._ran, self._waited = shares, 0.0, 0.0, 0.0
        self.used: list[ThreadConfig] = []
        self.reports: list[tuple[int, str]] = []
        self.seconds: dict[ThreadConfig, float] = {}
        self.tuner = ThreadTuner(
            asked, 1, self._report, self.used.append, lambda: self._now, lambda: CoreTime(self._ran, self._waited)
        )

    def _report(self, step: int, reason: str) -> None:
        self.reports.append((step, reason))
        assert ONE not in self.used  # no later than the first step with other bits

    def run(self, until: float, first: ThreadConfig = SPIN) -> Machine:
        with self.tuner:
            assert self.used[-1] == first
            for step in range(int(until / STEP)):
                config = self.used[-1]
                share = self._shares(self._now)[config]
                self._now += STEP
                self._ran, self._waited = self._ran + STEP * (1 - share), self._waited + STEP * share
                self.seconds[config] = self.seconds.get(config, 0.0) + STEP
                self.tuner.after_step(step + 1)
        assert self.used[-1] == ThreadConfig(self.tuner.threads, sleep=False)
        return self


def test_a_run_alone_on_a_machine_keeps_its_threads() -> None:
    machine = Machine(lambda now: QUIET).run(300)
    assert machine.seconds.keys() == {SPIN}
    assert machine.tuner.remark == ""
    assert machine.reports == []


@pytest.mark.parametrize(("shares", "best"), [(BESIDE_ONE, ONE), (QUOTA, SLEEP)], ids=["busy process", "quota"])
def test_a_run_uses_fewer_threads_if_they_wait_for_cores(shares: Shares, best: ThreadConfig) -> None:
    machine = Machine(lambda now: shares).run(200)
    assert machine.seconds[best] > 190
    assert machine.tuner.remark.startswith("2 cores, shared: ")
    assert [reason for _, reason in machine.reports] == [
        "threads change from 2 to 1, as other processes use the cores"
    ] * (best == ONE)


def test_the_second_phase_of_a_run_begins_with_the_threads_of_the_first() -> None:
    machine = Machine(lambda now: BESIDE_ONE).run(60)
    machine.seconds.clear()
    machine.run(60, first=ONE)
    assert machine.seconds[ONE] > 50


def test_a_helper_of_the_run_does_not_take_its_threads() -> None:
    """Fewer threads would change bits; once the helper has ended, other processes may take cores again."""
    machine = Machine(lambda now: {SPIN: 0.69, SLEEP: 0.67, ONE: 0.62})
    machine.tuner.has_helper = lambda: machine._now < 30
    machine.run(29)
    assert machine.seconds.keys() == {SPIN, SLEEP}
    assert machine.reports == []
    assert ONE in machine.run(60, first=SLEEP).seconds


def test_a_given_number_of_threads_is_not_changed() -> None:
    machine = Machine(lambda now: BESIDE_ONE, asked=2).run(100)
    assert machine.seconds.keys() == {SPIN}
    assert machine.tuner.remark == ""


def test_a_run_returns_to_more_threads_when_the_machine_is_idle_again() -> None:
    machine = Machine(lambda now: BESIDE_ONE if 30 < now < 80 else QUIET).run(200)
    assert machine.seconds[ONE] > 40
    assert machine.seconds[SPIN] > 100


def test_unsuccessful_increases_become_rare() -> None:
    machine = Machine(lambda now: BESIDE_ONE).run(600)
    assert machine.used.count(SLEEP) < 20
    assert len(machine.reports) == 1


def test_a_changed_quota_is_followed(two_cores: list[int]) -> None:
    def shares(now: float) -> Shares:
        two_cores[0] = 1 if now > 100 else 2
        return QUIET

    machine = Machine(shares).run(200)
    assert machine.tuner.threads == 1
    assert machine.seconds[ONE] > 95
    assert [reason for _, reason in machine.reports] == ["threads change from 2 to 1, as other processes use the cores"]


def test_running_and_waiting_time_is_read_from_the_system() -> None:
    before = CoreTime.now()
    sum(range(3_000_000))
    after = CoreTime.now()
    assert after.ran > before.ran or before == (0, 0)
    assert after.waited >= before.waited


def test_ranks_on_a_machine_divide_its_cores(two_cores: list[int]) -> None:
    two_cores[0] = 8
    torch.set_num_threads(8)
    assert [ThreadTuner(0, ranks, print).threads for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert ThreadTuner(3, 8, print).threads == 3


def shares_of(monkeypatch: pytest.MonkeyPatch, shares: Callable[[ThreadConfig], float]) -> None:
    """Measure after each step, with this share of waiting."""

    def measured(self: ThreadTuner, step: int) -> None:
        if not self._asked:
            self._decide(shares(self._ladder[self._level]), 10.0 * step, step)

    monkeypatch.setattr(ThreadTuner, "after_step", measured)


def test_a_run_whose_threads_change_has_the_same_tables_and_reports_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and threads are real, the shares are synthetic."""

    def make_recipe(name: str, **options: int) -> Recipe:
        return Recipe.from_dict(tiny(home, run=str(tmp_path / name), **options))

    shares_of(monkeypatch, BESIDE_ONE.__getitem__)
    train(make_recipe("free"))
    result = read_result(tmp_path / "free")
    assert result is not None
    assert "1 thread from step" in result.sharing
    assert torch.get_num_threads() == 2
    monkeypatch.undo()
    train(make_recipe("plain", threads=2))
    assert_same_model(last(tmp_path / "free"), last(tmp_path / "plain"))


def test_a_report_states_once_that_bits_may_differ(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares_of(monkeypatch, BESIDE_ONE.__getitem__)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(tiny(home, run=str(tmp_path / "run"), report=True, checkpoint={"every_steps": 5})))
    assert main(["train", str(recipe), "train.max_steps=12"]) == 0
    assert "".join(capsys.readouterr()).count("another run may differ in its last bits") == 1
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Another run of this recipe may differ in its last bits from step " in page
    # A resumed run keeps the statement.
    monkeypatch.undo()
    assert main(["train", str(recipe), "train.max_steps=14", "train.threads=2", "--resume", "-q"]) == 0
    assert "may differ in its last bits from step " in (tmp_path / "run" / "report.html").read_text()


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
    assert not missing("step 4 2 1", (tmp_path / "run" / "report.html").read_text())
