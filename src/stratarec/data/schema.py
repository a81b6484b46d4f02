"""The columns of a data set: labels, dense and sparse features, and the keys that group samples.

*Labels.* A row with several labels may lack some of them (`UNKNOWN` in files, NaN in batches), but
not all. Histories, early stopping and the counts of a split use the first label.

*Weights.* `Schema.weight` is the weight of a sample in the loss and in metrics. Only ratios of
weights matter, and weights of 1 give the same bits as no weights. `SparseFeature.weights` are the
weights of the values in a bag. A feature with weights is stored with the samples and not in a
deduplication group, because different weights would make otherwise equal values of the group
distinct.

*Sequences.* A ``history`` is computed by `prepare`. A ``sequence`` is an ordered list in the log,
oldest value first, optionally with parallel lists (`SparseFeature.beside`). Both kinds share the
vocabulary of the feature that their field `of` names.

*Dates.* `Schema.dates` lists columns of dates, and the numbers that are computed from them
(`data/columns/dates.py`). Each number is a feature named after its column, such as
``arrival.month``. It is a dense feature, unless `Schema.sparse` has a feature of this name.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

import pydantic

from stratarec.config.validate import check_finite
from stratarec.data.column_names import check_column, check_name
from stratarec.data.durations import Duration, TimeUnit, in_unit
from stratarec.errors import ConfigError

SparseKind = Literal["single", "multi", "history", "sequence"]
DenseTransform = Literal["log1p", "none"]
ValueType = Literal["auto", "integer", "text"]
DatePart = Literal["hour", "weekday", "day", "month", "days"]
Decimal = Literal["", ".", ","]


class _KindTraits(NamedTuple):
    """Properties of one `SparseKind`, which decide how the values of such features are read and
    stored.
    """

    lists: bool
    """Whether a row has several values."""
    derived: bool
    """Whether `prepare` computes the values from earlier samples, so that the log has no such
    column.
    """
    last: bool
    """Whether the last `max_length` values are kept instead of the first."""


_KINDS: dict[SparseKind, _KindTraits] = {
    "single": _KindTraits(lists=False, derived=False, last=False),
    "multi": _KindTraits(lists=True, derived=False, last=False),
    "history": _KindTraits(lists=True, derived=True, last=True),
    "sequence": _KindTraits(lists=True, derived=False, last=True),
}

UNKNOWN = 2
"""Stored value of an unknown label, if samples have several labels."""


def _word(value: Any) -> Any:
    """Return `value` if it is text, else raise an error: YAML reads yes and no as booleans, and
    digits as numbers.
    """
    if isinstance(value, bool | int | float):
        raise ConfigError(f"expected text, got {value}; put it in quotes, as in equals: 'yes'")
    return value


@dataclass(frozen=True, kw_only=True)
class LabelRule:
    """A label that is computed from a number or a word; either `at_least` or `equals` is set."""

    column: str
    """Column of the number or word."""
    at_least: Annotated[float | None, pydantic.Field(exclude_if=lambda value: value is None)] = None
    """The label is 1 if the number is at least this, else 0."""
    equals: Annotated[str, pydantic.BeforeValidator(_word), pydantic.Field(exclude_if=operator.not_)] = ""
    """The label is 1 if the text, without surrounding spaces, is equal to this, else 0."""

    def __post_init__(self) -> None:
        check_finite(self, "schema.label.")
        object.__setattr__(self, "equals", self.equals.strip())
        if (self.at_least is None) == (not self.equals):
            which = "neither" if self.at_least is None else "both"
            raise ConfigError(
                f"a label's rule of column {self.column!r} has {which} of at_least and equals, expected "
                "one: at_least: 4 of numbers, or equals: 'yes' of words"
            )


@dataclass(frozen=True, kw_only=True)
class DenseFeature:
    """A number per sample. A missing number becomes 0 after all transforms, which is the mean if
    standardized.
    """

    name: str
    """Name of the feature, and of its column unless `column` names another."""
    column: Annotated[str, pydantic.Field(exclude_if=operator.not_)] = ""
    """Column of the log, if it is not named like the feature: a column of whole numbers can be a
    number and, under its own name, a category."""
    transform: DenseTransform = "log1p"
    """``log1p`` is sign(x) * log(1 + |x|)."""
    standardize: bool = True
    """Subtract the training mean and divide by the training standard deviation."""
    group: str = ""
    """Name of a deduplication group: features that repeat together in a session. Distinct values
    are stored once.
    """
    decimal: Annotated[Decimal, pydantic.Field(exclude_if=operator.not_)] = ""
    """Decimal mark of numbers that are text as people write it: ``.`` for 1,234.50 and $7, ``,``
    for 1.234,50 and 12 %. Separators of thousands, and signs of a currency or percent, are then
    ignored. Empty for plain numbers such as 1234.5."""

    @property
    def source(self) -> str:
        """Name of the column that is read."""
        return self.column or self.name


@dataclass(frozen=True, kw_only=True)
class SparseFeature:
    """A feature with zero, one or several ids per sample; a missing value is an empty bag."""

    name: str
    """Name of the column and of the feature."""
    kind: SparseKind = "single"
    """``single``: at most one value. ``multi``: a list without order. ``sequence``: an ordered list
    in the log, oldest value first, such as the user's last items. ``history``: computed by
    `prepare` from the log: the values of the feature `of` in the last positive samples of the same
    user, strictly earlier than this sample, oldest first."""
    vocabulary: str = ""
    """Name of the vocabulary. Features with the same vocabulary share ids and a table. If empty, it
    is the feature's name, or, for a history or sequence with `of`, the vocabulary of that
    feature."""
    of: str = ""
    """For ``history``: the feature of kind ``single`` whose earlier values it collects. For
    ``sequence``: the feature of kind ``single`` (such as the candidate item) with which attention
    compares its values; empty for no comparison."""
    beside: str = ""
    """For ``sequence``: name of the main sequence, if this is a parallel column, such as the
    categories of its items. The two lists of a row have the same length, and their i-th values
    belong to the same event. An event that lacks a value in one of the columns is removed from all
    of them."""
    weights: Annotated[str, pydantic.Field(exclude_if=operator.not_)] = field(default="", repr=False)
    """For ``multi``: name of the column with a weight for each value, in lists of the same length,
    or in text that is split at the same `separator`. Weights are finite and at least 0. Pooling
    computes the sum of w * row, for a mean divided by the sum of w."""
    max_length: int = 50
    """Maximum number of values that are kept: the first of ``multi``, the last of ``history`` and
    ``sequence``. A parallel column has the maximum of its main sequence."""
    within: Annotated[Duration, pydantic.Field(exclude_if=operator.not_)] = field(default="", repr=False)
    """For ``history``: age of the oldest event that a history may contain, such as ``30d``,
    measured at the time of the sample. Empty for events of any age."""
    separator: str = ""
    """For ``multi`` and ``sequence``: string at which text is split; spaces around the parts are
    removed. If empty, the column has lists, or text such as ``[1, 2]``, ``["a", "b"]`` or ``['a',
    'b']``."""
    type: ValueType = "auto"
    """Type of the values. ``integer``: 7 and 7.0 are equal, and 007 is refused. ``text``: numbers
    become text. ``auto``: text in text files, the type of the column in Parquet; with `of`, the
    type of that feature."""
    group: str = ""
    """Name of a deduplication group, as for dense features. All columns of a sequence are in one
    group. Histories are not in groups, because they are stored as windows."""

    def __post_init__(self) -> None:
        if self.kind == "history" and not self.of:
            raise ConfigError(
                f"sparse feature {self.name!r}: kind history needs `of`, the feature with the values"
            )
        if self.max_length < 1:
            raise ConfigError(
                f"sparse feature {self.name!r}: max_length is {self.max_length}, expected at least 1"
            )
        if self.kind == "history" and self.group:
            raise ConfigError(
                f"sparse feature {self.name!r}: a history is stored as a window, not in group "
                f"{self.group!r}; remove `group`"
            )
        if self.within and self.kind != "history":
            raise ConfigError(
                f"sparse feature {self.name!r}: `within` requires kind history; got {self.kind}"
            )
        if self.beside and self.kind != "sequence":
            raise ConfigError(
                f"sparse feature {self.name!r}: `beside` requires kind sequence; got {self.kind}"
            )
        self._check_weights()
        if not self.vocabulary and self.kind != "history" and not (self.kind == "sequence" and self.of):
            object.__setattr__(self, "vocabulary", self.name)

    @property
    def traits(self) -> _KindTraits:
        """Properties of the feature's kind."""
        return _KINDS[self.kind]

    def as_column(self) -> SparseFeature:
        """Return a history as a column of lists of any length, because it must keep its last
        values.
        """
        return replace(self, kind="multi", of="", within="", max_length=1 << 62)

    def _check_weights(self) -> None:
        if self.weights and self.kind != "multi":
            raise ConfigError(
                f"sparse feature {self.name!r}: `weights` requires kind multi; got {self.kind}"
            )
        if self.weights and self.group:
            raise ConfigError(
                f"sparse feature {self.name!r}: a feature with `weights` is stored with its samples, not "
                f"in group {self.group!r}; remove `group`"
            )


@dataclass(frozen=True, kw_only=True)
class DateColumn:
    """A column of dates, and the features that are computed from it. A missing date gives missing
    numbers.
    """

    name: str
    """Column name; it may be `schema.time`."""
    parts: tuple[DatePart, ...] = ()
    """Features, named ``NAME.PART``: ``hour`` (0 to 23), ``weekday`` (1 to 7, from Monday), ``day``
    of the month, ``month`` (1 to 12), ``days`` since 1970-01-01."""
    since: tuple[str, ...] = ()
    """Other columns of dates, `schema.time` or names in `schema.dates`. The feature
    ``NAME.since.OTHER`` is the number of days from that date to this one, with a fraction, negative
    if this one is earlier."""
    zone: str = "UTC"
    """Time zone of `parts`, such as ``Europe/Berlin``. Dates are read as UTC unless they have an
    offset or a zone, so leave it out if the log has local times without an offset."""
    time_unit: TimeUnit = "s"
    """Unit of integers, as `schema.time_unit`, from which the column `schema.time` takes it."""
    time_format: str = ""
    """Format of text or digits, as `schema.time_format`, from which the column `schema.time` takes
    it.
    """

    @property
    def part_features(self) -> dict[DatePart, str]:
        """Part of a date (such as ``hour``) -> name of the feature that is computed from it."""
        return {part: f"{self.name}.{part}" for part in self.parts}

    @property
    def since_features(self) -> dict[str, str]:
        """Name of another column of dates -> name of the feature with the days since then."""
        return {other: f"{self.name}.since.{other}" for other in self.since}

    @property
    def features(self) -> tuple[str, ...]:
        """Names of all features that are computed from the column."""
        return *self.part_features.values(), *self.since_features.values()

    def check(self) -> None:
        """Raise `ConfigError` if the name, the zone or a repeated entry is wrong."""
        place = f"schema.dates: column {self.name!r}"
        check_column("schema.dates: name", self.name)
        for field_name in ("parts", "since"):
            values = getattr(self, field_name)
            repeated = next((value for value in values if values.count(value) > 1), None)
            if repeated is not None:
                raise ConfigError(f"{place}: {field_name} repeats {repeated!r}, expected different entries")
        try:
            ZoneInfo(self.zone)
        except (KeyError, ValueError, OSError) as error:  # OSError: the name of a directory of zones
            raise ConfigError(
                f"{place}: zone is {self.zone!r}, expected a name such as UTC or Europe/Berlin; if no zone "
                "is known, install the package tzdata"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a log and of the data set that is prepared from it, with their roles."""

    label: str | LabelRule = "label"
    """Name of a column of 0 and 1 or of booleans, or a rule such as ``{column: rating, at_least:
    4}`` or ``{column: answer, equals: 'yes'}``."""
    labels: tuple[str | LabelRule, ...] = ()
    """Several labels instead of `label`, such as ``[click, like]``: names of columns or rules. A
    row may lack some of them. The model has a logit for each label. The first label decides which
    rows are events of histories, and its metrics decide about early stopping."""
    weight: str = ""
    """Name of the column with sample weights, for the training loss and every metric; finite
    numbers of at least 0. Empty for equal weights."""
    dense: tuple[DenseFeature, ...] = ()
    sparse: tuple[SparseFeature, ...] = ()
    time: str = ""
    """Name of the column with times: integers, seconds since 1970 with a fraction, timestamps, or
    text such as 2024-05-31 or 2024-05-31 23:59:59 (UTC, unless an offset such as +02:00 follows).
    Empty if the log has no times."""
    time_unit: TimeUnit = "s"
    """Unit of integers in the time column; timestamps and fractions are converted to this unit."""
    time_format: str = ""
    """Format of times in text or digits, such as ``%d/%m/%Y %H:%M`` or ``%Y%m%d%H``; empty for the
    formats that `time` lists."""
    session: str = ""
    """Name of the column with sessions. Samples of a session are stored together."""
    user: str = ""
    """Name of the column with users. It is needed for histories, and used for grouped AUC."""
    dates: Annotated[tuple[DateColumn, ...], pydantic.Field(exclude_if=operator.not_)] = field(
        default=(), repr=False
    )
    """Columns of dates, such as ``{name: arrival, parts: [weekday, month], since: [time]}``, from
    which features are computed."""

    def __post_init__(self) -> None:
        self._take_labels()
        self._take_dates()
        vocabularies = {feature.name: feature.vocabulary for feature in self.sparse}
        types = {feature.name: feature.type for feature in self.sparse}
        filled = (
            replace(
                f, vocabulary=f.vocabulary or vocabularies.get(f.of) or f.of, type=types.get(f.of, f.type)
            )
            for f in self.sparse
        )
        object.__setattr__(self, "sparse", tuple(self._with_main_of(feature) for feature in filled))
        self._check_names()
        self._check_keys()
        self._check_events()

    def _take_labels(self) -> None:
        if not self.labels:
            return
        if self.label not in (Schema.label, self.labels[0]):
            raise ConfigError(
                f"schema.label is {self.label!r}, but schema.labels is set too; remove one of them"
            )
        if len(self.labels) == 1:
            raise ConfigError(
                "schema.labels has one entry, expected several; use schema.label for one label"
            )
        object.__setattr__(self, "label", self.labels[0])
        columns = self.label_columns
        repeated = next((name for name in columns if columns.count(name) > 1), None)
        if repeated is not None:
            raise ConfigError(f"schema.labels: column {repeated!r} is repeated, expected different columns")

    def _take_dates(self) -> None:
        """Check the columns of dates, and append their features to `dense` if they are not in
        `dense` or `sparse`.
        """
        names = [date.name for date in self.dates]
        for date in self.dates:
            date.check()
            place = f"schema.dates: column {date.name!r}"
            if names.count(date.name) > 1:
                raise ConfigError(f"{place} has several entries, expected one")
            if date.name in (*self.label_columns, self.weight):
                raise ConfigError(f"{place} is a label or the weight of samples; name another column")
            if date.name == self.time and (date.time_unit, date.time_format) != ("s", ""):
                raise ConfigError(
                    f"{place} is schema.time: set schema.time_unit and schema.time_format "
                    "and omit these fields here"
                )
            others = [name for name in (*names, self.time) if name and name != date.name]
            unknown = next((other for other in date.since if other not in others), None)
            if unknown is not None:
                raise ConfigError(
                    f"{place}: since names {unknown!r}, expected schema.time or "
                    "another column of schema.dates"
                )
        features = self.date_features
        present = set(self.names)
        added = (DenseFeature(name=name, transform="none") for name in features if name not in present)
        object.__setattr__(self, "dense", (*self.dense, *added))
        derived = next(
            (f for f in self.sparse if f.kind != "single" and (f.name in features or f.of in features)),
            None,
        )
        if derived is not None:
            raise ConfigError(
                f"sparse feature {derived.name!r}: a feature of schema.dates is of kind single, and no "
                "feature is made of its earlier values; rename the feature, or name another one in `of`"
            )

    def _with_main_of(self, feature: SparseFeature) -> SparseFeature:
        """Return a parallel column with the maximum length and group of its main sequence."""
        if not feature.beside:
            return feature
        mains = {main.name: main for main in self.sparse if main.kind == "sequence" and not main.beside}
        if feature.beside not in mains:
            raise ConfigError(
                f"sparse feature {feature.name!r}: `beside` is {feature.beside!r}, expected a feature of "
                "kind sequence that has no `beside`"
            )
        main, default = mains[feature.beside], SparseFeature.max_length
        for name, free in (("max_length", default), ("group", "")):
            if getattr(feature, name) not in (free, getattr(main, name)):
                raise ConfigError(
                    f"sparse feature {feature.name!r}: {name} is {getattr(feature, name)!r}, but its main "
                    f"sequence {main.name!r} has {getattr(main, name)!r}; remove it"
                )
        return replace(feature, max_length=main.max_length, group=main.group)

    def _check_names(self) -> None:
        for where, name in self._given_names():
            check_name(where, name)
        names = self.names
        repeated = sorted(name for name, count in Counter(names).items() if count > 1)
        if repeated:
            raise ConfigError(f"schema: feature names must be distinct, repeated: {', '.join(repeated)}")
        for label in self.label_columns:
            if label in (*names, *(feature.column for feature in self.dense)):
                raise ConfigError(
                    f"schema: the label column {label!r} is also a feature; remove the feature"
                )
        computed = next((feature for feature in self.dense if feature.column in self.date_features), None)
        if computed is not None:
            raise ConfigError(
                f"dense feature {computed.name!r}: column is {computed.column!r}, which is computed from a "
                "date, expected a column of the log"
            )
        clash = sorted(set(self.groups) & set(names))
        if clash:
            raise ConfigError(
                f"schema: groups and features must have different names, shared: {', '.join(clash)}"
            )

    def _given_names(self) -> Iterator[tuple[str, str]]:
        """Yield the field and the name of every feature, group and vocabulary."""
        for place, dense in enumerate(self.dense):
            yield f"schema.dense[{place}].name", dense.name
            yield f"schema.dense[{place}].column", dense.source
            if dense.group:
                yield f"schema.dense[{place}].group", dense.group
        for place, sparse in enumerate(self.sparse):
            yield f"schema.sparse[{place}].name", sparse.name
            yield f"schema.sparse[{place}].vocabulary", sparse.vocabulary
            if sparse.group:
                yield f"schema.sparse[{place}].group", sparse.group

    def _check_keys(self) -> None:
        lists = {
            feature.name for feature in self.sparse if feature.traits.lists and not feature.traits.derived
        }
        for label in self.label_columns:
            check_column("schema.labels" if self.labels else "schema.label", label)
        for key in ("time", "session", "user"):
            name = getattr(self, key)
            if not name:
                continue
            check_column(f"schema.{key}", name)
            if name in self.label_columns:
                raise ConfigError(
                    f"schema.{key} is {name!r}, which is the label column; name another column"
                )
            if name in lists:
                raise ConfigError(
                    f"schema.{key} is {name!r}, a feature with several values; name a column with one"
                )
        self._check_weight()
        for feature in self.weighted:
            self._check_weights(feature)

    def _check_weight(self) -> None:
        if not self.weight:
            return
        check_column("schema.weight", self.weight)
        others = {feature.name for feature in self.sparse} | {
            *self.label_columns,
            self.time,
            self.session,
            self.user,
        }
        if self.weight in others:
            raise ConfigError(
                f"schema.weight is {self.weight!r}, which is the label, a key or a sparse "
                "feature; name another column"
            )

    def _check_weights(self, feature: SparseFeature) -> None:
        check_column(f"sparse feature {feature.name!r}: weights", feature.weights)
        if feature.weights in {
            *self.names,
            *self.label_columns,
            self.weight,
            self.time,
            self.session,
            self.user,
        }:
            raise ConfigError(
                f"sparse feature {feature.name!r}: weights is {feature.weights!r}, which is a label, a "
                "key, a feature or the weight of samples; name another column"
            )

    def _check_events(self) -> None:
        singles = {feature.name for feature in self.sparse if not feature.traits.lists}
        for feature in (
            feature for columns in self.behaviours.values() for feature in columns if feature.of
        ):
            if feature.of not in singles:
                raise ConfigError(
                    f"sparse feature {feature.name!r}: `of` is {feature.of!r}, expected "
                    "a feature of kind single"
                )
        for feature in self.histories:
            if not self.user or not self.time:
                raise ConfigError(
                    f"sparse feature {feature.name!r}: kind history needs schema.user and schema.time"
                )
            self.age_limit(feature)

    def age_limit(self, history: SparseFeature) -> int | None:
        """Return `within` of a history in `time_unit`; None if it has no limit."""
        field_name = f"sparse feature {history.name!r}: within"
        return in_unit(history.within, self.time_unit, field_name) if history.within else None

    @property
    def label_column(self) -> str:
        """Name of the label's column; of the first label if there are several."""
        return self.label_columns[0]

    @property
    def label_rules(self) -> tuple[str | LabelRule, ...]:
        """All labels, as names of columns or rules."""
        return self.labels or (self.label,)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Names of the columns of all labels; a label has the name of its column."""
        return tuple(rule if isinstance(rule, str) else rule.column for rule in self.label_rules)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all features, dense before sparse."""
        return (*(feature.name for feature in self.dense), *(feature.name for feature in self.sparse))

    @property
    def date_features(self) -> tuple[str, ...]:
        """Names of the features that are computed from `dates`."""
        return tuple(name for date in self.dates for name in date.features)

    @property
    def scored_columns(self) -> tuple[str, ...]:
        """Names of the columns of a row to score: features, weights of their values, and dates of
        computed features.

        A row to score may have the histories, which `prepare` computes for a log.
        """
        computed = set(self.date_features)
        read = (*(feature.source for feature in self.dense), *(feature.name for feature in self.sparse))
        features = (name for name in read if name not in computed)
        dates = (name for date in self.dates for name in (date.name, *date.since))
        return tuple(dict.fromkeys((*features, *(feature.weights for feature in self.weighted), *dates)))

    @property
    def scored_time(self) -> str:
        """`time` if a feature is computed from it, else empty: a row to score then needs no
        time.
        """
        uses_time = any(self.time in (date.name, *date.since) for date in self.dates)
        return self.time if uses_time else ""

    def reduced(self, sparse: tuple[SparseFeature, ...] = ()) -> Schema:
        """Return the schema of the keys, times and labels, with no other features than `sparse`."""
        return replace(self, dense=(), dates=(), sparse=sparse, session="", weight="")

    @property
    def weighted(self) -> tuple[SparseFeature, ...]:
        """The features whose values have weights."""
        return tuple(feature for feature in self.sparse if feature.weights)

    @property
    def histories(self) -> tuple[SparseFeature, ...]:
        """The features that `prepare` computes from earlier samples."""
        return tuple(feature for feature in self.sparse if feature.traits.derived)

    @property
    def sequences(self) -> dict[str, tuple[SparseFeature, ...]]:
        """Name of each main sequence -> all columns of the sequence, the main one first."""
        columns = [feature for feature in self.sparse if feature.kind == "sequence"]
        return {
            main.name: (main, *(feature for feature in columns if feature.beside == main.name))
            for main in columns
            if not main.beside
        }

    @property
    def behaviours(self) -> dict[str, tuple[SparseFeature, ...]]:
        """Name of a history or main sequence -> its columns. Histories come first."""
        return {**{feature.name: (feature,) for feature in self.histories}, **self.sequences}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Declared group -> its features, sparse before dense, in schema order."""
        groups: dict[str, tuple[str, ...]] = {}
        members = [(feature.group, feature.name) for feature in self.sparse]
        for group, name in [*members, *((feature.group, feature.name) for feature in self.dense)]:
            if group:
                groups[group] = (*groups.get(group, ()), name)
        return groups

    @property
    def shard_key(self) -> str:
        """Column whose equal values are in the same shard: the user if there are histories, else
        the session.
        """
        return self.user if self.histories or not self.session else self.session

    @property
    def session_keys(self) -> tuple[str, ...]:
        """Columns that identify a session: the user and the session, if the schema has them."""
        return tuple(dict.fromkeys(name for name in (self.shard_key, self.session, self.user) if name))

    def inputs(self) -> dict[str, list[dict[str, Any]]]:
        """Return JSON with the properties of features on which a model depends.

        Properties that only say how features are read and stored are left out.
        """
        sparse, optional = ("name", "kind", "vocabulary", "of", "max_length"), ("beside", "within")
        dense = ("name", "column", "transform", "standardize")
        return {
            "sparse": [
                {key: getattr(feature, key) for key in sparse}
                | {key: value for key in optional if (value := getattr(feature, key))}
                | ({"weighted": True} if feature.weights else {})
                for feature in self.sparse
            ],
            "dense": [{key: getattr(feature, key) for key in dense} for feature in self.dense],
            **(
                {"dates": [{"name": date.name, "zone": date.zone} for date in self.dates]}
                if self.dates
                else {}
            ),
        }

    def vocabularies(self) -> dict[str, tuple[SparseFeature, ...]]:
        """Vocabulary name -> the features that share it, in schema order."""
        vocabularies: dict[str, list[SparseFeature]] = {}
        for feature in self.sparse:
            vocabularies.setdefault(feature.vocabulary, []).append(feature)
        return {name: tuple(features) for name, features in vocabularies.items()}
