"""The third stage of `prepare`: each partition becomes one shard of each split that it has samples of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratarec.data.dataset.manifest import Shard
from stratarec.data.dataset.writer import write_shard
from stratarec.data.prepare.executor import Executor
from stratarec.data.prepare.partition import Partition
from stratarec.data.prepare.partitions import EachPartition, Partitions, note_of
from stratarec.data.splits import SPLITS
from stratarec.data.transforms import Moments
from stratarec.data.vocabulary import Vocabulary
from stratarec.io.atomic import read_json, reading
from stratarec.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What shards hold, and where they are written."""

    output: Path
    """Directory of the data set."""
    vocabularies: Mapping[str, Vocabulary]
    moments: Mapping[str, Moments]
    groups: Mapping[str, Sequence[str]] | None
    keep_rows: bool

    def write(self, number: int, part: Partition) -> dict[str, Any]:
        """Write the shards of a partition, and say of each split that has samples what they are."""
        written = {}
        for split, name in enumerate(SPLITS):
            encoded = part.encode(split, self.vocabularies, self.moments, self.groups, keep_rows=self.keep_rows)
            if encoded.samples.num_rows:
                written[name] = write_shard(self.output, name, number, encoded).to_dict()
            del encoded
        return written

    @property
    def bytes(self) -> int:
        """Memory of the vocabularies."""
        return sum(int(known.values.estimated_size()) + known.counts.nbytes for known in self.vocabularies.values())


def encode_shards(
    folder: Path, partitions: Partitions, shards: Shards, executor: Executor, progress: Progress
) -> dict[str, tuple[Shard, ...]]:
    """The shards of each split, of which those without a note in `folder` are written first."""
    stage = EachPartition(partitions=partitions, notes=folder, make=shards.write, held=shards.bytes)
    stage.run("encode", executor, progress)
    splits: dict[str, list[Shard]] = {name: [] for name in SPLITS}
    for path in (note_of(folder, number) for number in range(len(partitions))):
        with reading(path):
            for name, shard in read_json(path).items():
                splits[name].append(Shard.model_validate_json(json.dumps(shard)))
    return {name: tuple(found) for name, found in splits.items()}
