"""Curves for MLflow; MLFLOW_TRACKING_URI says where they go, as for any of its users."""

from __future__ import annotations

import time
from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from stratarec.reporting.live.curve_writers import CurvesOf

# Characters of a parameter, and parameters of a call, that every store takes.
_LONGEST, _MOST = 500, 100


class MlflowCurves:
    """A session is a run there, in the experiment of the recipe's name; its fields are parameters."""

    def __init__(self, of: CurvesOf) -> None:
        # A client, not `mlflow.start_run`: what is global there may be the user's.
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(of.name)
        number = self._client.create_experiment(of.name) if experiment is None else experiment.experiment_id
        self._run = self._client.create_run(number, run_name=of.run.name).info.run_id
        fields = [Param(name, str(value)[:_LONGEST]) for name, value in of.recipe.items()]
        for first in range(0, len(fields), _MOST):
            self._client.log_batch(self._run, params=fields[first : first + _MOST])

    def add(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")
