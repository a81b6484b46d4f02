"""Curves for Weights & Biases; WANDB_MODE, WANDB_DIR and the like say where they go, as for any of its users."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from stratarec.reporting.live.curve_writers import CurvesOf


class WandbCurves:
    """A session is a run there, in the group of the run's name."""

    def __init__(self, of: CurvesOf) -> None:
        quiet = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=of.name,
            group=of.run.name,
            name=of.run.name,
            config=dict(of.recipe),
            reinit="create_new",
            settings=quiet,
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
