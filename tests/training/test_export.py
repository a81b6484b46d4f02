"""Test that exports and predictions are written completely or not at all, whatever happens to the
disk or the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch

from errors import refuses
from recipes import DISK_BYTES, fill_disk, prepared, tiny
from stratarec import Scorer
from stratarec.cli import main
from stratarec.errors import CheckpointError, ExportError, StorageError
from stratarec.io.atomic import lock_directory
from stratarec.recipe import Recipe
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    recipe = Recipe.from_dict(tiny(root, epochs=1, max_steps=3, eval_every=0))
    Trainer(recipe, prepared(recipe.data)).train()
    return root / "run"


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def run_limited(
    arguments: tuple[str, ...], run: Path, output: Path, limit: int
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process whose files may have at most `limit` bytes."""
    before = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    )
    return forked.run([*arguments, "-q", str(run), "-o", str(output)], before=before)


@pytest.mark.slow
def test_a_file_that_cannot_be_written_completely_leaves_nothing(run: Path, tmp_path: Path) -> None:
    assert main(["export", "-q", str(run), "-o", str(tmp_path / "whole")]) == 0
    sizes = sorted({path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file()})
    shutil.rmtree(tmp_path / "whole")
    # Each time another file is the first one that is too large.
    for limit in (4096, sizes[-2] - 1, sizes[-1] - 1):
        done = run_limited(("export",), run, tmp_path / "out", limit)
        assert done.returncode == 2, (limit, done.stderr)
        assert done.stderr.count("\n") == 1
        assert "File too large" in done.stderr
        assert "terminate" not in done.stderr
        assert not list(tmp_path.iterdir()), limit
    assert run_limited(("export",), run, tmp_path / "out", sizes[-1]).returncode == 0


@pytest.mark.parametrize("command", ["predict", "export"])
def test_a_full_disk_leaves_nothing(
    run: Path, small_disk: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command.split(), "-q", str(run), "-o"]
    assert main([*arguments, str(tmp_path / "whole.parquet")]) == 0
    needed = size(tmp_path / "whole.parquet")
    assert needed < DISK_BYTES
    for share in (0, 0.3, 0.95):
        fill_disk(small_disk / "filler", int(needed * share))
        capsys.readouterr()
        assert main([*arguments, str(small_disk / "out.parquet")]) == 2
        expected = f"cannot write {small_disk}/out.parquet: No space left on device; free space or name another path"
        assert capsys.readouterr().err == f"stratarec: {expected}\n"
        assert [path.name for path in small_disk.iterdir()] == ["filler"]
        (small_disk / "filler").unlink()
    assert main([*arguments, str(small_disk / "out.parquet")]) == 0
    assert size(small_disk / "out.parquet") == needed


def test_existing_files_and_links_are_neither_replaced_nor_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "target")
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "mine").touch()
    with open_run(run) as trained:
        for name in ("file", "folder", "nowhere"):
            with refuses(StorageError, "--output"):
                export(trained, tmp_path / name)
        with refuses(StorageError, "directory"):
            export(trained, tmp_path / "file" / "out")
        export(trained, tmp_path / "out")
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / ".out.tmp" / "mine").exists()
    assert not (tmp_path / "target").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".out.tmp",
        "file",
        "folder",
        "nowhere",
        "out",
    ]


def test_weights_that_are_not_finite_are_not_exported(run: Path, tmp_path: Path) -> None:
    with open_run(run) as trained:
        name = trained.model.embeddings.tables[3].name
        trained.model.embeddings.table(name)["weight"][0, 0] = float("nan")
        with refuses(CheckpointError, name):
            export(trained, tmp_path / "out")
    with open_run(run) as trained:
        trained.model.network.score.out.bias.data.fill_(torch.inf)
        with refuses(CheckpointError, "score.out.bias"):
            export(trained, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_export_is_no_export(run: Path, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from stratarec.serving.export_manifest import ExportManifest\n"
        "from stratarec.training.export.export import export\n"
        "from stratarec.training.run.open_run import open_run\n"
        "ExportManifest.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with open_run(sys.argv[1]) as trained:\n"
        "    export(trained, Path(sys.argv[2]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(run), str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.iterdir()
    with refuses(ExportError, "manifest.json"):
        Scorer.open(left)
    for mine in (".out.tmp", ".out.0123456789abcdef.tmp", ".output.0123456789abcdef.tmp"):
        (tmp_path / mine).mkdir()
        (tmp_path / mine / "mine").touch()
    locked = lock_directory(Path(shutil.copytree(left, tmp_path / ".out.fedcba9876543210.tmp")))
    assert main(["export", "-q", str(run), "-o", str(tmp_path / "out")]) == 0
    os.close(locked)
    Scorer.open(tmp_path / "out")
    # Files of the killed export are removed. Files that another process created or writes stay.
    names = sorted(path.name for path in tmp_path.iterdir())
    kept = [
        ".out.0123456789abcdef.tmp",
        ".out.fedcba9876543210.tmp",
        ".out.tmp",
        ".output.0123456789abcdef.tmp",
    ]
    assert names == [*kept, "out"]


def test_equal_models_give_equal_files(run: Path, tmp_path: Path) -> None:
    with open_run(run) as trained:
        for name in ("one", "other"):
            export(trained, tmp_path / name)
    one = {
        path.relative_to(tmp_path / "one"): path.read_bytes() for path in (tmp_path / "one").rglob("*.*")
    }
    other = {
        path.relative_to(tmp_path / "other"): path.read_bytes()
        for path in (tmp_path / "other").rglob("*.*")
    }
    assert one == other
    assert json.loads(one[Path("manifest.json")])["precision"] == "float32"
