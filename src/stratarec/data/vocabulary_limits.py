"""Which values get rows of their own, for how long, and which counts are kept: the recipe's words for vocabularies."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from stratarec.data.durations import in_unit
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError

# Ids have 31 bits, and a table has a row for each bucket whether or not a value falls into it.
_RANGES = {
    "min_count": (1, 1 << 62), "tail_buckets": (1, 10**8), "max_rows": (0, 1 << 31), "candidates": (0, 1 << 40),
    "buckets": (1, 10**8),
}  # fmt: skip

VocabularyKind = Literal["count", "hash"]


@dataclass(frozen=True, kw_only=True)
class VocabularyOverride:
    """Limits of one vocabulary; null leaves the one that holds for all."""

    min_count: int | None = None
    """Rarer values share the tail buckets."""
    tail_buckets: int | None = None
    """Rows shared by rare and unseen values."""
    max_rows: int | None = None
    """Keep at most this many values; 0 for no limit."""
    candidates: int | None = None
    """Values without a row whose counts are kept."""
    kind: VocabularyKind | None = None
    """``count`` or ``hash``."""
    buckets: int | None = None
    """Rows of a ``hash``."""

    def check_kind(self, where: str, kind: VocabularyKind) -> None:
        """Refuse what vocabularies of `kind` make no use of."""
        for name in ("min_count", "tail_buckets", "max_rows", "candidates") if kind == "hash" else ("buckets",):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{where}.{name} is {getattr(self, name)}, which kind {kind} makes no use of; remove it"
                )


@dataclass(frozen=True, kw_only=True)
class VocabularyLimits:
    """Which values get a row of their own."""

    min_count: int = 2
    """Rarer values share the tail buckets."""
    tail_buckets: int = 16
    """Rows shared by rare and unseen values, by a hash of the value."""
    max_rows: int = 0
    """Keep at most this many values; 0 for no limit."""
    candidates: int = 10_000_000
    """Keep the counts of at most this many values that have no row, for a data set that goes on from this one and may
    give them one; the rarest are forgotten."""
    kind: VocabularyKind = "count"
    """``count`` gives frequent values rows of their own; ``hash`` gives every value one of `buckets` rows by its hash
    alone, so that memory does not grow with the values and new ones are like old ones."""
    buckets: int = 1 << 18
    """Rows of a ``hash``: values that share one cannot be told apart."""

    def __post_init__(self) -> None:
        _check_limits(self, "data.vocabulary")


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """When a value loses its row, in a data set that goes on from another; only as its first log ranks them, all stay.

    What is evicted is looked up as rare values are, and its row is not used again. A value that comes back gets a new
    one.
    """

    idle: str = ""
    """Such as ``3d``: where no row of the logs had it for so long, histories and lists aside."""
    keep: int = 0
    """All but so many values, by `half_life` counted; 0 for no limit."""

    def __post_init__(self) -> None:
        if not self.idle and not self.keep:
            raise ConfigError("data.vocabulary.evict: set idle, such as 3d, or keep, a number of values")
        if self.keep < 0:
            raise ConfigError(f"data.vocabulary.evict: keep is {self.keep}, expected at least 1")
        if self.idle:
            in_unit(self.idle, "s", "data.vocabulary.evict: idle")


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(VocabularyLimits):
    """Limits for all vocabularies, and others for some."""

    overrides: Mapping[str, VocabularyOverride] = field(default_factory=dict)
    """Vocabulary name -> what is different for it."""
    evict: Mapping[str, Eviction] = field(default_factory=dict)
    """Vocabulary name -> when values lose their rows; none by default."""
    half_life: str = "7d"
    """By so much of the log's time ago a lookup counts half where values are ranked by what they are worth now: by
    ``keep``, and by `stratarec rebase`."""
    base: str = ""
    """An earlier data set of the same features: its values keep their ids, whatever their counts are now, new ones
    follow, and numbers are standardised by its moments. So `train --from` goes on with a run on it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit(self.half_life, "s", "data.vocabulary.half_life")
        for name, override in self.overrides.items():
            where = f"data.vocabulary.overrides.{name}"
            _check_limits(override, where)
            override.check_kind(where, override.kind or self.kind)

    def limits(self, name: str) -> VocabularyLimits:
        """What holds for the vocabulary `name`."""
        common = {entry.name: getattr(self, entry.name) for entry in fields(VocabularyLimits)}
        override = self.overrides.get(name, VocabularyOverride())
        return VocabularyLimits(**{**common, **{k: v for k, v in asdict(override).items() if v is not None}})

    def check(self, schema: Schema) -> None:
        """Refuse what is said of vocabularies that do not exist, and evictions that cannot be."""
        known = schema.vocabularies()
        users = {feature.name: feature.vocabulary for feature in schema.sparse}
        for part, name in (
            *(("overrides", name) for name in self.overrides),
            *(("evict", name) for name in self.evict),
        ):
            if name in known:
                continue
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}"
            hint = f"the feature of that name uses {users[name]}" if name in users else hint
            raise ConfigError(f"data.vocabulary.{part}.{name}: no such vocabulary; {hint}")
        for name, rule in self.evict.items():
            if self.limits(name).kind == "hash":
                raise ConfigError(
                    f"data.vocabulary.evict.{name}: values of kind hash have no rows of their own; remove it"
                )
            if rule.idle and not schema.time:
                raise ConfigError(
                    f"data.vocabulary.evict.{name}.idle is {rule.idle!r}, and schema.time is not set: set it"
                )


def _check_limits(limits: VocabularyLimits | VocabularyOverride, where: str) -> None:
    for name, (least, most) in _RANGES.items():
        value = getattr(limits, name)
        if value is not None and value < least:
            raise ConfigError(f"{where}.{name} is {value}, expected at least {least}")
        if value is not None and value > most:
            raise ConfigError(f"{where}.{name} is {value}, expected at most {most}")
