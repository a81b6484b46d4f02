"""Update the seals and hashes of all files in a folder, as a writer would.

An attacker who changes a file also changes what protects it: hashes, sizes and digests up to the
manifest, then the seal.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stratarec.data.vocabulary import Vocabulary
from stratarec.io.atomic import file_hash
from stratarec.io.sealed import content_hash


def seal(file: Path, content: Any) -> None:
    """Write a manifest with a correct hash of itself."""

    def write() -> None:
        sealed = content
        if isinstance(content, dict) and isinstance(content.get("hash"), str):
            bare = {key: value for key, value in content.items() if key != "hash"}
            # Values that JSON does not allow are sealed as Python writes them.
            sealed = {**bare, "hash": content_hash(bare)}
        file.write_text(json.dumps(sealed, indent=1))

    # Content that is nested more deeply than a reader allows must be written too.
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(before)


def reseal(path: Path, *, adapt: bool = False) -> None:
    """Let every manifest below `path` say what its files are now.

    Parameters
    ----------
    adapt : bool
        Of their numbers, too: rows, row groups, values.
    """
    for file in sorted(path.rglob("*.json"), key=lambda path_of: len(path_of.parts), reverse=True):
        try:
            content = json.loads(file.read_text())
        except (ValueError, OSError, RecursionError):
            continue
        if not isinstance(content, dict) or not isinstance(content.get("hash"), str):
            continue
        for entry, own in _entries(file.parent, content):
            # Values of a wrong type stay as they are.
            with suppress(AttributeError, KeyError, OSError, TypeError, ValueError, pa.ArrowException):
                if adapt:
                    _adapt(entry, own)
                if "hash" in entry:
                    entry["hash"] = file_hash(own)
                if "bytes" in entry:
                    entry["bytes"] = own.stat().st_size
        hashes = content.get("hashes")
        if isinstance(hashes, dict):
            hashes.update(
                {name: file_hash(file.parent / name) for name in hashes if (file.parent / name).is_file()}
            )
        seal(file, content)


def _entries(folder: Path, content: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Path]]:
    """Return the parts of a manifest in `folder` that protect a file, and that file."""
    stack: list[tuple[Path, str, Any]] = [(folder, "", content)]
    while stack:
        place, key, part = stack.pop()
        if isinstance(part, list):
            stack += [(place, key, each) for each in part]
        if not isinstance(part, dict):
            continue
        # The files of a group are in a folder of its name, with separate folders for its home and
        # its slots.
        inside = place / "tables" / str(part["name"]) if "home" in part else place
        named = part.get("path", part.get("name", key))
        if "sequence" in part:
            named = f"segment-{part['sequence']:010d}.log" if isinstance(part["sequence"], int) else ""
        if isinstance(named, str) and named and "\0" not in named and part is not content:
            with suppress(OSError):
                if (inside / named).is_file() and not (inside / named).is_symlink():
                    yield part, inside / named
        for name, each in part.items():
            stack.append(
                (inside / name if name in ("home", "slots") and "home" in part else inside, name, each)
            )


def _adapt(entry: dict[str, Any], own: Path) -> None:
    """Set the numbers next to a hash to those of the file."""
    if "row_groups" in entry:
        result = pq.ParquetFile(own).metadata
        entry["row_groups"] = [result.row_group(place).num_rows for place in range(result.num_row_groups)]
        entry["samples"] = sum(entry["row_groups"])
    elif "tail_buckets" in entry:
        column = pq.read_table(own, columns=["value"])["value"]
        if len(column) != entry["values"] + entry["tail_buckets"]:
            entry["values"] = len(column) - column.null_count
            entry["tail_buckets"] = len(column) - entry["values"]
        if "rows" in entry:
            entry["rows"] = entry["values"] + entry["tail_buckets"]
    elif set(entry) == {"name", "rows", "hash"}:
        front = json.loads(own.read_bytes()[8 : 8 + int.from_bytes(own.read_bytes()[:8], "little")])
        entry["rows"] = front["rows"]["shape"][0]
    if "digest" in entry:
        entry["digest"] = _digest(own, entry["values"])


def _digest(own: Path, values: int) -> str:
    import polars as pl

    column = pq.read_table(own, columns=["value"])["value"]
    result = pl.from_arrow(column.slice(max(len(column) - values, 0)))
    assert isinstance(result, pl.Series)
    return Vocabulary(values=result, counts=result.is_null().to_numpy(), tail_buckets=1).digest
