"""A log of clicks alone, turned into click-through samples.

Each click is a positive. K negatives are drawn among the items clicked in the window before it, in proportion to their
clicks there (drawing a click of the window at random does just that), so nothing looks ahead in time. A negative is
never the clicked item and no two negatives of a click are equal; a click for which 16 K draws find fewer (its window
holds too few other items, or one far above the rest) gets fewer negatives. Negatives take over the user, session, time
and contexts of their click.

Beside the contexts of the click, a sample holds numbers that say what was known of the item at that moment, all from
clicks strictly earlier: see `DENSE` and `kernels.lookback`. They matter more than ids do where items live for days.

The log need not be sorted: it is first spooled into buckets of one window each, which are then taken in order of time.
Memory holds two buckets, and keys and counts of the clicks of `memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.checks import check_seed
from stratarec.data.durations import in_unit
from stratarec.data.hashing import stable_hash
from stratarec.data.schema import DenseFeature, Schema, SparseFeature, TimeUnit
from stratarec.data.sources.base import Chunk, OnBadRow
from stratarec.data.sources.files import expand, fingerprint
from stratarec.data.sources.parquet import Converter, count_rows, parquet_pieces
from stratarec.data.sources.text import BadRows
from stratarec.errors import ConfigError
from stratarec.files import make_directory, read_json, reading, write_atomic, write_json
from stratarec.kernels.lookback import FEATURES, Clicks, Lookback
from stratarec.kernels.negatives import draw_negatives
from stratarec.kernels.random import table_key

# Clicks of the item in the window and in its last sixth, and seconds since the item's first click in the log; then
# what `Lookback` counts, and clicks in the window in the same context, for each context.
DENSE = ("popularity", "recent_popularity", "item_age", *FEATURES)
_RECENT_SHARE = 6
# Most clicks that become one chunk; bounds memory however dense the log is.
_CHUNK_CLICKS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class ClicksConfig:
    """Where a click log lies, and how samples are made of it."""

    kind: Literal["clicks"] = "clicks"
    paths: tuple[str, ...] = ()
    """Parquet files, globs or URLs."""
    user: str = "user_id"
    """Column of the user."""
    session: str = "session_id"
    """Column of the session; empty when there is none."""
    item: str = "item_id"
    """Column of the clicked item."""
    time: str = "timestamp"
    """Column of the time of the click."""
    time_unit: TimeUnit = "s"
    """Unit of the time column, where it is an integer."""
    contexts: tuple[str, ...] = ()
    """Categorical columns that describe the moment of the click."""
    negatives: int = 4
    """K, negatives for each click."""
    popularity_window: str = "1h"
    """How far back negatives and the `popularity` feature look; `recent_popularity` looks back a sixth of it."""
    memory: str = "1d"
    """How far back moves between items, the user's clicks, the session and `long_popularity` are counted."""
    history_length: int = 50
    """L, how many of the user's earlier clicks make the `history` feature; 0 for no history."""
    dense: tuple[str, ...] | None = None
    """Which of the numbers that are counted from earlier clicks a sample holds; null for all of them."""
    seed: int = 0
    """Of the negatives."""

    def __post_init__(self) -> None:
        if self.negatives < 0:
            raise ConfigError(f"data.source.negatives is {self.negatives}, expected 0 or more")
        if self.history_length < 0:
            raise ConfigError(f"data.source.history_length is {self.history_length}, expected 0 or more")
        check_seed(self.seed, "data.source.seed")
        strange = sorted(set(self.dense or ()) - set(self.countable))
        if strange:
            raise ConfigError(
                f"data.source.dense names {strange[0]!r}, which is not counted; there are {', '.join(self.countable)}"
            )
        window = in_unit(self.popularity_window, self.time_unit, "data.source.popularity_window")
        if in_unit(self.memory, self.time_unit, "data.source.memory") < window:
            raise ConfigError(
                f"data.source.memory is {self.memory}, expected at least popularity_window ({self.popularity_window})"
            )

    @property
    def countable(self) -> tuple[str, ...]:
        """The numbers that `dense` chooses from."""
        return (*DENSE, *(f"{name}_popularity" for name in self.contexts))

    @property
    def counted(self) -> tuple[str, ...]:
        """Those that it chooses, in the order of `countable`."""
        return tuple(name for name in self.countable if self.dense is None or name in self.dense)


class ClicksSource:
    """Samples of a click log in order of time."""

    def __init__(self, config: ClicksConfig, on_bad_row: OnBadRow) -> None:
        self._config = config
        self._on_bad_row = on_bad_row
        self._files = expand(config.paths)
        self._window = in_unit(config.popularity_window, config.time_unit, "data.source.popularity_window")
        self.files = tuple(file.path for file in self._files)
        self.total_bytes = sum(file.size for file in self._files)
        self.schema = Schema(
            label="label",
            dense=tuple(DenseFeature(name=name) for name in config.counted),
            sparse=tuple(self._sparse()),
            time=config.time,
            time_unit=config.time_unit,
            session=config.session,
            user=config.user,
        )

    def _sparse(self) -> Iterator[SparseFeature]:
        config = self._config
        yield SparseFeature(name=config.item)
        yield from (SparseFeature(name=name) for name in (*config.contexts, "hour_of_day", "weekday"))
        if config.history_length:
            yield SparseFeature(name="history", kind="history", of=config.item, max_length=config.history_length)

    def estimate_rows(self) -> int:
        return count_rows(self._files) * (1 + self._config.negatives)

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "clicks", "files": fingerprint(self._files), "config": repr(self._config)}

    def chunks(self, workspace: Path, start: int = 0) -> Iterator[Chunk]:
        bad = self._spool(workspace)
        buckets = sorted(int(path.name.removeprefix("bucket=")) for path in workspace.glob("bucket=*"))
        lookback = self._lookback()
        number, index, before = 0, 0, pl.DataFrame()
        born = pl.DataFrame()
        for place, bucket in enumerate(buckets):
            clicks = _read_bucket(workspace, bucket, self._config.time)
            born = self._first_clicks(born, clicks)
            near = before if len(before) and buckets[place - 1] == bucket - 1 else clicks.clear()
            both = pl.concat([near, clicks])
            edges = len(near) + _pieces(clicks[self._config.time].to_numpy())
            for first, last in pairwise(edges):
                # Chunks before `start` are gone through for what is remembered of them.
                frame = self._samples(both[:last], int(first), lookback, born, number, wanted=index >= start)
                if frame is not None:
                    yield Chunk(
                        index=index,
                        file=0,
                        frame=frame,
                        bytes_done=self.total_bytes * (place + 1) // len(buckets),
                        bad_rows=bad[0] if index == 0 else 0,
                        bad_examples=tuple(bad[1]) if index == 0 else (),
                    )
                index, number = index + 1, number + int(last - first)
            before = clicks

    def _lookback(self) -> Lookback:
        config = self._config
        return Lookback(
            window=self._window,
            memory=in_unit(config.memory, config.time_unit, "data.source.memory"),
            unit=in_unit("1s", config.time_unit, "time_unit"),
            contexts=len(config.contexts),
        )

    def _spool(self, workspace: Path) -> tuple[int, list[str]]:
        """Cut the log into buckets of one window; returns the number of bad rows and some of their messages."""
        config = self._config
        columns = [config.item, config.user, config.time, *config.contexts]
        columns = list(dict.fromkeys(columns + ([config.session] if config.session else [])))
        make_directory(workspace / "done")
        done = {int(path.stem) for path in (workspace / "done").glob("*.json")}
        # Pieces are finished in order, so the finished ones are a prefix.
        for piece in parquet_pieces(self._files, columns, start=len(done)):
            bad = BadRows(self._on_bad_row)
            frame = self._typed(piece.frame, self._files[piece.file].path, piece.first_row, bad)
            for (bucket,), part in frame.group_by(pl.col(config.time) // self._window, maintain_order=True):
                target = workspace / f"bucket={bucket}" / f"{piece.index:08d}.parquet"
                write_atomic(target, part.write_parquet)
            write_json(workspace / "done" / f"{piece.index:08d}.json", [bad.count, bad.examples])
        notes = [read_json(path) for path in sorted((workspace / "done").glob("*.json"))]
        return sum(count for count, _ in notes), [text for _, texts in notes for text in texts][:5]

    def _typed(self, frame: pl.DataFrame, path: str, first_row: int, bad: BadRows) -> pl.DataFrame:
        config = self._config
        converter = Converter(path, first_row, frame.height, bad)
        columns = {name: converter.category(frame[name]) for name in (config.item, *config.contexts)}
        columns[config.user] = converter.category(frame[config.user])
        if config.session:
            columns[config.session] = converter.category(frame[config.session])
        for name in filter(None, (config.item, config.user, config.session)):
            converter.require(frame[name], frame[name].is_not_null(), "a value")
        columns[config.time] = converter.time(frame[config.time], config.time_unit)
        return converter.good(columns)

    def _first_clicks(self, born: pl.DataFrame, clicks: pl.DataFrame) -> pl.DataFrame:
        """Item and time of its first click, `clicks` included; buckets come in order of time."""
        found = clicks.group_by(self._config.item).agg(pl.col(self._config.time).min().alias("born"))
        both = pl.concat([born, found]) if len(born) else found
        return both.group_by(self._config.item).agg(pl.col("born").min())

    def _samples(
        self, both: pl.DataFrame, first: int, lookback: Lookback, born: pl.DataFrame, number: int, *, wanted: bool
    ) -> pl.DataFrame | None:
        """The clicks of `both` from `first` on and their negatives, click by click, the positive first."""
        config = self._config
        clicks = both[first:]
        found, codes = np.unique(both[config.item].to_numpy(), return_inverse=True)
        hashes = stable_hash(pl.Series(config.item, found, dtype=both[config.item].dtype))
        if not wanted:
            lookback.features(self._hashed(clicks), np.zeros((len(clicks), 0), dtype=np.uint64))
            return None
        negatives, counts = draw_negatives(
            both[config.time].to_numpy(),
            codes.astype(np.int64),
            first=first,
            window=self._window,
            recent=self._window // _RECENT_SHARE,
            wanted=config.negatives,
            key=table_key(config.seed, "negatives"),
            number=number,
        )
        shown = np.concatenate([codes[first:, None], negatives], axis=1)
        kept = shown >= 0
        known = lookback.features(self._hashed(clicks), np.where(kept, hashes[shown], np.uint64(0)))[kept]
        row = np.repeat(np.arange(len(clicks)), shown.shape[1]).reshape(shown.shape)[kept]
        label = np.zeros(shown.shape, dtype=np.uint8)
        label[:, 0] = 1
        second = in_unit("1s", config.time_unit, "time_unit")
        moment = pl.from_epoch(clicks[config.time] // second, "s")
        frame = clicks.with_columns(
            moment.dt.hour().cast(pl.Int64).alias("hour_of_day"), moment.dt.weekday().cast(pl.Int64).alias("weekday")
        )[row]
        items = pl.Series(config.item, found[shown[kept]], dtype=clicks[config.item].dtype)
        birth = items.to_frame().join(born, on=config.item, how="left", maintain_order="left")["born"]
        age = ((frame[config.time] - birth) / second).to_numpy()
        dense = np.column_stack([counts[kept], age, known]).astype(np.float32)
        columns = [
            pl.Series(name, dense[:, f]).fill_nan(None)
            for f, name in enumerate(config.countable)
            if name in config.counted
        ]
        return frame.with_columns(items, pl.Series("label", label[kept]), *columns)

    def _hashed(self, clicks: pl.DataFrame) -> Clicks:
        config = self._config
        contexts = [stable_hash(clicks[name]) for name in config.contexts]
        return Clicks(
            times=clicks[config.time].to_numpy(),
            users=stable_hash(clicks[config.user]),
            sessions=stable_hash(clicks[config.session or config.user]),
            items=stable_hash(clicks[config.item]),
            contexts=np.column_stack(contexts) if contexts else np.zeros((len(clicks), 0), dtype=np.uint64),
        )


def _pieces(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Edges of runs of about `_CHUNK_CLICKS`; clicks of one moment stay together."""
    edges = [0]
    while edges[-1] < len(times):
        wanted = min(edges[-1] + _CHUNK_CLICKS, len(times)) - 1
        edges.append(int(np.searchsorted(times, times[wanted], side="right")))
    return np.array(edges)


def _read_bucket(workspace: Path, bucket: int, time: str) -> pl.DataFrame:
    """The clicks of one window in order of time, and of the log where times are equal."""
    folder = workspace / f"bucket={bucket}"
    with reading(folder):
        parts = [pl.read_parquet(path, hive_partitioning=False) for path in sorted(folder.glob("[0-9]*.parquet"))]
        return pl.concat(parts).sort(time, maintain_order=True)
