"""How long one rank waited for the others, and how much of that while it trained."""

from __future__ import annotations

import time
from types import TracebackType

from stratarec.distributed.mesh import Mesh


class Waits:
    """Counts the waits of steps; each step is a ``with`` block on the thread that trains.

    An exchange is *exposed* where that thread waits for it: in a step, for rows, gradients and what is decided
    together; between two steps, for the ids of the next batch, as far as the thread that exchanges them waits then. It
    is *hidden* where only the threads of ids and of early rows wait.

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
        self._ids, self._rows, self._awaited = self._of_ids, 0.0, 0.0
        self._start = self._of_ids + mesh.early.wait_seconds

    @property
    def _of_ids(self) -> float:
        return sum(part.ids.wait_seconds for part in self._mesh.parts)

    @property
    def _of_rows(self) -> float:
        return sum(part.rows.wait_seconds for part in self._mesh.parts)

    @property
    def hidden_seconds(self) -> float:
        """Waits of other threads that were not exposed."""
        behind = self._of_ids + self._mesh.early.wait_seconds - self._start
        return max(behind - self._background, 0.0)

    def __enter__(self) -> None:
        mesh, self._began = self._mesh, time.perf_counter()
        waited = min(self._of_ids - self._ids, self._began - self._ended)
        self._count(waited, waited)
        self.step_seconds += waited
        self._rows, self._awaited = self._of_rows, mesh.early.awaited_seconds

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mesh, self._ended = self._mesh, time.perf_counter()
        awaited = mesh.early.awaited_seconds - self._awaited
        self._count(self._of_rows - self._rows + awaited, awaited)
        self.step_seconds += self._ended - self._began
        self._ids = self._of_ids

    def _count(self, exposed: float, background: float) -> None:
        """So many seconds were exposed, so many of them waits for another thread."""
        self.exposed_seconds += exposed
        self._background += background
