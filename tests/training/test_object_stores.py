"""Test what is written to an object store: the mirror of a run, from which it resumes, exports and
deltas.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import polars as pl
import pytest
import yaml
from object_store import ACCESS_KEY, SECRET_KEY, Proxy, object_store
from training.test_continual import begin
from training.test_refit import At, crash, served

from errors import missing, refuses
from recipes import KILLS, assert_same_model, interrupt, last, prepared, start, tiny
from stratarec import Scorer
from stratarec.cli import main
from stratarec.errors import CheckpointError, ConfigError, ExportError, Interrupted, StorageError
from stratarec.io.remote import RemoteDirectory, check_store_url, hide_secrets
from stratarec.io.sealed import sealed_text
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.export import write_delta
from stratarec.training.run import mirror as mirror_module
from stratarec.training.run.mirror import RunMirror
from stratarec.training.trainer import Trainer


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Proxy, dict[str, str]]]:
    pytest.importorskip("moto")
    with object_store() as pair:
        yield pair


@pytest.fixture
def store(server: tuple[Proxy, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy, variables = server
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # The pauses between attempts are as long as the outages of a real store.
    monkeypatch.setattr(mirror_module, "_RETRY_SECONDS", (0.05, 0.1))
    proxy.fault = ""
    proxy.writes = 0
    yield proxy
    proxy.fault = ""


def having(messages: list[str], text: str) -> list[str]:
    return [message for message in messages if text in message]


def content(root: Path, url: str = "", **train: Any) -> dict[str, Any]:
    return tiny(root, mirror=url or new_url(), epochs=1, **train)


def new_url() -> str:
    return f"s3://bucket/runs/{uuid4().hex}"


def trainer_of(recipe: dict[str, Any], progress: SilentProgress | None = None) -> Trainer:
    parsed = Recipe.from_dict(recipe)
    return Trainer(parsed, prepared(parsed.data), progress)


def after_step(trainer: Trainer, act: Callable[[int], object]) -> None:
    """Call `act` with the number of each finished step."""

    @contextmanager
    def stepped(_: int) -> Iterator[None]:
        yield
        act(trainer.state.step)

    trainer.hooks.append(stepped)


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 30 seconds")


@cache
def remote(url: str) -> RemoteDirectory:
    return RemoteDirectory(url, "url")


def versions(url: str) -> list[str]:
    return list(remote(url).sizes("versions"))


def moved(recipe: dict[str, Any], root: Path) -> dict[str, Any]:
    """Return the recipe on another machine: the same data set in another folder, and no run."""
    shutil.copytree(recipe["data"]["path"], root / "data")
    return {
        **recipe,
        "data": {**recipe["data"], "path": str(root / "data")},
        "train": {**recipe["train"], "run": str(root / "run")},
    }


def test_a_run_resumes_from_its_mirror_alone_with_the_same_bits(
    store: Proxy, tmp_path: Path, said: list[str]
) -> None:
    whole = trainer_of(tiny(tmp_path / "whole", epochs=1))
    whole.train()
    recipe = content(tmp_path / "one", max_steps=16)
    trainer_of(recipe).train()
    shutil.rmtree(tmp_path / "one" / "run")

    other = moved(recipe, tmp_path / "two")
    other["train"]["max_steps"] = 0
    trainer = trainer_of(other)
    trainer.train(resume=True)
    assert having(said, "copying step 16 from s3://bucket/")
    assert_same_model(last(whole.run), last(trainer.run))

    # Only what is needed stays, and the result is there, too.
    sizes = remote(recipe["train"]["mirror"]).sizes()
    assert len(versions(recipe["train"]["mirror"])) <= 2
    newest = json.loads(remote(recipe["train"]["mirror"]).read(versions(recipe["train"]["mirror"])[-1]))
    assert {"recipe.json", "result.json"} < set(newest["files"])
    used = {f"files/{digest}-{size}" for digest, size in newest["files"].values()}
    assert used <= set(sizes)
    # A complete run is copied as well, and prints its result.
    again = moved(recipe, tmp_path / "three")
    again["train"]["max_steps"] = 0
    assert trainer_of(again).train(resume=True) == json_result(trainer.run)


def json_result(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    return {key: value for key, value in result.items() if key not in ("format", "hash")}


def resumes(recipe: dict[str, Any], root: Path, trainer: Trainer) -> None:
    """Assert that the mirror has the end of the run."""
    other = moved(recipe, root / "resumed")
    there = trainer_of(other)
    there.train(resume=True)
    assert_same_model(last(trainer.run), last(there.run))


SLOW_FAULTS = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("cut", "wrong key", "expired", "full", "denied")
]


@pytest.mark.parametrize("fault", ["down", *SLOW_FAULTS])
def test_training_continues_during_a_fault_and_the_mirror_catches_up(
    store: Proxy, tmp_path: Path, said: list[str], fault: str
) -> None:
    recipe = content(tmp_path)
    trainer = trainer_of(recipe)

    def act(step: int) -> None:
        if step == 10:
            store.fault = fault
        if step == 30:  # two checkpoints later
            wait_for(lambda: having(said, "the mirror is behind"))
            store.fault = ""

    after_step(trainer, act)
    trainer.train()
    (message,) = having(said, "the mirror is behind")
    assert "training continues" in message
    assert having(said, "has caught up")
    assert not any(key in line for key in (ACCESS_KEY, SECRET_KEY) for line in said)
    resumes(recipe, tmp_path, trainer)


@pytest.mark.slow
def test_training_does_not_wait_for_a_slow_store(store: Proxy, tmp_path: Path) -> None:
    recipe = content(tmp_path, max_steps=22)
    trainer = trainer_of(recipe)
    store.fault = "held"
    reached = []

    def act(step: int) -> None:
        reached.append(step)
        if step == 22:
            assert not versions(recipe["train"]["mirror"])
            store.fault = ""

    after_step(trainer, act)
    trainer.train()
    assert reached[-1] == 22
    assert versions(recipe["train"]["mirror"])


@pytest.mark.slow
def test_of_two_writers_the_last_one_writes(store: Proxy, tmp_path: Path, said: list[str]) -> None:
    recipe = content(tmp_path)
    trainer = trainer_of(recipe)

    def act(step: int) -> None:
        if step == 10:
            wait_for(lambda: versions(recipe["train"]["mirror"]))
            other = RunMirror(recipe["train"]["mirror"], tmp_path / "other", SilentProgress())
            (tmp_path / "other").mkdir()
            with other.copying():
                pass

    after_step(trainer, act)
    with refuses(StorageError, "another process began to write"):
        trainer.train()
    assert (trainer.run / "result.json").exists()
    assert having(said, "another process began to write")


@pytest.mark.slow
def test_a_stopped_run_is_in_its_mirror(store: Proxy, tmp_path: Path, said: list[str]) -> None:
    whole = trainer_of(tiny(tmp_path / "whole", epochs=1))
    whole.train()
    recipe = content(tmp_path / "one")
    trainer = trainer_of(recipe)
    interrupt(trainer, at=17)
    with pytest.raises(Interrupted):
        trainer.train()
    stopped = int(last(trainer.run).name.removeprefix("step-"))
    other = moved(recipe, tmp_path / "two")
    resumed = trainer_of(other)
    resumed.train(resume=True)
    assert having(said, f"copying step {stopped}")
    assert_same_model(last(whole.run), last(resumed.run))


def test_runs_do_not_share_a_mirror(store: Proxy, tmp_path: Path) -> None:
    recipe = content(tmp_path / "one", max_steps=8)
    trainer_of(recipe).train()
    before = versions(recipe["train"]["mirror"])

    other = content(tmp_path / "two", recipe["train"]["mirror"], max_steps=8, seed=5)
    with refuses(CheckpointError, "holds a run up to step 8"):
        trainer_of(other).train()
    assert not (tmp_path / "two" / "run").exists()
    trainer_of({**other, "train": {**other["train"], "mirror": ""}}).train()
    with refuses(CheckpointError, "holds another run"):
        trainer_of({**other, "train": {**other["train"], "max_steps": 12}}).train(resume=True)
    assert versions(recipe["train"]["mirror"]) == before

    trainer_of(other).train(overwrite=True)
    assert versions(recipe["train"]["mirror"]) != before


@pytest.mark.slow
def test_a_run_without_a_mirror_gets_one_when_it_resumes(store: Proxy, tmp_path: Path) -> None:
    recipe = content(tmp_path, max_steps=8)
    trainer_of({**recipe, "train": {**recipe["train"], "mirror": ""}}).train()
    trainer = trainer_of(recipe)
    trainer.train(resume=True)  # it is complete: only the copy is missing
    resumes(recipe, tmp_path, trainer)


@pytest.mark.slow
def test_an_interrupted_copy_of_the_mirror_continues(
    store: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = content(tmp_path)
    trainer = trainer_of(recipe)
    trainer.train()
    other = moved(recipe, tmp_path / "resumed")
    download, calls = RemoteDirectory.download, []

    def fails(self: RemoteDirectory, name: str, file: Path) -> None:
        calls.append(name)
        if len(calls) == 5:
            raise StorageError("the connection was cut")
        download(self, name, file)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteDirectory, "download", fails)
        with refuses(StorageError, "the connection was cut"):
            trainer_of(other).train(resume=True)
    there = trainer_of(other)
    there.train(resume=True)
    assert_same_model(last(trainer.run), last(there.run))


def test_damaged_mirrors_are_refused(store: Proxy, tmp_path: Path) -> None:
    recipe = content(tmp_path, max_steps=8)
    trainer_of(recipe).train()
    url = recipe["train"]["mirror"]
    there = remote(url)
    name = versions(url)[-1]
    whole = there.read(name)
    sizes = there.sizes("files")
    other = moved(recipe, tmp_path / "resumed")

    version = json.loads(whole)
    del version["hash"]
    some = next(iter(version["files"].values()))
    for hostile in (
        "../outside",
        "/etc/outside",
        "checkpoints/../../x",
        "checkpoints/step-00000008",
        "other.txt",
    ):
        there.write(name, sealed_text({**version, "files": {**version["files"], hostile: some}}).encode())
        with refuses(CheckpointError, "is not the name of a file of a run"):
            trainer_of(other).train(resume=True)
    there.write(name, whole.replace(b'"step": 8', b'"step": 9'))
    with refuses(CheckpointError, "hash does not match"):
        trainer_of(other).train(resume=True)
    there.write(name, sealed_text({**version, "format": 2}).encode())
    with refuses(CheckpointError, "format 2, which a newer version of StrataRec writes"):
        trainer_of(other).train(resume=True)
    there.write(name, whole)
    damaged = next(key for key in sizes if sizes[key] == some[1])
    there.write(damaged, bytes(sizes[damaged]))
    with refuses(CheckpointError, "is damaged"):
        trainer_of(other).train(resume=True)
    # If an object is missing, the version is not complete.
    there.remove([damaged])
    assert RunMirror(url, tmp_path / "absent", SilentProgress())._newest != version


def test_mistakes_are_said_before_anything_is_written(store: Proxy, tmp_path: Path) -> None:
    with refuses(StorageError, "s3://bukcet/runs/x"):
        trainer_of(content(tmp_path, "s3://bukcet/runs/x", max_steps=8)).train()
    for url in (
        "bucket/x",
        "ftp://bucket/x",
        "s3://bucket",
        "s3://",
        "s3://bucket/a::s3://b/c",
        "file:///tmp/x",
    ):
        with refuses(ConfigError, "train.mirror"):
            check_store_url(url, "train.mirror")
    for url in ("s3://key:secret@bucket/x", "s3://bucket/x?token=12345"):
        with refuses(ConfigError, "environment") as caught:
            Recipe.from_dict(content(tmp_path, url))
        assert "secret" not in str(caught.value)
        assert "12345" not in str(caught.value)
    store.fault = "wrong key"
    with refuses(StorageError, "cannot be written") as caught:
        trainer_of(content(tmp_path, max_steps=8)).train()
    assert SECRET_KEY not in str(caught.value)


def test_secrets_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=abcdefgh")
    assert hide_secrets("no access with AccountKey=abcdefgh\n here") == (
        "no access with <AZURE_STORAGE_CONNECTION_STRING> here"
    )


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_mirror_with_the_same_bits(store: Proxy, tmp_path: Path) -> None:
    whole = tiny(tmp_path / "whole", epochs=4)
    recipe = {**content(tmp_path / "0"), "train": {**content(tmp_path / "0")["train"], "epochs": 4}}
    for each in (whole, recipe):
        prepared(Recipe.from_dict(each).data)
    finish(whole, tmp_path / "whole.yaml")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    random.seed(seed)
    for kill in range(KILLS):
        process = started(recipe, tmp_path / f"{kill}.yaml")
        while not versions(recipe["train"]["mirror"]) and process.poll() is None:
            time.sleep(0.05)
        time.sleep(random.uniform(0, 1))
        process.kill()
        process.communicate()
        recipe = moved(recipe, tmp_path / str(kill + 1))
    finish(recipe, tmp_path / "last.yaml")
    assert_same_model(last(Path(whole["train"]["run"])), last(Path(recipe["train"]["run"])))


def started(recipe: dict[str, Any], path: Path) -> subprocess.Popen[bytes]:
    path.write_text(yaml.safe_dump(recipe))
    return start(path)


def finish(recipe: dict[str, Any], path: Path) -> None:
    process = started(recipe, path)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def test_exports_and_deltas_are_served_from_a_store(
    store: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(write_delta, "_MOST", 1.0)
    begin(tmp_path)
    run, url = str(tmp_path / "run"), new_url()
    log = pl.read_parquet(tmp_path / "day-2.parquet").with_columns(
        pl.concat_list("item", "item").alias("seen")
    )
    assert main(["export", "-q", run, "-o", f"{url}/full"]) == 0
    assert main(["export", "-q", run, "-o", f"{url}/full"]) == 0  # the same export is complete already
    assert main(["export", "-q", run, "-o", str(tmp_path / "first")]) == 0
    scorer = Scorer.open(f"{url}/full")
    np.testing.assert_array_equal(scorer.score(log), Scorer.open(tmp_path / "first").score(log))

    assert (
        main(["continue", "-q", run, str(tmp_path / "day-1.parquet"), "--publish", f"{url}/published"]) == 0
    )
    assert (
        main(["continue", "-q", run, str(tmp_path / "day-2.parquet"), "--publish", f"{url}/published"]) == 0
    )
    assert f"{url}/published/00002.delta" in capsys.readouterr().out
    assert main(["export", "-q", run, "-o", f"{url}/later", "--since", f"{url}/full"]) == 0
    scorer.update(f"{url}/later.delta")
    published = Scorer.open(f"{url}/published/00001")
    published.update(f"{url}/published/00002.delta")
    later = Scorer.open(f"{url}/later").score(log)
    np.testing.assert_array_equal(scorer.score(log), later)
    np.testing.assert_array_equal(published.score(log), later)

    capsys.readouterr()
    assert main(["export", "-q", run, "-o", f"{url}/full"]) == 2
    assert not missing(f"{url}/full exists --output", capsys.readouterr().err)
    with refuses(StorageError, "no files"):
        Scorer.open(f"{url}/absent")
    # An export without its manifest, which is written last, is none.
    remote(f"{url}/later").remove(["manifest.json"])
    with refuses(ExportError, "manifest.json"):
        Scorer.open(f"{url}/later")
    remote(f"{url}/odd").write("a//b", b"x")
    with refuses(StorageError, "is not a path"):
        Scorer.open(f"{url}/odd")

    # Logs are read from a store, and scores are written there.
    remote(f"{url}/logs").upload(tmp_path / "day-1.parquet", "day-1.parquet")
    assert main(["predict", "-q", run, f"{url}/logs/day-1.parquet", "-o", f"{url}/scores.parquet"]) == 0
    assert (
        main(
            ["predict", "-q", run, str(tmp_path / "day-1.parquet"), "-o", str(tmp_path / "scores.parquet")]
        )
        == 0
    )
    remote(url).download("scores.parquet", tmp_path / "downloaded.parquet")
    scores = pl.read_parquet(tmp_path / "downloaded.parquet")["score"]
    assert scores.equals(pl.read_parquet(tmp_path / "scores.parquet")["score"])
    assert main(["predict", "-q", run, str(tmp_path / "day-1.parquet"), "-o", f"{url}/scores.txt"]) == 2
    assert "scores.txt" not in remote(url).sizes()


def test_a_refit_resumes_from_its_mirror(store: Proxy, tmp_path: Path, said: list[str]) -> None:
    recipe = content(tmp_path, refit=True)
    with pytest.raises(OSError, match="ends here"):
        trainer_of(recipe, At(10, crash)).train()
    shutil.rmtree(tmp_path / "run")
    trainer_of(recipe).train(resume=True)
    assert having(said, f"resuming from {tmp_path / 'run' / 'refit'}")
    recipe["train"] |= {"run": str(tmp_path / "whole"), "mirror": ""}
    trainer_of(recipe).train()
    assert_same_model(served(tmp_path / "run"), served(tmp_path / "whole"))
