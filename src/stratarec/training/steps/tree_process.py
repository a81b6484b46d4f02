"""Fit boosted trees by LightGBM, in a process of its own that `trees.py` starts.

LightGBM imports scikit-learn and pandas if they are installed, but does not need them here. This process hides them:
its start takes 0.3 s instead of 1.1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PATIENCE = 50
_SETTINGS: dict[str, Any] = {
    "objective": "binary", "min_data_in_leaf": 20, "cat_smooth": 20, "cat_l2": 20,
    "verbosity": -1, "deterministic": True, "force_row_wise": True, "num_threads": 1,
}  # fmt: skip
_MEMBERS: tuple[dict[str, Any], ...] = (
    {"learning_rate": 0.04, "feature_fraction": 0.5, "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 3.0},
    {"learning_rate": 0.12, "feature_fraction": 0.7, "extra_trees": True, "lambda_l2": 1.0},
)
_HIDDEN = ("sklearn", "pandas", "matplotlib", "graphviz", "dask")


def fit(request: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays ``nodes`` and ``leaves`` of `kernels/trees.py`, and the ``counts`` of trees of the members.

    Parameters
    ----------
    request : mapping
        ``train_rows``, ``train_label``, ``train_weight`` and the same for ``valid``; ``codes``, the number of the first
        columns that are codes, and as many last columns are click rates; ``sets``, the codes that are categorical;
        ``nodes`` and ``leaves`` without trees; ``seed``.
    """
    import lightgbm

    nodes, leaves, codes = request["nodes"], request["leaves"], int(request["codes"])
    width = request["train_rows"].shape[1] - codes
    train, valid = (
        [request[f"{split}_{name}"] for name in ("rows", "label", "weight")] for split in ("train", "valid")
    )

    def fit_pair(start: int, first: int, sets: list[int]) -> list[int]:
        data = lightgbm.Dataset(
            train[0][:, first : first + width], train[1], weight=train[2], categorical_feature=sets
        )  # fmt: skip
        validation = lightgbm.Dataset(valid[0][:, first : first + width], valid[1], weight=valid[2], reference=data)
        counts = []
        for member, settings in enumerate(_MEMBERS, start):
            fixed = {"num_leaves": leaves.shape[2], "seed": int(request["seed"]) + member}
            booster = lightgbm.train(
                {**_SETTINGS, **settings, **fixed}, data, nodes.shape[1], valid_sets=[validation],
                callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)],
            )  # fmt: skip
            structures = booster.dump_model(num_iteration=booster.best_iteration)["tree_info"]
            for place, structure in enumerate(structures):
                _store(nodes[member, place], leaves[member, place], structure["tree_structure"], first)
            counts.append(len(structures))
        return counts

    # Two threads, because the process that trains networks waits at its first evaluation.
    with ThreadPoolExecutor(2) as threads:
        pairs = threads.map(fit_pair, (0, len(_MEMBERS)), (0, codes), (request["sets"].tolist(), []))
        return {"nodes": nodes, "leaves": leaves, "counts": np.concatenate(list(pairs))}


def _store(nodes: NDArray[np.float32], leaves: NDArray[np.float32], structure: dict[str, Any], first: int) -> None:
    """Copy a tree of LightGBM (a node of its JSON dump), whose columns begin at `first`, into the arrays."""
    if "split_index" not in structure:  # a constant: all samples go left
        nodes[0, :4] = 0, np.finfo(np.float32).max, -1, -2
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
            bits = np.zeros(16 * (len(row) - 4), dtype=np.uint8)
            bits[[int(value) for value in node["threshold"].split("||")]] = 1
            row[0] = -1 - feature
            row[4:] = np.packbits(bits, bitorder="little").view("<u2")
        else:
            threshold = np.float32(node["threshold"])
            # Rounded down, so that the same float32 numbers are at most the threshold.
            fits = threshold <= node["threshold"]
            row[:2] = feature, threshold if fits else np.nextafter(threshold, np.float32(-np.inf))


def main() -> None:
    """Read a request from standard input, and write the result, or the reason why there is none, to standard output."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # LightGBM prints warnings to standard output
        sys.modules.update(dict.fromkeys(_HIDDEN))  # type: ignore[arg-type]
        try:
            result = fit(np.load(sys.stdin.buffer))
        except (ImportError, OSError) as error:  # OSError: the shared library for threads is missing
            result = {"reason": np.array(f"lightgbm does not load ({' '.join(str(error).split())[:200]})")}
        np.savez(output, **result)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
