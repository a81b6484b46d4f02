"""The third stage of `prepare`: each partition becomes one shard of each split that it has samples of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from stratarec.data.manifest import Shard
from stratarec.data.partition import Partition
from stratarec.data.partitions import Partitions, note_of
from stratarec.data.row_group import Encoded
from stratarec.data.splits import SPLITS
from stratarec.data.writing import write_shard
from stratarec.files import read_json, reading, write_json
from stratarec.progress import Progress


def encode_shards(
    folder: Path,
    partitions: Partitions,
    output: Path,
    encode: Callable[[Partition, int], Encoded],
    progress: Progress,
) -> dict[str, tuple[Shard, ...]]:
    """The shards of each split, of which those without a note in `folder` are written into `output` first.

    Parameters
    ----------
    encode : callable
        What a shard holds: the samples of a partition that are in a split.
    """
    for number, part, note in partitions.left(folder, "encode", progress):
        written = {}
        for split, name in enumerate(SPLITS):
            encoded = encode(part, split)
            if encoded.samples.num_rows:
                written[name] = write_shard(output, name, number, encoded).to_dict()
            del encoded
        write_json(note, written)
        del part
    splits: dict[str, list[Shard]] = {name: [] for name in SPLITS}
    for path in (note_of(folder, number) for number in range(len(partitions))):
        with reading(path):
            for name, shard in read_json(path).items():
                splits[name].append(Shard.model_validate_json(json.dumps(shard)))
    return {name: tuple(found) for name, found in splits.items()}
