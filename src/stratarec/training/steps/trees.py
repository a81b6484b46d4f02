"""Fit the members of an ensemble that are boosted trees, by LightGBM.

All members are fitted to the training split; the validation split determines their numbers of trees. The trees of the
first member see half of the features and four fifths of the samples. Those of the second member draw one threshold for
each feature (extremely randomized trees, Geurts et al. 2006), so the two err differently. Two more members have the
same settings with other seeds, and click rates in place of codes, which help for features with many values. The rate of
a training sample's value is computed without the tenth of the samples that contains the sample, so that no sample sees
its own label. The parameters are the result of simulations (`docs/log.md`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.kernels.trees import CATEGORIES
from stratarec.models.zoo.trees import LEAVES, RATED, TreeMembers
from stratarec.recipe.train_section import TrainConfig

_BATCH = 1 << 16
_PATIENCE = 50
# A click rate is that of a value's samples and of _STRENGTH samples with the mean rate, without one of _PARTS.
_STRENGTH, _PARTS = 3.0, 10
_SETTINGS: dict[str, Any] = {
    "objective": "binary", "num_leaves": LEAVES, "min_data_in_leaf": 20, "cat_smooth": 20, "cat_l2": 20,
    "verbosity": -1, "deterministic": True, "force_row_wise": True, "num_threads": 1,
}  # fmt: skip
_MEMBERS: tuple[dict[str, Any], ...] = (
    {"learning_rate": 0.04, "feature_fraction": 0.5, "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 3.0},
    {"learning_rate": 0.12, "feature_fraction": 0.7, "extra_trees": True, "lambda_l2": 1.0},
)


def fit_trees(trees: TreeMembers, dataset: Dataset, config: TrainConfig) -> str:
    """Fit `trees` to the training split, and return a line that describes them or says why there are none.

    Equal data and seeds give equal trees.
    """
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # OSError: the shared library for threads is missing
        return f"no trees are fitted: lightgbm does not load ({' '.join(str(error).split())[:200]})"
    for split, name in (("train", "training"), ("valid", "validation")):
        count = dataset.label_counts(split)[dataset.schema.label_column]
        if not 0 < count.positives < count.known:
            return f"no trees are fitted: the {name} split has no samples of one of the classes"
    (positive,) = config.class_weights(dataset.schema.label_columns)
    rows, label, weight = _read(trees, dataset, "train", positive)
    if not rows.shape[1]:
        return "no trees are fitted: there are no features"
    names, tables = len(trees.features), dataset.table_rows()
    sets = [
        place
        for place, feature in enumerate(dataset.schema.sparse)
        if feature.kind == "single" and tables[feature.vocabulary] < CATEGORIES
    ]
    _fit_rates(trees, rows, label, weight, config.seed)
    seen, truth, truth_weight = _read(trees, dataset, "valid", positive)
    counts: list[int] = []
    for first, categorical in ((0, sets), (names, [])):
        last = first + rows.shape[1] - names
        data = lightgbm.Dataset(rows[:, first:last], label, weight=weight, categorical_feature=categorical)
        validation = lightgbm.Dataset(seen[:, first:last], truth, weight=truth_weight, reference=data)
        for settings in _MEMBERS:
            chosen = {**_SETTINGS, **settings, "seed": config.seed + len(counts)}
            stopping = lightgbm.early_stopping(_PATIENCE, verbose=False)
            booster = lightgbm.train(
                chosen, data, trees.nodes.shape[1], valid_sets=[validation], callbacks=[stopping]
            )  # fmt: skip
            structures = booster.dump_model(num_iteration=booster.best_iteration)["tree_info"]
            for place, structure in enumerate(structures):
                _store(trees, (len(counts), place), structure["tree_structure"], first)
            counts.append(len(structures))
    return f"members of the ensemble that are boosted trees: {', '.join(f'{count:,}' for count in counts)} trees"


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


@torch.no_grad()
def _store(trees: TreeMembers, place: tuple[int, int], structure: dict[str, Any], first: int) -> None:
    """Copy a tree of LightGBM (a node of its JSON dump), whose columns begin at `first`, into the tensors."""
    nodes, leaves = trees.nodes[place], trees.leaves[place]
    if "split_index" not in structure:  # a constant: all samples go left
        nodes[0, :4] = torch.tensor([0, torch.finfo(torch.float32).max, -1, -2])
        leaves[0] = structure["leaf_value"]
        return
    waiting = [structure]
    while waiting:
        node = waiting.pop()
        row, feature = nodes[node["split_index"]], node["split_feature"] + first
        for column, side in ((2, "left_child"), (3, "right_child")):
            child = node[side]
            if "split_index" in child:
                row[column] = child["split_index"]
                waiting.append(child)
            else:
                row[column] = -1 - child["leaf_index"]
                leaves[child["leaf_index"]] = child["leaf_value"]
        if node["decision_type"] == "==":
            bits = np.zeros(CATEGORIES, dtype=np.uint8)
            bits[[int(value) for value in node["threshold"].split("||")]] = 1
            row[0] = -1 - feature
            row[4:] = torch.from_numpy(np.packbits(bits, bitorder="little").view("<u2").astype(np.float32))
        else:
            threshold = np.float32(node["threshold"])
            # Rounded down, so that the same float32 numbers are at most the threshold.
            row[0] = feature
            fits = threshold <= node["threshold"]
            row[1] = float(threshold if fits else np.nextafter(threshold, np.float32(-np.inf)))
