"""Test that a missing cluster, or a machine that cannot run the work, gives a one-line error."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from errors import missing
from recipes import tiny
from stratarec.cli import main
from stratarec.data.prepare.executor import grant
from stratarec.data.prepare.ray_executor import TaskRequirements, work
from stratarec.errors import StrataError


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(tiny(tmp_path)))
    return path


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("auto", "no Ray cluster at auto ("),
        ("127.0.0.1:1", "no Ray cluster at 127.0.0.1:1 ("),
        ("nowhere", "no Ray cluster at nowhere ("),
        ("ray://127.0.0.1:1", "expected auto or HOST:PORT"),
        ("", "expected auto or HOST:PORT"),
    ],
)
def test_a_missing_cluster_is_a_one_line_error(
    recipe: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    message: str,
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'stratarec[ray]'")
    # Ray looks for the processes of any cluster on this machine, such as the cluster of a parallel
    # test.
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    assert main(["prepare", "-q", str(recipe), "--ray", where]) == 2
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors
    assert not (recipe.parent / "data").exists()


def test_missing_ray_is_a_one_line_error(
    recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["prepare", "-q", str(recipe), "--ray", "auto"]) == 2
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1
    assert not missing("stratarec[ray]", errors)
    assert main(["prepare", "-q", str(recipe)]) == 0


def other_versions(order: TaskRequirements) -> TaskRequirements:
    return replace(order, versions=(*order.versions[:-2], ("xxhash", "0.1"), order.versions[-1]))


WRONG: dict[str, tuple[Callable[[TaskRequirements], TaskRequirements], str]] = {
    "library": (other_versions, "0.1"),
    "log": (lambda order: replace(order, logs=(("/nowhere/log.csv", 1, 1),)), "/nowhere/log.csv"),
    "other log": (lambda order: replace(order, logs=((__file__, 1, 1),)), "test_connecting.py"),
    "directory": (
        lambda order: replace(order, work=Path("/nowhere/data.preparing")),
        "/nowhere/data.preparing data.path",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_machine_that_cannot_run_the_work_is_named(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratarec.data.prepare.ray_executor._pass_of", lambda reference: reference)
    change, message = WRONG[what]
    order = TaskRequirements.of(tmp_path, grant(tmp_path), [__file__, "memory://x"])
    data_pass = [lambda number: iter([number, 1])]
    assert work(data_pass, order, 3).advance == 4
    error = work(data_pass, change(order), 3).error
    assert isinstance(error, StrataError)
    assert not missing(f"{socket.gethostname()} {message}", str(error))
    stale = work(data_pass, replace(order, token="another"), 3).error
    assert "another call" in str(stale)
