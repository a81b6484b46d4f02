"""The same embedding tables in three libraries: StrataRec, FBGEMM's CPU operator and
`torch.nn.EmbeddingBag`.

FBGEMM's operator is called directly (`SplitTableBatchedEmbeddingBagsCodegen`, which TorchRec's
fused `EmbeddingBagCollection` calls), so TorchRec's overhead is excluded. `EmbeddingBag` uses
sparse gradients and SGD, its cheapest sparse optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.registry import import_peer
from benchmarks.timing import alternate
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.sources.synthetic import EXPONENT
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, TieredEmbeddingBagCollection

RATE, EPS = 0.02, 1e-8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the tables, and distribution of the ids that are looked up."""

    sizes: Sequence[int]
    """Number of rows of each table; each table has one feature."""
    width: int
    batch: int
    ids: int = 1
    """Mean number of ids in a bag; if more than 1, bags have between 0 and twice as many."""
    mean: bool = False
    skew: str | float = "criteo"
    """Distribution of the ids: `uniform`, `criteo`, or the exponent of Zipf's law. Frequent rows
    come first, as after `prepare`."""

    def bags(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return the ids and the ``[F B + 1]`` offsets of a batch, both int64."""
        draws = np.random.default_rng(seed)
        lengths = np.ones((len(self.sizes), self.batch), dtype=np.int64)
        if self.ids > 1:
            lengths = draws.integers(0, 2 * self.ids + 1, lengths.shape)
        parts = [
            np.minimum(rows * self._places(draws.random(int(count)), rows), rows - 1).astype(np.int64)
            for rows, count in zip(self.sizes, lengths.sum(1), strict=True)
        ]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return torch.from_numpy(np.concatenate(parts)), torch.from_numpy(offsets)

    def _places(self, draws: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
        """Map uniform draws to relative positions (0 to 1) in a table of `rows` rows."""
        if isinstance(self.skew, str):
            places: NDArray[np.float64] = draws ** (1.0 if self.skew == "uniform" else EXPONENT)
            return places
        rest = 1 - self.skew
        if abs(rest) < 1e-6:
            return ((rows + 1) ** draws - 1) / rows
        return ((((rows + 1) ** rest - 1) * draws + 1) ** (1 / rest) - 1) / rows


def build_fbgemm(shape: Shape) -> Any:
    """Build FBGEMM's CPU operator with the tables of `shape`."""
    fbgemm = import_peer("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = import_peer("fbgemm_gpu.split_embedding_configs")
    pooling = import_peer("fbgemm_gpu.split_table_batched_embeddings_ops_common").PoolingMode
    place = (fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)
    return fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, shape.width, *place) for rows in shape.sizes],
        optimizer=common.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=pooling.MEAN if shape.mean else pooling.SUM,
        learning_rate=RATE,
        eps=EPS,
    )


class Contenders:
    """The same tables in three libraries, and batches that the steps cycle through."""

    def __init__(self, shape: Shape, batches: int = 8) -> None:
        self.shape = shape
        self.keys = tuple(f"f{i}" for i in range(len(shape.sizes)))
        self.batches = [shape.bags(seed) for seed in range(batches)]
        self.gradient = torch.randn(shape.batch, len(shape.sizes) * shape.width) * 1e-3
        pooling = "mean" if shape.mean else "sum"
        self.ours = TieredEmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=key,
                    num_embeddings=rows,
                    embedding_dim=shape.width,
                    feature_names=(key,),
                    pooling=pooling,
                )
                for key, rows in zip(self.keys, shape.sizes, strict=True)
            ],
            optimizer=RowOptimizerConfig(learning_rate=RATE, eps=EPS),
        )
        self.fbgemm = build_fbgemm(shape)
        for key, weight in zip(self.keys, self.fbgemm.split_embedding_weights(), strict=True):
            weight.copy_(self.ours.table(key)["weight"])

    @cached_property
    def bags(self) -> list[torch.nn.EmbeddingBag]:
        """Tables of torch, with their own initial weights; built on first use."""
        mode = "mean" if self.shape.mean else "sum"
        return [
            torch.nn.EmbeddingBag(rows, self.shape.width, mode=mode, sparse=True)
            for rows in self.shape.sizes
        ]

    @cached_property
    def sgd(self) -> torch.optim.SGD:
        """Optimizer of `bags`."""
        return torch.optim.SGD([bag.weight for bag in self.bags], lr=RATE)

    def step_ours(self, step: int) -> Tensor:
        ids, offsets = self.batches[step % len(self.batches)]
        starts = None if self.shape.ids == 1 else offsets
        jagged = KeyedJagged(keys=self.keys, values=ids, offsets=starts, batch_size=self.shape.batch)
        pooled = self.ours(jagged).pooled
        pooled.backward(self.gradient)
        return pooled

    def step_fbgemm(self, step: int) -> Tensor:
        pooled: Tensor = self.fbgemm(*self.batches[step % len(self.batches)])
        pooled.backward(self.gradient)
        return pooled

    def step_bags(self, step: int) -> None:
        self.sgd.zero_grad()
        ids, offsets = self.batches[step % len(self.batches)]
        batch, parts = self.shape.batch, []
        for f, bag in enumerate(self.bags):
            starts = offsets[f * batch : (f + 1) * batch + 1]
            parts.append(bag(ids[starts[0] : starts[-1]], starts[:-1] - starts[0]))
        torch.cat(parts, dim=1).backward(self.gradient)
        self.sgd.step()

    def agree(self, steps: int = 10) -> None:
        """Check that outputs and weights of StrataRec and FBGEMM agree over some steps."""
        for step in range(steps):
            torch.testing.assert_close(self.step_ours(step), self.step_fbgemm(step), rtol=1e-5, atol=1e-5)
        for key, weight in zip(self.keys, self.fbgemm.split_embedding_weights(), strict=True):
            torch.testing.assert_close(self.ours.table(key)["weight"], weight, rtol=1e-5, atol=1e-5)


def best_threads(step: Callable[[int], object], most: int, rounds: int = 5) -> int:
    """Return the number of threads, up to `most`, with the fastest steps."""
    seconds = {}
    for threads in range(1, most + 1):
        torch.set_num_threads(threads)
        seconds[threads] = median(alternate({"peer": step}, rounds)["peer"])
    torch.set_num_threads(most)
    return min(seconds, key=lambda threads: seconds[threads])


def on_threads(step: Callable[[int], object], threads: int) -> Callable[[int], None]:
    """Wrap `step` so that it runs on `threads` threads."""

    def run(number: int) -> None:
        most = torch.get_num_threads()
        torch.set_num_threads(threads)
        step(number)
        torch.set_num_threads(most)

    return run
