"""Click-through samples from a log that contains only clicks.

Each click is a positive sample. Its K negatives are the items of K clicks by *other users* within
`negative_window` after it and in the same split, drawn uniformly with replacement. Negatives have
the user, session, time and contexts of their click. The dense features of a sample count only
clicks strictly before its time. So in a log without signal, positives and negatives have the same
distribution, and an AUC above 0.5 is signal. ``docs/log.md`` shows that three other designs leak.
Negatives from the window *before* the click depend on the same clicks as the counts. Negatives from
other splits have another distribution of items. Negatives that must differ from the clicked item
make popular items rarer among negatives. Here, training is noise-contrastive estimation (Gutmann
and Hyvarinen 2010), whose noise has the distribution of clicks and may equal the observation.

If no click of another user follows a click within the window, the click is not a sample, so that
every positive has exactly K negatives. The click is still part of histories. If the first click on
an item is within the window, the item can be a negative although nobody could have clicked it yet;
with a shorter window, this happens less often.

For the clicks in a log's last window, some of the later clicks are unknown. They either draw
negatives from the known clicks (``last_window: cut``), or they wait and become samples of the log
that continues this one. In the second case, consecutive logs give the same samples as one log with
all their clicks. A later log also counts the same earlier clicks (`ClickMemory`).

The log need not be sorted: its clicks are first written to buckets of one `negative_window` each,
which are then read in order of time. Memory holds two buckets, keys and counts of the clicks within
`memory`, each item's first click, and at the end the clicks that a later log needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.config.validate import check_ranges, check_seed
from stratarec.data.click_memory import ITEM, PARTS, TIME, ClickMemory, read_click_memory
from stratarec.data.column_names import FILE, column
from stratarec.data.columns.converter import BadRows, Converter, OnBadRow
from stratarec.data.durations import Duration, TimeUnit, in_unit
from stratarec.data.hashing import stable_hash
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.base import ALL_CHUNKS, Chunk, ChunkShare, LogConfig
from stratarec.data.sources.files import expand, fingerprint
from stratarec.data.sources.parquet import FileSlice, count_rows, parquet_pieces
from stratarec.data.splits import SplitConfig, Splitter
from stratarec.errors import ConfigError, DataError
from stratarec.io.atomic import (
    make_directory,
    read_frame,
    read_json,
    reporting_damage,
    write_atomic,
    write_json,
)
from stratarec.kernels.random import table_key

if TYPE_CHECKING:  # these load Numba, which takes a second that other sources do not need
    from stratarec.kernels.click_counts import Clicks, Lookback

# Features that are computed for a sample, in addition to the columns of its click.
_DERIVED = ("hour_of_day", "weekday", "history")
_RECENT_SHARE = 6
# Maximum number of clicks in a chunk, which limits memory for any density of clicks.
_CHUNK_CLICKS = 1 << 15
# Name of the file of a bucket with the clicks of the earlier log; it sorts before the files of this
# log.
_WAITING = "0.parquet"


@dataclass(frozen=True, kw_only=True)
class ClicksConfig(LogConfig):
    """Paths and columns of a click log, and how samples are made from it."""

    kind: Literal["clicks"] = "clicks"
    paths: tuple[str, ...] = ()
    """Parquet files, globs or URLs."""
    user: str = "user_id"
    """Column of the user."""
    session: str = "session_id"
    """Column of the session; empty for none."""
    item: str = "item_id"
    """Column of the clicked item."""
    time: str = "timestamp"
    """Column of the time of the click."""
    time_unit: TimeUnit = "s"
    """Unit of the time column, if its values are integers."""
    contexts: tuple[str, ...] = ()
    """Categorical columns that describe the context of a click."""
    negatives: int = 4
    """K, the number of negatives for each click."""
    negative_window: Duration = "1h"
    """Length of the time after a click. The click's negatives are items of other users' clicks in
    this time.
    """
    last_window: Literal["cut", "wait"] = field(default="cut", repr=False)
    """Use of the clicks in the log's last `negative_window`, whose possible negatives are partly
    unknown. ``cut`` draws from the known clicks. ``wait`` leaves these clicks to a data set with
    this one as its base, as `stratarec continue` does."""
    popularity_window: Duration = "1h"
    """Length of time over which `popularity` counts clicks; `recent_popularity` counts over a sixth
    of this time.
    """
    memory: Duration = "1d"
    """Length of the time before a sample over which moves between items, clicks of the user and
    session, and `long_popularity` are counted."""
    history_length: int = 50
    """L, the number of the user's earlier clicks in the `history` feature; 0 for no history."""
    history_within: Duration = field(default="", repr=False)
    """Age of the oldest click that a history may contain, such as ``30d``; empty for clicks of any
    age.
    """
    dense: tuple[str, ...] | None = None
    """Counts of earlier clicks that are dense features of a sample; null for all of them."""
    seed: int = 0
    """Seed of the negatives."""

    def __post_init__(self) -> None:
        check_ranges(self, "data.source.", negatives="[1, inf)", history_length="[0, inf)")
        check_seed(self.seed, "data.source.seed")
        for place, name in enumerate(self.contexts):
            if name in (self.item, *_DERIVED) or name in self.contexts[:place]:
                raise ConfigError(
                    f"data.source.contexts names {name!r}, which is a feature already; leave it out"
                )
        unknown = sorted(set(self.dense or ()) - set(self.countable))
        if unknown:
            raise ConfigError(
                f"data.source.dense names {unknown[0]!r}, which is not counted; there are "
                f"{', '.join(self.countable)}"
            )
        in_unit(self.negative_window, self.time_unit, "data.source.negative_window")
        if self.history_within:
            in_unit(self.history_within, self.time_unit, "data.source.history_within")
        window = in_unit(self.popularity_window, self.time_unit, "data.source.popularity_window")
        if in_unit(self.memory, self.time_unit, "data.source.memory") < window:
            raise ConfigError(
                f"data.source.memory is {self.memory}, expected at least popularity_window "
                f"({self.popularity_window})"
            )

    def of_file(self, file: str) -> ClicksConfig:
        return replace(self, paths=(file,), last_window="wait")

    @property
    def countable(self) -> tuple[str, ...]:
        """Names of all counts that `dense` may contain."""
        from stratarec.kernels.click_counts import FEATURES

        return (*FEATURES, *(f"{name}_popularity" for name in self.contexts))

    @property
    def counted(self) -> tuple[str, ...]:
        """Names of the counts in `dense`, in the order of `countable`."""
        return tuple(name for name in self.countable if self.dense is None or name in self.dense)


class ClicksSource:
    """Samples of a click log, in order of time."""

    divisible = False

    def __init__(self, config: ClicksConfig, on_bad_row: OnBadRow, split: SplitConfig) -> None:
        if split.of:
            raise ConfigError(
                f"data.split.of is {split.of}, but the source is of kind clicks, where negatives are drawn "
                "among the users of a split; remove it"
            )
        self._config = config
        self._on_bad_row = on_bad_row
        self._files = expand(config.paths)
        self._window = in_unit(config.negative_window, config.time_unit, "data.source.negative_window")
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
        self._splitter = Splitter(split, self.schema, self.files)
        self._before: ClickMemory | None = None

    def resume(self, memory: ClickMemory) -> None:
        """Continue an earlier log: its waiting clicks become the first samples, and its other
        clicks are counted.
        """
        names = self._columns
        if sorted(memory.recent.columns) != sorted(names):
            raise ConfigError(
                f"columns are {names} in data.source, {memory.recent.columns} in data.vocabulary.base"
            )
        self._before = replace(
            memory, recent=memory.recent.select(names), waiting=memory.waiting.select(names)
        )

    @property
    def _columns(self) -> list[str]:
        """Columns that are read from the log, in the order of the frames."""
        config = self._config
        keys = filter(None, [config.user, config.session, config.time])
        return list(dict.fromkeys([config.item, *config.contexts, *keys]))

    def _sparse(self) -> Iterator[SparseFeature]:
        config = self._config
        yield SparseFeature(name=config.item)
        yield from (SparseFeature(name=name) for name in (*config.contexts, "hour_of_day", "weekday"))
        if config.history_length:
            length, within = config.history_length, config.history_within
            yield SparseFeature(
                name="history", kind="history", of=config.item, max_length=length, within=within
            )

    def estimate_rows(self) -> int:
        return count_rows(self._files) * (1 + self._config.negatives)

    def fingerprint(self) -> dict[str, object]:
        config = replace(self._config, paths=())
        return {"kind": "clicks", "files": fingerprint(self._files, self._columns), "config": repr(config)}

    def chunks(self, workspace: Path, share: ChunkShare = ALL_CHUNKS) -> Iterator[Chunk]:
        bad_rows, bad_examples = self._write_buckets(workspace)
        self._check_order(workspace)
        buckets = sorted(int(path.name.removeprefix("bucket=")) for path in workspace.glob("bucket=*"))
        if not buckets:
            return
        time = self._config.time
        lookback, last_bucket = self._lookback(), self._read(workspace, buckets[-1])
        last_time = int(last_bucket[time].to_numpy()[-1])
        following = self._read(workspace, buckets[0])
        # A later log may begin at the very time of this log's last click, so clicks at `end` wait,
        # too.
        end = last_time - self._window if self._config.last_window == "wait" else last_time + 1
        if following[time][0] >= end:
            raise DataError(
                f"{', '.join(self.files[:3])}: all clicks, including waiting ones, are in one window of "
                f"{self._config.negative_window} (data.source.negative_window), so no negatives are known "
                "yet: give a longer log, such as this one and the next in one file"
            )
        index, unpaired, earlier = 0, 0, self._before.clicks if self._before else 0
        number = earlier
        for place, bucket in enumerate(buckets):
            clicks, has_more = following, place + 1 < len(buckets)
            following = self._read(workspace, buckets[place + 1]) if has_more else clicks.clear()
            is_adjacent = has_more and buckets[place + 1] == bucket + 1
            window = _ClickWindow(
                self._config,
                pl.concat([clicks, following]) if is_adjacent else clicks,
                self._splitter,
                last_time,
            )
            edges = _piece_edges(window.times[: min(len(clicks), int(np.searchsorted(window.times, end)))])
            is_last_bucket = not has_more or following[time][0] >= end
            for first, last in pairwise(edges):
                drawn = window.draw(first, last, self._window, number)
                is_followed: NDArray[np.bool_] = np.all(drawn >= 0, axis=1)
                unpaired += int((~is_followed).sum())
                # The clicks of completed chunks are counted again, because counts of later samples
                # include them.
                is_needed = index not in share.done
                shown = (
                    window.with_negatives(first, drawn)
                    if is_needed
                    else np.zeros((last - first, 0), dtype=np.int64)
                )
                counts = lookback.features(window.part(first, last), window.hashes(shown))
                if is_needed:
                    is_last = is_last_bucket and last == edges[-1]
                    yield Chunk(
                        index=index,
                        file=window.files[first:last].repeat(np.where(is_followed, shown.shape[1], 1)),
                        frame=self._samples(
                            window.frame[first:last], is_followed, window.items(shown), counts
                        ),
                        bytes_done=self.total_bytes * (place + 1) // len(buckets),
                        bad_rows=bad_rows if index == 0 else 0,
                        bad_examples=tuple(bad_examples) if index == 0 else (),
                        note=self._note(unpaired, number + last - first - earlier) if is_last else "",
                    )
                index, number = index + 1, number + last - first
            if is_last_bucket:
                break
        self._write_memory(workspace, lookback, buckets, end, number)

    def _note(self, unpaired: int, clicks: int) -> str:
        """Return the text of `Chunk.note` for the last chunk: what happened to clicks that are not
        samples.
        """
        window, notes = self._config.negative_window, []
        if unpaired:
            notes.append(
                f"left out {unpaired:,} of {clicks:,} clicks, because no other user in the same split "
                f"clicked within {window} after them (data.source.negative_window)"
            )
        if self._config.last_window == "wait":
            notes.append(f"clicks of the last {window} wait for the next log, which has their negatives")
        return "; ".join(notes)

    def _lookback(self) -> Lookback:
        from stratarec.kernels.click_counts import Lookback

        config = self._config
        window = in_unit(config.popularity_window, config.time_unit, "data.source.popularity_window")
        lookback = Lookback(
            recent=window // _RECENT_SHARE,
            window=window,
            memory=in_unit(config.memory, config.time_unit, "data.source.memory"),
            second=in_unit("1s", config.time_unit, "time_unit"),
            contexts=len(config.contexts),
        )
        if self._before is not None:
            lookback.set_firsts(self._before.first[ITEM].to_numpy(), self._before.first[TIME].to_numpy())
            recent = _ClickWindow(
                config, self._before.recent.with_columns(pl.lit(0, pl.Int32).alias(FILE)), self._splitter, 0
            )
            for first, last in pairwise(_piece_edges(recent.times)):
                lookback.features(recent.part(first, last), np.zeros((last - first, 0), dtype=np.uint64))
        return lookback

    def _read(self, workspace: Path, bucket: int) -> pl.DataFrame:
        """Read the clicks of one bucket, sorted by time. Clicks with equal times keep the order of
        the log.
        """
        folder = workspace / f"bucket={bucket}"
        with reporting_damage(folder):
            parts = [read_frame(path) for path in sorted(folder.glob("[0-9]*.parquet"))]
            return pl.concat(parts).sort(column(self._config.time), maintain_order=True)

    def _write_buckets(self, workspace: Path) -> tuple[int, list[str]]:
        """Write the clicks to buckets of one window each; return the number of bad rows and some of
        their messages.
        """
        config = self._config
        make_directory(workspace / "done")
        done = frozenset(int(path.stem) for path in (workspace / "done").glob("*.json"))
        for piece in parquet_pieces(self._files, self._columns, ChunkShare(done=done)):
            bad = BadRows(self._on_bad_row)
            frame = self._convert(piece, bad)
            self._check_types(frame, self._files[piece.file].path)
            self._write_clicks(workspace, frame, piece.file, f"{piece.index:012d}.parquet")
            record = [bad.count, bad.examples, frame[config.time].min()]
            write_json(workspace / "done" / f"{piece.index:012d}.json", record)
        if self._before is not None:
            self._write_clicks(workspace, self._before.waiting, 0, _WAITING)
        records = [read_json(path)[:2] for path in sorted((workspace / "done").glob("*.json"))]
        return sum(count for count, _ in records), [text for _, texts in records for text in texts][:5]

    def _check_types(self, frame: pl.DataFrame, path: str) -> None:
        """Raise `DataError` if a column has another type than in the earlier log."""
        for name, kind in ({} if self._before is None else dict(self._before.waiting.schema)).items():
            if frame[name].dtype != kind:
                raise DataError(
                    f"{path}: column {name!r} has values of type {frame[name].dtype}, but {kind} in the "
                    "earlier log: write the column with the earlier type"
                )

    def _write_clicks(self, workspace: Path, clicks: pl.DataFrame, file: int, name: str) -> None:
        """Append the clicks of a file to their buckets."""
        clicks = clicks.with_columns(pl.lit(file, dtype=pl.Int32).alias(FILE))
        for (bucket,), part in clicks.group_by(
            column(self._config.time) // self._window, maintain_order=True
        ):
            write_atomic(workspace / f"bucket={bucket}" / name, part.write_parquet)

    def _check_order(self, workspace: Path) -> None:
        """Raise `DataError` if the log begins before the end of the log that it continues."""
        if self._before is None:
            return
        time = self._config.time
        last = max(
            (part[time][-1] for part in (self._before.recent, self._before.waiting) if len(part)),
            default=None,
        )
        firsts = [
            first
            for path in (workspace / "done").glob("*.json")
            if (first := read_json(path)[2]) is not None
        ]
        if last is not None and firsts and min(firsts) < last:
            raise DataError(
                f"the log starts at {min(firsts)} ({', '.join(self.files[:3])}), but the earlier log ends "
                f"at {last} ({time}, in {self._config.time_unit}): give logs in the "
                "order of time, each only once"
            )

    def _write_memory(
        self, workspace: Path, lookback: Lookback, buckets: list[int], end: int, clicks: int
    ) -> None:
        """Write the clicks that a later log needs to `workspace`, from where `memory` reads
        them.
        """
        frames = [] if self._before is None else [self._before.recent]
        oldest = end - 1 - lookback.reach
        frames += [
            self._read(workspace, bucket).drop(FILE)
            for bucket in buckets
            if (bucket + 1) * self._window > oldest
        ]
        recent, time = pl.concat(frames), column(self._config.time)
        items, times = lookback.firsts()
        memory = ClickMemory(
            recent=recent.filter((time < end) & (time >= oldest)),
            waiting=recent.filter(time >= end),
            first=pl.DataFrame({ITEM: items, TIME: times}).sort(ITEM),
            clicks=clicks,
        )
        for part, frame in memory.frames.items():
            write_atomic(workspace / f"{part}.parquet", frame.write_parquet)
        write_json(workspace / "clicks.json", clicks)

    def memory(self, workspace: Path) -> ClickMemory:
        """Return the clicks that a later log needs. All chunks must have been read before, with the
        same `workspace`.
        """
        paths = {part: workspace / f"{part}.parquet" for part in PARTS}
        return read_click_memory(paths, read_json(workspace / "clicks.json"), self._config.time)

    def _convert(self, piece: FileSlice, bad: BadRows) -> pl.DataFrame:
        config, frame = self._config, piece.frame
        rows = piece.first_row + np.arange(frame.height, dtype=np.int64)
        converter = Converter(self._files[piece.file].path, rows, bad)
        columns = {name: converter.category(frame[name]) for name in config.contexts}
        columns |= {
            name: converter.key(frame[name]) for name in (config.item, config.user, config.session) if name
        }
        columns[config.time] = converter.time(frame[config.time], config.time_unit)
        return converter.good_rows(pl.DataFrame({name: columns[name] for name in self._columns}))

    def _samples(
        self,
        clicks: pl.DataFrame,
        is_followed: NDArray[np.bool_],
        items: pl.Series,
        counts: NDArray[np.float32],
    ) -> pl.DataFrame:
        """Return the samples of clicks: each click followed by its K negatives.

        `items` are ``[N (1 + K)]``, `counts` are ``[N, 1 + K, F]``. Clicks without negatives are
        only events of histories.
        """
        config, width = self._config, counts.shape[1]
        time = pl.from_epoch(clicks[config.time] // in_unit("1s", config.time_unit, "time_unit"), "s")
        is_sample = np.ones(counts.shape[:2], dtype=bool)
        is_sample[:, 1:] = is_followed[:, None]
        label = np.zeros(is_sample.shape, dtype=np.uint8)
        label[:, 0] = 1
        is_event = np.broadcast_to(~is_followed[:, None], is_sample.shape)[is_sample]
        frame: pl.DataFrame = clicks.with_columns(
            time.dt.hour().cast(pl.Int64).alias("hour_of_day"),
            time.dt.weekday().cast(pl.Int64).alias("weekday"),
        ).drop(FILE)[np.flatnonzero(is_sample) // width]
        counted, countable = config.counted, config.countable
        dense = [
            pl.Series(name, counts[:, :, place][is_sample]).fill_nan(None)
            for place, name in enumerate(countable)
            if name in counted
        ]
        labels = pl.Series("label", label[is_sample]).set(pl.Series(is_event), None)
        return frame.with_columns(items.filter(pl.Series(is_sample.ravel())), labels, *dense)


class _ClickWindow:
    """Clicks of a bucket and of the next bucket, as arrays for kernels."""

    def __init__(
        self, config: ClicksConfig, frame: pl.DataFrame, splitter: Splitter, last_time: int
    ) -> None:
        self.frame = frame
        self._config = config
        self.times = frame[config.time].to_numpy()
        self.files = frame[FILE].to_numpy()
        self._splits = splitter.assign(frame, splitter.last_time(last_time))
        self._users = stable_hash(frame[config.user])
        self._items = stable_hash(frame[config.item])
        self._key = table_key(config.seed, "negatives")

    def draw(self, first: int, last: int, window: int, number: int) -> NDArray[np.int64]:
        """Draw K clicks, whose items are negatives, for each of the clicks ``first:last``; -1 if
        none can be drawn.

        Parameters
        ----------
        first, last : int
            Limits of the positive clicks.
        window : int
            Length of the time after a click in which its negatives are clicked, in the unit of the
            times.
        number : int
            Number of the first click in the log, of which the draws are a function.
        """
        from stratarec.kernels.negatives import draw_negatives

        return draw_negatives(
            self.times,
            self._users,
            self._splits,
            clicks=(first, last),
            window=window,
            count=self._config.negatives,
            key=self._key,
            number=number,
        )

    def with_negatives(self, first: int, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return click indices ``[N, 1 + K]``: the positive click, then the K clicks whose items
        are its negatives.

        Parameters
        ----------
        first : int
            Index of the first positive click.
        drawn : ndarray
            ``[N, K]`` clicks that `draw` returned; -1 where none was drawn.
        """
        return np.concatenate([np.arange(first, first + len(drawn))[:, None], drawn], axis=1)

    def hashes(self, shown: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the hash of each click's item, or 0 where the click is -1 (none was drawn)."""
        return np.where(shown >= 0, self._items[shown], np.uint64(0))

    def items(self, shown: NDArray[np.int64]) -> pl.Series:
        """Return the items of `shown` as one series, click by click."""
        return self.frame[self._config.item][np.maximum(shown, 0).ravel()]

    def part(self, first: int, last: int) -> Clicks:
        """Return the clicks ``first:last`` in the form that `Lookback` needs."""
        from stratarec.kernels.click_counts import Clicks

        config, clicks = self._config, self.frame[first:last]
        contexts = [
            np.where(clicks[name].is_null().to_numpy(), np.uint64(0), stable_hash(clicks[name]))
            for name in config.contexts
        ]
        return Clicks(
            times=self.times[first:last],
            users=self._users[first:last],
            sessions=stable_hash(clicks[config.session]) if config.session else self._users[first:last],
            items=self._items[first:last],
            contexts=np.column_stack(contexts) if contexts else np.zeros((len(clicks), 0), dtype=np.uint64),
        )


def _piece_edges(times: NDArray[np.int64]) -> list[int]:
    """Return the limits of pieces of about `_CHUNK_CLICKS` clicks; clicks with equal times are in
    the same piece.
    """
    edges = [0]
    while edges[-1] < len(times):
        last = min(edges[-1] + _CHUNK_CLICKS, len(times)) - 1
        edges.append(int(np.searchsorted(times, times[last], side="right")))
    return edges
