"""Fit boosted trees by LightGBM, in a second process that `trees.py` starts."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.io.hidden_packages import hidden_packages
from stratarec.kernels.trees.pair_rates import PairRates, look_up_pairs, no_pairs
from stratarec.training.steps.pair_rates import Labels, choose_pairs, fit_pairs

_PATIENCE = 50
# Number of successive draws of features and thresholds without a split after which the growth ends.
_DRAWS = 20
_SETTINGS: dict[str, Any] = {
    "objective": "binary", "min_data_in_leaf": 20, "verbosity": -1, "deterministic": True, "force_row_wise": True,
    "num_threads": 1,
}  # fmt: skip


class Member(NamedTuple):
    """Member of an ensemble that is fitted here."""

    inputs: Literal["codes", "rates", "both", "pairs"]
    """Columns that its trees compare, next to dense features: codes, click rates, both, or both and
    rates of pairs.
    """
    settings: dict[str, Any]


_LIGHT = {
    "learning_rate": 0.05, "feature_fraction": 0.8, "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 1.0,
    "cat_smooth": 10, "cat_l2": 10,
}  # fmt: skip
_EXTRA = {
    "learning_rate": 0.12, "feature_fraction": 0.7, "extra_trees": True, "lambda_l2": 1.0, "cat_smooth": 20,
    "cat_l2": 20,
}  # fmt: skip
_STRONG = {
    "learning_rate": 0.04, "feature_fraction": 0.5, "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 3.0,
    "cat_smooth": 20, "cat_l2": 20,
}  # fmt: skip
MEMBERS = (
    Member("codes", _STRONG),
    Member("codes", _EXTRA),
    Member("codes", _LIGHT),
    Member("rates", _EXTRA),
    Member("both", _LIGHT),
    Member("pairs", _LIGHT),
)
_FIRST_THREAD = 3
"""Number of members that the first of two threads fits; the others take as long."""


def fit(request: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return ``models``, the trees of each member as LightGBM writes them; ``limited``, whether the
    limit in seconds ended the fit of the member; ``pairs``, ``pair_rates`` and ``edges``
    (`PairRates`).

    Parameters
    ----------
    request : mapping
        ``train_rows``, ``train_label``, ``train_weight`` and the same for ``valid``;
        ``categorical``, whether each of the first columns is a code or the length of a list, and as
        many last columns are click rates; ``sets``, the codes that are compared with sets;
        ``num_leaves``, ``seed``, and ``seconds``, the limit; ``most``, the most trees of a member.
        If there is no ``valid``: ``rounds``, the number of trees of each member, and ``pairs`` and
        ``edges``, the pairs of columns that have click rates.
    """
    import lightgbm

    codes, limit, began = len(request["categorical"]), float(request["seconds"]), time.monotonic()
    width = request["train_rows"].shape[1]
    train, valid = (
        [request[f"{split}_{name}"] for name in ("rows", "label", "weight") if f"{split}_{name}" in request]
        for split in ("train", "valid")
    )

    seen, labels = train[0][:, : width - codes], Labels(train[1], train[2], int(request["seed"]))
    if valid:
        pairs = choose_pairs(seen, labels, request["categorical"].tolist())
    else:
        pairs = PairRates(request["pairs"], no_pairs().rates, request["edges"])
    if has_pairs := bool(len(pairs.pairs)):
        pairs, pair_features = fit_pairs(seen, labels, pairs, codes)
        train[0] = np.concatenate([train[0], pair_features], axis=1)
        if valid:
            new = look_up_pairs(valid[0][:, : width - codes], pairs, pairs.keys(), codes)
            valid[0] = np.concatenate([valid[0], new], axis=1)
    parts = {
        "codes": slice(0, width - codes),
        "rates": slice(codes, width),
        "both": slice(0, width),
        "pairs": slice(0, width + len(pairs.pairs)),
    }

    def data_of(inputs: str) -> tuple[lightgbm.Dataset, lightgbm.Dataset | None]:
        rows = train[0][:, parts[inputs]]
        sets = [] if inputs == "rates" else request["sets"].tolist()
        data = lightgbm.Dataset(rows, train[1], weight=train[2], categorical_feature=sets)
        if not valid:
            return data, None
        return data, lightgbm.Dataset(valid[0][:, parts[inputs]], valid[1], weight=valid[2], reference=data)

    def fit_members(numbers: range) -> list[tuple[bytes, bool]]:
        data = {
            inputs: data_of(inputs)
            for inputs in dict.fromkeys(MEMBERS[number].inputs for number in numbers)
            if inputs != "pairs" or has_pairs
        }
        fitted = []
        for place, number in enumerate(numbers, 1):
            inputs, settings = MEMBERS[number]
            if inputs == "pairs" and not has_pairs:
                fitted.append((b"", False))
                continue
            fixed = {"num_leaves": int(request["num_leaves"]), "seed": int(request["seed"]) + number}
            booster = lightgbm.Booster({**_SETTINGS, **settings, **fixed}, data[inputs][0])
            most, held_out = int(request["most"]), data[inputs][1]
            if held_out is None:
                most = int(request["rounds"][number])
            else:
                booster.add_valid(held_out, "valid")
            count, is_limited = _grow(
                booster, began + limit * place / len(numbers), most, is_validated=held_out is not None
            )
            text = booster.model_to_string(num_iteration=count) if count else ""
            fitted.append((text.encode(), is_limited))
        return fitted

    # Two threads, because the process that trains networks waits at its first evaluation.
    with ThreadPoolExecutor(2) as threads:
        halves = threads.map(fit_members, (range(_FIRST_THREAD), range(_FIRST_THREAD, len(MEMBERS))))
        models, limited = zip(*(member for half in halves for member in half), strict=True)
    if not any(text for member, text in zip(MEMBERS, models, strict=True) if member.inputs == "pairs"):
        pairs = no_pairs()  # validation kept no tree that compares them
    return {
        "models": np.array(models),
        "limited": np.array(limited),
        "pairs": pairs.pairs,
        "pair_rates": pairs.rates,
        "edges": pairs.edges,
    }


def _grow(booster: Any, deadline: float, most: int, *, is_validated: bool) -> tuple[int, bool]:
    """Add trees until there are `most`, until validation no longer improves, or until no leaf can
    be split.

    The work ends at `deadline`, a time of `time.monotonic`. Return the number of trees to keep
    (with the lowest validation loss), and whether the deadline ended the work.
    """
    least = np.inf
    best = 0
    trees = 0
    failed = 0
    while trees < most and trees - best < _PATIENCE and failed < _DRAWS:
        if time.monotonic() > deadline:
            return best, True
        if booster.update():  # no leaf can be split by the features and thresholds that were drawn
            failed += 1
            continue
        trees, failed = booster.current_iteration(), 0
        loss = booster.eval_valid()[0][2] if is_validated else -trees
        if loss < least:
            # A first draw without a split adds a constant, which is not counted.
            least, best = loss, min(trees, most)
    return best, False


def _end_with_reader(pipe: int) -> None:
    """End this process when the pipe has no reader: the training process ended, even by SIGKILL."""
    watcher = select.poll()
    watcher.register(pipe, 0)
    watcher.poll()
    os._exit(1)


def main() -> None:
    """Read a request from standard input, and write the result, or the reason why there is none, to
    standard output.
    """
    threading.Thread(target=_end_with_reader, args=(os.dup(1),), daemon=True).start()
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # LightGBM prints warnings to standard output
        try:
            with hidden_packages():
                # All arrays are read here: the archive reads when it is indexed, which is not safe
                # from two threads.
                result = fit(dict(np.load(sys.stdin.buffer)))
        except (ImportError, OSError) as error:  # OSError: the shared library for threads is missing
            result = {"reason": np.array(f"lightgbm does not load ({' '.join(str(error).split())[:200]})")}
        np.savez(output, **result)  # type: ignore[arg-type]
