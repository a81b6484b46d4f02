"""Groups of features that repeat together within a session, declared by the schema or proposed from measured repeats.

RecD (arXiv 2211.05239) stores a group's distinct values once. A value is a duplicate only if all members match, so a
member that changes often costs the others their repeats: features are grouped as long as no member loses more than a
fifth of its dedup factor. Raw values are compared, and vocabularies and transforms run on distinct ones; values that
become equal by that (rare values share rows) are merged afterwards.
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

# Samples for each distinct value from which a feature is worth a pointer.
_LEAST_FACTOR = 1.5
# Share of its dedup factor that each member must keep in a group.
_LEAST_SHARE = 0.8


def dedup_factor(samples_per_session: float, same: float) -> float:
    """Samples for each distinct value if sessions stay together: 1 / (1/S + (1 - 1/S) (1 - d)).

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
    """How often features keep their value from one sample of a session to the next.

    Parameters
    ----------
    names : tuple of str
        F features without histories and features with weights; a sequence represents all of its columns.
    samples, sessions : int
        Number of measured samples and sessions.
    same : ndarray
        ``[F, F]`` int64: neighbours within a session that agree in both features.
    """

    names: tuple[str, ...]
    samples: int
    sessions: int
    same: NDArray[np.int64]

    @classmethod
    def none(cls, schema: Schema) -> Repeats:
        """Repeats of no samples."""
        names = feature_names(schema)
        return cls(names=names, samples=0, sessions=0, same=np.zeros((len(names), len(names)), dtype=np.int64))

    @classmethod
    def measure(cls, frame: pl.DataFrame, schema: Schema, inside: NDArray[np.bool_]) -> Repeats:
        """Count over rows in stored order; ``inside[i]`` is true if rows i - 1 and i are in one session."""
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
        """d: share of neighbours that agree in `names`, estimated by the smallest share of any two of them."""
        places = [self.names.index(name) for name in names]
        pairs = self.samples - self.sessions
        return float(self.same[np.ix_(places, places)].min()) / pairs if pairs else 0.0

    def factor(self, *names: str) -> float:
        """Dedup factor of a feature, or of features that share a group."""
        return dedup_factor(self.samples_per_session, self.stays(*names))

    def propose(self, grouped: Sequence[str] = (), names: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Propose groups of features that are not `grouped` yet, called found_1, found_2, ... unless in `names`."""
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
            name: tuple(sorted(group, key=self.names.index)) for group, name in zip(groups, free_names, strict=False)
        }


def as_before(frame: pl.DataFrame, columns: Sequence[str]) -> NDArray[np.bool_]:
    """``[N]`` whether a row equals the row before it in all of `columns`; false everywhere without columns."""
    if not columns:
        return np.zeros(len(frame), dtype=np.bool_)
    equal = (column(name).eq_missing(column(name).shift(1)) for name in columns)
    same: NDArray[np.bool_] = frame.select(pl.all_horizontal(equal)).to_series().to_numpy().copy()
    same[:1] = False
    return same


def feature_names(schema: Schema) -> tuple[str, ...]:
    """Features that can be in a group, sparse before dense: no histories, no features with weights, and no parallel
    columns of a sequence, which follow their main sequence."""
    free = (feature for feature in schema.sparse if not feature.traits.derived and not feature.weights)
    return (
        *(feature.name for feature in free if not feature.beside),
        *(feature.name for feature in schema.dense),
    )


def choose_groups(mode: GroupMode, schema: Schema, repeats: Repeats) -> dict[str, tuple[str, ...]] | None:
    """The groups of a data set; None if it is stored without groups, histories as copies."""
    if mode == "none":
        return None
    declared = [name for names in schema.groups.values() for name in names]
    proposed = repeats.propose(declared, (*schema.groups, *schema.names)) if mode == "auto" and repeats.sessions else {}
    groups = {**schema.groups, **{name: _with_columns(features, schema) for name, features in proposed.items()}}
    return groups if groups or schema.histories else None


def _with_columns(features: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Add the parallel columns of sequences, and return features in the order of the schema, sparse before dense."""
    chosen = {column.name for name in features for column in schema.sequences.get(name, ())} | set(features)
    names = [*(feature.name for feature in schema.sparse), *(feature.name for feature in schema.dense)]
    return tuple(name for name in names if name in chosen)


def describe(groups: Mapping[str, Sequence[str]], schema: Schema, repeats: Repeats) -> list[str]:
    """Lines for the user about proposed groups, and about declared groups that do not repeat together."""
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
