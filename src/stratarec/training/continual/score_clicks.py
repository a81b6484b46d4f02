"""Samples that are made of a log of clicks, scored by a model that was not trained on them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.hashing import stable_hash
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.sources.clicks import ClicksSource
from stratarec.data.sources.clicks_config import ClicksConfig
from stratarec.data.user_history import Events
from stratarec.io.atomic import read_frame, write_atomic
from stratarec.io.scratch import reading_directory
from stratarec.progress import Progress
from stratarec.training.continual.novelty import Novelty
from stratarec.training.evaluate import ScoredSamples
from stratarec.training.raw_logs import logits_of, make_encoder
from stratarec.training.run.open_run import TrainedModel


def score_clicks(
    trained: TrainedModel, config: PrepareConfig, novelty: Novelty, progress: Progress
) -> Iterator[tuple[ScoredSamples, NDArray[np.int8]]]:
    """The samples that `prepare` makes of a log that goes on from the model's data set, some at a time, with the kinds
    of their values."""
    before, schema = trained.dataset.clicks(), trained.dataset.schema
    assert isinstance(config.source, ClicksConfig)
    assert before is not None
    source = ClicksSource(config.source, config.on_bad_row, config.split)
    source.go_on(before)
    progress.start("score", source.total_bytes, "B")
    with reading_directory() as workspace:
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
