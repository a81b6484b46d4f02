"""Checksummed blocks against plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from stratarec.kernels.blocks import Buffer, Index, Shape, as_bytes, as_tags, cpu, reference


@pytest.mark.parametrize(("record_bytes", "tag_words", "blocks"), [(37, 1, 3), (700, 2, 4), (5000, 1, 2)])
def test_blocks_are_packed_and_sealed_as_the_reference_does(record_bytes: int, tag_words: int, blocks: int) -> None:
    block_bytes = 4096 * -(-(8 + 4 * tag_words + record_bytes) // 4096)
    per_block = (block_bytes - 8) // (4 * tag_words + record_bytes)
    shape = Shape(block_bytes // 8, per_block, record_bytes, tag_words, 8)
    words = np.zeros(blocks * block_bytes // 8, np.uint64)
    count = blocks * per_block - per_block // 2
    generator = np.random.default_rng(0)
    rows = generator.permutation(2**20)[:count]
    records = generator.integers(0, 256, (count, record_bytes), np.uint8)
    locations, changed = np.zeros(2**20, np.uint64), np.zeros(2**17, np.uint8)
    state, live = np.array([0, 0, 0, blocks * per_block]), np.zeros(1, np.int64)
    index, buffer = Index(locations, changed, live), Buffer(state, as_tags(words), as_bytes(words))
    done = cpu.append(rows, records.reshape(-1), 0, index, buffer, shape)
    assert (done, live[0]) == (count, count)
    np.testing.assert_array_equal(locations[rows], np.arange(1, count + 1))
    cpu.seal(words, shape, blocks, np.uint64(7), 100)
    for b in range(blocks):
        part = slice(b * per_block, min((b + 1) * per_block, count))
        held = {int(row): record.tobytes() for row, record in zip(rows[part], records[part], strict=True)}
        packed = reference.pack(held, block_bytes=block_bytes, per_block=per_block, tag_bytes=4 * tag_words)
        expected = reference.checksum(packed, 7, 100 + b).to_bytes(8, "little") + packed[8:]
        assert as_bytes(words)[b * block_bytes : (b + 1) * block_bytes].tobytes() == expected


def test_the_checksum_sees_every_byte_and_the_place() -> None:
    generator = np.random.default_rng(0)
    shape = Shape(512, 1, 4080, 1, 8)
    words = generator.integers(0, 2**63, 512, np.uint64)
    cpu.seal(words, shape, 1, np.uint64(3), 5)
    assert cpu.first_damaged(words, shape, 1, np.uint64(3), 5) == -1
    assert cpu.first_damaged(words, shape, 1, np.uint64(4), 5) == 0
    assert cpu.first_damaged(words, shape, 1, np.uint64(3), 6) == 0
    content = as_bytes(words)
    for byte in range(4096):
        flip = np.uint8(generator.integers(1, 256))
        content[byte] ^= flip
        assert cpu.first_damaged(words, shape, 1, np.uint64(3), 5) == 0, f"byte {byte} flipped by {flip}"
        content[byte] ^= flip
    content[:] = 0
    assert cpu.first_damaged(words, shape, 1, np.uint64(3), 5) == 0
