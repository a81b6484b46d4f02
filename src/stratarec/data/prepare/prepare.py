"""Raw logs -> a prepared data set, in three stages that each resume where they stopped.

1. *spill*: source chunks, checked and typed, are partitioned by the hash of their user or session (`workspace.py`);
2. *count*: values and dense moments of the training rows, and how features repeat within sessions, partition by
   partition, then added in a fixed order (`count.py`); groups are chosen here;
3. *encode*: each partition becomes one shard of each split (`pipeline.py`).

Memory holds one chunk, or one partition, and the vocabularies. Everything happens in ``<path>.preparing``
(`workspace.py`); the last act renames its output to `path`. An earlier data set stays there until then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from stratarec.data.dataset.compatibility import settings, settings_difference
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import (
    DATASET,
    MANIFEST,
    DatasetManifest,
    Origin,
)
from stratarec.data.prepare.base_dataset import BaseDataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.executor import Executor, SerialExecutor, revoke_leases
from stratarec.data.prepare.pipeline import PreparePipeline
from stratarec.data.prepare.workspace import WORK, Workspace
from stratarec.data.sources import Source, open_source
from stratarec.data.sources.clicks import ClicksSource
from stratarec.data.sources.files import hash_logs
from stratarec.data.splits import Splitter
from stratarec.errors import DatasetError, StorageError
from stratarec.io.atomic import remove_leftovers, storage_error
from stratarec.io.owned_directory import (
    check_replaceable,
    claim,
    directory_lock,
    directory_state,
    named_directory,
    recover_replacement,
    remove_directory,
    replace_directory_at,
    write_marker,
)
from stratarec.progress import Progress, SilentProgress

# Raise this when the same logs and settings give another data set.
_VERSION = 5


def prepare(
    config: PrepareConfig,
    *,
    name: str = "",
    overwrite: bool = False,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Dataset:
    """Prepare a data set, or return the finished one when nothing has changed.

    Parameters
    ----------
    config : PrepareConfig
    name : str
        Of the data set; that of its directory by default.
    overwrite : bool
        Whether a data set of other logs or settings is replaced.
    progress : Progress, optional
    executor : Executor, optional
        Runs the pieces of each stage, such as `ray_executor.on_ray`; by default this process alone.

    Raises
    ------
    DataError
        For raw logs that cannot be read as the recipe says: names the file, the row and the field.
    DatasetError
        When `path` holds a data set of other logs or settings and `overwrite` is false.
    StorageError
        When an output cannot be written, or `path` holds anything but a data set. It is then as it was.
    """
    run = _Run(config, name, progress or SilentProgress(), executor or SerialExecutor())
    with _storage_errors(run.final):
        return run.run(overwrite)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(path, error) from error


class _Run:
    """One call of `prepare`."""

    def __init__(self, config: PrepareConfig, name: str, progress: Progress, executor: Executor) -> None:
        self.final = named_directory(config.path)
        self.config, self.name, self.progress = config, name or self.final.name, progress
        self.executor = executor
        self.work = self.final.with_name(f"{self.final.name}.preparing")
        self.source: Source = open_source(config.source, on_bad_row=config.on_bad_row, split=config.split)
        self.schema = self.source.schema
        config.vocabulary.check(self.schema)
        self.base = BaseDataset.of(config, self.schema)
        if self.base is not None and isinstance(self.source, ClicksSource):
            self.source.resume(self.base.clicks())
        self.splitter = Splitter(config.split, self.schema, self.source.files)

    def run(self, overwrite: bool) -> Dataset:
        there = self._look(overwrite)
        self._hash_logs()
        self.origin = self._origin()
        if there and not overwrite:
            return self._finished()
        claim(self.work, WORK)
        with directory_lock(self.work), nullcontext() if self.base is None else self.base.locked():
            if not overwrite and self.final.exists():  # another process has just finished it
                remove_directory(self.work)
                return self._finished()
            revoke_leases(self.work)
            remove_leftovers(self.work)
            self._work()
        return Dataset.open(self.final, verify="used")

    def _origin(self) -> Origin:
        """What the outcome depends on; an interrupted run goes on under the same alone."""
        files = self.splitter.file_split
        return Origin(
            format=_VERSION,
            settings=settings(self.config),
            source=json.loads(json.dumps(self.source.fingerprint())),
            # Patterns may name folders, which the fingerprint leaves out.
            file_split=None if files is None else tuple(files.tolist()),
            base=None if self.base is None else self.base.fingerprint,
        )

    def _look(self, overwrite: bool) -> bool:
        """Whether something is at `path`; refused unless it is a data set, which is all that is ever replaced."""
        recover_replacement(self.final, DATASET, lambda path: (path / MANIFEST).is_file())
        if overwrite:
            check_replaceable(self.final, DATASET)
            if directory_state(self.final, DATASET) == "ours":
                with directory_lock(self.final):  # whoever reads it is in the way now, and not only in the end
                    pass
        elif directory_state(self.final, DATASET) == "free" and self.final.exists():
            raise DatasetError(f"{self.final} exists and is no prepared data set; name another data.path")
        return self.final.exists()

    def _hash_logs(self) -> None:
        """Read logs that are not known yet once, so that their contents can be compared without reading them."""
        if self.source.files:
            self.progress.start("check", self.source.total_bytes, "B")
            hash_logs(self.source.files, self.progress.advance)
            self.progress.finish()

    def _finished(self) -> Dataset:
        if not (self.final / MANIFEST).is_file():
            raise DatasetError(f"{self.final} exists and is no prepared data set; name another data.path")
        dataset = Dataset.open(self.final)
        if dataset.about.origin != self.origin:
            raise DatasetError(f"{self._difference(dataset)}; name another data.path, or pass --overwrite")
        self.progress.say(f"{self.final} is up to date")
        return dataset

    def _difference(self, dataset: Dataset) -> str:
        before = dataset.about.origin
        found = settings_difference(self.origin.settings, before.settings)
        if found is not None:
            return f"{self.final} was prepared with data.{found.field} = {found.have!r}, and not {found.want!r}"
        if before.format != self.origin.format:
            return f"{self.final} was prepared by another version of StrataRec"
        if before.base != self.origin.base:
            return f"{self.final} was prepared with {'another' if before.base else 'no'} data.vocabulary.base"
        return f"{self.final} was prepared from logs of other content, {', '.join(dataset.about.paths[:3])}"

    def _work(self) -> None:
        self.workspace = Workspace(self.work, self.origin, self.schema)
        resumed = self.workspace.open(self._estimate_partitions, self.progress.say)
        try:
            self._write()
        except DatasetError as error:
            if not resumed:
                raise
            self.workspace.start_anew(str(error), self.progress.say)
            self.workspace.open(self._estimate_partitions, self.progress.say)
            self._write()

    def _write(self) -> None:
        pipeline = PreparePipeline(
            self.workspace, self.source, self.splitter, self.config, self.base, self.executor, self.progress
        )  # fmt: skip
        self._publish(pipeline.manifest(self.name, self.origin))

    def _estimate_partitions(self) -> int:
        return max(round(self.source.estimate_rows() / self.config.shard_samples), 1)

    def _publish(self, manifest: DatasetManifest) -> None:
        """Rename what was written to where it belongs, in place of an earlier data set."""
        output, about = self.workspace.output, manifest.about
        remove_leftovers(output)  # of tasks that died elsewhere
        manifest.write(output)
        write_marker(output, DATASET)
        Dataset.open(output, verify="used")
        old = replace_directory_at(output, self.final, DATASET)
        remove_directory(self.work)
        if old is not None:
            remove_directory(old)
        if about.bad_rows:
            self.progress.say(f"left out {about.bad_rows} bad rows, such as {'; '.join(about.bad_examples[:2])}")
