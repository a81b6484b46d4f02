"""A run that chooses the fastest number of threads, with step times that the test sets."""

from __future__ import annotations

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
from stratarec.training.steps.thread_tuner import ThreadConfig, ThreadTuner

TURN, SLEEP, ONE = ThreadConfig(2, sleep=False), ThreadConfig(2, sleep=True), ThreadConfig(1, sleep=False)
QUIET = {TURN: 0.012, SLEEP: 0.021, ONE: 0.023}
BESIDE_ONE = {TURN: 0.042, SLEEP: 0.031, ONE: 0.022}
BESIDE_FOUR = {TURN: 0.180, SLEEP: 0.044, ONE: 0.058}
Seconds = dict[ThreadConfig, float]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What `cores` gives: its first number."""
    found, before = [2], torch.get_num_threads()
    monkeypatch.setattr(thread_tuner, "cores", lambda: found[0])
    monkeypatch.setattr(thread_tuner, "AVAILABLE", True)
    torch.set_num_threads(2)
    yield found
    torch.set_num_threads(before)


def trained(
    at: Callable[[float], Seconds], until: float, asked: int = 0
) -> tuple[ThreadTuner, dict[ThreadConfig, float], list[tuple[int, str]]]:
    """A run whose steps take at a time what is said of each way; its seconds in each way, and what it says."""
    used: list[ThreadConfig] = []
    said: list[tuple[int, str]] = []
    spent: dict[ThreadConfig, float] = {}
    run, now, step = ThreadTuner(asked, 1, lambda step, reason: said.append((step, reason)), used.append), 0.0, 0
    with run:
        while now < until:
            way, step = used[-1], step + 1
            taken = at(now)[way]
            now += taken
            spent[way] = spent.get(way, 0.0) + taken
            run.stepped(taken, step)
    assert used[-1] == ThreadConfig(run.threads, sleep=False)
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
def test_the_fastest_way_is_kept_and_told(seconds: Seconds, asked: int, best: ThreadConfig) -> None:
    run, spent, said = trained(lambda now: seconds, 100, asked)
    assert spent[best] > 90
    assert "2 cores, shared: " in run.remark
    assert run.remark.endswith("on")
    assert len(said) == (not asked)
    assert not asked or ONE not in spent


TRIED_ONLY = {TURN: 0.042, SLEEP: 0.031, ONE: 0.040}


def test_a_trial_of_fewer_threads_is_reported_even_if_the_run_goes_back() -> None:
    """Every step with one thread may change bits, so the report comes no later than the first of them."""
    used: list[ThreadConfig] = []
    reports: list[tuple[int, str, bool]] = []
    tuner = ThreadTuner(0, 1, lambda step, reason: reports.append((step, reason, ONE in used)), used.append)
    first = 0
    with tuner:
        for step in range(1, 3000):
            first = first or step * (used[-1] == ONE)
            tuner.stepped(TRIED_ONLY[used[-1]], step)
    assert ONE in used
    assert "1 thread " not in tuner.remark
    assert reports == [(first - 1, "threads change from 2 to 1, as other processes use the cores", False)]


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
    assert [reason for _, reason in said] == ["threads change from 2 to 1, as other processes use the cores"]


def test_ranks_of_a_machine_divide_its_cores(two_cores: list[int]) -> None:
    two_cores[0] = 8
    torch.set_num_threads(8)
    assert [ThreadTuner(0, ranks, print).threads for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert ThreadTuner(3, 8, print).threads == 3


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

    def now(run: ThreadTuner) -> ThreadConfig:
        return run._left[0] if run._trying else run._config

    stepped = ThreadTuner.stepped
    monkeypatch.setattr(
        ThreadTuner, "stepped", lambda self, seconds, step: stepped(self, BESIDE_ONE[now(self)] * 9, step)
    )
    train(made("free"))
    assert "1 thread from step" in told("free")
    train(made("given", threads=2))
    assert "asleep" in told("given")
    assert torch.get_num_threads() == 2
    monkeypatch.undo()
    train(made("plain", threads=2))
    for name in ("free", "given"):
        assert_same_model(last(tmp_path / name), last(tmp_path / "plain"))


def test_a_report_states_that_bits_may_differ_after_a_trial_of_fewer_threads(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real steps and threads; only the step times that the tuner compares are set. The run goes back to two threads."""
    stepped, threads = ThreadTuner.stepped, list[int]()

    def timed(self: ThreadTuner, seconds: float, step: int) -> None:
        config = self._left[0] if self._trying else self._config
        threads.append(torch.get_num_threads())
        stepped(self, TRIED_ONLY[config] * 9, step)

    monkeypatch.setattr(ThreadTuner, "stepped", timed)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(tiny(home, run=str(tmp_path / "run"), report=True, checkpoint={"every_steps": 5})))
    assert main(["train", str(recipe), "train.max_steps=12"]) == 0
    assert 1 in threads
    assert threads[-1] == 2
    output = "".join(capsys.readouterr())
    assert output.count("another run may differ in its last bits") == 1
    assert "1 thread " not in output
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Another run of this recipe may differ in its last bits from step " in page
    # Another session of the run does not forget it.
    monkeypatch.undo()
    assert main(["train", str(recipe), "train.max_steps=14", "train.threads=2", "--resume", "-q"]) == 0
    assert "may differ in its last bits from step " in (tmp_path / "run" / "report.html").read_text()


def test_a_run_that_is_resumed_with_other_threads_says_so(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(tiny(home, run=str(tmp_path / "run"), report=True)))
    assert main(["train", str(recipe), "train.max_steps=4", "train.threads=2", "-q"]) == 0
    assert "may differ" not in (tmp_path / "run" / "report.html").read_text()
    assert main(["train", str(recipe), "train.max_steps=8", "train.threads=1", "--resume"]) == 0
    said = "threads change from 2 to 1: from step 4 on another run may differ in its last bits"
    assert said in " ".join("".join(capsys.readouterr()).split())
    assert not missing("step 4 2 1", (tmp_path / "run" / "report.html").read_text())
