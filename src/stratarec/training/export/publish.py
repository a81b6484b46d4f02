"""Publish a continued run to a directory: a full export, and a delta for each later period.

    00000/         full export of the finished run's model
    00001.delta/   changes by period 1
    00002.delta/   changes by period 2, and so on
    00007/         full export, because more than a quarter of the rows differ, or rows were
                   renumbered

A server opens the last full export and applies the later deltas in order. An export or delta is
either complete or absent. If a process is killed before it publishes a period, the next delta
includes the changes by that period. After `revert`, numbers of periods repeat. Numbers of exports
never do: what replaces a published period has the next number.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

from stratarec.errors import ExportError
from stratarec.io.atomic import check_output, make_directory, sync
from stratarec.io.remote import RemoteDirectory, is_url, upload_directory
from stratarec.io.scratch import ScratchDirectory, temporary_directory
from stratarec.serving.export_manifest import DELTA, MANIFEST, ExportManifest
from stratarec.serving.exported_model import ExportedModel
from stratarec.training.export.export import export
from stratarec.training.export.write_delta import write_delta
from stratarec.training.run.open_run import open_run

_NAME = re.compile(r"(\d{5,})(\.delta)?")


class PublishTarget:
    """Directory to which a run is published, on this machine or in an object store. Use it as a
    context.

    A published export in an object store is copied to ``TMPDIR`` once, because a delta is the
    difference from it.

    Parameters
    ----------
    place : str
        Path or URL.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._stack = ExitStack()
        self._remote = RemoteDirectory(place, "--publish") if is_url(place) else None

    def __enter__(self) -> PublishTarget:
        if self._remote is None:
            self._folder = Path(self._place)
            return self
        self._folder = self._stack.enter_context(temporary_directory())
        for name in self._remote.sizes():
            folder, _, file = name.partition("/")
            if file in (MANIFEST, DELTA):  # the others are incomplete, and are written again
                RemoteDirectory(f"{self._remote}/{folder}", "--publish").download_all(self._folder / folder)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def check(self) -> None:
        """Check before the next period, see `check_publish`."""
        check_publish(self._folder)

    def publish(self, run: Path) -> str:
        """Publish the current model of a run, see `publish`."""
        text = publish(run, self._folder)
        if self._remote is None:
            return text
        for folder in sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)):
            last = DELTA if folder.suffix == ".delta" else MANIFEST
            upload_directory(folder, f"{self._remote}/{folder.name}", last, "--publish")
        return text.replace(str(self._folder), str(self._remote))


def check_publish(folder: Path) -> None:
    """Check, before the next period of a run is trained, that `publish` can use a folder.

    Raises
    ------
    ExportError
        If the folder has an export or a delta that cannot be read, or deltas without an export.
    StorageError
        If the folder cannot be written.
    """
    check_output(folder / ".publishing")
    if folder.exists() and (published := _published(folder)):
        _opened(published)


def publish(run: Path, folder: Path) -> str:
    """Publish the current model of a run, and return a description of the written files.

    Raises
    ------
    ExportError
        If the folder has an export or a delta that cannot be read, or deltas without an export.
    StorageError
        If the folder cannot be written. Earlier exports remain.
    """
    make_directory(folder)
    there = _published(folder)
    with open_run(run, same_samples=False) as trained, ScratchDirectory(folder, ".publishing-") as scratch:
        new_export = export(trained, scratch / "export")
        number, share, why = trained.period, None, "the first one"
        if there:
            last = _opened(there)
            if last.manifest.fingerprint == ExportManifest.read(new_export).fingerprint:
                return f"{there[-1][1]} is up to date"
            number = max(number, there[-1][0] + 1)
            delta, why = folder / f"{number:05d}.delta", "more than a quarter of the rows differ"
            if trained.recipe.train.embedding.rows == "all":
                why += "; train.embedding.rows=all changes rows that a period lacks, so continue with "
                why += "train.embedding.rows=batch"
            try:
                share = write_delta(last, new_export, delta)
            except ExportError as error:
                why = str(error).removeprefix(f"{new_export} does not continue the earlier export: ")
        if share is not None:
            return f"{delta}, {share:.1%} of the rows"
        final = folder / f"{number:05d}"
        os.rename(new_export, final)
        sync(folder)
    return f"{final}, a full export: {why.removesuffix('; use the full export')}"


def _published(folder: Path) -> list[tuple[int, Path]]:
    """Return the last full export and the deltas after it, each with the number of its period, in
    order.
    """
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
