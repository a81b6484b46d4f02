"""Test slots in GPU memory, with interpreted kernels on CPU tensors and, if there is a GPU, on the
GPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import forked
import pytest
import slot_memories
import torch
from lazy_device import SCHEDULES

from errors import missing, refuses
from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.embedding.slots import Level0
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import ConfigError
from stratarec.kernels.runtime import accelerator
from stratarec.kernels.runtime.accelerator import DeviceTransfers, require_triton

if sys.platform != "linux":
    pytest.skip("there is no Triton for this system", allow_module_level=True)


FAULTS_OF_STREAMS = (
    "moves do not wait for steps",
    "steps do not wait for moves",
    "places are reused too early",
    "pinned buffers are written too early",
    "lists do not wait for the copy",
)


def run_job(call: str, module: str = "device_slot_jobs") -> Any:
    """Run a job in a child process and return the JSON that it prints; a crash is reported as its
    text.
    """
    done = forked.python(f"import sys; sys.path[:] = {sys.path!r}\nimport {module} as jobs\njobs.{call}")
    if done.returncode < 0:
        return "crash"
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "numbers",
    [(0, 3), *(pytest.param(each, marks=pytest.mark.slow) for each in ((1, 4), (2, 5, 6)))],
    ids=str,
)
def test_training_matches_slots_in_dram_bit_for_bit(numbers: tuple[int, ...]) -> None:
    for differing, count in run_job(f"compare({numbers!r})"):
        assert differing == []
        assert count >= 15


def test_kernels_match_the_cpu_kernels_at_odd_sizes() -> None:
    differences = run_job("kernels()")
    assert len(differences) == 10
    longest = {name: differences.pop(name) for name in ("long runs", "long runs of bags")}
    assert set(differences.values()) == {0.0}, differences
    # These kernels add hundreds of numbers in another order. A missing number would change the
    # third digit.
    assert all(0 < each < 1e-6 for each in longest.values()), longest


def test_records_match_the_cpu_bytes() -> None:
    assert run_job("codecs()") == [[], 60]


def test_concurrent_programs_do_not_share_addresses() -> None:
    assert run_job("watched()") == []


# The other faults fail in the same way; each needs a process of its own.
@pytest.mark.parametrize(
    "fault",
    [
        "programs overlap",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "a segment ends early",
                "sums do not start from 0",
                "the last bag is left out",
                "another order of additions",
                "noise of another column",
                "codes are clamped early",
                "state stays",
                "clocks stand still",
            )
        ),
    ],
)
def test_a_kernel_fault_is_detected(fault: str) -> None:
    shown = run_job(f"find({fault!r})")
    assert shown
    if fault == "programs overlap":
        assert "update: two programs write one address" in shown


@pytest.mark.parametrize(
    ("number", "schedules", "steps"),
    [
        (1, SCHEDULES[-2:-1], 2),
        # so many that each place and buffer is used again
        pytest.param(7, SCHEDULES, 9, marks=pytest.mark.slow),
        pytest.param(2, SCHEDULES, 4, marks=pytest.mark.slow),
    ],
)
def test_streams_wait_for_each_other(number: int, schedules: tuple[str, ...], steps: int) -> None:
    """Rows in the memory of a lazy device, whose streams run as late as their waits allow."""
    assert run_job(f"compare({number}, {schedules!r}, steps={steps})", "lazy_rows") == []


@pytest.mark.parametrize(
    ("names", "schedules"),
    [
        (("adam",), SCHEDULES[-1:]),
        pytest.param(("adam", "caches over int8"), SCHEDULES, marks=pytest.mark.slow),
    ],
)
def test_a_step_sends_one_buffer_and_waits_for_nothing(
    names: tuple[str, ...], schedules: tuple[str, ...]
) -> None:
    """A whole step, with the network on the lazy device, and batches that are staged ahead."""
    for number, (same, batches, others, later, waits) in enumerate(
        run_job(f"step({names!r}, {schedules!r})", "lazy_rows")
    ):
        assert same
        assert batches == 6
        if names[number % len(names)] == "adam":
            # The features of the tables, once; later the numbers of batches that were staged with
            # another rate.
            assert others == 1
            assert 1 <= later <= 3
            assert waits == []


@pytest.mark.slow
# Six steps show places that are reused too early only if threads are slow; the next test has enough
# steps.
@pytest.mark.parametrize("fault", sorted({*FAULTS_OF_STREAMS} - {"places are reused too early"}))
def test_a_missing_wait_is_detected_in_a_step(fault: str) -> None:
    assert run_job(f"step(('adam', 'caches over int8'), {SCHEDULES!r}, {fault!r})", "lazy_rows")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS_OF_STREAMS)
def test_a_missing_wait_of_a_stream_is_detected(fault: str) -> None:
    # A kernel that reads poisoned slots ends the process.
    assert run_job(f"compare(7, {SCHEDULES!r}, {fault!r})", "lazy_rows")


@pytest.mark.parametrize("numbers", [(1,), pytest.param((0, 4), marks=pytest.mark.slow)], ids=str)
def test_homes_in_gpu_memory_match_homes_in_dram_bit_for_bit(numbers: tuple[int, ...]) -> None:
    """Also evaluations, checkpoints, and tables that are loaded from them."""
    for differing, count in run_job(f"homes({numbers!r})"):
        assert differing == []
        assert count >= 10


def test_tables_for_which_others_on_the_device_leave_no_memory_are_one_line() -> None:
    (rows, records, lists), again = run_job("crowded()", "lazy_rows")
    assert lists == rows
    assert not missing("ConfigError lazy:0 4,000 slots", rows)
    assert not missing("ConfigError lazy:0 4,000 records dram", records)
    assert "\n" not in rows + records
    assert again


def test_slots_that_a_gpu_cannot_have_are_refused() -> None:
    many, optimizer, memory = run_job("refused()")
    assert not missing("2,147,483,648 2^31 GPU", many)
    assert not missing("train.embedding.kind sgd GPU memory.hbm 0", optimizer)
    assert not missing("meta cpu cuda", memory)


def test_a_home_in_gpu_memory_needs_rows_on_a_gpu() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=900, embedding_dim=4, feature_names=("x",))
    tiers = TierConfig(tables={"t": TableTier(home="hbm", cache_rows=64)})
    with refuses(ConfigError, "'t' 'hbm' cpu dram"):
        TieredEmbeddingBagCollection([table], tiers=tiers)


@pytest.mark.parametrize("numbers", [(0,), pytest.param((1, 2, 3, 4, 5), marks=pytest.mark.slow)], ids=str)
def test_checkpoints_move_between_homes_on_the_cpu_and_on_a_gpu(numbers: tuple[int, ...]) -> None:
    *results, (foreign, _) = run_job(f"crossing({numbers!r})")
    assert all(same for _, same in results)
    # Other slots, or a log: rows are transferred one by one.
    assert [number for number, (said, _) in zip(numbers, results, strict=True) if said] == [
        *({1, 3} & set(numbers))
    ]
    assert not missing("groups.1.home 'pages' layout checkpoint", foreign)
    assert "\n" not in foreign


@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "4.0", None])
def test_another_triton_version_is_refused(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise accelerator.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(accelerator, "version", installed)
    with refuses(ConfigError, f"Triton {version or 'none'} stratarec[gpu]"):
        require_triton()


def test_ids_or_network_on_another_device_are_refused() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=("x",))
    ids = torch.zeros(2, dtype=torch.int64, device="meta")
    with refuses(ConfigError, "meta CPU"):
        TieredEmbeddingBagCollection([table])(
            KeyedJagged(keys=("x",), values=ids, offsets=None, batch_size=2)
        )
    level0 = Level0.__new__(Level0)
    level0.device = torch.device("cuda", 0)
    elsewhere = DeviceTransfers.__new__(DeviceTransfers)
    elsewhere.device = torch.device("cuda", 1)
    with refuses(ConfigError, "cuda:0 cuda:1"):
        level0.transfers = elsewhere


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(7))
def test_training_on_a_gpu_matches_training_in_dram(number: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    expected, one, other = (
        list(slot_memories.results("plain", **slot_memories.DEVICE_WORK[number], place=place))
        for place in ("cpu", "cuda", "cuda")
    )
    assert one == other
    assert max(map(slot_memories.difference, expected, one)) < 1e-6
