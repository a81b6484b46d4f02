"""Blocks of checksummed cells in plain Python."""

from __future__ import annotations

from stratarec.kernels.random.reference import mix

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def checksum(cell: bytes, tag_bytes: int, sequence: int, number: int) -> int:
    """Return the checksum of a cell, whose first `tag_bytes` bytes are taken as zeros."""
    total, content = 0, bytes(tag_bytes) + cell[tag_bytes:]
    for i in range(len(content) // 8):
        word = int.from_bytes(content[i * 8 : i * 8 + 8], "little")
        term = ((word ^ (i * _GOLDEN & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        total += (term ^ (term >> 32)) * 0x94D049BB133111EB
    return mix((total & _MASK) ^ mix((sequence * _GOLDEN + number) & _MASK)) % (1 << 8 * tag_bytes)


def pack(
    records: dict[int, bytes],
    *,
    block_bytes: int,
    cell_bytes: int,
    tag_bytes: int,
    sequence: int,
    first: int,
) -> bytes:
    """Return a block with these records, by row, in order; `first` is its first cell's number."""
    block = b""
    tags_and_records = [(row + 1, record) for row, record in records.items()]
    for k in range(block_bytes // cell_bytes):
        tag, record = tags_and_records[k] if k < len(records) else (0, b"")
        cell = (bytes(tag_bytes) + tag.to_bytes(tag_bytes, "little") + record).ljust(cell_bytes, b"\0")
        block += (
            checksum(cell, tag_bytes, sequence, first + k).to_bytes(tag_bytes, "little") + cell[tag_bytes:]
        )
    return block.ljust(block_bytes, b"\0")
