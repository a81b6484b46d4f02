"""The order of samples within users, sessions or slates, of splits and of raw logs: `stratarec evaluate --rank-by`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.models.ranking import Ranked, RankedGroups, estimates
from stratarec.training.evaluation.evaluate import Scored


def rank_within(
    labels: Sequence[str],
    found: Scored,
    group: NDArray[np.int64],
    at: Sequence[int],
    grouped: NDArray[np.bool_] | None = None,
) -> dict[str, Ranked]:
    """Of each label, by the samples that know it.

    Parameters
    ----------
    group : array
        ``[N]`` a number for each group.
    at : sequence of int
        Places down to which a list is looked at.
    grouped : array or None
        ``[N]`` whether a sample is in a group; None where all are.
    """
    ranked, grouped = {}, np.ones(len(group), dtype=np.bool_) if grouped is None else grouped
    for place, name in enumerate(labels):
        label, score = (part if part.ndim == 1 else part[:, place] for part in (found.label, found.logit))
        known = ~np.isnan(label) & (found.weight > 0 if len(found.weight) else True)
        chosen = known & grouped
        figures = {}
        if chosen.any():
            weight = found.weight[chosen] if len(found.weight) else None
            groups = RankedGroups(label[chosen], score[chosen], group[chosen], weight)
            each = [groups.figures(places) for places in at]
            # Those that look at places first, as the options name them.
            figures = estimates({name: one[name] for name in _sorted(each) for one in each if name in one})
        ranked[name] = Ranked(
            groups=len(np.unique(group[chosen])), ungrouped=int((known & ~grouped).sum()), figures=figures
        )
    return ranked


def _sorted(each: Sequence[Mapping[str, object]]) -> list[str]:
    """Names of figures: NDCG at every place, then recall at every place, and so on."""
    return list(dict.fromkeys(name for names in zip(*each, strict=True) for name in names))


def groups_of_split(dataset: Dataset, split: str, found: Scored, by: str) -> NDArray[np.int64]:
    """The user or the session of each sample of a whole split, in the order of storage.

    Raises
    ------
    ConfigError
        Where the data set was prepared without, and for anything else.
    """
    check_kept(dataset.schema, by)
    if by == "user" or not dataset.schema.user:
        return found.user
    return np.concatenate([np.zeros(0, dtype=np.int64), *dataset.session_keys(split)])


def check_kept(schema: Schema, by: str, option: str = "--rank-by") -> None:
    """Refuse what samples of a prepared data set cannot be grouped by."""
    if by not in ("user", "session"):
        raise ConfigError(
            f"{option} {by}: a prepared data set knows user and session of its samples; name one of these, or raw logs"
        )
    if not getattr(schema, by):
        raise ConfigError(f"{option} {by}: the data set was prepared without schema.{by}; name it and prepare again")


def column_of(schema: Schema, by: str) -> str:
    """The column of raw logs behind a word: that of the schema's user or session, or the one that is called so."""
    return {"user": schema.user, "session": schema.session}.get(by) or by


def groups_of_values(values: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A number for each value of a column, and which of them is one."""
    return values.rank("dense").fill_null(0).to_numpy().astype(np.int64), values.is_not_null().to_numpy()
