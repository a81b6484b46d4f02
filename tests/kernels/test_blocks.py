"""Compare blocks of checksummed cells with plain Python."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stratarec.kernels.blocks import (
    Buffer,
    Index,
    ReadBuffers,
    ReadRequest,
    Shape,
    aio,
    as_bytes,
    cpu,
    reads,
    reference,
)


def shape_of(record_bytes: int, tag_words: int, segment_blocks: int = 8) -> Shape:
    cell_words = -(-(8 * tag_words + record_bytes) // 8)
    block_words = 512 * -(-cell_words // 512)
    return Shape(
        block_words, cell_words, block_words // cell_words, record_bytes, tag_words, segment_blocks
    )


def filled(shape: Shape, blocks: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return blocks with `count` records, sealed as blocks 100, 101 ... of segment 7, with their
    rows and records.
    """
    words = np.zeros(blocks * shape.block_words, np.uint64)
    generator = np.random.default_rng(0)
    rows = generator.permutation(2**20)[:count]
    records = generator.integers(0, 256, (count, shape.record_bytes), np.uint8)
    locations, changed = np.zeros(2**20, np.uint64), np.zeros(2**17, np.uint8)
    state, live = np.array([0, 0, 0, blocks * shape.per_block]), np.zeros(1, np.int64)
    index, buffer = Index(locations, changed, live), Buffer(state, words, as_bytes(words))
    done = cpu.append(rows, np.arange(count), records.reshape(-1), 0, index, buffer, shape)
    assert (done, live[0]) == (count, count)
    np.testing.assert_array_equal(locations[rows], np.arange(1, count + 1))
    cpu.seal(words, shape, blocks, np.uint64(7), 100)
    return words, rows, records


@pytest.mark.parametrize(("record_bytes", "tag_words", "blocks"), [(37, 1, 3), (700, 2, 4), (5000, 1, 2)])
def test_blocks_are_packed_and_sealed_like_the_reference(
    record_bytes: int, tag_words: int, blocks: int
) -> None:
    shape = shape_of(record_bytes, tag_words, blocks)
    block_bytes, per_block = shape.block_words * 8, shape.per_block
    words, rows, records = filled(shape, blocks, blocks * per_block - per_block // 2)
    for b in range(blocks):
        part = slice(b * per_block, min((b + 1) * per_block, len(rows)))
        expected = reference.pack(
            {int(row): record.tobytes() for row, record in zip(rows[part], records[part], strict=True)},
            block_bytes=block_bytes,
            cell_bytes=shape.cell_words * 8,
            tag_bytes=4 * tag_words,
            sequence=7,
            first=(100 + b) * per_block,
        )
        assert as_bytes(words)[b * block_bytes : (b + 1) * block_bytes].tobytes() == expected


@pytest.mark.parametrize(("record_bytes", "tag_words"), [(4080, 1), (1000, 1), (30, 2)])
def test_the_checksums_depend_on_every_byte_and_the_position(record_bytes: int, tag_words: int) -> None:
    shape = shape_of(record_bytes, tag_words)
    words, _, _ = filled(shape, 1, max(shape.per_block - 1, 1))
    assert cpu.first_damaged(words, shape, 1, np.uint64(7), 100) == -1
    assert cpu.first_damaged(words, shape, 1, np.uint64(8), 100) == 0
    assert cpu.first_damaged(words, shape, 1, np.uint64(7), 101) == 0
    content, generator = as_bytes(words), np.random.default_rng(1)
    for byte in range(4096):
        flip = np.uint8(generator.integers(1, 256))
        content[byte] ^= flip
        assert cpu.first_damaged(words, shape, 1, np.uint64(7), 100) == 0, f"byte {byte} flipped by {flip}"
        content[byte] ^= flip
    content[:] = 0
    assert cpu.first_damaged(words, shape, 1, np.uint64(7), 100) == 0


@pytest.mark.parametrize("alignment", [512, 4096])
@pytest.mark.parametrize(("record_bytes", "tag_words"), [(37, 1), (134, 1), (700, 2), (5000, 1)])
def test_cells_are_read_by_the_sectors_that_contain_them(
    record_bytes: int, tag_words: int, alignment: int, tmp_path: Path
) -> None:
    shape = shape_of(record_bytes, tag_words, 40)
    words, _, _ = filled(shape, 40, 40 * shape.per_block)
    _, rows, records = filled(shape, 40, 40 * shape.per_block)
    cpu.seal(words, shape, 40, np.uint64(7), 0)
    (tmp_path / "segment").write_bytes(words.tobytes())
    scratch = np.zeros(2 * 2 * shape.block_words, np.uint64)
    buffers = ReadBuffers(
        spans=np.zeros((2, 4), np.int64),
        requests=np.zeros(2 * aio.REQUEST_WORDS, np.uint64),
        addresses=np.zeros(2, np.int64),
        events=np.zeros(2 * aio.EVENT_WORDS, np.int64),
        words=scratch,
        data=as_bytes(scratch),
    )
    descriptor = os.open(tmp_path / "segment", os.O_RDONLY)
    try:
        for draw in range(20):
            cells = np.sort(
                np.random.default_rng(draw).permutation(len(rows))[: 1 + draw * len(rows) // 25]
            )
            out = np.zeros((len(cells), record_bytes), np.uint8)
            request = ReadRequest(
                descriptors=np.array([descriptor], np.int32),
                sequences=np.array([7], np.uint64),
                cells=cells,
                entries=np.arange(len(cells)),
                rows=rows[cells],
                out=out.reshape(-1),
            )
            assert reads.read_cells(0, request, buffers, alignment, shape) == -1
            np.testing.assert_array_equal(out, records[cells])
            bad = draw % len(cells)
            request = request._replace(rows=np.where(np.arange(len(cells)) == bad, 1 << 20, rows[cells]))
            assert reads.read_cells(0, request, buffers, alignment, shape) == cells[bad] // shape.per_block
            assert (buffers.spans[:, 2:] % alignment == 0).all()
    finally:
        os.close(descriptor)
