"""How long one rank waited for the others, and how much of that while it trained."""

from __future__ import annotations

import time
from types import TracebackType

from stratarec.distributed.mesh import Mesh


class Waits:
    """Counts the waits of steps; each step is a ``with`` block on the thread that trains.

    An exchange is *exposed* where that thread waits for it: in a step, for rows, gradients and what is decided
    together; between two steps, for the ids of the next batch, as far as the thread that exchanges them waits then. It
    is *hidden* where only the thread of ids waits.

    Parameters
    ----------
    mesh : Mesh
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.exposed_seconds = self.step_seconds = 0.0
        """Waits that were exposed; time of all steps, and of such waits before them."""
        self._background = 0.0
        self._began = self._ended = time.perf_counter()
        self._start = self._ids = self._of_ids
        self._rows = 0.0

    @property
    def _of_ids(self) -> float:
        return sum(part.ids.wait_seconds for part in self._mesh.parts)

    @property
    def _of_rows(self) -> float:
        return sum(part.rows.wait_seconds for part in self._mesh.parts)

    @property
    def hidden_seconds(self) -> float:
        """Waits of the thread of ids that were not exposed."""
        return max(self._of_ids - self._start - self._background, 0.0)

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        waited = min(self._of_ids - self._ids, self._began - self._ended)
        self.exposed_seconds += waited
        self._background += waited
        self.step_seconds += waited
        self._rows = self._of_rows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = time.perf_counter()
        self.exposed_seconds += self._of_rows - self._rows
        self.step_seconds += self._ended - self._began
        self._ids = self._of_ids
