"""Histories of the rows of a frame: what each user chose before, in training and in earlier rows of the frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.columns.converter import BadRows, Converter
from stratarec.data.schema import Schema
from stratarec.data.user_history import Events, read_events
from stratarec.errors import DataError, DatasetError, ExportError
from stratarec.io.atomic import file_hash
from stratarec.recipe import Recipe

EVENTS = "events.parquet"
_FRAME = "the frame"


class Histories:
    """The last positive rows of each user of a training log, from which later rows have their histories.

    Parameters
    ----------
    events : DataFrame
        User, time and the features that histories are of, as `Dataset.events` gives them.
    schema : Schema
        Of the log, with histories.
    """

    def __init__(self, events: pl.DataFrame, schema: Schema) -> None:
        self._events, self._schema = events, schema

    def columns(
        self, columns: Mapping[str, pl.Series], positive: NDArray[np.bool_] | None = None
    ) -> dict[str, pl.Series]:
        """Return a column of lists for each history; none if the frame has such columns itself.

        Parameters
        ----------
        columns : mapping of str to Series
            The columns of the frame.
        positive : array, optional
            ``[N]`` which rows of the frame are positive: later rows have them in their histories.
        """
        schema = self._schema
        if any(feature.name in columns for feature in schema.histories):
            return {}
        needed = {feature.of for feature in schema.histories} if positive is not None else set()
        wanted = [schema.user, schema.time, *needed]
        for name in wanted:
            if name not in columns:
                raise DataError(
                    f"{_FRAME}: no column {name!r}, from which histories are made; add it, or a column of lists for "
                    f"each of {', '.join(feature.name for feature in schema.histories)}"
                )
        raw = pl.DataFrame([columns[name].alias(name) for name in dict.fromkeys(wanted)])
        sparse = tuple(feature for feature in schema.sparse if feature.name in needed)
        keys = replace(schema, dense=(), sparse=sparse, session="", weight="")
        rows = Converter(_FRAME, 1 + np.arange(len(raw), dtype=np.int64), BadRows(None)).convert(raw, keys)
        logs = [self._events.with_columns(pl.lit(1, pl.UInt8).alias(schema.label_column))]
        if positive is not None:
            logs.append(rows.with_columns(pl.Series(schema.label_column, positive.astype(np.uint8))))
        return Events(logs, schema).histories(rows)

    def write(self, folder: Path) -> None:
        """Write the events into a directory."""
        self._events.write_parquet(folder / EVENTS)

    @classmethod
    def read(cls, folder: Path, expected: str, recipe: Mapping[str, Any]) -> Histories:
        """Return what `write` wrote, with the hash `expected`; `ExportError` where it is damaged."""
        path, schema = folder / EVENTS, getattr(Recipe.from_dict(recipe).data.source, "schema", None)
        try:
            if schema is None or file_hash(path) != expected:
                raise ExportError(f"{path} is damaged: its hash does not match; save the model again")
            return cls(read_events(path, schema), schema)
        except (OSError, DatasetError) as error:
            raise ExportError(f"{path} cannot be read: {error}; save the model again") from error
