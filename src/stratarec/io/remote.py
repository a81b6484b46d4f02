"""Directories in object stores, such as ``s3://bucket/models/clicks``, through fsspec.

An object is written completely or not at all, but a directory of objects is not. So a caller that
writes several objects writes the one that names the others last.

A URL may come from an untrusted recipe, and some file systems of fsspec run templates, open
archives or read the memory of this process. So only URLs with one of `PROTOCOLS` are opened, and
chained URLs are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from stratarec.errors import ConfigError, StorageError, StrataError
from stratarec.io.scratch import temporary_directory

PROTOCOLS = {
    "file": "fsspec",
    "http": '"fsspec[http]"',
    "https": '"fsspec[http]"',
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "hf": "huggingface_hub",
}
"""Protocols of URLs that may be read, and the package that reads each."""
STORES = ("s3", "gs", "az", "abfs")
"""Protocols of object stores, in which objects are written completely or not at all."""
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# Names of variables whose values are secret. An error of a store may quote the key that it refused.
_SECRET = re.compile(r"(KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING)", re.IGNORECASE)
_SHORTEST_SECRET = 8


def is_url(text: str | Path) -> bool:
    """Whether `text` is a URL, and not a path of this machine."""
    return URL.match(str(text)) is not None


def check_store_url(url: str, field: str) -> None:
    """Raise `ConfigError`, which names `field`, unless `url` is a directory in an object store,
    without credentials.
    """
    match = URL.match(url)
    names = ", ".join(f"{name}://" for name in STORES)
    if match is None or match[1] not in STORES or "://" in url[match.end() :] or "::" in url:
        raise ConfigError(f"{field}: {url!r} is not a URL of an object store; expected one of {names}")
    parts = urlsplit(url)
    # In abfs://container@account, the text before @ is no user.
    if (parts.password or parts.query or parts.fragment) or ("@" in parts.netloc and match[1] != "abfs"):
        raise ConfigError(
            f"{field}: the URL must have no user, password or query; credentials belong in the environment "
            "variables or files of the store's library"
        )
    if not parts.netloc or not parts.path.strip("/"):
        raise ConfigError(
            f"{field}: {url!r} must name a bucket and a directory in it, such as s3://bucket/clicks"
        )


def hide_secrets(text: str) -> str:
    """Return `text` in one line, without the values of environment variables that contain
    credentials.
    """
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET.search(name):
            text = text.replace(value, f"<{name}>")
    return " ".join(text.split())


@contextmanager
def remote_errors(url: str, doing: str) -> Iterator[None]:
    """Convert errors of a store to `StorageError`. Libraries of stores raise exceptions of any
    class.

    Parameters
    ----------
    url : str
        URL of the file or directory.
    doing : str
        End of "cannot be ...", such as ``written``.
    """
    try:
        yield
    except StrataError:
        raise
    except ImportError as error:
        protocol = url.partition("://")[0]
        advice = f"{protocol}:// needs a library that is not installed; pip install {PROTOCOLS[protocol]}"
        raise StorageError(f"{url}: {advice} ({error})") from error
    except Exception as error:
        reason = hide_secrets(str(error) or type(error).__name__)
        raise StorageError(f"{url} cannot be {doing}: {reason}") from error


class RemoteDirectory:
    """A directory in an object store.

    Names of objects are relative to the directory, with ``/`` as separator. Listings are not
    cached, because other processes write to the store.

    Parameters
    ----------
    url : str
        URL of the directory, with one of the protocols `STORES`.
    field : str
        Option or field with which a user named the directory, for error messages.

    Raises
    ------
    ConfigError
        If `url` is not the URL of a directory in an object store, or contains credentials.
    StorageError
        If the library of the store is not installed.
    """

    def __init__(self, url: str, field: str) -> None:
        check_store_url(url, field)
        self.url = url.rstrip("/")
        with remote_errors(self.url, "opened"):
            import fsspec  # slow to import, and most commands use no store

            self._system, self._path = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True
            )

    def __str__(self) -> str:
        return self.url

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return name -> bytes of all objects, or of those in the subdirectory `below`; empty if
        there are none.
        """
        folder = f"{self._path}/{below}".rstrip("/")
        with remote_errors(self.url, "listed"):
            self._system.invalidate_cache()
            try:
                entries = self._system.find(folder, detail=True)
            except FileNotFoundError:
                return {}
        return {path[len(self._path) + 1 :]: int(entry["size"]) for path, entry in sorted(entries.items())}

    def read(self, name: str) -> bytes:
        """Return the content of the small object `name`."""
        with remote_errors(f"{self.url}/{name}", "read"):
            content: bytes = self._system.cat_file(f"{self._path}/{name}")
        return content

    def write(self, name: str, content: bytes, *, new: bool = False) -> None:
        """Write the small object `name`. With `new`, raise `StorageError` if it exists, also if it
        was just written.
        """
        with remote_errors(f"{self.url}/{name}", "written"):
            self._system.pipe_file(f"{self._path}/{name}", content, mode="create" if new else "overwrite")

    def upload(self, file: Path, name: str) -> None:
        """Copy a local file to the object `name`."""
        with remote_errors(f"{self.url}/{name}", "written"):
            self._system.put_file(str(file), f"{self._path}/{name}")

    def download(self, name: str, file: Path) -> None:
        """Copy the object `name` to a local file."""
        with remote_errors(f"{self.url}/{name}", "read"):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._system.get_file(f"{self._path}/{name}", str(file))

    def download_all(self, folder: Path) -> list[str]:
        """Copy all objects to the local directory `folder`, and return their names."""
        names = [*self.sizes()]
        for name in names:
            if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name:
                raise StorageError(
                    f"{self.url} has the object {name[:80]!r}, whose name is not a path; remove it"
                )
            self.download(name, folder / name)
        return names

    def remove(self, names: Iterable[str]) -> None:
        """Delete the objects `names`."""
        with remote_errors(self.url, "changed"):
            for name in names:
                self._system.rm_file(f"{self._path}/{name}")


@contextmanager
def uploaded(path_or_url: str | Path) -> Iterator[Path]:
    """Context manager that yields the path of a file to write.

    For a URL, the file is in ``TMPDIR`` and is copied to the URL when the context ends, unless it
    ends with an error.

    Parameters
    ----------
    path_or_url : str or Path
        Value of the option ``--output``: a file on this machine, or the URL of an object.
    """
    if not is_url(path_or_url):
        yield Path(path_or_url)
        return
    folder, _, name = str(path_or_url).rpartition("/")
    check_store_url(str(path_or_url), "--output")
    remote = RemoteDirectory(folder, "--output")
    with temporary_directory() as local:
        yield local / name
        if (local / name).exists():  # of several processes, only the first one writes
            remote.upload(local / name, name)


def upload_directory(folder: Path, url: str, last: str, field: str) -> None:
    """Copy a directory to an object store. The file `last`, which lists the others, is written at
    the end.

    If a process is killed before, the next call with the same files completes the copy.

    Parameters
    ----------
    folder : Path
        Directory to copy.
    url : str
        URL of the copy.
    last : str
        Name of the file to write at the end.
    field : str
        Option or field that names the URL, for error messages.

    Raises
    ------
    StorageError
        If the directory cannot be written, or if it has another file `last` already.
    """
    remote = RemoteDirectory(url, field)
    if last in remote.sizes():
        if remote.read(last) != (folder / last).read_bytes():
            raise StorageError(f"cannot write {remote}: it exists; remove it, or name another {field}")
        return
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name != last:
            remote.upload(file, name)
    remote.write(last, (folder / last).read_bytes(), new=True)


@contextmanager
def local_copy(path_or_url: str | Path, field: str) -> Iterator[Path]:
    """Context manager that yields a directory of this machine.

    For the URL of a directory, it is a copy in ``TMPDIR``, which is removed when the context ends.
    Files that are open or mapped at the end can still be read.

    Parameters
    ----------
    path_or_url : str or Path
        Directory on this machine, or URL of a directory.
    field : str
        Option or field that names it, for error messages.

    Raises
    ------
    StorageError
        If the URL has no objects, cannot be read, or has an object whose name is no path below it.
    """
    if not is_url(path_or_url):
        yield Path(path_or_url)
        return
    remote = RemoteDirectory(str(path_or_url), field)
    with temporary_directory() as folder:
        if not remote.download_all(folder):
            raise StorageError(f"{remote} has no files; name another {field}")
        yield folder
