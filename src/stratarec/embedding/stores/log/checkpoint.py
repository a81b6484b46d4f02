"""Segments in checkpoints: other names of the same files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from stratarec.artifacts import own_file
from stratarec.embedding.stores.log.segments import SegmentEntry, Segments
from stratarec.embedding.stores.rowfile import link_or_copy
from stratarec.errors import CheckpointError


def keep_segments(segments: Segments, directory: Path, last: Path | None) -> list[dict[str, Any]]:
    """Sync the segments, all sealed, and link them into `directory`; their entries for the manifest.

    A file that the last checkpoint has too is linked from there: the working directory may be on another file system,
    from which it was copied once already.
    """
    entries = []
    for slot in segments.used:
        segments.sync(int(slot))
        entry = segments.entry(int(slot))
        before = None if last is None else last / entry.name
        source = before if before is not None and _same(before, segments, entry) else segments.path(int(slot))
        link_or_copy(source, directory / entry.name)
        entries.append(asdict(entry))
    return entries


def _same(path: Path, segments: Segments, entry: SegmentEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.blocks * segments.layout.block_bytes


def check_segments(segments: Segments, directory: Path, manifest: dict[str, Any]) -> list[SegmentEntry]:
    """The segments of a manifest; `CheckpointError` names the file that is missing or truncated."""
    entries = [SegmentEntry(**fields) for fields in manifest["segments"]]
    for entry in entries:
        path, size = directory / entry.name, entry.blocks * segments.layout.block_bytes
        try:
            own_file(directory, entry.name)
        except ValueError as error:
            raise CheckpointError(f"{error}; use another checkpoint") from error
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path} is damaged: it has {path.stat().st_size} bytes, expected {size}; use another checkpoint"
            )
    return entries
