"""A log of clicks alone, turned into click-through samples.

Each click is a positive. Its K negatives are items of K clicks that *other users* make within `negative_window` behind
it, in the same split, drawn evenly and with replacement. Every number that a sample holds counts clicks strictly
before its moment. So on a log without signal a positive and a negative have the same law whatever is counted, a new
item is as likely one as the other, and nothing can tell them apart: an AUC above 0.5 is signal. What gives that up, and
how much it leaks, is in ``docs/log.md``: draws from the window before, which is what is counted; draws across splits;
and draws that must differ from the clicked item, which makes popular items rarer among negatives than among positives.
Training against draws from what is clicked anyway is noise-contrastive estimation (Gutmann and Hyvarinen 2010), where
noise may hit the observation too. Negatives take over the user, session, time and contexts of their click. A click that
no other user's click follows is no sample, so that every positive has exactly K negatives; histories still hold it.
An item that appears within the window is a negative that nobody could have clicked yet: a shorter window has fewer.

What follows the clicks of a log's last window is not all known. They draw from what there is (``last_window: cut``), or
they wait: a log that goes on from this one begins with them, so that samples of logs one after another are those of
their clicks in one log, whoever cut it where. It looks back on the same clicks, too (`ClickMemory`).

The log need not be sorted: it is first spooled into buckets of one `negative_window` each, which are then taken in
order of time. Memory holds two buckets, keys and counts of the clicks of `memory`, and each item's first click; in the
end the clicks that a later log looks back on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.click_memory import ITEM, PARTS, TIME, ClickMemory, read_click_memory
from stratarec.data.column_names import FILE, column
from stratarec.data.durations import in_unit
from stratarec.data.hashing import stable_hash
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.base import WHOLE, Chunk, ChunkShare, OnBadRow
from stratarec.data.sources.blocks import BadRows
from stratarec.data.sources.clicks_config import ClicksConfig
from stratarec.data.sources.files import expand, fingerprint
from stratarec.data.sources.parquet import count_rows, parquet_pieces
from stratarec.data.sources.typed import Converter
from stratarec.data.splits import SplitConfig, Splitter
from stratarec.errors import ConfigError, DataError
from stratarec.io.atomic import make_directory, read_frame, read_json, reporting_damage, write_atomic, write_json
from stratarec.kernels.click_counts import Clicks, Lookback
from stratarec.kernels.negatives import draw_negatives
from stratarec.kernels.random import table_key

_RECENT_SHARE = 6
# Most clicks that become one chunk; bounds memory however dense the log is.
_CHUNK_CLICKS = 1 << 15
# In a bucket, before the files of the log's pieces in order of names.
_WAITING = "0.parquet"


class ClicksSource:
    """Samples of a click log in order of time; the split says which clicks may be drawn for which."""

    divisible = False

    def __init__(self, config: ClicksConfig, on_bad_row: OnBadRow, split: SplitConfig) -> None:
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

    def go_on(self, before: ClickMemory) -> None:
        """Begin where another log ended: with its clicks that wait, and looking back on the others."""
        names = self._columns
        if sorted(before.recent.columns) != sorted(names):
            raise ConfigError(f"data.source has columns {names}, and {before.recent.columns} in data.vocabulary.base")
        self._before = replace(before, recent=before.recent.select(names), waiting=before.waiting.select(names))

    @property
    def _columns(self) -> list[str]:
        """Those of the log that are read, in the order of frames."""
        config = self._config
        keys = filter(None, [config.user, config.session, config.time])
        return list(dict.fromkeys([config.item, *config.contexts, *keys]))

    def _sparse(self) -> Iterator[SparseFeature]:
        config = self._config
        yield SparseFeature(name=config.item)
        yield from (SparseFeature(name=name) for name in (*config.contexts, "hour_of_day", "weekday"))
        if config.history_length:
            yield SparseFeature(name="history", kind="history", of=config.item, max_length=config.history_length)

    def estimate_rows(self) -> int:
        return count_rows(self._files) * (1 + self._config.negatives)

    def fingerprint(self) -> dict[str, object]:
        config = replace(self._config, paths=(), max_row_group_bytes=ClicksConfig.max_row_group_bytes)
        return {"kind": "clicks", "files": fingerprint(self._files), "config": repr(config)}

    def chunks(self, workspace: Path, share: ChunkShare = WHOLE) -> Iterator[Chunk]:
        bad = self._spool(workspace)
        self._check_order(workspace)
        buckets = sorted(int(path.name.removeprefix("bucket=")) for path in workspace.glob("bucket=*"))
        if not buckets:
            return
        lookback, following = self._lookback(), self._read(workspace, buckets[-1])
        last_time = int(following[self._config.time].to_numpy()[-1])
        following = self._read(workspace, buckets[0])
        # A later log may begin at the moment that this one ends at.
        end = last_time - self._window if self._config.last_window == "wait" else last_time + 1
        if following[self._config.time][0] >= end:
            raise DataError(
                f"{', '.join(self.files[:3])}: all of its clicks, and those that wait, are of one window of "
                f"{self._config.negative_window} (data.source.negative_window), so that no negatives are known yet: "
                "expected a longer log, such as this one and the next in one file"
            )
        index, left_out, number = 0, 0, self._before.clicks if self._before else 0
        earlier = number
        for place, bucket in enumerate(buckets):
            clicks, more = following, place + 1 < len(buckets)
            following = self._read(workspace, buckets[place + 1]) if more else clicks.clear()
            near = more and buckets[place + 1] == bucket + 1
            ahead = _Ahead(self._config, pl.concat([clicks, following]) if near else clicks, self._splitter, last_time)
            edges = _pieces(ahead.times[: min(len(clicks), int(np.searchsorted(ahead.times, end)))])
            over = not more or following[self._config.time][0] >= end
            for first, last in pairwise(edges):
                drawn = ahead.draw(first, last, self._window, number)
                followed: NDArray[np.bool_] = np.all(drawn >= 0, axis=1)
                left_out += int((~followed).sum())
                # Chunks that are there are gone through for what is remembered of them.
                wanted = index not in share.done
                shown = ahead.shown(first, drawn) if wanted else np.zeros((last - first, 0), dtype=np.int64)
                known = lookback.features(ahead.part(first, last), ahead.hashes(shown))
                if wanted:
                    yield Chunk(
                        index=index,
                        file=ahead.files[first:last].repeat(np.where(followed, shown.shape[1], 1)),
                        frame=self._samples(ahead.frame[first:last], followed, ahead.items(shown), known),
                        bytes_done=self.total_bytes * (place + 1) // len(buckets),
                        bad_rows=bad[0] if index == 0 else 0,
                        bad_examples=tuple(bad[1]) if index == 0 else (),
                        note=self._note(left_out, number + last - first - earlier, over and last == edges[-1]),
                    )
                index, number = index + 1, number + last - first
            if over:
                break
        self._keep(workspace, lookback, buckets, end, number)

    def _note(self, left_out: int, clicks: int, over: bool) -> str:
        """What there is to say of the log with its last chunk."""
        window, notes = self._config.negative_window, []
        if over and left_out:
            notes.append(
                f"left out {left_out:,} of {clicks:,} clicks: no other user of their split clicks within {window} "
                "behind them (data.source.negative_window)"
            )
        if over and self._config.last_window == "wait":
            notes.append(f"clicks of the last {window} wait for the next log: what others click then is not known yet")
        return "; ".join(notes)

    def _lookback(self) -> Lookback:
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
            recent = _Ahead(
                config, self._before.recent.with_columns(pl.lit(0, pl.Int32).alias(FILE)), self._splitter, 0
            )
            for first, last in pairwise(_pieces(recent.times)):
                lookback.features(recent.part(first, last), np.zeros((last - first, 0), dtype=np.uint64))
        return lookback

    def _read(self, workspace: Path, bucket: int) -> pl.DataFrame:
        """The clicks of one bucket in order of time, and of the log where times are equal."""
        folder = workspace / f"bucket={bucket}"
        with reporting_damage(folder):
            parts = [read_frame(path) for path in sorted(folder.glob("[0-9]*.parquet"))]
            return pl.concat(parts).sort(column(self._config.time), maintain_order=True)

    def _spool(self, workspace: Path) -> tuple[int, list[str]]:
        """Cut the log into buckets of one window; returns the number of bad rows and some of their messages."""
        config = self._config
        make_directory(workspace / "done")
        done = frozenset(int(path.stem) for path in (workspace / "done").glob("*.json"))
        for piece in parquet_pieces(self._files, self._columns, config.max_row_group_bytes, ChunkShare(done=done)):
            bad = BadRows(self._on_bad_row)
            frame = self._typed(piece.frame, self._files[piece.file].path, piece.first_row, bad)
            self._check_types(frame, self._files[piece.file].path)
            self._deal(workspace, frame, piece.file, f"{piece.index:012d}.parquet")
            note = [bad.count, bad.examples, frame[config.time].min()]
            write_json(workspace / "done" / f"{piece.index:012d}.json", note)
        if self._before is not None:
            self._deal(workspace, self._before.waiting, 0, _WAITING)
        notes = [read_json(path)[:2] for path in sorted((workspace / "done").glob("*.json"))]
        return sum(count for count, _ in notes), [text for _, texts in notes for text in texts][:5]

    def _check_types(self, frame: pl.DataFrame, path: str) -> None:
        """Refuse columns of other types than those of the log before."""
        for name, kind in ({} if self._before is None else dict(self._before.waiting.schema)).items():
            if frame[name].dtype != kind:
                raise DataError(
                    f"{path}: column {name!r} has values of type {frame[name].dtype}, and of {kind} in the log before: "
                    "write it with the type of that"
                )

    def _deal(self, workspace: Path, clicks: pl.DataFrame, file: int, name: str) -> None:
        """Write clicks of a file to their buckets."""
        clicks = clicks.with_columns(pl.lit(file, dtype=pl.Int32).alias(FILE))
        for (bucket,), part in clicks.group_by(column(self._config.time) // self._window, maintain_order=True):
            write_atomic(workspace / f"bucket={bucket}" / name, part.write_parquet)

    def _check_order(self, workspace: Path) -> None:
        """Refuse a log that begins before the one that it goes on from ended."""
        if self._before is None:
            return
        time = self._config.time
        last = max((part[time][-1] for part in (self._before.recent, self._before.waiting) if len(part)), default=None)
        firsts = [first for path in (workspace / "done").glob("*.json") if (first := read_json(path)[2]) is not None]
        if last is not None and firsts and min(firsts) < last:
            raise DataError(
                f"{', '.join(self.files[:3])} begins at {min(firsts)} and the log before ended at {last} ({time}, in "
                f"{self._config.time_unit}): logs follow each other in time, give them in order and none twice"
            )

    def _keep(self, workspace: Path, lookback: Lookback, buckets: list[int], end: int, clicks: int) -> None:
        """Leave in `workspace` what a later log needs: `memory` finds it there."""
        time, before = self._config.time, self._before
        frames = [] if before is None else [before.recent]
        oldest = end - 1 - lookback.reach
        frames += [
            self._read(workspace, bucket).drop(FILE) for bucket in buckets if (bucket + 1) * self._window > oldest
        ]
        known, moment = pl.concat(frames), column(time)
        items, times = lookback.firsts()
        memory = ClickMemory(
            recent=known.filter((moment < end) & (moment >= oldest)),
            waiting=known.filter(moment >= end),
            first=pl.DataFrame({ITEM: items, TIME: times}).sort(ITEM),
            clicks=clicks,
        )
        for part, frame in memory.frames.items():
            write_atomic(workspace / f"{part}.parquet", frame.write_parquet)
        write_json(workspace / "clicks.json", clicks)

    def memory(self, workspace: Path) -> ClickMemory:
        """What a later log needs of this one, all of whose chunks were made in `workspace`."""
        paths = {part: workspace / f"{part}.parquet" for part in PARTS}
        return read_click_memory(paths, read_json(workspace / "clicks.json"), self._config.time)

    def _typed(self, frame: pl.DataFrame, path: str, first_row: int, bad: BadRows) -> pl.DataFrame:
        config = self._config
        rows = first_row + np.arange(frame.height, dtype=np.int64)
        converter = Converter(path, rows, bad)
        columns = {name: converter.category(frame[name]) for name in (config.item, *config.contexts)}
        columns[config.user] = converter.category(frame[config.user])
        if config.session:
            columns[config.session] = converter.category(frame[config.session])
        for name in filter(None, (config.item, config.user, config.session)):
            converter.require(frame[name], columns[name].is_not_null(), "a value")
        columns[config.time] = converter.time(frame[config.time], config.time_unit)
        return converter.good(columns)

    def _samples(
        self, clicks: pl.DataFrame, followed: NDArray[np.bool_], items: pl.Series, known: NDArray[np.float32]
    ) -> pl.DataFrame:
        """Clicks and their negatives, click by click, the positive first.

        `items` are ``[N (1 + K)]``, `known` is ``[N, 1 + K, F]``; clicks that are not `followed` are mere events.
        """
        config, width = self._config, known.shape[1]
        second = in_unit("1s", config.time_unit, "time_unit")
        moment = pl.from_epoch(clicks[config.time] // second, "s")
        kept = np.ones(known.shape[:2], dtype=bool)
        kept[:, 1:] = followed[:, None]
        label = np.zeros(kept.shape, dtype=np.uint8)
        label[:, 0] = 1
        event = np.broadcast_to(~followed[:, None], kept.shape)[kept]
        frame: pl.DataFrame = clicks.with_columns(
            moment.dt.hour().cast(pl.Int64).alias("hour_of_day"), moment.dt.weekday().cast(pl.Int64).alias("weekday")
        ).drop(FILE)[np.flatnonzero(kept) // width]
        columns = [
            pl.Series(name, known[kept][:, f]).fill_nan(None)
            for f, name in enumerate(config.countable)
            if name in config.counted
        ]
        return frame.with_columns(
            items.filter(pl.Series(kept.ravel())), pl.Series("label", label[kept]).set(pl.Series(event), None), *columns
        )


class _Ahead:
    """Clicks of a bucket and of the next one, as the kernels take them."""

    def __init__(self, config: ClicksConfig, frame: pl.DataFrame, splitter: Splitter, last_time: int) -> None:
        self.frame, self._config = frame, config
        self.times = frame[config.time].to_numpy()
        self.files = frame[FILE].to_numpy()
        self._splits = splitter.assign(frame, last_time)
        self._users, self._items = stable_hash(frame[config.user]), stable_hash(frame[config.item])
        self._key = table_key(config.seed, "negatives")

    def draw(self, first: int, last: int, window: int, number: int) -> NDArray[np.int64]:
        """``[last - first, K]`` clicks whose items are negatives, -1 where there are none."""
        return draw_negatives(
            self.times, self._users, self._splits, clicks=(first, last), window=window,
            count=self._config.negatives, key=self._key, number=number,
        )  # fmt: skip

    def shown(self, first: int, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """``[N, 1 + K]`` clicks whose items are shown: each click itself, then what was drawn for it."""
        return np.concatenate([np.arange(first, first + len(drawn))[:, None], drawn], axis=1)

    def hashes(self, shown: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Of the items of clicks, 0 for -1."""
        return np.where(shown >= 0, self._items[shown], np.uint64(0))

    def items(self, shown: NDArray[np.int64]) -> pl.Series:
        """The items of clicks, click by click."""
        return self.frame[self._config.item][np.maximum(shown, 0).ravel()]

    def part(self, first: int, last: int) -> Clicks:
        """Some clicks in the form of `Lookback`."""
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


def _pieces(times: NDArray[np.int64]) -> list[int]:
    """Edges of runs of about `_CHUNK_CLICKS`; clicks of one moment stay together."""
    edges = [0]
    while edges[-1] < len(times):
        wanted = min(edges[-1] + _CHUNK_CLICKS, len(times)) - 1
        edges.append(int(np.searchsorted(times, times[wanted], side="right")))
    return edges
