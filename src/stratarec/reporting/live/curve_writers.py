"""Where the curves of a run are written, besides its report: one small writer for each library, one registry.

A writer is opened before the first step, and what goes wrong then is the user's to mend. Later a library that fails (a
network that is gone) costs the curves it writes, never the run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from stratarec.errors import ConfigError, StrataError

# Kind -> the package that it needs, and its class: the kinds that `train.curves` may name.
_WRITERS = {
    "tensorboard": ("tensorboard", "tensorboard_curves.TensorBoardCurves"),
    "wandb": ("wandb", "wandb_curves.WandbCurves"),
    "mlflow": ("mlflow", "mlflow_curves.MlflowCurves"),
    "trackio": ("trackio", "trackio_curves.TrackioCurves"),
}


@dataclass(frozen=True, kw_only=True)
class CurvesOf:
    """What is trained."""

    name: str
    """Of the recipe: the project, or experiment."""
    run: Path
    recipe: Mapping[str, Any]
    """Fields whose values are not the defaults, by their paths."""
    step: int
    """From which the session goes on: a library that cannot cut off later points begins a run of its own."""


class CurveWriter(Protocol):
    """Made of `CurvesOf`."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Points, by the names of their curves, such as ``train/loss``."""

    def close(self, *, failed: bool) -> None:
        """Nothing follows; whether the run ended by an error, or was stopped."""


def check_installed(kinds: Sequence[str]) -> None:
    """Refuse what cannot be written here, with the package to install."""
    for kind in kinds:
        if find_spec(_WRITERS[kind][0]) is None:
            raise ConfigError(
                f"train.curves names {kind}, which is not installed: pip install 'stratarec[{kind}]', or leave it out"
            )


@contextmanager
def curve_writers(kinds: Sequence[str], of: CurvesOf, say: Callable[[str], None]) -> Iterator[CurveWriters]:
    """All of them, open; `ConfigError` where one cannot be opened."""
    curves = CurveWriters([], say)
    failed = True
    try:
        for kind in kinds:
            module, _, name = _WRITERS[kind][1].partition(".")
            try:
                writer = getattr(importlib.import_module(f"stratarec.reporting.live.{module}"), name)(of)
            except (StrataError, OSError):
                raise
            except Exception as error:
                raise ConfigError(f"train.curves: {kind} cannot be written: {_in_a_line(error)}") from error
            curves.writers.append((kind, writer))
        yield curves
        failed = False
    finally:
        curves.close(failed=failed)


class CurveWriters:
    """Writers as one."""

    def __init__(self, writers: list[tuple[str, CurveWriter]], say: Callable[[str], None]) -> None:
        self.writers, self._say = writers, say

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Points for all of them."""
        self._each(lambda writer: writer.add(step, values))

    def close(self, *, failed: bool) -> None:
        """Close all of them."""
        self._each(lambda writer: writer.close(failed=failed))
        self.writers = []

    def _each(self, do: Callable[[CurveWriter], None]) -> None:
        self.writers = [each for each in self.writers if self._done(*each, do)]

    def _done(self, kind: str, writer: CurveWriter, do: Callable[[CurveWriter], None]) -> bool:
        try:
            do(writer)
        except Exception as error:
            self._say(f"curves go to {kind} no more: {_in_a_line(error)}")
            return False
        return True


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
