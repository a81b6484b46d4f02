"""Read raw logs with the source settings of a run, and score or evaluate their rows.

A history is read from its column if the file has one. Otherwise it is computed from the last values
of the user's earlier positive rows, which are kept in memory. These rows come from the logs of
``--history`` or from the events that the run stores, and from the log itself if it has labels.
Without any of them, users start with empty histories. A source is refused if its samples are not
rows of a log (clicks, synthetic).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.columns.converter import OnBadRow, check_present
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.hashing import stable_hash
from stratarec.data.schema import UNKNOWN, Schema, ValueType
from stratarec.data.sources import RowsConfig, RowsSource, SourceConfig, open_rows
from stratarec.data.sources.base import Chunk, View
from stratarec.data.sources.files import STANDARD_INPUT, hash_logs
from stratarec.data.user_history import Events
from stratarec.errors import ConfigError, DataError
from stratarec.io.scratch import temporary_directory
from stratarec.models.base import autocast
from stratarec.models.metrics import Metrics, Ranked
from stratarec.progress import Progress
from stratarec.serving.features import FeatureEncoder
from stratarec.training.continual.period_checks import KINDS
from stratarec.training.evaluate import ScoredSamples, measured, rank_within, score, value_groups
from stratarec.training.run.open_run import TrainedModel

# The hidden layers of an ensemble of 8 members for 8,192 rows do not fit the caches, and took twice
# as long per row.
_BATCH = 2048
# Maximum number of files that a message lists.
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Rows of a log with their logits, in order."""

    file: str
    rows: NDArray[np.int64]
    """Row numbers in the file, counted from 1; for text files, line numbers."""
    columns: pl.DataFrame
    """Columns that are passed through unchanged."""
    label: NDArray[np.float32] | None
    """Labels ``[N]``, or ``[N, T]`` if there are several; NaN if a label is not known."""
    weight: NDArray[np.float32] | None
    """Sample weights, if the log is evaluated and the schema names a weight."""
    logits: NDArray[np.float32]
    user: NDArray[np.int64] | None
    """Hash of the user of each row; None if the log has no users."""
    novelty: NDArray[np.int8] | None
    """Result of the function `novelty` that was passed to `RawLogs`."""

    @property
    def samples(self) -> ScoredSamples:
        """Rows as samples for metrics. Each row without a user counts as a separate user. The log
        must have labels.
        """
        assert self.label is not None
        user = np.empty(0, dtype=np.int64)
        if self.user is not None:
            row = stable_hash(f"{self.file}:" + pl.Series(self.rows).cast(pl.String)).view(np.int64)
            user = np.where(self.user == _no_user(), row, self.user)
        weight = np.empty(0, dtype=np.float32) if self.weight is None else self.weight
        return ScoredSamples(self.label, self.logits, user, weight)


def _no_user() -> NDArray[np.int64]:
    """Return the hash of a row without a user, ``[1]``."""
    return stable_hash(pl.Series([None], dtype=pl.String)).view(np.int64)


class RawLogs:
    """Raw logs that are read with the source settings of a run.

    Parameters
    ----------
    files : sequence of str
        Paths, globs or URLs of the logs.
    keep : sequence of str
        Columns that are passed through unchanged.
    earlier : sequence of str
        Logs with labels. Their positive rows become part of the histories of rows in `files`.
    labelled : bool
        Whether the logs must have labels and, if the schema names a weight, weights.
    events : DataFrame, optional
        Events of users before the log, used if `earlier` is empty; by default the events that the
        run stores.
    novelty : callable, optional
        Called with each frame of rows. The result is stored in `ScoredRows.novelty`.

    Raises
    ------
    DataError
        If the samples of the run's source are not rows of a log, or a column is missing.
    """

    def __init__(
        self,
        trained: TrainedModel,
        files: Sequence[str],
        *,
        keep: Sequence[str] = (),
        earlier: Sequence[str] = (),
        labelled: bool = False,
        events: pl.DataFrame | None = None,
        novelty: Callable[[pl.DataFrame], NDArray[np.int8]] | None = None,
    ) -> None:
        self._trained = trained
        self._config = trained.recipe.data
        # Values have the types of the data set, because files of another format may have other
        # types.
        self._schema = typed_schema(trained.dataset)
        first = self._open(files, View(schema=self._schema))
        names, path = first.column_names(), first.files[0]
        self.labels = self._schema.label_columns
        self.labelled = set(self.labels) <= set(names)
        if labelled:
            check_present(names, [*filter(None, (*self.labels, self._schema.weight))], path)
        check_present(names, keep, path)
        self._earlier = tuple(earlier)
        self._novelty = novelty
        self._carried = None if earlier else trained.events if events is None else events
        # Weights are needed only for metrics.
        self._weight = self._schema.weight if labelled else ""
        self._given = self._given_histories(names, path)
        self._made = bool(self._schema.histories) and not self._given and self._has_events
        schema, self._user = self._read_schema(), self._schema.user if self._schema.user in names else ""
        self.keep = tuple(dict.fromkeys(keep))
        columns = tuple(dict.fromkeys((*self.keep, *([self._user] if self._user else []))))
        self._optional_label = not labelled
        view = View(
            schema=schema, label=self.labelled, pass_through=columns, optional_label=self._optional_label
        )
        self._source = self._open(files, view)
        self.total_bytes = self._source.total_bytes

    @property
    def _has_events(self) -> bool:
        return bool(self._earlier) or self.labelled or self._carried is not None

    @property
    def trained_files(self) -> list[str]:
        """Files with the content of a log that the model's data set was prepared from."""
        logs = str(self._trained.dataset.about.origin.source)
        files = [path for path in self._source.files if path != STANDARD_INPUT]
        return [path for path, digest in hash_logs(files).items() if digest in logs]

    def _open(self, files: Sequence[str], view: View) -> RowsSource:
        return open_view(
            self._config.source, self._config.on_bad_row, files, replace(view, optional_user=True)
        )

    def _given_histories(self, names: Sequence[str], path: str) -> bool:
        """Return whether the log has a column for each history; `DataError` if it has columns for
        only some.
        """
        histories = [feature.name for feature in self._schema.histories]
        present = [name for name in histories if name in names]
        if present and len(present) < len(histories):
            missing = next(name for name in histories if name not in names)
            raise DataError(
                f"{path}: a column for the history {present[0]!r} but none for "
                f"{missing!r}; give both or none"
            )
        return bool(present)

    @property
    def _empty(self) -> list[str]:
        """Names of the histories that are empty for all rows, because there are neither columns nor
        events for them.
        """
        return [] if self._given or self._made else [feature.name for feature in self._schema.histories]

    def _read_schema(self) -> Schema:
        """Return the schema with which the log is read.

        Users, and times from which no feature is computed, are read only if histories are computed
        from events. History columns are read as lists.
        """
        schema = replace(self._schema, session="", weight=self._weight)
        if self._made:
            return schema
        lists = tuple(
            feature.as_column() if feature.kind == "history" else feature
            for feature in schema.sparse
            if self._given or feature.kind != "history"
        )
        return replace(schema, sparse=lists, user="", time=schema.scored_time)

    def scored(self, progress: Progress) -> Iterator[ScoredRows]:
        """Yield all rows of the logs with their logits, in parts."""
        events = self._events() if self._made else None
        if self._empty:
            progress.say(
                f"users start with empty histories in {', '.join(self._empty)}: name earlier logs by "
                "--history, such as the log that the model was trained on"
            )
        encoder = make_encoder(self._trained.dataset)
        progress.start("score", self.total_bytes, "B")
        before = 0
        try:
            for chunk in self._chunks(self._source):
                yield self._score(chunk, encoder, events)
                progress.advance(chunk.bytes_done - before)
                before = chunk.bytes_done
                if chunk.bad_rows:
                    progress.say(
                        f"left out {chunk.bad_rows:,} bad rows, such as {'; '.join(chunk.bad_examples[:1])}"
                    )
        finally:
            progress.finish()

    def _chunks(self, source: RowsSource) -> Iterator[Chunk]:
        with temporary_directory() as workspace:
            yield from source.chunks(workspace)

    def _events(self) -> Events:
        """Return the events for histories: stored ones or those of the earlier logs, and those of
        the log itself if it has labels.
        """
        schema = self._schema
        needed = {feature.of for feature in schema.histories}
        sparse = tuple(f for f in schema.sparse if f.name in needed or f.kind == "history")
        view = View(schema=schema.reduced(sparse), optional_label=self._optional_label)
        logs = [self._earlier] if self._earlier else []
        logs += [self._source.files] if self.labelled else []
        frames = (chunk.frame for files in logs for chunk in self._chunks(self._open(files, view)))
        return Events(frames if self._carried is None else chain(self._before(), frames), schema)

    def _before(self) -> Iterator[pl.DataFrame]:
        """Yield the stored events that are earlier than all rows of the log.

        The log may be older than some of the stored events.
        """
        assert self._carried is not None
        schema = self._schema
        times = replace(schema.reduced(), user="", label=schema.label, labels=())
        chunks = self._chunks(self._open(self._source.files, View(schema=times, label=False)))
        first = min((chunk.frame[schema.time].min() for chunk in chunks if len(chunk.frame)), default=None)  # type: ignore[type-var]
        if first is not None:
            label = pl.lit(None, pl.UInt8).alias(schema.label_column)
            yield self._carried.filter(self._carried[schema.time] < first).with_columns(label)

    def sample(self, file: str, row: int) -> Batch:
        """Return one row of one file as a batch; `DataError` if the row does not exist.

        `file` may be empty if there is only one file. A label that is not known is NaN.
        """
        files = enumerate(self._source.files)
        chosen = [place for place, name in files if not file or f"/{name}".endswith(f"/{file}")]
        if len(chosen) != 1:
            names = f"they are {', '.join(self._source.files[:_NAMED])}"
            raise ConfigError(
                f"--row {file and f'{file}:'}{row}: expected one of the logs, as in --row FILE:ROW; {names}"
            )
        path, events = self._source.files[chosen[0]], self._events() if self._made else None
        for chunk in self._chunks(self._source):
            assert chunk.rows is not None
            place = np.flatnonzero((chunk.rows == row) & (np.asarray(chunk.file) == chosen[0]))
            if len(place):
                frame = chunk.frame[int(place[0]) : int(place[0]) + 1]
                dense, sparse = self._features(frame, path, make_encoder(self._trained.dataset), events)
                unknown = np.full(
                    (1, len(self.labels)) if len(self.labels) > 1 else 1, np.nan, dtype=np.float32
                )
                label = self._label(frame) if self.labelled else unknown
                return Batch(label=torch.from_numpy(label), dense=dense, sparse=sparse)
        raise DataError(
            f"{path}: row {row} is not a sample; rows are counted from 1, in text files as lines"
        )

    def _features(
        self, frame: pl.DataFrame, path: str, encoder: FeatureEncoder, events: Events | None
    ) -> tuple[torch.Tensor, KeyedJagged]:
        columns = {name: frame[name] for name in frame.columns}
        if events is not None:
            columns |= events.histories(frame)
        columns |= {name: pl.Series([None] * len(frame), dtype=pl.List(pl.String)) for name in self._empty}
        return encoder.encode_columns(columns, path)

    def _score(self, chunk: Chunk, encoder: FeatureEncoder, events: Events | None) -> ScoredRows:
        frame, path = chunk.frame, self._source.files[int(chunk.file)]
        dense, sparse = self._features(frame, path, encoder, events)
        assert chunk.rows is not None
        assert chunk.passed_through is not None or not (self.keep or self._user)
        passed = chunk.passed_through if chunk.passed_through is not None else pl.DataFrame()
        user = stable_hash(passed[self._user].cast(pl.String)).view(np.int64) if self._user else None
        return ScoredRows(
            file=path,
            rows=chunk.rows,
            columns=passed.select(passed[name] for name in self.keep),
            label=self._label(frame) if self.labelled else None,
            weight=frame[self._weight].to_numpy().astype(np.float32) if self._weight else None,
            logits=logits_of(self._trained, dense, sparse),
            user=user,
            novelty=None if self._novelty is None else self._novelty(frame),
        )

    def _label(self, frame: pl.DataFrame) -> NDArray[np.float32]:
        labels = [frame[name].to_numpy().astype(np.float32) for name in self.labels]
        label = np.stack(labels, axis=1) if len(labels) > 1 else labels[0]
        label[label == UNKNOWN] = np.nan
        return label


def logits_of(trained: TrainedModel, dense: torch.Tensor, sparse: KeyedJagged) -> NDArray[np.float32]:
    """Return logits ``[N]``, or ``[N, T]`` with several labels, of features that were encoded by
    `make_encoder`.
    """
    model, parts, labels = trained.model.eval(), [], len(trained.dataset.schema.label_columns)
    with torch.no_grad(), autocast(trained.recipe.train.precision, model.device):
        for first in range(0, len(dense), _BATCH):
            chosen = torch.arange(first, min(first + _BATCH, len(dense)))
            batch = Batch(label=torch.zeros(len(chosen)), dense=dense[chosen], sparse=sparse.take(chosen))
            parts.append(score(model, batch))
    return np.concatenate(parts) if parts else np.zeros((0, labels) if labels > 1 else 0, dtype=np.float32)


def typed_schema(dataset: Dataset) -> Schema:
    """Return the schema of a data set, in which each sparse feature has the type of its stored
    values.
    """
    types: dict[str, ValueType] = {"Int64": "integer", "String": "text", "UInt64": "auto"}
    infos = dataset.vocabularies
    return replace(
        dataset.schema,
        sparse=tuple(replace(f, type=types[infos[f.vocabulary].type]) for f in dataset.schema.sparse),
    )


def make_encoder(dataset: Dataset) -> FeatureEncoder:
    """Return an encoder that encodes raw columns with the vocabularies and moments of a data
    set.
    """
    moments = {name: stored.moments for name, stored in dataset.about.moments.items()}
    vocabularies = {name: dataset.vocabulary(name) for name in dataset.vocabularies}
    return FeatureEncoder(dataset.schema, moments, vocabularies)


def open_view(
    config: SourceConfig, on_bad_row: OnBadRow | None, files: Sequence[str], view: View
) -> RowsSource:
    """Open other logs with the source settings of a recipe; `DataError` if its samples are not rows
    of a log.
    """
    if isinstance(config, RowsConfig):
        return open_rows(replace(config, paths=tuple(files)), on_bad_row, view)
    raise DataError(
        f"samples of data.source.kind {config.kind} are not rows of a log: prepare {files[0]} as a "
        "separate data set with the run's vocabulary and name that, or export the model "
        "and use stratarec.Scorer"
    )


@dataclass(frozen=True, kw_only=True)
class LogMetrics:
    """Result of `evaluate_logs`. Each inner dictionary has the metrics of each label, by its
    name.
    """

    overall: dict[str, Metrics]
    slices: dict[str, list[tuple[str, dict[str, Metrics]]]]
    """Column -> metrics of the rows with each value of the column, most frequent value first."""
    ranked: dict[str, dict[str, Ranked]]
    """Column -> ranking metrics, for which rows with the same value of the column are ranked."""
    users: tuple[int, int] | None
    """Number of users, and of those whose value is new; None without users or without a `novelty`
    of one feature.
    """


def evaluate_logs(
    logs: RawLogs,
    progress: Progress,
    by: Sequence[str] = (),
    rank_by: Sequence[str] = (),
    at: Sequence[int] = (),
) -> LogMetrics:
    """Compute the metrics of all rows, the metrics for each value of columns `by`, and ranking
    metrics within each value of columns `rank_by`.

    `logs` must pass these columns through. They are kept in memory for all rows, as are labels and
    logits.
    """
    parts = list(logs.scored(progress))
    samples = ScoredSamples.joined(part.samples for part in parts)
    slices, ranked = {}, {}
    for name in rank_by:
        group, grouped = value_groups(pl.concat([part.columns[name].cast(pl.String) for part in parts]))
        ranked[name] = rank_within(logs.labels, samples, group, at, grouped)
    for name in by:
        codes = pl.concat([part.columns[name].cast(pl.String) for part in parts], rechunk=True)
        rows = pl.DataFrame({"value": codes}).with_row_index("row").group_by("value").agg("row")
        rows = rows.sort([pl.col("row").list.len(), "value"], descending=[True, False], nulls_last=True)
        slices[name] = [
            ("(nothing)" if value is None else value, measured(logs.labels, samples.of(np.asarray(chosen))))
            for value, chosen in rows.iter_rows()
        ]
    overall = measured(logs.labels, samples)
    return LogMetrics(overall=overall, slices=slices, ranked=ranked, users=_count_users(parts))


def _count_users(parts: Sequence[ScoredRows]) -> tuple[int, int] | None:
    novelty = [
        (part.user, part.novelty[:, 0])
        for part in parts
        if part.user is not None and part.novelty is not None
    ]
    if not novelty:
        return None
    user, kind = (np.concatenate(column) for column in zip(*novelty, strict=True))
    is_user = user != _no_user()
    return len(np.unique(user[is_user])), len(np.unique(user[is_user & (kind == KINDS.index("new"))]))
