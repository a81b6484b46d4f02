"""Publish a continued run to a directory: a full export, and a delta for each later period.

    00000/         full export of the finished run's model
    00001.delta/   changes by period 1
    00002.delta/   changes by period 2, and so on
    00007/         full export, because more than a quarter of the rows differ, or rows were renumbered

A server opens the last full export and applies the later deltas in order. An export or delta is either complete or
absent. If a process is killed before it publishes a period, the next delta includes the changes by that period.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

from stratarec.errors import ExportError
from stratarec.io.atomic import check_output, make_directory, sync
from stratarec.io.remote import RemoteDirectory, is_url, upload_directory
from stratarec.io.scratch import ScratchDirectory, reading_directory
from stratarec.serving.export_manifest import DELTA, MANIFEST, ExportManifest
from stratarec.serving.exported_model import ExportedModel
from stratarec.training.export.export import export
from stratarec.training.export.write_delta import write_delta
from stratarec.training.run import periods
from stratarec.training.run.open_run import open_run

_NAME = re.compile(r"(\d{5,})(\.delta)?")


class PublishTarget:
    """Directory to which a run is published, on this machine or in an object store. Use it as a context.

    What is in an object store is copied to ``TMPDIR`` once, because a delta is the difference from it.

    Parameters
    ----------
    place : str
        Path or URL.
    """

    def __init__(self, place: str) -> None:
        self._place, self._stack = place, ExitStack()
        self._remote = RemoteDirectory(place, "--publish") if is_url(place) else None

    def __enter__(self) -> PublishTarget:
        if self._remote is None:
            self._folder = Path(self._place)
            return self
        self._folder = self._stack.enter_context(reading_directory())
        for name in self._remote.sizes():
            folder, _, file = name.partition("/")
            if file in (MANIFEST, DELTA):  # the others are incomplete, and are written again
                RemoteDirectory(f"{self._remote}/{folder}", "--publish").download_all(self._folder / folder)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def check(self, run: Path) -> None:
        """Check before the next period, see `check_publish`."""
        check_publish(run, self._folder)

    def publish(self, run: Path) -> str:
        """Publish the current model of a run, see `publish`."""
        text = publish(run, self._folder)
        if self._remote is None:
            return text
        for folder in sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)):
            last = DELTA if folder.suffix == ".delta" else MANIFEST
            upload_directory(folder, f"{self._remote}/{folder.name}", last, "--publish")
        return text.replace(str(self._folder), str(self._remote))


def check_publish(run: Path, folder: Path) -> None:
    """Check, before the next period of a run is trained, that `publish` can use a folder.

    Raises
    ------
    ExportError
        If the folder has a later period than the run, or deltas without an export that can be read.
    StorageError
        If the folder cannot be written.
    """
    check_output(folder / ".publishing")
    if not folder.exists():
        return
    published, number = _published(folder), len(periods.paths(run))
    for item in published:
        _check_earlier(item, run, number)
    if published:
        _opened(published)


def _check_earlier(published: tuple[int, Path], run: Path, number: int) -> None:
    if published[0] > number:
        raise ExportError(
            f"{published[1]} is of a later period than the last one of {run}, {number}: name another folder"
        )


def publish(run: Path, folder: Path) -> str:
    """Publish the current model of a run, and return a description of what was written.

    Raises
    ------
    ExportError
        If the last period in the folder is of another run, or is later than the last period of this run.
    StorageError
        If the folder cannot be written. Earlier exports remain.
    """
    make_directory(folder)
    there = _published(folder)
    with open_run(run, same_samples=False) as trained:
        number = trained.period
        if there:
            _check_earlier(there[-1], run, number)
        with ScratchDirectory(folder, ".publishing-") as scratch:
            new_export = export(trained, scratch / "export")
            if there and there[-1][0] == number:
                if _opened(there).manifest.fingerprint != ExportManifest.read(new_export).fingerprint:
                    raise ExportError(f"{there[-1][1]} is not the model of {run}: name another folder")
                return f"{there[-1][1]} is up to date"
            share, why = None, "the first one"
            if there:
                delta, why = folder / f"{number:05d}.delta", "more than a quarter of the rows differ"
                try:
                    share = write_delta(_opened(there), new_export, delta)
                except ExportError as error:
                    why = str(error).removeprefix(f"{new_export} does not continue the earlier export: ")
            if share is not None:
                return f"{delta}, {share:.1%} of the rows"
            final = folder / f"{number:05d}"
            os.rename(new_export, final)
            sync(folder)
    return f"{final}, a full export: {why.removesuffix('; use the full export')}"


def _published(folder: Path) -> list[tuple[int, Path]]:
    """Return the last full export and the deltas after it, each with the number of its period, in order."""
    exports = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    exports.sort(key=lambda item: (item[0], item[1].name))
    full = [place for place, (_, path) in enumerate(exports) if path.suffix != ".delta"]
    if exports and not full:
        raise ExportError(f"{folder} has deltas without the full export before them: name another folder")
    return exports[full[-1] :] if full else []


def _opened(there: list[tuple[int, Path]]) -> ExportedModel:
    model = ExportedModel.open(there[0][1])
    for _, path in there[1:]:
        model = model.updated(path)
    return model
