"""Curves for TensorBoard: event files in the run itself."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from stratarec.reporting.live.curve_writers import CurvesOf


class TensorBoardCurves:
    """Points later than where a session goes on are cut off."""

    def __init__(self, of: CurvesOf) -> None:
        self._board = SummaryWriter(str(of.run / "tensorboard"), purge_step=of.step)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._board.close()
