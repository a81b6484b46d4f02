"""Groups of features that repeat together within a session, declared by the schema or proposed from
measured repeats.

RecD (arXiv 2211.05239) stores the distinct values of a group once. A value of a group is repeated
only if all its features have the same values, so a feature that changes often reduces the repeats
of the others. Features are grouped as long as no feature loses more than a fifth of its dedup
factor (samples per distinct value). Raw values are compared, and vocabularies and transforms are
applied only to distinct values. If two distinct values get the same id, because rare values share
rows, they are merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.column_names import column
from stratarec.data.schema import Schema

GroupMode = Literal["auto", "declared", "none"]

# Minimum number of samples per distinct value for a feature to be worth a pointer.
_LEAST_FACTOR = 1.5
# Share of its dedup factor that each feature must keep in a group.
_LEAST_SHARE = 0.8


def dedup_factor(samples_per_session: float, same: float) -> float:
    """Return the samples per distinct value if sessions are stored together: 1 / (1/S + (1 - 1/S)
    (1 - d)).

    Parameters
    ----------
    samples_per_session : float
        S, at least 1.
    same : float
        d, the probability that a value stays the same from one sample of a session to the next.
    """
    first = 1 / max(samples_per_session, 1.0)
    return 1 / (first + (1 - first) * (1 - same))


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Counts of how often features keep their values from one sample of a session to the next.

    Parameters
    ----------
    names : tuple of str
        F features. Histories and features with weights are left out; the main sequence represents
        all its columns.
    samples, sessions : int
        Number of measured samples and sessions.
    same : ndarray
        ``[F, F]`` int64: number of adjacent samples of a session that agree in both features.
    """

    names: tuple[str, ...]
    samples: int
    sessions: int
    same: NDArray[np.int64]

    @classmethod
    def none(cls, schema: Schema) -> Repeats:
        """Return counts that are all 0."""
        names = feature_names(schema)
        return cls(
            names=names, samples=0, sessions=0, same=np.zeros((len(names), len(names)), dtype=np.int64)
        )

    @classmethod
    def measure(cls, frame: pl.DataFrame, schema: Schema, inside: NDArray[np.bool_]) -> Repeats:
        """Count repeats in rows in stored order. ``inside[i]`` says whether rows i - 1 and i are in
        one session.
        """
        names = feature_names(schema)
        pairs = np.empty((len(names), int(inside.sum())), dtype=np.float32)
        for place, name in enumerate(names):
            columns = [feature.name for feature in schema.sequences.get(name, ())] or [name]
            pairs[place] = as_before(frame, columns)[inside]
        return cls(
            names=names,
            samples=len(frame),
            sessions=len(frame) - int(inside.sum()),
            same=np.rint((pairs @ pairs.T).astype(np.float64)).astype(np.int64),
        )

    def __add__(self, other: Repeats) -> Repeats:
        return Repeats(
            names=self.names,
            samples=self.samples + other.samples,
            sessions=self.sessions + other.sessions,
            same=self.same + other.same,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data, which `from_dict` reads."""
        return {
            "names": list(self.names),
            "samples": self.samples,
            "sessions": self.sessions,
            "same": self.same.tolist(),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Repeats:
        names = tuple(content["names"])
        same = np.array(content["same"], dtype=np.int64).reshape(len(names), len(names))
        return cls(names=names, samples=content["samples"], sessions=content["sessions"], same=same)

    @property
    def samples_per_session(self) -> float:
        return self.samples / max(self.sessions, 1)

    def stays(self, *names: str) -> float:
        """Return RecD's d: the share of adjacent samples of a session with equal values of all
        features `names`.

        The estimate is the smallest share for any two of these features.
        """
        places = [self.names.index(name) for name in names]
        pairs = self.samples - self.sessions
        return float(self.same[np.ix_(places, places)].min()) / pairs if pairs else 0.0

    def factor(self, *names: str) -> float:
        """Return the dedup factor of a feature, or of several features in one group."""
        return dedup_factor(self.samples_per_session, self.stays(*names))

    def propose(self, grouped: Sequence[str] = (), names: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Propose groups of the features that are not in `grouped`. Groups are named found_1,
        found_2 and so on; names that are in use (`names`) are skipped.
        """
        free = [name for name in self.names if name not in grouped and self.factor(name) >= _LEAST_FACTOR]
        groups: list[list[str]] = []
        for name in sorted(free, key=lambda name: (-self.factor(name), self.names.index(name))):
            for group in groups:
                joined = self.factor(*group, name)
                if all(joined >= _LEAST_SHARE * self.factor(member) for member in (*group, name)):
                    group.append(name)
                    break
            else:
                groups.append([name])
        free_names = (name for number in count(1) if (name := f"found_{number}") not in names)
        return {
            name: tuple(sorted(group, key=self.names.index))
            for group, name in zip(groups, free_names, strict=False)
        }


def as_before(frame: pl.DataFrame, columns: Sequence[str]) -> NDArray[np.bool_]:
    """Return ``[N]`` flags: whether a row equals the row before it in all of `columns`. Without
    columns, all false.
    """
    if not columns:
        return np.zeros(len(frame), dtype=np.bool_)
    equal = (column(name).eq_missing(column(name).shift(1)) for name in columns)
    same: NDArray[np.bool_] = frame.select(pl.all_horizontal(equal)).to_series().to_numpy().copy()
    same[:1] = False
    return same


def feature_names(schema: Schema) -> tuple[str, ...]:
    """Return the features that can be chosen for a group, sparse before dense.

    These are all except histories, features with weights, and parallel columns, which are in the
    group of their main sequence.
    """
    free = (feature for feature in schema.sparse if not feature.traits.derived and not feature.weights)
    return (
        *(feature.name for feature in free if not feature.beside),
        *(feature.name for feature in schema.dense),
    )


def choose_groups(mode: GroupMode, schema: Schema, repeats: Repeats) -> dict[str, tuple[str, ...]] | None:
    """Return the groups of a data set. None if it has no groups and every sample stores a copy of
    its histories.
    """
    if mode == "none":
        return None
    declared = [name for names in schema.groups.values() for name in names]
    proposed = (
        repeats.propose(declared, (*schema.groups, *schema.names))
        if mode == "auto" and repeats.sessions
        else {}
    )
    groups = {
        **schema.groups,
        **{name: _with_columns(features, schema) for name, features in proposed.items()},
    }
    return groups if groups or schema.histories else None


def _with_columns(features: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Add the parallel columns of sequences, and return features in the order of the schema, sparse
    before dense.
    """
    chosen = {column.name for name in features for column in schema.sequences.get(name, ())} | set(features)
    names = [*(feature.name for feature in schema.sparse), *(feature.name for feature in schema.dense)]
    return tuple(name for name in names if name in chosen)


def describe(groups: Mapping[str, Sequence[str]], schema: Schema, repeats: Repeats) -> list[str]:
    """Return messages about proposed groups, and about declared groups that do not repeat
    together.
    """
    lines = []
    for name, features in groups.items():
        counted = [feature for feature in features if feature in repeats.names]
        factor = repeats.factor(*counted) if repeats.sessions else float("nan")
        if name not in schema.groups:
            lines.append(f"found group {name}: {', '.join(features)} (dedup factor about {factor:.1f})")
        elif factor < _LEAST_FACTOR:
            loner = min(counted, key=repeats.stays)
            lines.append(
                f"group {name!r} of the schema: its columns do not repeat together (dedup factor at most "
                f"{factor:.2f}, {loner!r} changes most often); the data set is correct but "
                "larger than without the group"
            )
    return lines
