"""Fit the members of an ensemble that are boosted trees, while its networks train.

All members are fitted to the training split; the validation split determines their numbers of
trees. Two members are regularized strongly and lightly, because the former are better on small logs
and the latter on logs with sharp effects. A third draws one threshold for each feature (extremely
randomized trees, Geurts et al. 2006), so that it errs differently. These compare codes. A fourth,
with the settings of the third, has click rates in place of codes, which help for features with many
values, the fifth has codes and click rates, and the sixth also has click rates of pairs of columns
(`pair_rates.py`). It has no trees if no pair says more than its columns. The rate of a training
sample's value is computed without the tenth of the samples that contains the sample, so that no
sample sees its own label. The parameters are the result of simulations (`docs/log.md`).
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
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
from stratarec.kernels.runtime.cores import memory_bytes
from stratarec.kernels.trees.sums import NODE_FIELDS, TREE_FIELDS
from stratarec.models.zoo.trees import LEAVES, PAIR_ARRAYS, RATED, TreeMembers, TreeSizes
from stratarec.progress import Progress
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.steps.pair_rates import PAIRS, Labels
from stratarec.training.steps.tree_process import MEMBERS

Doubles = NDArray[np.float64]
_BATCH = 1 << 16
# Copies of the samples in memory: of this process, of the other one, and that from which LightGBM
# makes bins.
_COPIES = 3
# Python adds the working directory to the path, where any file may have the name of a module.
_START = (
    "import sys; sys.path = [folder for folder in sys.path if folder]; "
    "from stratarec.training.steps.tree_process import main; main()"
)


class TreeFit:
    """Fitting of trees in a second process (`tree_process.py`). Equal data and seeds give equal
    trees.

    Parameters
    ----------
    trees : TreeMembers
        Trees of an ensemble, which receive the fitted trees.
    dataset : Dataset
        Data set with the training and validation samples.
    config : TrainConfig
        Limits of the trees, seed and number of threads.
    growth : float
        If positive, the trees are fitted again to more samples, without validation. Each member
        gets this multiple of the number of trees that it has.
    """

    def __init__(
        self, trees: TreeMembers, dataset: Dataset, config: TrainConfig, *, growth: float = 0.0
    ) -> None:
        self._trees = trees
        self._reason = ""
        self._seconds = config.tree_seconds
        self._is_required = bool(growth)
        self._process: subprocess.Popen[bytes] | None = None
        (positive,) = config.class_weights(dataset.schema.label_columns)
        size, most = _COPIES * 4 * dataset.samples("train") * (trees.width + PAIRS), memory_bytes() // 2
        if size > most:
            self._reason = (
                f"their samples take {size / 2**30:,.1f} GiB, more than half of the memory "
                f"({2 * most / 2**30:,.1f} GiB)"
            )
            return
        train = _read(trees, dataset, "train", positive)
        if not _has_both_classes(*train):
            self._reason = "the training split has no samples of one of the classes"
            return
        if not train[0].shape[1]:
            self._reason = "there are no features"
            return
        tables = dataset.table_rows()
        sets = [
            place
            for place, feature in enumerate(dataset.schema.sparse)
            if feature.kind == "single" and tables[feature.vocabulary] < RATED
        ]
        counts = trees.counts
        rated = min(max(tables.values(), default=0) + 1, RATED)
        pairs = trees.of_pairs() if growth else None
        trees.resize(TreeSizes(rated=rated))
        _fit_rates(trees, train[0], Labels(*train[1:], config.seed))
        splits = {"train": train}
        if not growth:
            splits["valid"] = _read(trees, dataset, "valid", positive)  # with click rates
            if not _has_both_classes(*splits["valid"]):
                trees.resize(TreeSizes())
                lacking = (
                    "no samples of one of the classes" if splits["valid"][2].any() else "only weights of 0"
                )
                self._reason = f"the validation split has {lacking}"
                return
        # A file, because a pipe would make this process wait until the other one reads.
        with storage_errors(Path(gettempdir())), TemporaryFile() as file:
            parts = ("rows", "label", "weight")
            arrays: dict[str, Any] = {
                f"{split}_{name}": array
                for split in splits
                for name, array in zip(parts, splits[split], strict=True)
            }
            if pairs is not None:
                arrays |= {"pairs": pairs.pairs, "edges": pairs.edges}
            np.savez(
                file,
                **arrays,
                sets=np.array(sets, np.int64),
                seed=config.seed,
                categorical=np.array([not is_list for _, is_list in trees.features], np.bool_),
                num_leaves=LEAVES,
                seconds=config.tree_seconds,
                most=trees.most,
                rounds=np.rint(growth * counts).astype(np.int64),
            )
            file.seek(0)
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)
                ),
                # NumPy's products, which choose pairs, have the same bits on any machine, and leave
                # cores to networks.
                "OPENBLAS_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            }
            # Ctrl-C in a terminal reaches only this process, which then waits for the trees and
            # saves a checkpoint.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=environment,
            )
        # Read into memory by a thread, because the disk may be full when the trees are complete.
        self._reader = ThreadPoolExecutor(1)
        self._written = self._reader.submit(self._process.communicate)

    @property
    def is_running(self) -> bool:
        """Whether the process still fits trees."""
        return self._process is not None and not self._written.done()

    def finish(self, progress: Progress) -> str:
        """Wait for the trees and store them. Report how many there are, or why there are none.

        Returns
        -------
        str
            Why another run may have other trees; empty if it has the same.
        """
        difference = ""
        if self._process is not None:
            if self.is_running:
                progress.say("waiting until LightGBM has fitted the trees of the ensemble")
            result, difference = self._result()
            self._reason = difference or str(result.get("reason", ""))
            if not self._reason:
                self._store(result)
            if limited := int(result.get("limited", np.zeros(0)).sum()):
                difference = (
                    f"train.tree_seconds ({self._seconds:g} s) ended the fit of {limited} members of trees"
                )
                if not len(self._trees.trees):
                    self._reason = (
                        f"train.tree_seconds is {self._seconds:g}, which is over before a tree; raise it"
                    )
        if self._reason:
            progress.say(f"no trees are fitted: {self._reason}")
        else:
            counts = ", ".join(f"{count:,}" for count in self._trees.counts)
            progress.say(f"members of the ensemble that are boosted trees: {counts} trees")
        return difference

    def _result(self) -> tuple[Mapping[str, NDArray[Any]], str]:
        """Return the arrays that the process wrote, or an empty mapping and the reason if it had
        too little memory.
        """
        assert self._process is not None
        output, errors = self._written.result()
        if not (code := self._process.returncode):
            return np.load(io.BytesIO(output)), ""
        last = " ".join(errors.decode(errors="replace").split("\n")[-2:])[:500]
        reason = f"LightGBM ended with {code}: {last or 'killed by a signal'}"
        has_memory = code > 0 and not re.search("MemoryError|bad_alloc", reason)
        if has_memory or self._is_required:
            raise TrainingError(f"fitting trees by {reason.rstrip()}; model.trees=0 trains without trees")
        # No step of the networks is lost. The system sends SIGKILL to processes that need too much
        # memory.
        return {}, f"{reason.rstrip()} (memory was probably full)"

    @torch.no_grad()
    def _store(self, result: Mapping[str, NDArray[Any]]) -> None:
        """Store the trees of members (text of LightGBM), and the click rates that they compare."""
        codes = len(self._trees.features)
        models = [model.decode() for model in result["models"].tolist()]
        arrays = {name: result[name] for name in PAIR_ARRAYS}
        arrays |= read_models(models, [codes if member.inputs == "rates" else 0 for member in MEMBERS])
        rates = self._trees.rates
        lengths = {name: len(array) for name, array in arrays.items() if name != "leaves"}
        self._trees.resize(TreeSizes(**lengths, rated=rates.shape[1]))
        self._trees.rates.copy_(rates)
        for name, array in arrays.items():
            getattr(self._trees, name).copy_(torch.from_numpy(array))

    def close(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._reader.shutdown()


def _has_both_classes(
    _rows: NDArray[np.float32], label: NDArray[np.float32], weight: NDArray[np.float32]
) -> bool:
    return {0.0, 1.0} <= set(np.unique(label[weight > 0]).tolist())


@torch.no_grad()
def _fit_rates(trees: TreeMembers, rows: NDArray[np.float32], labels: Labels) -> None:
    """Set the trees' click rates of codes, and those of the training samples `rows`.

    The rate of a sample is that of its code in the other parts of the samples.
    """
    rated = trees.sizes.rated
    for place, (_, is_list) in enumerate(trees.features):
        if is_list:
            continue
        code = np.where(rows[:, place] < rated, rows[:, place], 0).astype(np.int64)
        rates = labels.rates(code, rated)
        rows[:, place - len(trees.features)] = rates.by_sample
        trees.rates[place] = torch.from_numpy(rates.by_code)


def _read(
    trees: TreeMembers, dataset: Dataset, split: str, positive: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return the numbers that trees compare, except rates of pairs, the labels and the weights of
    all samples of a split.
    """
    loader = Loader(
        dataset, split, LoaderConfig(batch_size=_BATCH, shuffle=False, unit="sample", expand=True)
    )
    samples, width = dataset.samples(split), 2 * len(trees.features) + trees.dense
    rows = np.empty((samples, width), np.float32)
    label, weight, end = np.empty(samples, np.float32), np.ones(samples, np.float32), 0
    for batch in loader.epoch(0):
        place = slice(end, end := end + len(batch.label))
        rows[place] = trees.columns(batch.dense, batch.sparse)[:, :width]
        label[place] = batch.label.cpu().numpy()
        if batch.weight is not None:
            weight[place] = batch.weight.cpu().numpy()
    return rows, label, np.where(label > 0, weight * np.float32(positive), weight)


def read_models(models: Sequence[str], firsts: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    """Return the arrays of `kernels/trees/sums.py`, by name, for the models of members, which
    LightGBM wrote as text.

    Parameters
    ----------
    models : sequence of str
        Empty for a member without trees.
    firsts : sequence of int
        Place of each member's first column.
    """
    trees = []
    nodes = [np.zeros((0, NODE_FIELDS))]
    sets = [np.zeros(0)]
    leaves = [np.zeros(0)]
    place = 0  # number of codes so far
    for member, (model, first) in enumerate(zip(models, firsts, strict=True)):
        for text in model.split("\nTree=")[1:]:
            fields = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
            tree, tree_sets, tree_leaves = _read_tree(fields, first, place)
            place += len(tree_sets)
            trees.append((member, len(tree)))
            nodes.append(tree)
            sets.append(tree_sets)
            leaves.append(tree_leaves)
    parts: dict[str, list[NDArray[Any]]] = {
        "trees": [np.reshape(trees, (-1, TREE_FIELDS))],
        "nodes": nodes,
        "sets": sets,
        "leaves": leaves,
    }
    return {name: np.concatenate(arrays).astype(np.float32) for name, arrays in parts.items()}


def _read_tree(fields: Mapping[str, str], column: int, place: int) -> tuple[Doubles, NDArray[Any], Doubles]:
    """Return nodes, sets and leaves of a tree.

    Parameters
    ----------
    fields : mapping
        Content of LightGBM's text, by name.
    column : int
        Place of the first column that the tree compares.
    place : int
        Number of codes in the sets of earlier trees.
    """

    def numbers(name: str, kind: Any = np.float64) -> NDArray[Any]:
        return np.array(fields.get(name, "").split(), dtype=kind)

    leaves, feature = numbers("leaf_value"), numbers("split_feature") + column
    if not len(feature):  # a constant
        return np.zeros((0, NODE_FIELDS)), np.zeros(0), leaves
    threshold, is_set = numbers("threshold"), (numbers("decision_type", np.int64) & 1) > 0
    # Rounded down, so that the same float32 numbers are at most the threshold.
    rounded = threshold.astype(np.float32)
    rounded = np.where(rounded > threshold, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    # LightGBM numbers the sets of a tree, and stores each as the bits of words.
    bounds, words = numbers("cat_boundaries", np.int64), numbers("cat_threshold", "<u4")
    sets = [
        np.flatnonzero(np.unpackbits(words[start:end].view(np.uint8), bitorder="little"))
        for start, end in pairwise(bounds)
    ]
    codes = (
        np.concatenate([np.append(codes[:-1], -1 - codes[-1]) for codes in sets]) if sets else np.zeros(0)
    )
    starts = place + np.cumsum([0, *map(len, sets)])
    nodes = np.stack(
        [
            np.where(is_set, -1 - feature, feature),
            np.where(is_set, starts[np.where(is_set, threshold, 0).astype(np.int64)], rounded),
            numbers("left_child"),
            numbers("right_child"),
        ],
        axis=1,
    )
    return nodes, codes, leaves
