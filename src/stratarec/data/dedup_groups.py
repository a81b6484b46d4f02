"""Which features repeat together within a session: measured while values are counted, then declared or proposed.

RecD (arXiv 2211.05239) stores a group's distinct values once; a value is a duplicate only if all members match, so a
member that changes on its own costs the others their repeats. So features are joined as long as no member loses more
than a fifth of its dedup factor. Values are compared raw, and vocabularies and transforms run on distinct ones; those
that become equal by it (rare ones share rows) are joined afterwards.
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

# A feature is worth a pointer when each value serves at least so many samples.
_LEAST_FACTOR = 1.5
# Joining a group may cost no member more than a fifth of its dedup factor.
_KEPT = 0.8


def dedup_factor(samples_per_session: float, same: float) -> float:
    """Samples for each distinct value: 1 / (1/S + (1 - 1/S) (1 - d)), whole sessions being together.

    Parameters
    ----------
    samples_per_session : float
        S, at least 1.
    same : float
        d, the chance that a value stays the same from one sample of a session to the next.
    """
    first = 1 / max(samples_per_session, 1.0)
    return 1 / (first + (1 - first) * (1 - same))


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """How often features keep their value from one sample of a session to the next.

    Parameters
    ----------
    names : tuple of str
        F features, histories and those with weights left out; a sequence stands for all of its columns.
    samples, sessions : int
        How many were seen.
    same : ndarray
        ``[F, F]`` int64: neighbours within a session that agree in both features; in one on the diagonal.
    """

    names: tuple[str, ...]
    samples: int
    sessions: int
    same: NDArray[np.int64]

    @classmethod
    def none(cls, schema: Schema) -> Repeats:
        """Nothing seen yet."""
        names = feature_names(schema)
        return cls(names=names, samples=0, sessions=0, same=np.zeros((len(names), len(names)), dtype=np.int64))

    @classmethod
    def measure(cls, frame: pl.DataFrame, schema: Schema, inside: NDArray[np.bool_]) -> Repeats:
        """Count over rows in their stored order; ``inside[i]`` says that row i is of the session of row i - 1."""
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
        """JSON data; `from_dict` reads it."""
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
        """d: the share of neighbours that agree in `names`; the least over pairs of them, a bound on the joint one."""
        places = [self.names.index(name) for name in names]
        pairs = self.samples - self.sessions
        return float(self.same[np.ix_(places, places)].min()) / pairs if pairs else 0.0

    def factor(self, *names: str) -> float:
        """Dedup factor of a feature, or of features that share a group."""
        return dedup_factor(self.samples_per_session, self.stays(*names))

    def propose(self, taken: Sequence[str] = (), named: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Groups of the features that are not `taken`: each repeats, and loses little by its company.

        They are called found_1, found_2, ..., what is in `named` left out.
        """
        free = [name for name in self.names if name not in taken and self.factor(name) >= _LEAST_FACTOR]
        groups: list[list[str]] = []
        for name in sorted(free, key=lambda name: (-self.factor(name), self.names.index(name))):
            for group in groups:
                joined = self.factor(*group, name)
                if all(joined >= _KEPT * self.factor(member) for member in (*group, name)):
                    group.append(name)
                    break
            else:
                groups.append([name])
        free_names = (name for number in count(1) if (name := f"found_{number}") not in named)
        return {
            name: tuple(sorted(group, key=self.names.index)) for group, name in zip(groups, free_names, strict=False)
        }


def as_before(frame: pl.DataFrame, columns: Sequence[str]) -> NDArray[np.bool_]:
    """``[N]`` whether a row has in all of `columns` what the row before it has; nowhere, if there are none."""
    if not columns:
        return np.zeros(len(frame), dtype=np.bool_)
    kept = (column(name).eq_missing(column(name).shift(1)) for name in columns)
    same: NDArray[np.bool_] = frame.select(pl.all_horizontal(kept)).to_series().to_numpy().copy()
    same[:1] = False
    return same


def feature_names(schema: Schema) -> tuple[str, ...]:
    """The features that can be in a group, sparse before dense: all but histories, features with weights, and columns
    beside a sequence, which go where that goes."""
    free = (feature for feature in schema.sparse if not feature.traits.derived and not feature.weights)
    return (
        *(feature.name for feature in free if not feature.beside),
        *(feature.name for feature in schema.dense),
    )


def choose_groups(mode: GroupMode, schema: Schema, repeats: Repeats) -> dict[str, tuple[str, ...]] | None:
    """The groups of a data set; None where it is stored without any, histories as copies."""
    if mode == "none":
        return None
    taken = [name for names in schema.groups.values() for name in names]
    found = repeats.propose(taken, (*schema.groups, *schema.names)) if mode == "auto" and repeats.sessions else {}
    whole = {name: _with_columns(features, schema) for name, features in found.items()}
    groups = {**schema.groups, **whole}
    return groups if groups or schema.histories else None


def _with_columns(features: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Features with what is beside those of them that are sequences, in the order of the schema."""
    chosen = {column.name for name in features for column in schema.sequences.get(name, ())} | set(features)
    return tuple(name for name in _sparse_first(schema) if name in chosen)


def _sparse_first(schema: Schema) -> tuple[str, ...]:
    return (*(feature.name for feature in schema.sparse), *(feature.name for feature in schema.dense))


def describe(groups: Mapping[str, Sequence[str]], schema: Schema, repeats: Repeats) -> list[str]:
    """What to tell the user: the groups that were found, and declared ones that do not repeat together."""
    lines = []
    for name, features in groups.items():
        counted = [feature for feature in features if feature in repeats.names]
        factor = repeats.factor(*counted) if repeats.sessions else float("nan")
        if name not in schema.groups:
            lines.append(f"found group {name}: {', '.join(features)} (dedup factor about {factor:.1f})")
        elif factor < _LEAST_FACTOR:
            loner = min(counted, key=repeats.stays)
            lines.append(
                f"group {name!r} of the schema: its columns do not repeat together (dedup factor at most {factor:.2f}, "
                f"{loner!r} changes most often); the data set is right but larger than without the group"
            )
    return lines
