"""A whole DLRM training step, including data loading, compared with TorchRec training the same
architecture.

Both sides read the same data set through the same loader (TorchRec's side converts each batch to a
`KeyedJaggedTensor` without a copy), with the same batch size, threads and precision. Both use
torch's fused dense Adagrad and exact row-wise Adagrad on the tables. They alternate in stretches of
steps. All is repeated with batch normalization and dropout in all hidden layers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers import TorchRecDLRM, fused_collection
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.embedding import EmbeddingBagConfig, Prefetcher, RowOptimizerConfig
from stratarec.embedding.tiers import TierConfig
from stratarec.models import CTRModel, DLRMConfig, build_model
from stratarec.models.base import build_tables
from stratarec.training.torch_setup import bf16_slowness

RATE, EPS = 0.02, 1e-8
BOTTOM, TOP = (512, 256), (512, 256)
DROPOUT = 0.2
# Limits for differences of losses: rounding in the first steps, later its growth.
_FIRST_STEPS, _FIRST, _LATER, _LATER_BF16, _NORMALIZED = 3, 1e-5, 1e-3, 2e-2, 5


@dataclass(frozen=True)
class Shape:
    """Settings of one row of the table."""

    width: int
    batch: int
    precision: str
    regularized: bool = False
    """Whether the model has batch normalization and dropout."""


class Side:
    """A model with its dense optimizer and an endless iteration over the data; `lookahead` stages
    batches ahead.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        precision: str,
        lookahead: int = 0,
    ) -> None:
        self.model = model
        self.loader = loader
        self.precision = precision
        self.optimizer = optimizer
        self.batches: Iterator[tuple[Any, ...]] = self._forever()
        self.staging = ExitStack()
        self.staging.callback(self.batches.close)  # type: ignore[attr-defined]
        if isinstance(model, CTRModel) and lookahead:
            source = Prefetcher(
                model.embeddings.engine, self.batches, lambda item, _: item[1].features, depth=lookahead
            )
            ahead = self.staging.enter_context(source)
            self.batches = ((*item, handle) for item, handle in ahead)

    def close(self) -> None:
        """Stop the threads that read and stage batches ahead."""
        self.staging.close()

    def _forever(self) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the model, epoch after epoch."""
        epoch = 0
        while True:
            for batch in self.loader.epoch(epoch):
                yield (batch, self.model.request(batch)) if isinstance(self.model, CTRModel) else (batch,)
            epoch += 1

    def step(self) -> float:
        batch, *rest = next(self.batches)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            logits: Tensor = self.model(batch, *rest)
        loss = functional.binary_cross_entropy_with_logits(logits, batch.label)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


class Products:
    """Matrix products of a training step: a bound on the speed of the step if everything else took
    no time.

    Each layer has one product forward and two backward, as has the interaction of vectors. Operands
    stay the same, so that even their memory traffic is free.
    """

    def __init__(self, network: nn.Module, batch: int, vectors: int, width: int) -> None:
        first = next(layer for layer in network.modules() if isinstance(layer, nn.Linear))
        self.layers = []
        for layer in (each for each in network.modules() if isinstance(each, nn.Linear)):
            values, gradient = torch.randn(batch, layer.in_features), torch.randn(batch, layer.out_features)
            self.layers.append((values, layer.weight.detach(), gradient, layer is not first))
        self.vectors = torch.randn(batch, vectors, width)
        self.pairs = torch.randn(batch, vectors, vectors)

    def close(self) -> None:
        """Do nothing, because no thread runs."""

    def step(self) -> float:
        with torch.no_grad():
            for values, weight, gradient, onward in self.layers:
                functional.linear(values, weight)
                gradient.T @ values
                if onward:
                    gradient @ weight
            self.vectors @ self.vectors.transpose(1, 2)
            # the matrix of pairs is symmetric: one product is the gradient of both sides
            self.pairs @ self.vectors
        return 0.0


def copy_dense(ours: CTRModel, theirs: TorchRecDLRM) -> None:
    """Copy the weights of the network to TorchRec's network."""
    source = [layer for layer in ours.network.modules() if isinstance(layer, nn.Linear)]
    dense = [*theirs.dlrm.dense_arch.modules(), *theirs.dlrm.over_arch.modules()]
    target = [layer for layer in dense if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for one, other in zip(source, target, strict=True):
            other.weight.copy_(one.weight)
            if one.bias is None:  # before a normalization
                other.bias.zero_()
            else:
                other.bias.copy_(one.bias)
        # TorchRec lists the pairs of the upper triangle, StrataRec those of the lower triangle.
        vectors = len(ours.embeddings.pooled_keys) + 1
        rows, columns = torch.triu_indices(vectors, vectors, offset=1)
        order = columns * (columns - 1) // 2 + rows
        top = next(layer for layer in theirs.dlrm.over_arch.modules() if isinstance(layer, nn.Linear))
        width = ours.embeddings.dims[0]
        top.weight[:, width:] = top.weight[:, width:][:, order]


def sides(
    dataset: Dataset, shape: Shape, dense_optimizer: type[torch.optim.Optimizer], dropout: float = 0.0
) -> dict[str, Side]:
    """Build both models with the same weights."""
    width = shape.width
    config = DLRMConfig(
        embedding_dim=width,
        bottom_mlp=BOTTOM,
        top_mlp=TOP,
        pooling="sum",
        dropout=dropout,
        batch_norm=shape.regularized,
    )
    ours = build_model(
        config,
        dataset.schema,
        dataset.table_rows(),
        optimizer=RowOptimizerConfig(learning_rate=RATE, eps=EPS),
    )
    tables = list(ours.embeddings.tables)
    initial = {table.name: ours.embeddings.table(table.name)["weight"] for table in tables}
    collection = fused_collection(tables, rate=RATE, eps=EPS, initial=initial)
    theirs = TorchRecDLRM(collection, len(dataset.schema.dense), [*BOTTOM, width], [*TOP, 1])
    copy_dense(ours, theirs)
    if shape.regularized:
        theirs.regularize(dropout)
    loader = Loader(dataset, "train", LoaderConfig(batch_size=shape.batch))
    dense = [*theirs.dlrm.dense_arch.parameters(), *theirs.dlrm.over_arch.parameters()]

    def make(weights: Any) -> torch.optim.Optimizer:
        return dense_optimizer(weights, lr=0.01, fused=True)  # type: ignore[call-arg]

    return {
        "ours": Side(ours, make(ours.network.parameters()), loader, shape.precision),
        "torchrec": Side(theirs, make(dense), loader, shape.precision),
    }


def gate(dataset: Dataset, shape: Shape, steps: int = 20) -> float:
    """Check that both models train to the same losses, with plain SGD on the network and without
    dropout.

    Dropout masks differ between the libraries. Adagrad's first step is the sign of the gradient,
    which is random where the gradient is rounding noise: the network uses SGD, and the limits allow
    for Adagrad on the rows. Losses of the first steps agree to rounding; later differences grow,
    five times as fast with batch normalization. Different models would diverge at once. A test of
    the suite checks that the engines agree to 1e-5.
    """
    pair = sides(dataset, shape, torch.optim.SGD)
    differences = [abs(pair["ours"].step() - pair["torchrec"].step()) for _ in range(steps)]
    exact = shape.precision == "float32"
    first, later = (_FIRST if exact else _LATER_BF16), (_LATER if exact else _LATER_BF16)
    for difference, limit in (
        (max(differences[:_FIRST_STEPS]), first),
        (max(differences), later * (_NORMALIZED if shape.regularized else 1)),
    ):
        if difference > limit:
            raise AssertionError(f"losses differ by {difference}, expected at most {limit}")
    return max(differences)


TiersOf = Callable[[Sequence[EmbeddingBagConfig]], TierConfig]


def tiered_sides(
    dataset: Dataset, width: int, batch: int, contenders: Mapping[str, TiersOf | None]
) -> dict[str, Side]:
    """Build the model with several tiers and the same weights; None means float32 in DRAM."""
    config = DLRMConfig(embedding_dim=width, bottom_mlp=BOTTOM, top_mlp=TOP, pooling="sum")
    rows = RowOptimizerConfig(learning_rate=RATE, eps=EPS)
    tables = build_tables(config, dataset.schema, dataset.table_rows())
    loader = Loader(dataset, "train", LoaderConfig(batch_size=batch))
    sides_of = {}
    for name, tiers_of in contenders.items():
        tiers = tiers_of(tables) if tiers_of else None
        model = build_model(config, dataset.schema, dataset.table_rows(), optimizer=rows, tiers=tiers)
        dense = torch.optim.Adagrad(model.network.parameters(), lr=0.01, fused=True)
        sides_of[name] = Side(model, dense, loader, "float32", tiers.lookahead if tiers else 0)
    return sides_of


def take_turns(
    pair: Mapping[str, Side | Products], rounds: int, stretch: int, warmup: int
) -> dict[str, list[float]]:
    """Return seconds per step, in alternating stretches; the order is reversed every other
    round.
    """
    for side in pair.values():
        for _ in range(warmup):
            side.step()
    seconds: dict[str, list[float]] = {name: [] for name in pair}
    for round_ in range(rounds):
        for name in list(pair) if round_ % 2 else list(reversed(pair)):
            began = time.perf_counter()
            for _ in range(stretch):
                pair[name].step()
            seconds[name].append((time.perf_counter() - began) / stretch)
    return seconds


def loader_speed(dataset: Dataset, batch: int, seconds: float = 5.0) -> float:
    """Return the samples per second of the loader alone."""
    loader = Loader(dataset, "train", LoaderConfig(batch_size=batch))
    began = time.perf_counter()
    samples = 0
    while time.perf_counter() - began < seconds:
        for step in loader.epoch(0):
            samples += step.size
            if time.perf_counter() - began >= seconds:
                break
    return samples / (time.perf_counter() - began)


def cell(dataset: Dataset, shape: Shape, rounds: int, stretch: int) -> dict[str, Any]:
    """Measure one row of the table."""
    difference, batch = gate(dataset, shape), shape.batch
    pair = sides(dataset, shape, torch.optim.Adagrad, DROPOUT if shape.regularized else 0.0)
    network = pair["ours"].model.network
    vectors = len(pair["ours"].model.embeddings.pooled_keys) + 1
    turns: dict[str, Side | Products] = {**pair}
    if shape.precision == "float32":
        turns["products"] = Products(network, batch, vectors, shape.width)  # type: ignore[arg-type]
    seconds = take_turns(turns, rounds, stretch, warmup=3)
    for side in pair.values():
        side.close()
    ours, theirs = median(seconds["ours"]), median(seconds["torchrec"])
    # The ratio if everything but the products took no time.
    most = (
        {}
        if "products" not in seconds
        else {
            "products_ms": 1e3 * median(seconds["products"]),
            "most": theirs / median(seconds["products"]),
        }
    )
    return {
        **asdict(shape),
        "ours_ms": 1e3 * ours,
        "torchrec_ms": 1e3 * theirs,
        "ours_samples_s": batch / ours,
        "torchrec_samples_s": batch / theirs,
        "ratio": theirs / ours,
        **most,
        "loss_difference": difference,
        "loader_headroom": loader_speed(dataset, batch) * ours / batch,
    }


def run(quick: bool) -> dict[str, Any]:
    """Measure D = 16 at batch 2,048 and D = 64 at batch 4,096, in float32, and in bf16 if the
    processor supports it.
    """
    slowness = bf16_slowness()
    precisions = ("float32", "bf16") if slowness < 1 else ("float32",)
    samples, cap = (300_000, 20_000) if quick else (2_000_000, 1_000_000)
    source = SyntheticConfig(
        samples=samples, scale=1.0, max_rows=cap, session_length=1.0, missing=0.0, seed=7
    )
    with tempfile.TemporaryDirectory() as folder:
        config = PrepareConfig(
            source=source,
            path=str(Path(folder) / "data"),
            vocabulary=VocabularyConfig(min_count=1, tail_buckets=16),
        )
        dataset = prepare(config)
        rows = [
            cell(
                dataset,
                Shape(width, batch, precision, regularized),
                4 if quick else 10,
                stretch=5 if quick else 10,
            )
            for regularized in (False, True)
            for width, batch in ((16, 2048), (64, 4096))
            for precision in precisions
        ]
        tables = dataset.table_rows()
    plain, regularized = ([row for row in rows if row["regularized"] == each] for each in (False, True))
    config = {
        "bottom": BOTTOM,
        "top": TOP,
        "tables": tables,
        "samples": samples,
        "dense_optimizer": "Adagrad",
    }
    return {
        "config": {**config, "bf16_slowness": slowness},
        "metrics": {
            "ratio_torchrec": min(row["ratio"] for row in plain),
            **{
                f"ratio_torchrec_{each}": min(row["ratio"] for row in plain if row["precision"] == each)
                for each in precisions
            },
            "products_share": max(row["products_ms"] / row["ours_ms"] for row in plain if "most" in row),
            "ratio_torchrec_most": min(row["most"] for row in plain if "most" in row),
            "ratio_torchrec_regularized": min(row["ratio"] for row in regularized),
            "ratio_regularized_plain": min(
                one["ratio"] / other["ratio"] for one, other in zip(regularized, plain, strict=True)
            ),
            "loader_headroom": min(row["loader_headroom"] for row in rows),
        },
        "samples": {"rows": rows},
    }
