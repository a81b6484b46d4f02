"""`stratarec continue`: continue a finished run with new files, one period per file, in order.

The run is locked. Each file goes through these steps; either all of them take effect, or none:

1. *Score*: the current model scores the file, and the scores are measured.
2. *Count and admit*: values are counted, including values without a row. A value gets a row when it
   is frequent enough in all periods together. Existing rows keep their numbers; new rows come after
   them (`data.vocabulary.base`).
3. *Train* one pass. Rows, network, optimizer state, averages and histories continue from the last
   period. Learning rates decay in each period as they did in the run, without warm-up.
4. *Commit*: data set, checkpoint and scores are renamed into the run as one directory
   (`training.run.periods`).

A period depends only on the committed state and its file, so after an interruption the same command
repeats the period. All samples of the file are used for training: there is no validation or test
split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import MANIFEST, DatasetManifest
from stratarec.data.hashing import stable_hash
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources import RowsConfig, open_source
from stratarec.data.sources.clicks import ClicksConfig, ClicksSource
from stratarec.data.sources.files import hash_logs
from stratarec.data.user_history import Events
from stratarec.errors import CheckpointError, DataError, DatasetError
from stratarec.io.atomic import file_hash, read_frame, write_atomic
from stratarec.io.scratch import temporary_directory
from stratarec.io.sealed import validate, write_sealed
from stratarec.models.metrics import figures
from stratarec.progress import Progress
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.continual.chain import Chain
from stratarec.training.continual.period_checks import (
    KINDS,
    Novelty,
    auc_drift,
    check_times,
    dense_drift,
    kinds_of,
)
from stratarec.training.continual.train_period import period_recipe, train_period
from stratarec.training.evaluate import ScoredSamples, corrected_by, fit, measured
from stratarec.training.raw_logs import RawLogs, logits_of, make_encoder
from stratarec.training.run import periods
from stratarec.training.run.open_run import TrainedModel, open_run
from stratarec.training.run.periods import Period
from stratarec.training.run.run_directory import read_recipe, write_plan, write_recipe
from stratarec.training.torch_setup import device_of


def continue_run(
    run: Path,
    files: Sequence[str],
    progress: Progress,
    device: str | None = None,
    fields: Sequence[str] = (),
) -> Iterator[tuple[Period, bool]]:
    """Add a period for each of `files`, in order, and train it on `device` (by default, the device
    of the run).

    Yields each period after its commit, and whether it is new. A file that already is a period
    (because an earlier command was interrupted, for example) is skipped.

    Parameters
    ----------
    fields : sequence of str
        Fields of the recipe with other values, such as ``train.batch_size=1024``, for these periods
        and later ones.

    Raises
    ------
    CheckpointError
        If `run` is not a finished run, or is damaged.
    ConfigError
        If samples of the run are not rows of a log, or a field is invalid.
    DataError
        If a file cannot be the next period: the run was trained on it, it begins before the last
        period ended, it has other columns, or a few of its rows are far later than all others. The
        run keeps the periods before that file.
    StorageError
        If another process writes in the run, or the run cannot be written.
    """
    with Chain.locked(run) as chain:
        for file in files:
            step = _Step(chain, file, progress, device, fields)
            earlier = step.earlier()
            yield (step.run(), True) if earlier is None else (earlier, False)


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """Results of scoring a log with the model before the period."""

    scores: dict[str, Any]
    calibration: tuple[Any, ...]
    lookups: dict[str, Any]
    holes: dict[str, int]
    """Vocabulary -> number of values that had lost their row before this period."""


class _Step:
    """One period of one run."""

    def __init__(
        self, chain: Chain, file: str, progress: Progress, device: str | None, fields: Sequence[str]
    ) -> None:
        self._chain = chain
        self._run = chain.run
        self._file = file
        self._progress = progress
        self._fields = fields
        self._device = device_of(device or read_recipe(self._run).train.device, field="--device")
        self._log = self._hash()

    def earlier(self) -> Period | None:
        """Return the committed period of the same file, or None if there is none."""
        return next(
            (item for item in map(periods.read, periods.paths(self._run)) if item.log == self._log), None
        )

    def run(self) -> Period:
        """Score, train and commit the period."""
        with suppress(DatasetError):  # the user may have deleted the data set of the run
            if self._log in str(
                DatasetManifest.read(Path(read_recipe(self._run).data.path)).about.origin.source
            ):
                raise DataError(f"{self._file} is not new: {self._run} was trained on it; name a later log")
        with periods.working_directory(self._run) as work:
            with open_run(self._run) as opened:
                before, parent = self._chain.before(opened)
                trained = opened.with_fields(self._fields)
                if trained.model.network.trees is not None:
                    self._progress.say(
                        "the boosted trees stay as they are; only the networks of the ensemble are trained"
                    )
                recipe = period_recipe(trained.recipe, self._file, work / periods.DATA, trained.dataset)
                dataset = self._prepare(recipe, trained.dataset)
                scored = self._score(trained, recipe)
            # The model that scored is closed before training, so that only one copy of the tables
            # is in memory.
            recipe, plan, position = train_period(
                recipe, dataset, before, work / "checkpoints", self._progress, self._device
            )
            final = periods.of_number(self._run, before.number)
            written = replace(recipe, data=replace(recipe.data, path=str(final / periods.DATA)))
            write_recipe(work, written)
            write_plan(work, written, plan)
            content = {
                "format": periods.FORMAT,
                "number": before.number,
                "parent": file_hash(parent),
                "kind": "log",
                "file": Path(self._file).name,
                "log": self._log,
                "times": dataset.manifest.carried.times,
                "dataset": file_hash(work / periods.DATA / MANIFEST),
                "state": file_hash(periods.only_checkpoint(work) / checkpoint.STATE),
                "steps": position.step,
                "rate_factor": before.rate_factor,
                "scores": scored.scores,
                "calibration": [item.to_dict() for item in scored.calibration],
                "lookups": _admitted(scored, dataset),
                "dense": dense_drift(dataset),
                "auc": auc_drift(scored.scores["all"], self._earlier_aucs()),
            }
            result = validate(Period, content, self._file, periods.ADVICE, CheckpointError)
            write_sealed(work / periods.PERIOD, result.to_dict())
            self._chain.commit(work, final)
        periods.prune(self._run)
        return result

    def _hash(self) -> str:
        """Return the hash of the period's file; `DataError` unless it is exactly one local file."""
        recipe = read_recipe(self._run).with_overrides(self._fields)
        source = recipe.data.source.of_file(self._file)
        opened = open_source(source, on_bad_row=recipe.data.on_bad_row, split=recipe.data.split)
        if len(opened.files) != 1:
            raise DataError(
                f"{self._file} names {len(opened.files)} files, expected one: a period has one file"
            )
        hashes = hash_logs(opened.files)
        if not hashes:
            raise DataError(
                f"{self._file} is a URL; copy the file here first, since files are identified by a hash of "
                "their content"
            )
        (digest,) = hashes.values()
        return digest

    def _earlier_aucs(self) -> list[Any]:
        result = (periods.read(path) for path in periods.paths(self._run))
        return [period.scores["all"]["auc"] for period in result if period.kind == "log"]

    def _prepare(self, recipe: Recipe, before: Dataset) -> Dataset:
        """Prepare the log as a training split that continues the data set `before`."""
        try:
            dataset = prepare(
                recipe.data, name=before.name, progress=self._progress, complete_base=before.is_complete
            )
        except DataError as error:
            text = str(error)
            raise DataError(text if self._file in text else f"{self._file}: {text}") from error
        check_times(self._run, self._file, dataset, before)
        return dataset

    def _score(self, trained: TrainedModel, recipe: Recipe) -> _Scores:
        """Score the log with the current model and its calibration, and measure the scores."""
        maps = trained.maps
        trained.model.network.calibration = None
        novelty = Novelty(trained.dataset)
        parts, kinds = zip(*self._samples(trained, recipe, novelty), strict=True)
        raw = ScoredSamples.joined(parts)
        return _Scores(
            scores=_slices(trained.dataset, corrected_by(maps, raw), kinds),
            calibration=fit(trained.recipe.train.fitted, raw, maps),
            lookups=novelty.lookups,
            holes={name: info.holes for name, info in trained.dataset.vocabularies.items()},
        )

    def _samples(
        self, trained: TrainedModel, recipe: Recipe, novelty: Novelty
    ) -> Iterator[tuple[ScoredSamples, NDArray[np.int8]]]:
        if not isinstance(recipe.data.source, RowsConfig):
            yield from score_clicks(trained, recipe.data, novelty, self._progress)
            return
        logs = RawLogs(
            trained, [self._file], labelled=True, events=trained.dataset.events(), novelty=novelty.of
        )
        for part in logs.scored(self._progress):
            assert part.novelty is not None
            yield part.samples, part.novelty


def _slices(dataset: Dataset, result: ScoredSamples, kinds: Sequence[NDArray[np.int8]]) -> dict[str, Any]:
    """Return the metrics of all samples, and of the samples of each kind in `KINDS`."""
    labels, kind = dataset.schema.label_columns, kinds_of(np.concatenate(kinds))
    chosen = {name: np.flatnonzero(kind == place) for place, name in enumerate(KINDS)}
    scores = {"all": figures(measured(labels, result))}
    for name, rows in chosen.items():
        if len(rows):
            scores[name] = figures(measured(labels, result.of(rows)))
    return scores


def _admitted(scored: _Scores, dataset: Dataset) -> dict[str, dict[str, int]]:
    result = {}
    for name, counts in scored.lookups.items():
        info = dataset.vocabularies[name]
        kinds = {kind: counts[kind] for kind in KINDS}
        changes = {"admitted": info.values - info.inherited, "evicted": info.holes - scored.holes[name]}
        result[name] = {**kinds, **changes, "rows": info.rows}
    return result


def score_clicks(
    trained: TrainedModel, config: PrepareConfig, novelty: Novelty, progress: Progress
) -> Iterator[tuple[ScoredSamples, NDArray[np.int8]]]:
    """Score the samples that `prepare` derives from a log of clicks.

    Yields chunks of scored samples with the kinds of their values (`Novelty.of`).
    """
    before, schema = trained.dataset.clicks(), trained.dataset.schema
    assert isinstance(config.source, ClicksConfig)
    assert before is not None
    source = ClicksSource(config.source, config.on_bad_row, config.split)
    source.resume(before)
    progress.start("score", source.total_bytes, "B")
    with temporary_directory() as workspace:
        paths, done = [], 0
        for chunk in source.chunks(workspace):
            paths.append(workspace / f"chunk-{chunk.index:05d}.parquet")
            write_atomic(paths[-1], chunk.frame.write_parquet)
            progress.advance(chunk.bytes_done - done)
            done = chunk.bytes_done
        earlier, events = trained.dataset.events(), None
        if earlier is not None:
            earlier = earlier.with_columns(pl.lit(None, pl.UInt8).alias(schema.label_column))
            events = Events(chain([earlier], map(read_frame, paths)), schema)
        encoder, nobody = make_encoder(trained.dataset), np.empty(0, dtype=np.float32)
        for path in paths:
            frame = read_frame(path).drop_nulls(schema.label_column)
            columns = {name: frame[name] for name in frame.columns}
            columns |= {} if events is None else events.histories(frame)
            logits = logits_of(trained, *encoder.encode_columns(columns, source.files[0]))
            label = frame[schema.label_column].to_numpy().astype(np.float32)
            user = stable_hash(frame[schema.user].cast(pl.String)).view(np.int64)
            yield ScoredSamples(label, logits, user, nobody), novelty.of(frame)
    progress.finish()
