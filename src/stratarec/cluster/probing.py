"""Whether a machine of a cluster sees what the one sees that asks, and runs the same code."""

from __future__ import annotations

import os
import pickle
import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

import stratarec
from stratarec.data.lease import leased
from stratarec.errors import ClusterError, StorageError
from stratarec.opening import create, open_regular, temporary_name

# What decides about the bytes of a data set, beside Python and the code.
_LIBRARIES = ("stratarec", "numpy", "polars", "pyarrow", "xxhash")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What tasks must find where they run."""

    work: Path
    """Directory of the half-prepared data set."""
    token: str
    """By which tasks may work in it."""
    folder: str
    """Working directory, which relative paths are of."""
    logs: tuple[tuple[str, int, int], ...]
    """Path, bytes and time of change, in seconds, of each log that is a file."""
    versions: tuple[tuple[str, str], ...]
    """Of whatever decides about the bytes of a data set."""

    @classmethod
    def of(cls, work: Path, token: str, logs: Sequence[str]) -> Order:
        """By what is here."""
        known = [(path, os.stat(path)) for path in logs if "://" not in path]
        return cls(
            work=work,
            token=token,
            folder=os.getcwd(),
            logs=tuple((path, found.st_size, int(found.st_mtime)) for path, found in known),
            versions=versions(),
        )

    def enter(self) -> None:
        """Make relative paths mean what they mean where they were given; absolute ones need no such directory."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)

    def check(self) -> None:
        """Refuse to work on this machine.

        Raises
        ------
        ClusterError
            Naming the machine, and the library or path that is not as it was expected.
        """
        self.enter()
        for (name, wanted), (_, found) in zip(self.versions, versions(), strict=True):
            if wanted != found:
                raise _refusal(f"has {name} {found}, expected {wanted}: install the same on all machines")
        for path, size, changed in self.logs:
            _check_log(path, size, changed)

    def leave_mark(self) -> str:
        """Write a file in the work directory, for whoever asked to find; gives its name."""
        path = temporary_name(self.work / "probe")
        try:
            with leased(self.work, self.token), create(path) as file:
                file.write(self.token.encode())
        except (StorageError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise _refusal(
                f"cannot write in {self.work.absolute()} ({reason}): name a data.path that all machines share"
            ) from error
        return path.name

    def find_mark(self, name: str, machine: str) -> None:
        """Refuse a machine whose file is not seen here."""
        path = self.work / name
        try:
            with open_regular(path) as file:
                seen = file.read() == self.token.encode()
            path.unlink()
        except OSError:
            seen = False
        if not seen:
            raise ClusterError(
                f"machine {machine} of the cluster has another directory as {self.work.absolute()}: "
                "name a data.path that all machines share"
            )


def make_probe(order: Order) -> Callable[[], tuple[str, str]]:
    """A function that checks the machine on which it runs, and says what is wrong and which mark it left.

    It travels whole, not by its name, so that it can say where StrataRec is missing.
    """
    content = pickle.dumps(order)

    def probe() -> tuple[str, str]:
        import pickle
        import socket

        try:
            from stratarec.errors import StrataError
        except ImportError as error:
            return f"machine {socket.gethostname()} of the cluster has no stratarec ({error}): install it there", ""
        try:
            found = pickle.loads(content)
            found.check()
            return "", found.leave_mark()
        except StrataError as error:
            return str(error), ""
        except Exception as error:
            return (
                f"machine {socket.gethostname()} of the cluster cannot do the work ({type(error).__name__}: {error}): "
                "install the same version of stratarec[ray] on all machines",
                "",
            )

    return probe


def _check_log(path: str, size: int, changed: int) -> None:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _refusal(f"cannot read {path} ({error.strerror}): keep logs where all machines see them") from error
    if (found.st_size, int(found.st_mtime)) != (size, changed):
        raise _refusal(f"has another file as {path}, of other size or time: keep logs where all machines see them")


def _refusal(reason: str) -> ClusterError:
    return ClusterError(f"machine {socket.gethostname()} of the cluster {reason}")


@cache
def versions() -> tuple[tuple[str, str], ...]:
    """Of Python, of libraries, and of the code of StrataRec itself."""
    return (
        ("Python", platform.python_version()),
        *((name, _version(name)) for name in _LIBRARIES),
        ("code of stratarec with the hash", _code()),
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _code() -> str:
    digest, root = xxhash.xxh3_64(), Path(stratarec.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
