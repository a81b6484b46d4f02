"""Compare every byte of a placed table with figures computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig, EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.packed_batch import BatchBuffer, DeviceBatch, FeatureLists
from stratarec.embedding.rings import Ring
from stratarec.embedding.tables.base import group_layout
from stratarec.kernels.bags import BagBatch
from stratarec.kernels.codec.kinds import KINDS
from stratarec.kernels.runtime.accelerator import CPU, HOST, driver_of
from stratarec.planning.bytes import (
    DEVICE_LOOKUP_BYTES,
    WORKSPACE_MARGIN,
    BatchDemand,
    Parts,
    RowShape,
    SlotSplit,
    cached_bytes,
    in_memory,
    level0_bytes,
    record_bytes,
)

NO_TRAFFIC = BatchDemand(lookups=0, distinct=0, batches=1)


def shape(width: int, kind: str = "sgd") -> RowShape:
    return RowShape.of(width, RowOptimizerConfig(kind=kind))  # type: ignore[arg-type]


def parts(
    row: RowShape, rows: int, slots: int, codec: CodecConfig, home: str = "dram", **options: object
) -> dict[str, int]:
    components: Parts = cached_bytes(
        row,
        rows,
        home=home,
        codec=codec,
        slots=slots,
        **{"traffic": NO_TRAFFIC, **options},  # type: ignore[arg-type]
    )
    return {
        f"{memory} {name}": size for memory, named in components.items() for name, size in named.items()
    }


@pytest.mark.parametrize(
    ("codec", "kind", "width", "expected"),
    [
        (CodecConfig(kind="fp32"), "sgd", 16, 64),
        (CodecConfig(kind="fp16"), "rowwise_adagrad", 16, 32 + 4),
        (CodecConfig(kind="bf16", state="bf16"), "adagrad", 16, 32 + 32),
        (CodecConfig(kind="int8"), "rowwise_adagrad", 64, 64 + 4 + 4),
        (CodecConfig(kind="int8", parameters="fp32"), "rowwise_adam", 64, 64 + 8 + 4 + 256),
        (CodecConfig(kind="int4"), "adam", 7, 4 + 4 + 56),
        (CodecConfig(kind="int4", state="bf16"), "rowwise_adagrad", 7, 4 + 4 + 2),
        (CodecConfig(kind="int4"), "sgd", 1, 1 + 4),
    ],
)
def test_a_record_has_weights_parameters_and_state_without_padding(
    codec: CodecConfig, kind: str, width: int, expected: int
) -> None:
    assert record_bytes(codec, shape(width, kind)) == expected


@given(
    kind=st.sampled_from(list(KINDS)),
    parameters=st.sampled_from(["fp16", "fp32"]),
    state=st.sampled_from(["fp32", "bf16"]),
    width=st.integers(1, 300),
    row_state=st.booleans(),
    full_state=st.integers(0, 2),
    clock=st.booleans(),
)
def test_a_record_has_the_bytes_that_the_codec_writes(
    kind: str, parameters: str, state: str, width: int, row_state: bool, full_state: int, clock: bool
) -> None:
    config = CodecConfig(kind=kind, parameters=parameters, state=state)  # type: ignore[arg-type]
    codec = RecordCodec(config, width=width, row_state=row_state, full_state=full_state, clock=clock)
    row = RowShape(width=width, row_state=row_state, full_state=full_state, clock=clock)
    assert record_bytes(config, row) == codec.record_bytes
    result = parts(row, 10, 0, config)
    assert sum(size for name, size in result.items() if "record" in name) == 10 * codec.record_bytes
    assert result.get("dram record state", 0) == 10 * (
        {"fp32": 4, "bf16": 2}[state] * row.state_floats + 4 * clock
    )


def test_a_table_in_level_0_has_only_weights_and_state() -> None:
    assert level0_bytes(shape(16, "rowwise_adagrad"), 1000) == {
        "dram": {"slot weights": 64_000, "slot state": 4_000}
    }
    assert in_memory(level0_bytes(shape(16, "adagrad"), 1000), "dram") == 128_000


def test_a_log_has_locations_in_dram_and_space_for_superseded_records() -> None:
    traffic = BatchDemand(lookups=100, distinct=50, batches=2)
    result = parts(
        shape(16, "rowwise_adagrad"), 1000, 136, CodecConfig(kind="int8"), home="log", traffic=traffic
    )
    record, blocks = 16 + 4 + 4, 8  # 128 cells of 32 bytes in 4096
    assert result["dram locations"] == 4000
    assert result["dram bitmaps"] == 125
    assert result["dram staging"] == 2 * 4 * 100 + 60 * (100 + 136 / 16) + 1.25 * record * 50
    assert result["block block padding"] == blocks * 4096 - 1000 * record
    assert result["block dead space"] == int(blocks * 4096 * (0.5 + 4 / 64))
    more = parts(
        shape(16, "rowwise_adagrad"), 1000, 136, CodecConfig(kind="int8"), home="log", dram_rows=80
    )
    assert (
        more["dram record weights"] + more["dram record parameters"] + more["dram record state"]
        == 80 * record
    )
    assert more["dram bitmaps"] == 125 + 2 * 10
    assert more["block record weights"] == result["block record weights"]


@given(rows=st.integers(1, 1 << 40), ways=st.integers(1, 256))
def test_slots_are_the_rows_and_a_sixteenth_more(rows: int, ways: int) -> None:
    slots = SlotSplit.holding(rows, ways)
    assert rows <= slots.in_sets < rows + ways
    assert slots.overflow % ways == 0
    assert slots.overflow == pytest.approx(slots.total / 16, abs=ways)
    assert SlotSplit.within(slots.total, ways) == slots


@given(total=st.integers(1, 1 << 40), ways=st.integers(1, 256))
def test_slots_within_a_number_are_the_most_that_fit(total: int, ways: int) -> None:
    slots = SlotSplit.within(total, ways)
    assert slots.total <= total or slots.sets == 1
    assert SlotSplit.holding(slots.in_sets + 1, ways).total > total


def test_the_buffer_of_a_batch_has_the_planned_bytes_of_a_gpu_and_pinned_memory_for_what_is_sent() -> None:
    lookups = 1 << 16
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=("x",))
    layout, ring = group_layout([table], {"x": 0}, [0], [9]), Ring(driver_of(CPU))
    bags = BagBatch(
        values=np.zeros(lookups, np.int32),
        offsets=np.arange(0, lookups + 1, 4),
        weights=np.ones(lookups, np.float32),
        batch=lookups // 4,
        key=np.zeros(1, np.int64),
    )
    BatchBuffer.pack(ring, [DeviceBatch.of(layout, bags, FeatureLists.of(layout, HOST))], ())
    assert (
        DEVICE_LOOKUP_BYTES * lookups
        < ring.device_bytes
        <= WORKSPACE_MARGIN * DEVICE_LOOKUP_BYTES * lookups
    )
    # A slot and a weight of each lookup, and the first lookup of each bag.
    assert 9 * lookups < ring.nbytes <= 10 * lookups + 256
