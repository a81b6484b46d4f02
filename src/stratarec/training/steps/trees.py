"""Fit the members of an ensemble that are boosted trees, while its networks train.

All members are fitted to the training split; the validation split determines their numbers of trees. The trees of the
first member see half of the features and four fifths of the samples. Those of the second member draw one threshold for
each feature (extremely randomized trees, Geurts et al. 2006), so the two err differently. Two more members have the
same settings with other seeds, and click rates in place of codes, which help for features with many values. The rate of
a training sample's value is computed without the tenth of the samples that contains the sample, so that no sample sees
its own label. The parameters are the result of simulations (`docs/log.md`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import TrainingError
from stratarec.io.atomic import storage_errors
from stratarec.kernels.trees import CATEGORIES
from stratarec.models.zoo.trees import RATED, TreeMembers
from stratarec.progress import Progress
from stratarec.recipe.train_section import TrainConfig

_BATCH = 1 << 16
# A click rate is that of a value's samples and of _STRENGTH samples with the mean rate, without one of _PARTS.
_STRENGTH, _PARTS = 3.0, 10


class TreeFit:
    """Fitting of trees in a second process (`tree_process.py`). Equal data and seeds give equal trees.

    Parameters
    ----------
    trees : TreeMembers
    dataset : Dataset
    config : TrainConfig
    """

    def __init__(self, trees: TreeMembers, dataset: Dataset, config: TrainConfig) -> None:
        self._trees, self._reason = trees, ""
        self._process: subprocess.Popen[bytes] | None = None
        for split, name in (("train", "training"), ("valid", "validation")):
            count = dataset.label_counts(split)[dataset.schema.label_column]
            if not 0 < count.positives < count.known:
                self._reason = f"the {name} split has no samples of one of the classes"
                return
        (positive,) = config.class_weights(dataset.schema.label_columns)
        train = _read(trees, dataset, "train", positive)
        if not train[0].shape[1]:
            self._reason = "there are no features"
            return
        tables = dataset.table_rows()
        sets = [
            place
            for place, feature in enumerate(dataset.schema.sparse)
            if feature.kind == "single" and tables[feature.vocabulary] < CATEGORIES
        ]
        _fit_rates(trees, *train, config.seed)
        # Files, because a pipe would make this process wait until the other one reads.
        with storage_errors(Path(gettempdir())), TemporaryFile() as file:
            self._output, self._errors = TemporaryFile(), TemporaryFile()  # noqa: SIM115
            splits = {"train": train, "valid": _read(trees, dataset, "valid", positive)}
            parts = ("rows", "label", "weight")
            arrays: dict[str, Any] = {
                f"{split}_{name}": array for split in splits for name, array in zip(parts, splits[split], strict=True)
            }
            np.savez(
                file, **arrays, sets=np.array(sets, np.int64), codes=len(trees.features), seed=config.seed,
                nodes=trees.nodes.cpu().numpy(), leaves=trees.leaves.cpu().numpy(),
            )  # fmt: skip
            file.seek(0)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            # Ctrl-C in a terminal reaches only this process, which then waits for the trees and saves a checkpoint.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stratarec.training.steps.tree_process"], stdin=file, stdout=self._output,
                stderr=self._errors, start_new_session=True, env=environment,
            )  # fmt: skip

    def finish(self, progress: Progress) -> None:
        """Wait for the trees and store them. Report how many there are, or why there are none."""
        if self._process is not None:
            if self._process.poll() is None:
                progress.say("waiting until LightGBM has fitted the trees of the ensemble")
            code = self._process.wait()
            self._errors.seek(0)
            if code:
                lines = self._errors.read().decode(errors="replace").split("\n")
                raise TrainingError(f"fitting trees by LightGBM ended with {code}: {' '.join(lines[-2:])[:500]}")
            self._output.seek(0)
            result = np.load(self._output)
            self._reason = str(result.get("reason", ""))
        if self._reason:
            progress.say(f"no trees are fitted: {self._reason}")
            return
        with torch.no_grad():
            self._trees.nodes.copy_(torch.from_numpy(result["nodes"]))
            self._trees.leaves.copy_(torch.from_numpy(result["leaves"]))
        counts = ", ".join(f"{count:,}" for count in result["counts"])
        progress.say(f"members of the ensemble that are boosted trees: {counts} trees")

    def close(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._output.close()
            self._errors.close()


@torch.no_grad()
def _fit_rates(
    trees: TreeMembers, rows: NDArray[np.float32], label: NDArray[np.float32], weight: NDArray[np.float32], seed: int
) -> None:
    """Set the click rates of codes, and in `rows` replace the rate of each sample by that without its part."""
    part = np.random.default_rng(seed).integers(0, _PARTS, len(rows))
    clicks, mean = label * weight, np.average(label, weights=weight)
    for place, (_, is_list) in enumerate(trees.features):
        if is_list:
            continue
        code = np.where(rows[:, place] < RATED, rows[:, place], 0).astype(np.int64)
        own, known = (sums_of_other_parts(code, part, column) for column in (clicks, weight))
        rows[:, place - len(trees.features)] = (own + _STRENGTH * mean) / (known + _STRENGTH)
        positives, samples = (np.bincount(code, column, RATED) for column in (clicks, weight))
        trees.rates[place] = torch.from_numpy((positives + _STRENGTH * mean) / (samples + _STRENGTH))


def sums_of_other_parts(code: NDArray[Any], part: NDArray[Any], column: NDArray[Any]) -> NDArray[np.float64]:
    """Return for each sample the sum of a column over the samples with its code that are in other parts."""
    both = part * (code.max(initial=0) + 1) + code
    sums: NDArray[np.float64] = np.bincount(code, column)[code] - np.bincount(both, column)[both]
    return sums


def _read(
    trees: TreeMembers, dataset: Dataset, split: str, positive: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return the numbers that trees compare, the labels and the weights of all samples of a split."""
    loader = Loader(dataset, split, LoaderConfig(batch_size=_BATCH, shuffle=False, unit="sample", expand=True))
    parts = [
        (
            trees.columns(batch.dense, batch.sparse), batch.label.cpu().numpy(),
            (torch.ones_like(batch.label) if batch.weight is None else batch.weight).cpu().numpy(),
        )
        for batch in loader.epoch(0)
    ]  # fmt: skip
    rows, label, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
    return rows, label, np.where(label > 0, weight * np.float32(positive), weight)
