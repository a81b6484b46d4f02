"""Which rows of which tables are hot, for a budget in bytes.

Two ways are tried, and the one that makes more of the inputs hot that neither was chosen by is taken: rows with most
lookups per byte (`by_count`), and thresholds that make most inputs hot (`by_input`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from stratarec.data.dataset import Dataset
from stratarec.errors import ConfigError
from stratarec.hot.by_count import hottest_rows
from stratarec.hot.by_input import most_inputs
from stratarec.hot.parts import Counts, Part, parts_of, share_of_accesses, used_bytes
from stratarec.hot.profile import HotProfile, HotTable, InputShare, Method, Point
from stratarec.hot.sampling import Sample, draw
from stratarec.sizes import readable

CURVE = (0.02, 0.068, 0.124)
"""Budgets of the curve, as shares of all bytes."""


def calibrate(
    dataset: Dataset,
    row_bytes: Mapping[str, int],
    budget: int,
    *,
    curve: Sequence[float] = CURVE,
    seed: int = 0,
    field: str = "--hot",
) -> HotProfile:
    """Choose hot rows.

    Parameters
    ----------
    row_bytes : mapping of str to int
        Vocabulary -> weights and optimizer state of a row; 0 for tables that are hot at no cost.
    budget : int
        Bytes of all hot rows.
    curve : sequence of float
        Other budgets to look at, as shares of all bytes.
    field : str
        Names the budget in errors.

    Raises
    ------
    ConfigError
        For a budget that holds no row, or all of them.
    """
    began = time.perf_counter()
    parts = parts_of(dataset, row_bytes)
    total = sum(part.nbytes for part in parts)
    if budget < min(part.row_bytes for part in parts if part.row_bytes):
        raise ConfigError(f"{field} is {budget:,} bytes, which hold no row; expected less than {readable(total)}")
    if budget >= total:
        raise ConfigError(
            f"{field} is {readable(budget)}, and all {len(dataset.vocabularies)} tables take {readable(total)}: "
            "every row fits, so none is hotter than others. Give less, or train without hot rows"
        )
    sample = draw(dataset, parts, "train", seed)
    hot, method, point = _choose(parts, budget, sample)
    others = [_choose(parts, int(share * total), sample)[2] for share in curve]
    return HotProfile(
        dataset=dataset.name,
        fingerprint=dataset.fingerprint,
        method=method,
        chosen=point,
        curve=tuple(others),
        tables=_tables(dataset, parts, hot),
        seconds=time.perf_counter() - began,
    )


def _choose(parts: Sequence[Part], budget: int, sample: Sample) -> tuple[Counts, Method, Point]:
    """Hot rows of each part, how they were chosen, and what they are worth."""
    counted, complete = hottest_rows(parts, budget), most_inputs(parts, budget, sample.choosing)
    by_count, by_input = sample.judge(counted), sample.judge(complete)
    better = by_input.share > by_count.share
    hot, found = (complete, by_input) if better else (counted, by_count)
    point = Point(
        budget_bytes=budget,
        row_share=used_bytes(parts, hot) / sum(part.nbytes for part in parts),
        accesses=share_of_accesses(parts, hot),
        inputs=InputShare(**vars(found)),
        counted=InputShare(**vars(by_count)),
    )
    return hot, "inputs" if better else "accesses", point


def _tables(dataset: Dataset, parts: Sequence[Part], hot: Counts) -> tuple[HotTable, ...]:
    found = []
    for name, rows in dataset.table_rows().items():
        own = [(part, int(taken)) for part, taken in zip(parts, hot, strict=True) if part.table == name]
        total = sum(int(part.counts.sum()) for part, _ in own)
        accesses = sum(int(part.counts[:taken].sum()) for part, taken in own)
        found.append(
            HotTable(
                name=name,
                rows=rows,
                row_bytes=own[0][0].row_bytes,
                head=sum(taken for part, taken in own if not part.whole),
                tail=sum(taken for part, taken in own if part.whole),
                accesses=accesses / total if total else 0.0,
            )
        )
    return tuple(found)


def passed_over(dataset: Dataset) -> str:
    """What to say of ids that keep the order of an earlier data set; empty where this one's counts rank all."""
    tables = [name for name, info in dataset.vocabularies.items() if 0 < info.inherited < info.values]
    if not tables:
        return ""
    return (
        f"ids of {', '.join(tables)} go on from an earlier data set, so what became popular since lies behind its "
        "rows, which would have to be hot, too: prepare without data.vocabulary.base where that leaves few hot inputs"
    )


def without_skew(profile: HotProfile) -> str:
    """What to say of data whose hot rows are hardly more popular than others; empty where they are."""
    point = profile.chosen
    if point.accesses < 2 * point.row_share:
        return (
            f"{point.row_share:.1%} of the rows take {point.accesses:.1%} of the lookups: there is little skew to use"
        )
    if point.inputs.share < 0.01:
        return f"{point.inputs.share:.2%} of the inputs are hot: too few for batches of their own"
    return ""
