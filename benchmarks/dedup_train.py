"""Training on deduplicated batches compared with the same model and batch size without
deduplication.

One side reads the data set with groups, shuffled in runs; the other reads the data set without
groups, shuffled by sample. Loading is part of the step. Both sides alternate in stretches of equal
numbers of samples, because stretches of a few short steps are too noisy. `dedup_quality` compares
the quality of the models.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.sessions import pair, recipe, with_run
from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dedup_groups import GroupMode
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.models.request import Request
from stratarec.training.torch_setup import torch_settings
from stratarec.training.trainer import Trainer

LIMIT = 1e-3


class Side:
    """A run and an endless iteration over its data."""

    def __init__(self, name: str, dataset: Dataset, folder: str, *fields: str) -> None:
        groups: GroupMode = "auto" if dataset.deduplicated else "none"
        recipe_of_side = recipe(name, groups, *fields)
        self.run = Trainer(with_run(recipe_of_side, Path(folder) / f"{name}-{groups}"), dataset).build()
        self.step = 0
        self.batches = self._forever()

    def _forever(self) -> Iterator[tuple[Batch, Request]]:
        epoch = 0
        while True:
            yield from self.run.pipeline.load(epoch)
            epoch += 1

    def steps(self, count: int) -> float:
        """Run `count` steps and return the seconds per step."""
        began = time.perf_counter()
        for item in islice(self.batches, count):
            self.run.pipeline.train(self.step, *item)
            self.step += 1
        return (time.perf_counter() - began) / count

    def saved_bytes(self) -> int:
        """Return the bytes that autograd saves for backward in one step."""
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        item = next(self.batches)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.run.model(*item)
        return sum(storages.values())


def gate(name: str, folder: str, *fields: str) -> None:
    """Check that a deduplicated batch and its expansion give bitwise equal pooled vectors and close
    logits.
    """
    grouped, _ = pair(name)
    side = Side(name, grouped, folder, *fields)
    keys = tuple(feature.name for feature in grouped.schema.sparse)
    stream = Loader(grouped, "train", LoaderConfig(batch_size=4096)).epoch(0)
    with torch.no_grad():
        for batch in islice(stream, 5):
            model = side.run.model
            _, pooled, _, runs = model.vectors(batch, model.request(batch))
            if runs is not None:
                pooled = runs.expand(pooled.view(batch.size, -1, model.network.width)).flatten(1)
            plain = batch.expanded(keys)
            if not torch.equal(pooled, model.embeddings(plain.sparse).pooled):
                raise AssertionError(
                    f"{name}, {fields}: pooled vectors of distinct values differ from expanded ones"
                )
            difference = float((model(batch) - model(plain)).abs().max())
            if difference > LIMIT:
                raise AssertionError(
                    f"{name}, {fields}: logits differ by {difference}, expected at most {LIMIT}"
                )
    stream.close()  # type: ignore[attr-defined]


def cell(name: str, pooling: str, rounds: int, samples: int, precision: str = "float32") -> dict[str, Any]:
    """Measure one kind of pooling, in stretches of `samples` samples."""
    grouped, plain = pair(name)
    fields = (f"model.history.pooling={pooling}", f"train.precision={precision}")
    with tempfile.TemporaryDirectory() as folder:
        gate(name, folder, *fields)
        sides = {
            key: Side(name, data, folder, *fields) for key, data in (("ours", grouped), ("plain", plain))
        }
        saved = {key: side.saved_bytes() for key, side in sides.items()}
        size = sides["ours"].run.config.batch_size
        stretch = samples // size
        seconds: dict[str, list[float]] = {key: [] for key in sides}
        for round_ in range(-1, rounds):
            for key in list(sides) if round_ % 2 else list(reversed(sides)):
                spent = sides[key].steps(stretch)
                seconds[key] += [spent] if round_ >= 0 else []
        for side in sides.values():
            side.batches.close()  # type: ignore[attr-defined]
    return {
        "log": name,
        "pooling": pooling,
        "precision": precision,
        "batch": size,
        "ours_samples_s": size / median(seconds["ours"]),
        "plain_samples_s": size / median(seconds["plain"]),
        "ratio": median(b / a for a, b in zip(seconds["ours"], seconds["plain"], strict=True)),
        "ours_saved_mib": saved["ours"] / 2**20,
        "plain_saved_mib": saved["plain"] / 2**20,
    }


@torch_settings()
def run(quick: bool) -> dict[str, Any]:
    """Measure Globo for the metrics; also the mean in bf16, and Trivago. `quick` runs a few steps
    of Globo.
    """
    rounds, samples = (2, 40_000) if quick else (8, 120_000)
    kinds = [("globo", pooling, "float32") for pooling in ("transformer", "mean", "target_attention")]
    if not quick:
        kinds += [
            ("globo", "mean", "bf16"),
            ("trivago", "transformer", "float32"),
            ("trivago", "mean", "float32"),
        ]
    rows = [cell(name, pooling, rounds, samples, precision) for name, pooling, precision in kinds]
    names = ["_".join(part for part in kind if part not in ("globo", "float32")) for kind in kinds]
    return {
        "config": {"recipes": ["globo", "trivago"], "history_length": 50, "negatives": 4},
        "metrics": {f"ratio_{name}": row["ratio"] for name, row in zip(names, rows, strict=True)},
        "samples": {"rows": rows},
    }
