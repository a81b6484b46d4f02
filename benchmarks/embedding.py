"""The embedding step (forward, backward, row-wise Adagrad) against FBGEMM's CPU operator and `torch.nn.EmbeddingBag`.

26 tables of Criteo's sizes, capped; one id a bag, as in Criteo. FBGEMM's operator is called directly
(`SplitTableBatchedEmbeddingBagsCodegen`, which TorchRec's fused `EmbeddingBagCollection` calls), so TorchRec's own
overhead is not counted against it. Its tuned form (huge pages, malloc that keeps freed blocks) runs beside ours; as
installed it runs in a child process, see `plain_peer`. `EmbeddingBag` gets sparse gradients and SGD, its cheapest
sparse optimizer.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.plain_peer import PlainPeer
from benchmarks.registry import import_peer
from benchmarks.timing import alternate, spread
from stratarec.data.sources.synthetic import CRITEO_ROWS, EXPONENT
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, TieredEmbeddingBagCollection
from stratarec.jagged import KeyedJagged

RATE, EPS = 0.02, 1e-8
# Idle OpenMP workers spin for some milliseconds.
REST = 0.02
FEATURES = len(CRITEO_ROWS)


def build_fbgemm(sizes: list[int], width: int) -> Any:
    """FBGEMM's operator over tables of the given sizes, on the CPU."""
    fbgemm = import_peer("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = import_peer("fbgemm_gpu.split_embedding_configs")
    place = (fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)
    return fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, *place) for rows in sizes],
        optimizer=common.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        eps=EPS,
    )


class Contenders:
    """The same tables, three times."""

    def __init__(self, sizes: list[int], width: int, batch: int) -> None:
        self.batch = batch
        self.keys = tuple(f"f{i}" for i in range(len(sizes)))
        self.offsets = torch.arange(len(sizes) * batch + 1)
        self.ours = TieredEmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=key, num_embeddings=rows, embedding_dim=width, feature_names=(key,))
                for key, rows in zip(self.keys, sizes, strict=True)
            ],
            optimizer=RowOptimizerConfig(learning_rate=RATE, eps=EPS),
        )
        self.fbgemm = build_fbgemm(sizes, width)
        for key, weight in zip(self.keys, self.fbgemm.split_embedding_weights(), strict=True):
            weight.copy_(self.ours.table(key)["weight"])
        self.bags = [torch.nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for rows in sizes]
        self.sgd = torch.optim.SGD([bag.weight for bag in self.bags], lr=RATE)

    def step_ours(self, ids: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        jagged = KeyedJagged(keys=self.keys, values=ids, offsets=None, batch_size=self.batch)
        pooled = self.ours(jagged).pooled
        pooled.backward(gradient)
        return pooled

    def step_fbgemm(self, ids: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.fbgemm(ids, self.offsets)
        pooled.backward(gradient)
        return pooled

    def step_bags(self, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        self.sgd.zero_grad()
        single = self.offsets[: self.batch]
        parts = [bag(ids[f * self.batch : (f + 1) * self.batch], single) for f, bag in enumerate(self.bags)]
        torch.cat(parts, dim=1).backward(gradient)
        self.sgd.step()


def make_ids(sizes: list[int], batch: int, skew: str, seed: int) -> torch.Tensor:
    """``[26 * B]`` int64 ids: uniform, or with Criteo's skew; frequent rows first, as `prepare` ranks them."""
    draws = np.random.default_rng(seed)
    power = 1.0 if skew == "uniform" else EXPONENT
    parts = [np.minimum(rows * draws.random(batch) ** power, rows - 1).astype(np.int64) for rows in sizes]
    return torch.from_numpy(np.concatenate(parts))


def gate(sizes: list[int]) -> None:
    """Ours and FBGEMM's weights agree after ten steps."""
    pair = Contenders([min(rows, 5000) for rows in sizes], 16, 256)
    for step in range(10):
        ids = make_ids([min(rows, 5000) for rows in sizes], 256, "criteo", step)
        gradient = torch.randn(256, FEATURES * 16, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(pair.step_ours(ids, gradient), pair.step_fbgemm(ids, gradient))
    for key, weight in zip(pair.keys, pair.fbgemm.split_embedding_weights(), strict=True):
        torch.testing.assert_close(pair.ours.table(key)["weight"], weight, rtol=1e-5, atol=1e-6)


def best_threads(pair: Contenders, batches: list[torch.Tensor], gradient: torch.Tensor, most: int) -> int:
    """The number of threads at which FBGEMM is fastest."""
    found = {}
    for threads in range(1, most + 1):
        torch.set_num_threads(threads)
        times = alternate({"fbgemm": lambda i: pair.step_fbgemm(batches[i % len(batches)], gradient)}, 5)
        found[threads] = median(times["fbgemm"])
    return min(found, key=lambda threads: found[threads])


def run(quick: bool) -> dict[str, Any]:
    """All widths, batch sizes and skews."""
    cap = 100_000 if quick else 1_000_000
    rounds = 8 if quick else 25
    sizes = [min(rows, cap) for rows in CRITEO_ROWS]
    most = torch.get_num_threads()
    gate(sizes)
    rows: list[dict[str, Any]] = []
    for width in (16, 64, 128):
        for batch in (2048, 16384):
            pair = Contenders(sizes, width, batch)
            gradient = torch.randn(batch, FEATURES * width) * 1e-3
            rows += [cell(pair, width, skew, sizes, gradient, rounds, most) for skew in ("uniform", "criteo")]
            del pair
    ratios = [row["ratio_fbgemm"] for row in rows]
    plain = [row["ratio_fbgemm_default"] for row in rows]
    return {
        "config": {"sizes": sizes, "cap": cap, "rounds": rounds, "optimizer": "row-wise Adagrad", "ids": "int64"},
        "metrics": {
            "ratio_fbgemm_median": median(ratios),
            "ratio_fbgemm_min": min(ratios),
            "ratio_fbgemm_default_median": median(plain),
            "ratio_fbgemm_default_min": min(plain),
            "ratio_embeddingbag_median": median(row["ratio_embeddingbag"] for row in rows),
            "ratio_embeddingbag_min": min(row["ratio_embeddingbag"] for row in rows),
        },
        "samples": {"rows": rows},
    }


def cell(
    pair: Contenders, width: int, skew: str, sizes: list[int], gradient: torch.Tensor, rounds: int, most: int
) -> dict[str, Any]:
    """One line of the table: all three in alternation, FBGEMM at its best number of threads."""
    batch = pair.batch
    batches = [make_ids(sizes, batch, skew, seed) for seed in range(8)]
    threads = best_threads(pair, batches, gradient, most)

    def fbgemm(step: int) -> None:
        torch.set_num_threads(threads)
        pair.step_fbgemm(batches[step % 8], gradient)
        torch.set_num_threads(most)

    torch.set_num_threads(most)
    times = alternate(
        {
            "ours": lambda step: pair.step_ours(batches[step % 8], gradient),
            "fbgemm": fbgemm,
            "bags": lambda step: pair.step_bags(batches[step % 8], gradient),
        },
        rounds,
    )
    default = against_default(pair, width, skew, sizes, batches, gradient, rounds, most)
    ours, peer, bags = (spread(times[name]) for name in ("ours", "fbgemm", "bags"))
    return {
        "width": width,
        "batch": batch,
        "skew": skew,
        "ours_ms": ours["median_ms"],
        "ours_low_ms": ours["low_ms"],
        "ours_high_ms": ours["high_ms"],
        "fbgemm_ms": peer["median_ms"],
        "fbgemm_threads": threads,
        "embeddingbag_ms": bags["median_ms"],
        "ratio_fbgemm": peer["median_ms"] / ours["median_ms"],
        **default,
        "ratio_embeddingbag": bags["median_ms"] / ours["median_ms"],
    }


def against_default(
    pair: Contenders, width: int, skew: str, sizes: list[int], batches: list[torch.Tensor], gradient: torch.Tensor,
    rounds: int, most: int,
) -> dict[str, float]:  # fmt: skip
    """Ours and FBGEMM as installed, taking turns; both rest first, until the other's threads have stopped spinning."""
    plain = PlainPeer(sizes, width, pair.batch, skew, most)
    seconds: dict[str, list[float]] = {"ours": [], "fbgemm": []}
    for round_ in range(-2, rounds):
        for name in ("ours", "fbgemm") if round_ % 2 else ("fbgemm", "ours"):
            time.sleep(REST)
            if name == "fbgemm":
                taken = plain.step(round_ + 2)
            else:
                began = time.perf_counter()
                pair.step_ours(batches[round_ % 8], gradient)
                taken = time.perf_counter() - began
            if round_ >= 0:
                seconds[name].append(taken)
    plain.close()
    peer, ours = spread(seconds["fbgemm"])["median_ms"], spread(seconds["ours"])["median_ms"]
    return {"fbgemm_default_ms": peer, "ours_rested_ms": ours, "ratio_fbgemm_default": peer / ours}
