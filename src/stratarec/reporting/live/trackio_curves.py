"""Curves for Trackio; TRACKIO_DIR and the like say where they go, as for any of its users."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from stratarec.reporting.live.curve_writers import CurvesOf


class TrackioCurves:
    """A session is a run there, in the project of the recipe's name."""

    def __init__(self, of: CurvesOf) -> None:
        self._run = trackio.init(
            project=of.name,
            group=of.run.name,
            config=dict(of.recipe),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()
