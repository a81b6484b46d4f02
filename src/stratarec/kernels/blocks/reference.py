"""Checksummed blocks in plain Python."""

from __future__ import annotations

from stratarec.kernels.random.reference import mix

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def checksum(block: bytes, sequence: int, number: int) -> int:
    """Return the checksum of block `number` of segment `sequence`; the first 8 bytes of `block` are ignored."""
    total = 0
    for i in range(1, len(block) // 8):
        word = int.from_bytes(block[i * 8 : i * 8 + 8], "little")
        term = ((word ^ (i * _GOLDEN & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        total += (term ^ (term >> 32)) * 0x94D049BB133111EB
    return mix((total & _MASK) ^ mix((sequence * _GOLDEN + number) & _MASK))


def pack(records: dict[int, bytes], *, block_bytes: int, per_block: int, tag_bytes: int) -> bytes:
    """Return a block with the given records, by row, in their order; the bytes of the checksum are zero."""
    tags = b"".join((row + 1).to_bytes(tag_bytes, "little") for row in records)
    body = bytes(8) + tags.ljust(per_block * tag_bytes, b"\0") + b"".join(records.values())
    return body.ljust(block_bytes, b"\0")
