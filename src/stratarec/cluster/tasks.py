"""The pieces of `prepare` as Ray tasks, seen from where `prepare` runs."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stratarec.cluster.connecting import joined
from stratarec.cluster.probing import Order, make_probe
from stratarec.cluster.working import Ended, work
from stratarec.data.executing import Stage
from stratarec.data.lease import grant, revoke
from stratarec.errors import ClusterError, StrataError
from stratarec.progress import Progress

# How often a task is begun again whose worker or machine has died.
_RETRIES = 3
# Tasks that are handed out for each processor: one runs, one waits.
_AHEAD = 2
_ENDING_SECONDS, _ANSWER_SECONDS = 30.0, 120.0


@contextmanager
def on_ray(address: str) -> Iterator[Tasks]:
    """An `Executor` whose pieces are tasks of a Ray cluster; see `connecting.joined`."""
    with joined(address) as ray:
        yield Tasks(ray)


class Tasks:
    """An `Executor`. Several tasks share a machine as far as its processors and its memory go.

    Parameters
    ----------
    ray : module
        Joined to a cluster.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._task = ray.remote(max_retries=_RETRIES, num_cpus=1)(work)

    @property
    def readers(self) -> int:
        return max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def begin(self, work: Path, logs: Sequence[str]) -> None:
        """Let tasks work in `work`, once every machine is found to see it and `logs`, and to have the same versions.

        Raises
        ------
        ClusterError
            Naming the machine and what is wrong with it.
        """
        self._order = Order.of(work, grant(work), logs)
        asked = self._ask()
        if not asked:
            raise ClusterError("the Ray cluster has no machine with a processor for tasks")
        for reference, machine in asked.items():
            refused, mark = self._get(reference, f"the check of machine {machine}", _ANSWER_SECONDS)
            if refused:
                raise ClusterError(refused)
            self._order.find_mark(mark, machine)

    def _ask(self) -> dict[Any, str]:
        """The answer of each machine, and its name."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        probe = self._ray.remote(max_retries=_RETRIES, num_cpus=0)(make_probe(self._order))
        asked = {}
        for node in self._ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU"):
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                asked[probe.options(scheduling_strategy=there).remote()] = node["NodeManagerHostname"]
        return asked

    def run(self, stage: Stage, numbers: Sequence[int], progress: Progress) -> None:
        order = replace(self._order, token=grant(self._order.work))
        shared, waiting = self._ray.put(stage), deque(numbers)
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < _AHEAD * self.readers:
                    number = waiting.popleft()
                    sized = self._task.options(memory=self._fitting(stage.memory(number)))
                    # In a list, so that a worker asks for the stage once, and not for every piece.
                    running[sized.remote([shared], order, number)] = number
                for done in self._ray.wait(list(running), num_returns=1)[0]:
                    self._take(self._get(done, f"piece {running.pop(done)}"), progress)
        except StrataError:
            self._stop(list(running))
            raise
        finally:
            revoke(order.work)

    def _stop(self, running: list[Any]) -> None:
        """Let tasks end soon whose outcomes nobody waits for."""
        # Not by `ray.cancel`: when a task ends meanwhile, Ray 2.60 ends this process.
        revoke(self._order.work)
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=_ENDING_SECONDS)

    def _take(self, ended: Ended, progress: Progress) -> None:
        for message in ended.warned:
            warnings.warn(message, stacklevel=2)
        if isinstance(ended.error, self._ray.exceptions.RayError):  # a worker that could not get its stage
            raise _lost("a worker", ended.error) from RuntimeError(ended.trace)
        if ended.error is not None:
            raise ended.error from RuntimeError(ended.trace)
        progress.advance(ended.advance)

    def _get(self, reference: Any, what: str, seconds: float | None = None) -> Any:
        """The outcome of a task; a cluster that lost it for good is a `ClusterError`."""
        try:
            return self._ray.get(reference, timeout=seconds)
        except self._ray.exceptions.RayError as error:
            raise _lost(what, error) from error

    def _fitting(self, memory: int) -> int:
        """What a task asks for: no more than the largest machine has, or it would wait for ever."""
        most = max((node["Resources"].get("memory", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
        return int(min(memory, most))


def _lost(what: str, error: Exception) -> ClusterError:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ClusterError(f"the Ray cluster lost {what} ({said}); the same command goes on")
