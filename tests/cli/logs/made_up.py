"""Write made-up logs: rows of users, items, sessions, times and labels, in the shape of a public
log.

A log is a table of columns. Each column has the role that the owner of the log would give to it,
and a function from a `World` to its values. Roles are label, time, user, item, session, number,
category, list, weight, leak and out (left out); several that are equally good are joined by ``|``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

Values = Sequence[Any]
Generator = Callable[["World"], Values]
Columns = dict[str, tuple[str, Generator]]


@dataclass(frozen=True, kw_only=True)
class Log:
    """A made-up log: how its file is written, its columns, and how many users, items and rows it
    has.
    """

    name: str
    file: str
    columns: Columns
    separator: str = ","
    header: bool = True
    quoted: bool = False
    """Whether every cell is in quotes."""
    encoding: str = "utf-8"
    label: str = ""
    """What the owner gives as ``--label`` if `init` asks for a label, unless it is the name of the
    column.
    """
    rows: int = 900
    users: int = 150
    items: int = 120
    start: str = "2023-05-02"
    days: float = 30
    rate: float = 0.3
    order: str = "time"
    """Order of the rows: ``time``, ``user`` (then by time) or ``random``."""

    @property
    def held_out(self) -> bool:
        """Whether rules were finished before this log was tried: true for about a third of all
        names.
        """
        return zlib.crc32(self.name.encode()) % 3 == 0

    def write(self, folder: Path) -> Path:
        """Write the log to its file in `folder`."""
        world = World(self)
        columns = {name: list(values(world)) for name, (_, values) in self.columns.items()}
        path = folder / self.file
        if path.suffix == ".parquet":
            pl.DataFrame(columns, strict=False).write_parquet(path)
            return path
        if ".json" in path.name:
            rows = zip(*columns.values(), strict=True)
            lines = [json.dumps(dict(zip(columns, map(_plain, row), strict=True))) for row in rows]
        else:
            cells = [map(self._cell, each) for each in columns.values()]
            head = [self.separator.join(map(self._cell, columns))] if self.header else []
            lines = [*head, *(self.separator.join(row) for row in zip(*cells, strict=True))]
        content = "".join(f"{line}\n" for line in lines).encode(self.encoding)
        path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
        return path

    def _cell(self, value: Any) -> str:
        text = "" if value is None else str(value)
        if self.quoted or any(mark in text for mark in (self.separator, '"', "\n")):
            return '"{}"'.format(text.replace('"', '""'))
        return text


class World:
    """Who did what, when: ``[N]`` arrays of user, item, session, time in seconds since 1970, and
    label.
    """

    def __init__(self, log: Log) -> None:
        self.rng = np.random.default_rng(zlib.crc32(log.name.encode()))
        draw, rows = self.rng, log.rows
        lengths = draw.integers(1, 7, rows)
        self.session = np.repeat(np.arange(rows), lengths)[:rows]
        start = int(datetime.fromisoformat(log.start).replace(tzinfo=timezone.utc).timestamp())
        begin = start + np.sort(draw.integers(0, int(log.days * 86_400), rows))
        # People are awake: two thirds of the sessions of the night move to noon.
        night = ((begin // 3600) % 24 < 6) & (draw.random(rows) < 2 / 3)
        begin = np.sort(np.where(night, begin + 43_200, begin))
        place = np.arange(rows) - np.concatenate([[0], np.cumsum(lengths)])[self.session]
        self.time = begin[self.session] + place * 37
        self.user = np.minimum(draw.zipf(1.2, rows) - 1, draw.integers(0, log.users, rows))[self.session]
        self.item = np.minimum(draw.zipf(1.2, rows) - 1, draw.integers(0, log.items, rows))
        taste = draw.normal(0, 1, log.users)[self.user] + draw.normal(0, 1, log.items)[self.item]
        self.score = taste + draw.normal(0, 1.5, rows)
        self.label = self.score > np.quantile(self.score, 1 - log.rate)
        order = {
            "time": np.argsort(self.time, kind="stable"),
            "user": np.lexsort((self.time, self.user)),
            "random": draw.permutation(rows),
        }[log.order]
        for name in ("session", "time", "user", "item", "score", "label"):
            setattr(self, name, getattr(self, name)[order])

    @property
    def rows(self) -> int:
        return len(self.time)

    def key(self, name: str) -> np.ndarray:
        """Return the codes ``[N]`` of users, items or sessions."""
        codes: np.ndarray = getattr(self, name)
        return codes


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _seeded(text: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(text.encode()))


def ids(key: str, form: str | Callable[[int], Any] = "", low: int = 1, high: int = 90_000) -> Generator:
    """Return the ids of users, items or sessions: numbers without order, or text of them in a
    format such as U{:05d}.

    ``{hex8}`` in a format is replaced by 8 hexadecimal digits, and so on.
    """

    def values(world: World) -> Values:
        codes = world.key(key)
        numbers = _seeded(f"{key}{form}").choice(high - low, int(codes.max()) + 1, replace=False) + low
        if not form:
            return [int(x) for x in numbers[codes]]
        return [_named(form, int(x)) for x in numbers[codes]]

    return values


def _named(form: str | Callable[[int], Any], number: int) -> Any:
    if callable(form):
        return form(number)
    for digits in (8, 16, 32, 40, 64):
        if f"{{hex{digits}}}" in form:
            return form.replace(f"{{hex{digits}}}", _seeded(str(number)).bytes(digits // 2).hex())
    return form.format(number)


def uuid(number: int) -> str:
    text = _seeded(str(number)).bytes(16).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def rising(key: str = "session", first: int = 1) -> Generator:
    """Return ids that rise with the rows, such as session numbers."""
    return lambda world: [int(x) + first for x in world.key(key)]


def trait(
    key: str, values: Sequence[Any] | Callable[[np.random.Generator], Any], salt: str = ""
) -> Generator:
    """Return a property of the user, item or session: each has one value."""

    def chosen(world: World) -> Values:
        codes, draw = world.key(key), _seeded(f"{key}{salt}{values if not callable(values) else ''}")
        own = [
            values(draw) if callable(values) else values[int(draw.integers(0, len(values)))]
            for _ in range(int(codes.max()) + 1)
        ]
        return [own[x] for x in codes]

    return chosen


def pick(values: Sequence[Any], skew: float = 0.0) -> Generator:
    """Return values drawn for each row; with `skew`, the first are more frequent."""

    def drawn(world: World) -> Values:
        share = 1 / np.arange(1, len(values) + 1) ** skew
        return [values[x] for x in world.rng.choice(len(values), world.rows, p=share / share.sum())]

    return drawn


def whole(low: int, high: int) -> Generator:
    return lambda world: [int(x) for x in world.rng.integers(low, high, world.rows)]


def codes(count: int, low: int = 1, high: int = 90_000, form: str = "") -> Generator:
    """Return codes without order, some of them frequent."""

    def values(world: World) -> Values:
        own = _seeded(f"{count}{low}{high}{form}").choice(high - low, count, replace=False) + low
        drawn = own[
            np.minimum(world.rng.zipf(1.3, world.rows) - 1, world.rng.integers(0, count, world.rows))
        ]
        return [_named(form, int(x)) if form else int(x) for x in drawn]

    return values


def amount(middle: float, spread: float = 0.8, digits: int = 2) -> Generator:
    """Return amounts with a long tail; whole numbers if `digits` is 0."""

    def values(world: World) -> Values:
        drawn = middle * np.exp(spread * world.rng.normal(size=world.rows))
        return [round(float(x), digits) if digits else int(x) for x in drawn]

    return values


def normal(mean: float, sd: float, digits: int = 3) -> Generator:
    return lambda world: [round(float(x), digits) for x in world.rng.normal(mean, sd, world.rows)]


def counts(mean: float) -> Generator:
    """Return counts of which many are 0 and few are large."""
    return lambda world: [int(x) for x in world.rng.negative_binomial(0.7, 0.7 / (0.7 + mean), world.rows)]


def when(form: str, shift: int = 0) -> Generator:
    """Return the times of the rows, written in a format. ``{-d}`` and similar are fields without
    leading zero.
    """

    def values(world: World) -> Values:
        return [written(int(x) + shift, form) for x in world.time]

    return values


def written(seconds: int, form: str) -> str:
    moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=seconds)
    return moment.strftime(form)


def since_1970(scale: int = 1, kind: type = int, shift: int = 0) -> Generator:
    """Return the times as numbers since 1970: seconds times `scale`."""
    return lambda world: [kind((int(x) + shift) * scale + int(x) % min(scale, 997)) for x in world.time]


def elapsed(step: int = 1) -> Generator:
    """Return the times since the first row, in steps of so many seconds."""
    return lambda world: [int(x - world.time.min()) // step for x in world.time]


def outcome(positive: Any = 1, negative: Any = 0) -> Generator:
    return lambda world: [positive if x else negative for x in world.label]


def stars(*scale: Any) -> Generator:
    """Return a rating: the quantile of the user's liking on a scale."""

    def values(world: World) -> Values:
        rank = np.argsort(np.argsort(world.score)) / world.rows
        return [scale[int(x * len(scale))] for x in rank]

    return values


def only(values: Generator, otherwise: Any = "", share: float = 1.0) -> Generator:
    """Return values that are present only where the label is 1, and in a share of these rows."""

    def present(world: World) -> Values:
        kept = world.label & (world.rng.random(world.rows) < share)
        return [value if there else otherwise for value, there in zip(values(world), kept, strict=True)]

    return present


def missing(values: Generator, share: float, word: Any = "") -> Generator:
    def some(world: World) -> Values:
        lost = world.rng.random(world.rows) < share
        return [word if gone else value for value, gone in zip(values(world), lost, strict=True)]

    return some


def each(values: Generator, change: Callable[[Any], Any]) -> Generator:
    return lambda world: [change(value) for value in values(world)]


def fixed(value: Any) -> Generator:
    return lambda world: [value] * world.rows


def numbered(first: int = 0, form: str = "") -> Generator:
    return lambda world: [_named(form, x) if form else x for x in range(first, first + world.rows)]


def random_key(form: str = "{hex32}") -> Generator:
    """Return a different value in every row, in no order."""
    return lambda world: [_named(form, int(x)) for x in world.rng.permutation(world.rows * 7)[: world.rows]]


def some_of(
    values: Sequence[Any], join: str | None = "|", most: int = 4, key: str = "", least: int = 1
) -> Generator:
    """Return several of the values, joined to text (a list if `join` is None), for each row or for
    each `key`.
    """

    def lists(world: World) -> Values:
        def one(draw: np.random.Generator) -> Any:
            chosen = draw.permutation(len(values))[: draw.integers(least, most + 1)]
            parts = [values[x] for x in chosen]
            return parts if join is None else join.join(map(str, parts))

        if key:
            return trait(key, one, f"{values[0]}")(world)
        return [one(world.rng) for _ in range(world.rows)]

    return lists


def earlier(values: Generator, join: str | None = " ", most: int = 8) -> Generator:
    """Return the values of the rows above, as a history of the user."""

    def lists(world: World) -> Values:
        own, lengths = list(values(world)), world.rng.integers(0, most, world.rows)
        parts = [
            [own[max(row - back, 0)] for back in range(length, 0, -1)] for row, length in enumerate(lengths)
        ]
        return parts if join is None else [join.join(map(str, part)) for part in parts]

    return lists


def words(count: int, key: str = "") -> Generator:
    """Return sentences of about so many words."""
    stock = [
        "blue",
        "soft",
        "new",
        "case",
        "for",
        "phone",
        "with",
        "steel",
        "the",
        "old",
        "garden",
        "lamp",
        "and",
        "kids",
    ]

    def one(draw: np.random.Generator) -> str:
        return " ".join(
            stock[x] for x in draw.integers(0, len(stock), draw.integers(count, 2 * count))
        ).capitalize()

    return trait(key, one, "words") if key else lambda world: [one(world.rng) for _ in range(world.rows)]


def vector(size: int, join: str = " ", ends: str = "", key: str = "item") -> Generator:
    """Return embeddings written as text."""

    def one(draw: np.random.Generator) -> str:
        inner = join.join(f"{x:.4f}" for x in draw.normal(size=size))
        return f"{ends[:1]}{inner}{ends[1:]}"

    return trait(key, one, "vector")
