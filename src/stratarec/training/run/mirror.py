"""Copy of a run in an object store (`train.mirror`), from which the run resumes on another machine.

    session.json            process that may write: the last one that started
    files/<hash>-<bytes>    content of files; files that are equal are stored once
    versions/00000007.json  run, step, and the path, hash and bytes of every file; written after all
                            files

A version is complete, because the object that lists its files is written last, under a new name. A
thread copies the files after each checkpoint, and training does not wait for it. If several
checkpoints are written during one copy, only the last one is copied next.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import pydantic
import xxhash

from stratarec.errors import CheckpointError, StorageError, StrataError
from stratarec.io.atomic import file_hash, rename_directory, working_directory, write_atomic
from stratarec.io.names import STEP_NAME
from stratarec.io.owned_directory import MARKER, claim, directory_lock
from stratarec.io.remote import RemoteDirectory
from stratarec.io.sealed import Count, Hash, Model, parse_sealed, read_sealed, sealed_text, write_sealed
from stratarec.progress import Progress
from stratarec.training import checkpoint
from stratarec.training.run.run_directory import (
    FILES,
    MIRROR,
    PLAN,
    RECIPE,
    REFIT,
    REPORT,
    RESULT,
    RUN,
    TRACE,
)

FORMAT: Literal[1] = 1
SESSION = "session.json"
_ADVICE = "name another train.mirror, or remove this one"
_VERSION = re.compile(r"versions/(\d{8,})\.json")
# Versions that are kept: a reader may still copy the one before the last.
_KEPT = 2
# Files of a run outside its checkpoints. Each is small, and is read as a whole.
_SMALL = (MARKER, RECIPE, PLAN, RESULT, REPORT, TRACE, FILES, f"{REFIT}/{RECIPE}", f"{REFIT}/{PLAN}")
# Directories of checkpoints.
_CHECKPOINTS = ("checkpoints", f"{REFIT}/checkpoints")
_IN_CHECKPOINT = re.compile(rf"((?:{'|'.join(_CHECKPOINTS)})/{STEP_NAME})/(.+)")
_THREADS = 8
# Seconds between two attempts, and between two messages that the mirror is behind.
_RETRY_SECONDS, _SAY_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0), 60.0
# Longest pause between two attempts once the run waits for the mirror.
_CLOSING_RETRY_SECONDS = 5.0
# Seconds for which the end of a run waits while every attempt fails, and for which a stopped run
# waits at all. Machines that are taken away at short notice leave about two minutes.
_PATIENCE, _STOP_SECONDS = 300.0, 90.0
# If the end of a run waits longer than this for the mirror, it says so.
_QUIET_SECONDS = 2.0

Key = tuple[Hash, Count]


class MirrorIdentity(Model):
    """Content of ``mirror.json`` in a run's directory without its seal."""

    format: Literal[1]
    run: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]
    """Random identity of the run, which its versions in a mirror have too."""


def local_identity(run: Path) -> str:
    """Return the identity that a run's directory records for its mirror; empty if there is none."""
    path = run / MIRROR
    return read_sealed(path, MirrorIdentity, "remove it", CheckpointError).run if path.exists() else ""


class Version(Model):
    """Content of an object ``versions/*.json`` without its seal."""

    format: Literal[1]
    run: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]
    step: Count
    """Step of the last checkpoint."""
    files: dict[str, Key]
    """Path below the run's directory -> hash and bytes of a file."""

    @pydantic.field_validator("files")
    @classmethod
    def _check_files(cls, value: dict[str, Key]) -> dict[str, Key]:
        for name in value:
            path = PurePosixPath(name)
            first, *others = path.parts or ("",)
            is_plain = (
                not path.is_absolute() and ".." not in path.parts and str(path) == name and "\0" not in name
            )
            in_checkpoint = _IN_CHECKPOINT.fullmatch(name)
            in_curves = first == "tensorboard" and len(others) == 1
            if not is_plain or not (in_checkpoint or in_curves or name in _SMALL):
                raise ValueError(f"{name[:80]!r} is not the name of a file of a run")
        return value


def object_name(key: Key) -> str:
    """Return the name of the object that has the content of a file."""
    return f"files/{key[0]}-{key[1]}"


class _Changed(Exception):
    """Raised if a file of the run changed while it was copied."""


class RunMirror:
    """Mirror of one run.

    Parameters
    ----------
    url : str
        Directory in an object store.
    run : Path
        Directory of the run.
    progress : Progress
        Receives messages; the mirror's thread calls it, too.

    Raises
    ------
    ConfigError
        If `url` is not the URL of a directory in an object store.
    StorageError
        If the store cannot be read.
    """

    def __init__(self, url: str, run: Path, progress: Progress) -> None:
        self._store = RemoteDirectory(url, "train.mirror")
        self._run = run
        self._progress = progress
        self._versions = self._read_versions()
        self._hashes: dict[tuple[int, ...], Hash] = {}
        self._pending = threading.Event()
        self._closing = threading.Event()
        self._failed_at: float | None = None
        self._said_at = -_SAY_SECONDS
        self._error = ""
        self._lost = False
        self._copied_step: int | None = None

    def _read_versions(self) -> dict[int, Version]:
        """Return number -> version, oldest first, of all versions whose files are complete."""
        sizes = self._store.sizes()
        versions = {}
        for name in sizes:
            if match := _VERSION.fullmatch(name):
                origin = f"{self._store}/{name}"
                version = parse_sealed(self._store.read(name), origin, Version, _ADVICE, CheckpointError)
                if all(sizes.get(object_name(key)) == key[1] for key in version.files.values()):
                    versions[int(match[1])] = version
        self._last_number = max(
            (int(match[1]) for match in map(_VERSION.fullmatch, sizes) if match), default=0
        )
        self._stored = {name for name in sizes if name.startswith("files/")}
        return dict(sorted(versions.items()))

    @property
    def _newest(self) -> Version | None:
        return next(reversed(self._versions.values()), None)

    def claim(self, *, resume: bool, overwrite: bool) -> None:
        """Check that this run may use the mirror and, if it resumes, copy the files that the run's
        directory lacks.

        Raises
        ------
        CheckpointError
            If the mirror has another run, or if it has a run and neither `resume` nor `overwrite`
            is set.
        StorageError
            If the mirror cannot be read, or the run's directory cannot be written.
        """
        newest = self._newest
        if newest is None or overwrite:
            return
        if not resume:
            raise CheckpointError(
                f"train.mirror: {self._store} holds a run up to step {newest.step:,}: pass --resume to "
                "continue it, --overwrite to replace it, or name another train.mirror"
            )
        local = checkpoint.list_checkpoints(self._run / "checkpoints")
        if local and local_identity(self._run) != newest.run:
            raise CheckpointError(
                f"train.mirror: {self._store} holds another run than {self._run}: name another "
                "train.mirror, or another train.run to resume the run of the mirror there"
            )
        if not local or checkpoint.read_state(local[-1])["step"] < newest.step:
            self._fetch(newest)

    def _fetch(self, version: Version) -> None:
        """Copy the files that the run's directory lacks; continues an interrupted copy."""
        claim(self._run, RUN)
        with directory_lock(self._run):
            write_sealed(self._run / MIRROR, {"format": FORMAT, "run": version.run})
            steps: dict[str, dict[str, Key]] = {}
            for name, key in version.files.items():
                if match := _IN_CHECKPOINT.fullmatch(name):
                    steps.setdefault(match[1], {})[match[2]] = key
                else:
                    (self._run / name).parent.mkdir(exist_ok=True)
                    write_atomic(self._run / name, lambda file, key=key: file.write(self._read(key)))  # type: ignore[misc]
            lacking = {
                step: files for step, files in sorted(steps.items()) if not (self._run / step).exists()
            }
            total = sum(key[1] for files in lacking.values() for key in files.values())
            self._progress.say(f"copying step {version.step:,} from {self._store}")
            self._progress.start("copy from the mirror", total, "bytes")
            for step, files in lacking.items():
                with (
                    working_directory(self._run / step, ()) as temporary,
                    ThreadPoolExecutor(_THREADS) as pool,
                ):
                    list(pool.map(lambda item: self._download(temporary / item[0], item[1]), files.items()))
                    rename_directory(temporary, self._run / step)
            self._progress.finish()

    def _read(self, key: Key) -> bytes:
        content = self._store.read(object_name(key))
        if xxhash.xxh3_128_hexdigest(content) != key[0]:
            raise self._damaged(key)
        return content

    def _download(self, path: Path, key: Key) -> None:
        self._store.download(object_name(key), path)
        if path.stat().st_size != key[1] or file_hash(path) != key[0]:
            raise self._damaged(key)
        self._progress.advance(key[1])

    def _damaged(self, key: Key) -> CheckpointError:
        return CheckpointError(
            f"{self._store}/{object_name(key)} is damaged: its hash does not match; {_ADVICE}"
        )

    @contextmanager
    def copying(self) -> Iterator[Callable[[], None]]:
        """Copy checkpoints inside the context, in a thread. At its end, wait until the last one is
        copied.

        Yields
        ------
        callable
            To be called after each checkpoint.

        Raises
        ------
        StorageError
            At the start, if the mirror cannot be written. At the end of a run that was not stopped,
            if the mirror is not complete after several minutes of attempts.
        """
        self._identity = local_identity(self._run) or secrets.token_hex(16)
        if not (self._run / MIRROR).exists():
            write_sealed(self._run / MIRROR, {"format": FORMAT, "run": self._identity})
        self._session = secrets.token_hex(16)
        self._store.write(SESSION, json.dumps({"format": FORMAT, "session": self._session}).encode())
        # A daemon: a process that is stopped at once does not wait for a slow store.
        thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        thread.start()
        try:
            yield self._pending.set
        except BaseException:
            self._finish(thread, _STOP_SECONDS)
            if thread.is_alive() or self._error:
                self._say_behind(self._error or "the store is slow")
            raise
        self._pending.set()  # the result and the report
        self._finish(thread, None)
        if self._error:
            raise StorageError(
                f"{self._run} is complete, but its mirror is not: {self._error}; to copy the rest, run the "
                "same command with --resume"
            )

    def _finish(self, thread: threading.Thread, seconds: float | None) -> None:
        self._closing.set()
        thread.join(_QUIET_SECONDS)
        if thread.is_alive():
            self._progress.say(f"waiting until the last checkpoint is copied to {self._store}")
            thread.join(seconds)

    def _work(self) -> None:
        """Copy each new checkpoint until the context ends and everything is copied."""
        attempt = 0
        while not self._lost:
            while not self._pending.wait(0.2):
                if self._closing.is_set():
                    return
            self._pending.clear()
            try:
                self._copy()
            except _Changed:
                self._pending.set()
                continue
            except Exception as error:  # nothing may end training
                self._pending.set()
                self._error = (
                    str(error) if isinstance(error, StrataError) else f"{type(error).__name__}: {error}"
                )
                now = time.monotonic()
                self._failed_at = self._failed_at or now
                if self._lost or now - self._said_at >= _SAY_SECONDS:
                    self._said_at = now
                    self._say_behind(self._error)
                if self._closing.is_set() and now - self._failed_at > _PATIENCE:
                    return
                self._pause(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
                attempt += 1
                continue
            if self._failed_at is not None and self._said_at > 0:
                self._progress.say(
                    f"the mirror {self._store} has caught up: it has step {self._copied_step or 0:,}"
                )
            attempt = 0
            self._failed_at = None
            self._error = ""

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt: shorter once the run waits for the mirror."""
        if not self._closing.wait(seconds):
            return
        time.sleep(min(seconds, _CLOSING_RETRY_SECONDS))

    def _say_behind(self, reason: str) -> None:
        has = "no checkpoint" if self._copied_step is None else f"step {self._copied_step:,}"
        more = "" if self._lost else "; training continues"
        self._progress.say(f"the mirror is behind, it has {has}: {reason}{more}")

    def _copy(self) -> None:
        """Copy the run's current files, and write a version that lists them."""
        self._check_session()
        with ExitStack() as stack:
            files, states = self._collect(stack)
            if not states:
                return
            keys = {}
            try:
                for name, source in files.items():
                    keys[name] = self._upload(source)
                if any(os.stat(path).st_ino != inode for path, inode in states.items()):
                    raise _Changed
            except FileNotFoundError as error:
                raise _Changed from error
            step = max(checkpoint.read_state(path.parent)["step"] for path in states)
        version = Version(format=FORMAT, run=self._identity, step=step, files=keys)
        newest = self._newest
        if newest is not None and newest == version:
            self._copied_step = step
            return
        self._check_session()
        number = self._last_number + 1
        content = sealed_text(version.to_dict()).encode()
        # With a new name: if two processes write, one of them fails.
        self._store.write(f"versions/{number:08d}.json", content, new=True)
        self._last_number = number
        self._versions[number] = version
        self._copied_step = step
        with suppress(StorageError):  # tried again after the next checkpoint
            self._prune()

    def _check_session(self) -> None:
        try:
            session = json.loads(self._store.read(SESSION)).get("session")
        except (ValueError, AttributeError) as error:
            raise StorageError(f"{self._store}/{SESSION} is damaged: not JSON ({error})") from error
        if session != self._session:
            self._lost = True
            raise StorageError(
                f"another process began to write to {self._store}, so this run no longer does; give each "
                "run its own train.mirror"
            )

    def _collect(self, stack: ExitStack) -> tuple[dict[str, Path | bytes], dict[Path, int]]:
        """Lock the checkpoints; return name -> path or content of all files, and state file ->
        inode.
        """
        files: dict[str, Path | bytes] = {}
        states = {}
        for path in chain.from_iterable(
            checkpoint.list_checkpoints(self._run / name) for name in _CHECKPOINTS
        ):
            with suppress(CheckpointError, OSError):  # it is being removed
                stack.enter_context(checkpoint.locked(path))
                states[path / checkpoint.STATE] = os.stat(path / checkpoint.STATE).st_ino
                for file in sorted(path.rglob("*")):
                    if file.is_file():
                        files[str(file.relative_to(self._run))] = file
        small = [self._run / name for name in _SMALL]
        for path in (*small, *sorted((self._run / "tensorboard").glob("*"))):
            with suppress(OSError):  # absent
                files[str(path.relative_to(self._run))] = path.read_bytes()
        return files, states

    def _upload(self, source: Path | bytes) -> Key:
        """Store a file or content, unless the mirror has it already."""
        if isinstance(source, bytes):
            key = (xxhash.xxh3_128_hexdigest(source), len(source))
        else:
            status = os.stat(source)
            signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if signature not in self._hashes:
                self._hashes[signature] = file_hash(source)
            key = (self._hashes[signature], status.st_size)
        name = object_name(key)
        if name not in self._stored:
            if isinstance(source, bytes):
                self._store.write(name, source)
            else:
                self._store.upload(source, name)
            self._stored.add(name)
        return key

    def _prune(self) -> None:
        """Remove old versions, then the files that no remaining version has."""
        for number in sorted(self._versions)[:-_KEPT]:
            self._store.remove([f"versions/{number:08d}.json"])
            del self._versions[number]
        used = {object_name(key) for version in self._versions.values() for key in version.files.values()}
        for name in sorted(self._stored - used):
            self._store.remove([name])
            self._stored.discard(name)
