"""The directory ``<data.path>.preparing``: what `prepare` has done so far, and of what.

origin.json    what the data set is of: work goes on under the same origin alone
lease          whose tasks on other machines may write here
source         files of the source's own
spilled        rows on their way to shards, and spilled.done once that are all
counts         what was counted in each partition
encoded        a note for each partition whose shards are written
output         the data set
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from stratarec.data.dataset.manifest import Origin, Shard
from stratarec.data.dedup_groups import Repeats
from stratarec.data.prepare.ray.lease import LEASE
from stratarec.data.prepare.spill import Spill, SpilledChunk
from stratarec.data.schema import Schema
from stratarec.data.transforms import Moments
from stratarec.errors import DatasetError
from stratarec.io.atomic import make_directory, read_json, write_json
from stratarec.io.owned_directory import Kind, entries
from stratarec.io.replace import empty

ORIGIN = "origin.json"
WORK = Kind(
    name="half-prepared data set",
    field="data.path",
    content=(ORIGIN, LEASE, "source", "spilled", "spilled.done", "counts", "encoded", "output"),
)
# What a run leaves here; a later version whose notes have other fields starts anew.
_FORMAT = [
    9,
    *(entry.name for kind in (SpilledChunk, Moments, Repeats) for entry in fields(kind)),
    *Shard.model_fields,
]


class Workspace:
    """The work directory of one data set, which this process holds.

    Parameters
    ----------
    root : Path
    origin : Origin
        Of the data set that is being prepared.
    schema : Schema
    """

    def __init__(self, root: Path, origin: Origin, schema: Schema) -> None:
        self.root, self._origin, self._schema = root, origin, schema
        self.output = root / "output"

    def open(self, estimate_partitions: Callable[[], int], say: Callable[[str], None]) -> bool:
        """Make the directory ready; true when an earlier run's work goes on.

        Parameters
        ----------
        estimate_partitions : callable
            How many partitions rows are to be dealt to; asked where work begins.
        """
        path = self.root / ORIGIN
        resumed = self._is_ours(path)
        if not resumed and len(entries(self.root)) > 1:
            self.start_anew(f"{self.root} is of other logs, settings or another version", say)
        make_directory(self.source)
        if not resumed:
            partitions = estimate_partitions()
            write_json(path, {"format": _FORMAT, "partitions": partitions, "origin": self._origin.to_dict()})
        self.spill = Spill(self.root / "spilled", self._schema, read_json(path)["partitions"])
        return resumed

    def start_anew(self, reason: str, say: Callable[[str], None]) -> None:
        """Remove everything."""
        say(f"{reason}; starting anew")
        empty(self.root)

    @property
    def source(self) -> Path:
        """Where the source has files of its own."""
        return self.root / "source"

    def folder(self, stage: str) -> Path:
        """The directory of a stage's outcomes, which now exists."""
        path = self.root / stage
        make_directory(path)
        return path

    def spilled(self) -> list[SpilledChunk] | None:
        """All chunks, where every one of the log is spilled; else None."""
        note = self.root / "spilled.done"
        if not note.exists():
            return None
        done = self.spill.done()
        if read_json(note) != len(done):
            raise DatasetError(f"{self.root / 'spilled'} is damaged: some of its chunks are missing")
        return done

    def finish_spilling(self, chunks: int) -> None:
        """Note that these are all."""
        write_json(self.root / "spilled.done", chunks)

    def _is_ours(self, path: Path) -> bool:
        try:
            found = read_json(path)
        except DatasetError:  # absent or damaged
            return False
        if not isinstance(found, dict) or not isinstance(found.get("partitions"), int):
            return False
        return found.get("format") == _FORMAT and found.get("origin") == self._origin.to_dict()
